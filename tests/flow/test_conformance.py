"""`astraflow conformance`: our own services pass as real processes; one that does a single thing wrong fails in the check of that name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response

sys.path.insert(0, str(Path(__file__).parent))
from conformance_rig import ROOT, TOKEN, WAIT_S, Proxy, Stage, failure, failures, proxy

from astraflow.lib.net import free_port
from astraflow.lib.wire import decode_body
from astraflow.protocol.batch import BatchReply
from astraflow.protocol.codec import encode
from astraflow.protocol.control import NotifyVersion, NotifyVersionReply
from astraflow.protocol.rollout import Pull, PullReply, Submit, SubmitReply
from astraflow.tools.conformance_suites import make
from astraflow.tools.conformance_trainer import TrainerSuite

SETTINGS = {"config": "", "model": str(ROOT / "assets/tiny/solver"), "workflow": "rlvr", "reward": "exact_match", "batch_size": 0}


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.close()


def conformance(stage: Stage, service: str, url: str, *options: str) -> dict[str, str]:
    """Name of the check → verdict, of a run of the command that ended with 0."""
    out = stage.directory / "out.json"
    token = ("--token-file", f"{stage.directory}/token")
    tool = stage.start("-m", "astraflow", "conformance", service, url, "--json", str(out), *token, *options)
    assert tool.wait(2 * WAIT_S) == 0, stage.said()
    return {result["name"]: result["verdict"] for result in json.loads(out.read_text())["results"]}


def ended(stage: Stage, process: subprocess.Popen[bytes]) -> None:
    assert process.wait(WAIT_S) == 0, stage.said()


def test_our_dataflow_passes(stage: Stage) -> None:
    process = stage.astraflow("dataflow")
    verdicts = conformance(stage, "dataflow", stage.url)
    assert set(verdicts.values()) == {"pass"}, verdicts
    ended(stage, process)


def test_our_rollout_service_passes(stage: Stage) -> None:
    process, url = rollout_service(stage)
    verdicts = conformance(stage, "raas", url, "--model", SETTINGS["model"])
    assert set(verdicts.values()) == {"pass"}, verdicts
    ended(stage, process)


@pytest.mark.parametrize("whose", ["foreign", pytest.param("ours", marks=pytest.mark.full)])
def test_our_trainer_and_the_foreign_one_pass(stage: Stage, whose: str) -> None:
    example = [str(ROOT / "examples" / "foreign_trainer.py"), stage.url, "--token-file", f"{stage.directory}/token"]
    process = stage.astraflow("trainer") if whose == "ours" else stage.start(*example)
    verdicts = conformance(stage, "trainer", stage.url, "--config", str(stage.recipe))
    assert set(verdicts.values()) == {"pass"}, verdicts
    ended(stage, process)


def rollout_service(stage: Stage) -> tuple[subprocess.Popen[bytes], str]:
    """One that was started without a Dataflow, and its address."""
    port = free_port()
    program = (
        "import sys; from astraflow.config.experiment import load_experiment; from astraflow.config.processes import raas_process;"
        "from astraflow.raas.service import run; process = raas_process(load_experiment([sys.argv[1]]), 0, sys.argv[3], 'none');"
        "process.dataflow_url, process.port = '', int(sys.argv[2]); sys.exit(run(process))"
    )
    return stage.start("-c", program, str(stage.recipe), str(port), TOKEN), f"http://127.0.0.1:{port}"


# --- wrong ones ---------------------------------------------------------------------------------------------------------


def test_a_dataflow_that_makes_a_batch_anew_when_it_is_asked_again_is_found_out(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAFLOW_TOKEN", TOKEN)
    asked = 0

    async def change(request: Request, body: bytes, answer: Response) -> Response:
        nonlocal asked
        if request.url.path != "/batch" or answer.status_code != 200 or "msgpack" not in str(answer.media_type):
            return answer
        reply = decode_body(bytes(answer.body), BatchReply, False)
        if reply.batch is not None:
            asked += 1
            reply.batch.trajectory_ids = reply.batch.trajectory_ids[::-1] if asked > 2 else reply.batch.trajectory_ids
        return Response(encode(reply), media_type="application/msgpack")

    stage.astraflow("dataflow")
    with proxy(stage.url, change) as wrong:
        assert "different bytes" in failure(make("dataflow", wrong.url, "", "127.0.0.1", SETTINGS), "batch.redelivery")


@pytest.mark.full
def test_a_dataflow_that_counts_notices_twice_and_believes_any_digest_is_found_out(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAFLOW_TOKEN", TOKEN)

    async def change(request: Request, body: bytes, answer: Response) -> Response:
        if request.url.path != "/notify_version" or "msgpack" not in str(answer.media_type):
            return answer
        if answer.status_code == 409 and b"was published with digest" in answer.body:
            return Response(encode(NotifyVersionReply(service_version=1, trained=0)), media_type="application/msgpack")
        if answer.status_code != 200:
            return answer
        reply = decode_body(bytes(answer.body), NotifyVersionReply, False)
        return Response(encode(NotifyVersionReply(service_version=reply.service_version, trained=8)), media_type="application/msgpack")

    stage.astraflow("dataflow")
    with proxy(stage.url, change) as wrong:
        assert failures(make("dataflow", wrong.url, "", "127.0.0.1", SETTINGS)) == ["notify.repeats", "notify.refused"]


@pytest.mark.full
def test_a_rollout_service_that_forgets_results_and_takes_any_workflow_is_found_out(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAFLOW_TOKEN", TOKEN)
    _, url = rollout_service(stage)
    made: list[Proxy] = []

    async def change(request: Request, body: bytes, answer: Response) -> Response:
        if answer.status_code != 200 or "msgpack" not in str(answer.media_type):
            return answer
        if request.url.path == "/pull":  # gone as soon as it was sent, whether it arrived or not
            ids = [delivery.delivery_id for delivery in decode_body(bytes(answer.body), PullReply, False).deliveries]
            await made[0].send("POST", "/pull", encode(Pull(ack=ids, max_items=0)))
        if request.url.path == "/submit":
            reply, asked = decode_body(bytes(answer.body), SubmitReply, False), decode_body(body, Submit, False)
            for verdict, lease in zip(reply.verdicts, asked.leases, strict=True):
                verdict.verdict = "accepted" if lease.workflow_id == "no-such-workflow" else verdict.verdict
            return Response(encode(reply), media_type="application/msgpack")
        return answer

    with proxy(url, change) as wrong:
        made.append(wrong)
        found = failures(make("raas", wrong.url, "", "127.0.0.1", SETTINGS))
    assert found == ["pull.redelivers", "pull.max_items", "submit.refuses"]


@pytest.mark.full
def test_a_trainer_that_announces_a_version_before_it_is_there_is_found_out(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAFLOW_TOKEN", TOKEN)
    played_at = f"http://127.0.0.1:{free_port()}"
    suite = make("trainer", played_at, "", "127.0.0.1", SETTINGS | {"config": str(stage.recipe)})
    assert isinstance(suite, TrainerSuite)
    made: list[Proxy] = []

    async def change(request: Request, body: bytes, answer: Response) -> Response:
        if request.url.path == "/batch" and answer.status_code == 200:
            reply = decode_body(bytes(answer.body), BatchReply, "json" in str(answer.media_type))
            if reply.batch is not None:  # before the step has even begun
                early = NotifyVersion(model_id=reply.batch.model_id, timeline=reply.batch.timeline, version=reply.batch.version + 1)
                for _ in range(2):  # the first answer to it is lost
                    await made[0].send("POST", "/notify_version", encode(early))
        return answer

    with proxy(played_at, change, stage.port) as wrong:
        made.append(wrong)
        stage.start(str(ROOT / "examples" / "foreign_trainer.py"), stage.url, "--token-file", f"{stage.directory}/token")
        assert failures(suite) == ["notify.order", "notify.data_there"], "announced twice, with two digests, and too early"
    assert any("cannot be pulled" in reason for reason in suite.played.wrong["notify.data_there"])
