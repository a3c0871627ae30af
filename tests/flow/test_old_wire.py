"""The seed's wire behind --allow-pickle: a real Dataflow process, and peers written from the description of that wire alone."""

from __future__ import annotations

import importlib.util
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

import astraflow
from astraflow.datasets.config import ValidDatasetConfig
from astraflow.protocol.control import LedgerCounts

TESTS = Path(__file__).parents[1]


def loaded(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


peers: Any = loaded("peers", TESTS / "flow" / "peers.py")
old_wire: Any = loaded("old_wire", TESTS / "contract" / "foreign" / "old_wire.py")
PICKLE = {"content-type": "application/octet-stream"}
BATCH, STEPS = 8, 3


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Any]:
    with peers.staged(tmp_path) as made:
        made.process.allow_pickle = True
        yield made


@pytest.fixture
def raas(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = old_wire.OldRaaS(**getattr(request, "param", {}))
    yield made
    made.close()


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def ledger(stage: Any) -> LedgerCounts:
    """Its counts, which add up."""
    found: LedgerCounts = peers.Trainer(stage.url).status().ledger
    assert found.made == found.trained + sum(found.dropped.values()) + sum(found.in_flight.values())
    return found


def test_an_old_trainer_trains_on_what_a_native_instance_makes(stage: Any, tmp_path: Path) -> None:
    stage.process.valid_datasets = {"held_out": ValidDatasetConfig(n_samples=2)}
    stage.dataflow()
    stage.raas("r0", "--reward", "mixed")
    trainer = old_wire.OldTrainer(stage.url)
    assert trainer.status()["agents"]["default"] == {"raas_ready": False, "trainer_ready": False, "started": False, "version": 0}
    trainer.ready(train_batch_size=BATCH, sender_endpoint="127.0.0.1:9")
    groups: set[int] = set()
    for version in range(STEPS):
        answer = trainer.batch(version if version % 2 else None)  # with and without the version
        batch = answer["batch"]
        assert {name: (str(batch[name].dtype), tuple(batch[name].shape)) for name in batch if name != "prompt_id"} == {
            **dict.fromkeys(("input_ids", "loss_mask", "versions"), ("torch.int32", (BATCH, 7))),
            "attention_mask": ("torch.bool", (BATCH, 7)), "logprobs": ("torch.float32", (BATCH, 7)), "group_id": ("torch.int64", (BATCH,)),
            **dict.fromkeys(("rewards", "group_reward_mean", "group_reward_std", "normalized_rewards"), ("torch.float32", (BATCH,))),
        }  # fmt: skip
        assert batch["loss_mask"].sum(1).tolist() == [4] * BATCH
        assert batch["rewards"].tolist() == [0.0, 1.0] * 4
        assert batch["normalized_rewards"].sum().abs() < 1e-5
        assert all(prompt.startswith("numbers:") for prompt in batch["prompt_id"])
        assert all(isinstance(value, float) for value in answer["buffer_stats"].values())
        fresh = set(batch["group_id"].tolist())
        assert len(fresh) == 2
        assert not fresh & groups
        groups |= fresh
        scores = trainer.notify(version + 1, run_eval=version == STEPS - 1)
        assert scores["ok"] is True
    assert scores["eval_results"]["held_out/avg@2"] == 0.5
    counts = ledger(stage)
    assert counts.trained == STEPS * BATCH
    assert trainer.status()["agents"]["default"] == {"raas_ready": True, "trainer_ready": True, "started": True, "version": STEPS}
    assert trainer.post("/save_buffer") == {"ok": True}
    assert trainer.post("/shutdown") == {"ok": True}
    assert stage.children["dataflow"].wait(peers.WAIT_S) == 0
    assert stage.children["r0"].wait(peers.WAIT_S) == 0
    assert "--allow-pickle: Dataflow unpickles" in (tmp_path / "dataflow.log").read_text()


def test_a_native_trainer_trains_on_what_an_old_instance_makes(stage: Any, raas: Any) -> None:
    stage.process.valid_datasets = {"held_out": ValidDatasetConfig(n_samples=2)}
    stage.dataflow()
    trainer = peers.Trainer(stage.url)
    trainer.ready()
    assert raas.register(stage.url) == {"ok": True, "uid": "old-0", "pool_size": 1}
    raas.lose_pulls = 1
    for version in range(STEPS):
        batch = trainer.step(run_eval=version == STEPS - 1).batch
        assert len(batch.group_ids) == 2
        assert peers.codec.array(batch.rows["group_size"]).tolist() == [4] * BATCH
        assert set(peers.codec.array(batch.tokens["versions"])[peers.codec.array(batch.tokens["loss_mask"]) > 0]) <= set(range(version + 1))
        assert len(peers.codec.array(batch.tokens["input_ids"])) == 6 * BATCH, "what the old peer had padded is off"
        if version == 0:  # the next Dataflow finds it again, and what it ran is run once more
            stage.kill("dataflow")
            stage.dataflow()
    assert ledger(stage).trained == STEPS * BATCH == len(set(trainer.seen))
    peers.until(lambda: raas.version == STEPS, peers.WAIT_S, "the last weights")
    asked = peers.control.EvalResultsRequest(wait_s=5.0)
    results = peers.until(lambda: trainer.client.call(peers.DataflowAPI.eval_results, asked, timeout_s=peers.WAIT_S).results, 0, "a score")
    assert [(result.dataset, result.missing, result.versions["default"].version) for result in results] == [("held_out", 0, STEPS)]
    assert raas.evals == 1
    spec = next(iter(raas.workflows.values()))
    assert (spec["workflow_cls"], spec["reward_fn"], spec["workflow_kwargs"]) == ("rlvr", None, {})
    trainer.shutdown()
    assert stage.children["dataflow"].wait(peers.WAIT_S) == 0
    assert raas.ended.is_set()


def odd(number: int, result: Any) -> Any:
    """Every fourth task fails, and another one is rejected."""
    return {"ok": False, "error": "ValueError('it broke')"} if number % 4 == 1 else None if number % 4 == 2 else result


@pytest.mark.parametrize("raas", [{"per_task": 2, "shape": odd}], indirect=True, ids=["pairs"])
def test_two_old_peers_find_each_other_and_failures_are_counted(stage: Any, raas: Any) -> None:
    stage.process.token = "a-token-of-this-cluster"
    stage.process.dataflow.buffer.unit = "sequences"
    stage.dataflow()
    with pytest.raises(ConnectionError, match="HTTP 401"):
        old_wire.OldTrainer(stage.url).status()
    with pytest.raises(ConnectionError, match="HTTP 401"):
        old_wire.OldTrainer(stage.url.replace("//", "//any:a-wrong-token@")).ready(train_batch_size=BATCH)
    url = stage.url.replace("//", f"//any:{stage.process.token}@")
    trainer = old_wire.OldTrainer(url, "default")
    answer = httpx.post(f"{url}/register_raas", json={"uid": raas.uid, "raas_url": raas.url}, timeout=peers.WAIT_S)
    assert answer.json()["pool_size"] == 1, "httpx and requests carry the password of an address by themselves"
    trainer.ready(train_batch_size=BATCH, sender_endpoint="127.0.0.1:9")
    for version in range(STEPS):
        assert tuple(trainer.batch(version)["batch"]["input_ids"].shape) == (BATCH, 6)
        trainer.notify(version + 1)
    peers.until(lambda: raas.version == STEPS, peers.WAIT_S, "the last weights")
    assert set(raas.senders) == {"127.0.0.1:9"}
    counts = httpx.get(f"{url}/status").json()["ledger"]
    assert counts["trained"] == STEPS * BATCH
    assert min(counts["dropped"]["rejected"], counts["dropped"]["error:workflow.exception"]) >= 1
    assert counts["made"] == counts["trained"] + sum(counts["dropped"].values()) + sum(counts["in_flight"].values())
    assert trainer.post("/shutdown") == {"ok": True}
    assert stage.children["dataflow"].wait(peers.WAIT_S) == 0
    assert raas.ended.is_set()


def test_what_is_no_honest_old_peer_is_refused_and_runs_nothing(stage: Any, tmp_path: Path) -> None:
    stage.dataflow()
    marker = tmp_path / "executed"
    bomb = pickle.dumps({"model_id": Bomb(marker)})
    with httpx.Client(base_url=stage.url, timeout=peers.WAIT_S) as client:

        def said(answer: httpx.Response) -> tuple[int, str]:
            return answer.status_code, answer.json()["error"]

        for path in ("/ready", "/notify_version"):
            for body in (bomb, b"\x80\x04nonsense.", pickle.dumps([1]), pickle.dumps({"version": True, "train_batch_size": "8"})):
                code, text = said(client.post(path, content=body, headers=PICKLE))
                assert code == 400, (path, body, text)
                assert path in text
        assert "it names pathlib.Path.touch" in said(client.post("/ready", content=bomb, headers=PICKLE))[1]
        for path in ("/register_raas", "/acquisition", "/run_eval"):
            assert client.post(path, content=bomb, headers=PICKLE).status_code == 422
        assert said(client.post("/ready", content=pickle.dumps({"model_id": "other", "train_batch_size": 8}), headers=PICKLE)) == (
            404, "model_id 'other': expected one of default",
        )  # fmt: skip
        assert said(client.get("/batch", params={"model_id": "other"}))[0] == 404
        assert said(client.get("/batch", params={"version": "-1"}))[0] == 400
        assert said(client.get("/batch", params={"version": 1}))[0] == 500, "it is not ready"
        assert said(client.post("/register_raas", json={"uid": "r"}))[0] == 400
        assert said(client.post("/register_raas", json={"uid": "r", "raas_url": "ftp://x"}))[0] == 400
        assert client.post("/deregister_raas", json={"uid": "r"}).json() == {"ok": True, "uid": "r", "pool_size": 0}
        assert client.get("/raas_pool").json()["size"] == 0
        trainer = old_wire.OldTrainer(stage.url)
        trainer.ready(train_batch_size=BATCH)
        trainer.notify(1)
        assert "is committed" in said(client.get("/batch", params={"version": 0}))[1]
    assert not marker.exists()


def test_without_the_option_an_old_peer_gets_the_usual_refusal(stage: Any, tmp_path: Path) -> None:
    stage.process.allow_pickle = False
    stage.dataflow()
    marker = tmp_path / "executed"
    with httpx.Client(base_url=stage.url, timeout=peers.WAIT_S, headers={"accept": "application/json"}) as client:
        for path in ("/ready", "/notify_version", "/save_buffer", "/shutdown"):
            answer = client.post(path, content=pickle.dumps({"version": Bomb(marker)}), headers=PICKLE)
            assert (answer.status_code, answer.json()["error"]) == (422, "BadMessage")
            assert "expected application/msgpack or application/json" in answer.json()["message"]
        assert client.get("/batch").json()["error"] == "BadMessage"
        assert client.post("/register_raas", json={"uid": "r", "raas_url": "http://127.0.0.1:9"}).json()["error"] == "BadMessage"
        assert {"status", "agents"}.isdisjoint(client.get("/status").json())
    assert not marker.exists()


def test_pickle_is_imported_in_two_places_only() -> None:
    """The old wire, and a data set that is published as packed pickles (texts only)."""
    root, imported = Path(astraflow.__file__).parent, re.compile(r"^\s*(?:import|from) +(?:pickle|cloudpickle|dill)\b", re.M)
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if imported.search(path.read_text(encoding="utf-8"))}
    assert found == {"dataflow/compat.py", "datasets/code.py"}
