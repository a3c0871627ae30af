"""Where the page is served: beside the routes of Dataflow, or alone for a directory (`astraflow view`)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from astraflow.config.load import read_yaml
from astraflow.config.processes import given_token
from astraflow.dashboard.app import OPEN_PATHS, PAGE, Dashboard
from astraflow.dataflow.config import DataflowProcess
from astraflow.dataflow.surroundings import MACHINE, Surroundings
from astraflow.lib.auth import read_token
from astraflow.lib.tls import PLAIN, Tls
from astraflow.lib.wire import Handler, Identity, Server, new_identity
from astraflow.protocol.errors import ConfigError


def mounted(process: DataflowProcess) -> Surroundings:
    """What the Dataflow process gets instead of a plain server: one that shows the page too. Dataflow itself does not know it."""
    page = Dashboard(Path(process.run_dir), new_identity(process.run_id, process.token, process.tls))

    def listen(name: str, api: type, handlers: Mapping[str, Handler], identity: Identity, **options: Any) -> Server:
        options["extra_routes"] = [*page.routes(), *options["extra_routes"]]
        return Server(name, api, handlers, identity, open_paths=OPEN_PATHS, **options)

    return dataclasses.replace(MACHINE, listen=listen)


class NoCalls:
    """A server of pages alone."""


def page_url(server_url: str, token: str) -> str:
    """The page's address. A token stands behind `#`, which browsers keep to themselves: it is in no request and no log."""
    return f"{server_url}{PAGE}/" + (f"#token={token}" if token else "")


def view(run_dir: Path, port: int, token_file: str, say: Callable[[str], None], tls: Tls = PLAIN) -> None:
    """Serve the page of a run directory on this machine until SIGINT or SIGTERM. Raises ConfigError."""
    asyncio.run(_view(run_dir, port, viewer_of(run_dir, token_file, tls), say))


def viewer_of(run_dir: Path, token_file: str = "", tls: Tls = PLAIN) -> Identity:
    """Who looks: with the run's id, so that another run at the same old address is not taken for it, and with its token.

    `tls`: what the page itself shows; the run's own authorities are trusted unless others are given."""
    config = run_dir / "config.yaml"
    if not config.is_file():
        raise ConfigError(f"{str(run_dir)!r}: not the directory of a run (it has no config.yaml)")
    values, _ = read_yaml(config)
    named = str(_entry(values, "launch", "token_file") or run_dir / "token")
    token = given_token(token_file) or (read_token(named) if Path(named).is_file() else "")
    own = _entry(values, "launch", "tls")
    ca = tls.ca or str(own.get("ca", "") if isinstance(own, dict) else "")
    return new_identity(str(_entry(values, "experiment", "run_id") or ""), token, Tls(cert=tls.cert, key=tls.key, ca=ca))


def _entry(values: Mapping[str, Any], section: str, key: str) -> Any:
    found = values.get(section)
    return found.get(key) if isinstance(found, dict) else None


async def _view(run_dir: Path, port: int, identity: Identity, say: Callable[[str], None]) -> None:
    page, ended = Dashboard(run_dir, identity), asyncio.Event()
    server = Server("view", NoCalls, {}, identity, port=port, extra_routes=page.routes(), open_paths=OPEN_PATHS)
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await server.start()
    say(f"{run_dir}: {page_url(server.url, identity.token)}   (Ctrl-C ends)")
    await ended.wait()
    await server.stop(1.0)
    await page.close()
