"""A headless Chromium, driven over the pipe of its DevTools protocol: no driver, no port, no package."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import queue
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

DEADLINE_S = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
ROOT = Path(__file__).parents[2]


def chromium() -> str | None:
    """The browser of this machine."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def axe_core() -> Path | None:
    """The accessibility checker, where `npm install --no-save axe-core` puts it."""
    found = Path(os.environ.get("AXE_CORE", ROOT / "node_modules" / "axe-core" / "axe.min.js"))
    return found if found.is_file() else None


class Browser:
    """One page. `complaints` holds every error of its console, its network and its content policy."""

    def __init__(self, program: str, profile: Path) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs_in, theirs_out)]

        def place() -> None:  # Chromium reads commands from 3 and writes answers to 4
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        argv = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
            "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        with (profile.parent / "chromium.log").open("wb") as log:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=place, pass_fds=(3, 4), start_new_session=True
            )
        for end in (theirs_in, theirs_out, *ends):
            os.close(end)
        self._in, self._out = os.fdopen(ours_in, "rb"), os.fdopen(ours_out, "wb")
        self._numbers, self._session = itertools.count(1), ""
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self.complaints: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE_S)
        self._out.close()

    # --- what a person does ---------------------------------------------------------------------------------------------

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def look(self, width: int = 1280, height: int = 1000, dark: bool = False) -> None:
        """The window, and what the person prefers."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39}
        text = {"Enter": "\r"}.get(key, "")
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=codes[key], text=text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=codes[key])

    def value(self, expression: str) -> Any:
        """Of an expression in the page; a promise is awaited."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """The first value that is true."""
        end = time.monotonic() + DEADLINE_S
        while not (found := self.value(expression)):
            if time.monotonic() > end:
                text = self.value("document.body.innerText")
                raise AssertionError(f"not within {DEADLINE_S:g} s: {expression}\n{text}\n{self.complaints}")
            time.sleep(0.1)
        return found

    def screenshot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def barriers(self, checker: Path) -> list[str]:
        """What axe-core calls serious or critical on the page as it is."""
        if not self.value("typeof axe === 'object'"):
            self.value(checker.read_text(encoding="utf-8") + ";true")
        found = self.value("axe.run(document).then((result) => JSON.stringify(result.violations))")
        bad = [rule for rule in json.loads(found) if rule["impact"] in ("serious", "critical")]
        return [f"{rule['id']}: {rule['help']}: {node['html'][:200]}" for rule in bad for node in rule["nodes"]]

    # --- the protocol ---------------------------------------------------------------------------------------------------

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._answers[number] = queue.Queue()
        session = {"sessionId": self._session} if self._session else {}
        self._out.write(json.dumps({"id": number, "method": method, "params": params, **session}).encode() + b"\0")
        self._out.flush()
        try:
            answer = self._answers[number].get(timeout=DEADLINE_S)
        except queue.Empty:
            raise AssertionError(f"Chromium does not answer {method} (exit status {self._process.poll()})") from None
        del self._answers[number]
        assert "error" not in answer, f"{method}: {answer['error']}"
        result = answer["result"]
        assert isinstance(result, dict)
        return result

    def _listen(self) -> None:
        rest = b""
        while chunk := self._in.read1(1 << 16):
            *messages, rest = (rest + chunk).split(b"\0")
            for message in map(json.loads, messages):
                if message.get("id") in self._answers:
                    self._answers[message["id"]].put(message)
                else:
                    self._event(message.get("method", ""), message.get("params", {}))

    def _event(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(f"{details['text']} {details.get('exception', {}).get('description', '')}")
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(params["args"]))
