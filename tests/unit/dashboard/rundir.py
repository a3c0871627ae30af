"""A run directory with a ledger of every fate and records beside it, made by the code that makes them in a run."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from astraflow.dashboard.serve import mounted
from astraflow.dataflow.config import DataflowProcess
from astraflow.raas.records import Records, record_ref

_spec = importlib.util.spec_from_file_location("dataflow_bench_dashboard", Path(__file__).parents[1] / "dataflow" / "bench.py")
assert _spec is not None
assert _spec.loader is not None
_bench: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_bench)
run = _bench.run

EVIL = "<script>alert(1)</script> & </script><img src=x onerror=alert(1)>"


def record(lease_id: str, index: int, reward: float | None = 1.0, answer: str = "an answer", **fields: Any) -> dict[str, Any]:
    """As raas/executor.py writes it (test_raas_executor holds the two together)."""
    return {
        "lease_id": lease_id, "attempt": 1, "task_id": f"t {lease_id}", "index": index, "workflow": "rlvr", "data": {"prompt": "?"},
        "reward": reward, "finish": "stop", "error": None,
        "turns": [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}],
        "calls": [{"policy": "m", "prompt": "?", "answer": answer, "new_tokens": 2, "versions": [0, 0]}],
        "segments": [[{"text": "?", "n": 1}, {"policy": "m", "version": 0, "tokens": ["an", " answer"], "logprobs": [-0.1, -2.0]}]],
        **fields,
    }  # fmt: skip


def keep(run_dir: Path, records: Sequence[dict[str, Any]], instance: str = "r", newest: int = 100_000) -> Records:
    store = Records(run_dir / "rollouts" / instance, newest)
    store.save({record_ref(instance, one["lease_id"], one["attempt"], one["index"]): one for one in records})
    return store


async def dataflow(run_dir: Path, token: str = "") -> Any:
    """A real Dataflow with the page beside its routes, listening, whose instance and trainer are the test. Closed by `leave`."""
    def with_token(process: DataflowProcess) -> None:
        process.token = token
        process.dataflow.policies.filter = "filter_zero_adv"

    outside = mounted(DataflowProcess(run_id="r", run_dir=str(run_dir), models=["m"], token=token))
    bench = await _bench.Bench(run_dir, change=with_token, outside=outside).start()
    await bench.service.server.start()
    (run_dir / "dataflow.url").write_text(bench.service.server.url)
    return bench


async def leave(bench: Any) -> None:
    await bench.service.server.stop(0.0)
    bench.close()
