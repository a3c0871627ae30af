"""A rollout service from outside takes the job's configuration and needs only what it uses itself."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from astraflow.config.experiment import load_experiment
from astraflow.config.processes import public_config
from astraflow.launch.join import dataflow_status, from_wire, join_process
from astraflow.protocol.errors import ConfigError, Unavailable

TINY = Path(__file__).parents[3] / "assets" / "tiny" / "solver"


@pytest.fixture
def told(tmp_path: Path) -> dict[str, object]:
    """What Dataflow answers for a job whose data and token lie on its own machine only."""
    rows, token, recipe = tmp_path / "rows.jsonl", tmp_path / "token", tmp_path / "r.yaml"
    rows.write_text('{"prompt": "s21", "answer": "12"}\n')
    token.write_text("secret\n")
    recipe.write_text(
        f"experiment: {{name: r}}\nmodels: {{default: {{path: {TINY}}}}}\ntrain_dataset: {{loader: jsonl, path: {rows}}}\n"
        f"valid_datasets: {{held: {{loader: jsonl, path: {rows}}}}}\nworkflow: {{reward: exact_match}}\n"
        f"launch: {{token_file: {token}}}\n"
    )
    config: dict[str, object] = msgspec.msgpack.decode(msgspec.msgpack.encode(public_config(load_experiment([recipe]))))
    rows.unlink()
    token.unlink()
    return config


def test_files_of_the_jobs_own_machine_need_not_be_here(told: dict[str, object]) -> None:
    joined = from_wire(told, ["raas.slots=4096"]).experiment
    assert (joined.train_dataset.path, joined.valid_datasets["held"].path, joined.launch.token_file) == ("", "", "")
    assert joined.raas.slots == 4096
    assert told["train_dataset"]["path"], "the answer itself is not changed"  # type: ignore[index]


def test_a_model_must_be_here(told: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"^models\.default\.path: '/nowhere': no such directory.*override"):
        from_wire(told, ["models.default.path=/nowhere"])


def test_whatever_answers_names_no_code_for_this_machine(told: dict[str, Any]) -> None:
    told["raas"] |= {name: {"x": "os:system"} for name in ("workflows", "reward_functions", "environments")}
    told["raas"]["agents"] = {"x": {"command": ["touch", "/tmp/x"]}}
    told["plugins"], told["trackers"] = ["antigravity"], {"os:system": {}}
    joined = from_wire(told, ["raas.environments={mine: 'mine:Door'}"]).experiment
    assert (joined.plugins, joined.trackers, joined.raas.workflows, joined.raas.reward_functions) == ([], {}, {}, {})
    assert (joined.raas.agents, joined.raas.environments) == ({}, {"mine": "mine:Door"}), "this side's own are another matter"
    told["raas"]["engine"]["kind"] = "os:system"
    with pytest.raises(ConfigError, match=r"^raas\.engine\.kind: the job says 'os:system', which is code"):
        from_wire(told)
    assert from_wire(told, ["raas.engine.kind=scripted"]).experiment.raas.engine.kind == "scripted"


@pytest.fixture
def stranger() -> Iterator[str]:
    """A web server that is no Dataflow: it answers everything with a page."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>hello</html>")

        def log_message(self, format: str, *args: object) -> None:
            return

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(10)


def test_what_answers_but_is_no_dataflow_is_told_by_its_address(stranger: str) -> None:
    with pytest.raises(ConfigError, match=f"^--join {stranger}: what answers at {stranger} is no Dataflow"):
        join_process(stranger)
    with pytest.raises(ConfigError, match=f"^status {stranger}: what answers"):
        dataflow_status(stranger)


@pytest.mark.parametrize("url", ["127.0.0.1:9", "ftp://x", "http://"])
def test_what_is_no_address_is_told_by_its_option(url: str) -> None:
    with pytest.raises(ConfigError, match=f"^--join {url}: url .*expected http://host:port"):
        join_process(url)


def test_nobody_there() -> None:
    with pytest.raises(Unavailable, match=r"^--join http://127\.0\.0\.1:9: no Dataflow answers at"):
        join_process("http://127.0.0.1:9")
