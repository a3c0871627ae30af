"""The pickles of the old wire: what honest peers write is read without torch, what others write is refused and runs nothing."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from astraflow.dataflow.compat import Kind, Values, pickled, unpickled
from astraflow.dataflow.compat_raas import trajectories
from astraflow.protocol import codec
from astraflow.protocol.errors import BadMessage
from astraflow.protocol.rollout import WorkflowSpec

TORCH = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
TORCH += (torch.bool,)
PROTOCOLS = range(2, pickle.HIGHEST_PROTOCOL + 1)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tensors_and_arrays_are_read_as_their_owner_wrote_them(protocol: int) -> None:
    for dtype in TORCH:
        whole = (torch.arange(24) % 7).to(dtype).reshape(4, 6)
        for tensor in (whole, whole[1:, ::2], whole.t(), whole[0, 0], whole[:0], whole[:1].expand(3, 6)):
            found = unpickled(pickle.dumps({"x": tensor}, protocol), "here")["x"].array
            assert found.shape == tuple(tensor.shape)
            assert found.tolist() == tensor.float().tolist(), (dtype, tensor.shape)
    other = (np.arange(6, dtype=">i4"), np.ones((2, 3), "f4", order="F"), np.array([True, False]), np.zeros((0, 2), "u1"), np.array(3.5))
    for array in other:
        found = unpickled(pickle.dumps({"x": array}, protocol), "here")["x"].array
        assert (found.shape, found.tolist()) == (array.shape, array.tolist())
    plain = {"a": [1, 2.5, None, True, "é", b"\x00\xff"], "b": {"c": (1,)}, "d": {1, 2}, "e": OrderedDict(f=1), "g": bytearray(b"h")}
    assert unpickled(pickle.dumps(plain, protocol), "here") == plain
    assert unpickled(pickle.dumps({"n": np.float32(0.5), "i": np.int64(-3)}, protocol), "here") == {"n": 0.5, "i": -3}
    assert unpickled(pickle.dumps({"p": torch.ones(2, requires_grad=True)}, protocol), "here")["p"].array.tolist() == [1, 1]


def test_what_is_written_is_read_as_tensors_by_any_peer() -> None:
    kinds = ("int32", "int64", "float32", "float64", "uint8", ">i4", "bool")
    arrays = {kind: np.arange(6).reshape(2, 3).astype(kind) for kind in kinds}
    found = pickle.loads(pickled({"batch": arrays | {"prompt_id": ["a", "b"]}, "n": 1, "nothing": None, "empty": {}}))
    assert (found["n"], found["nothing"], found["empty"], found["batch"].pop("prompt_id")) == (1, None, {}, ["a", "b"])
    for name, tensor in found["batch"].items():
        assert tensor.tolist() == arrays[name].tolist()
        tensor += 0 if tensor.dtype != torch.bool else False  # they are its own: it may write into them


class Calls:
    """Pickles as a call of `what`, followed by a state for the result."""

    def __init__(self, what: Any, *arguments: Any, state: Any = None) -> None:
        self.reduced = (what, arguments) if state is None else (what, arguments, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def object_array() -> np.ndarray[Any, Any]:
    return np.array([{}], dtype=object)


def test_everything_else_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    name = pickle.dumps(np.ndarray, 2)[2:-1]
    refused: dict[str, bytes] = {
        "a bomb": pickle.dumps({"x": Calls(Path.touch, marker)}),
        "the shell": pickle.dumps({"x": Calls(os.system, f"touch {marker}")}),
        "eval": pickle.dumps({"x": Calls(eval, "1")}),
        "a function that was not asked for": pickle.dumps({"x": Calls(np.load, "x")}),
        "a dtype of objects": pickle.dumps({"x": object_array()}),
        "a call of a name": pickle.dumps({"x": Calls(np.ndarray, (2**40,))}),
        "a huge bytearray": pickle.dumps({"x": Calls(bytearray, 2**50)}),
        "a state for a name": b"\x80\x02" + name + b"}b.",
        "attributes for a name": b"\x80\x02" + name + b"N}X\x01\x00\x00\x00aK\x01s\x86b.",
        "an instance of a name": b"\x80\x02" + name + b")\x81.",
        "something persistent": b"\x80\x02Pname\n.",
        "a list": pickle.dumps([1]),
        "half of one": pickle.dumps({"x": 1})[:-2],
        "no pickle": b"{}",
        "a dotted name": b"\x80\x04\x8c\x05numpy\x8c\x0dndarray.dumps\x93.",
    }
    tensor = pickle.dumps({"x": torch.arange(4, dtype=torch.int64)}, 2)
    refused["a tensor beyond its storage"] = tensor.replace(b"K\x04\x85", b"K\x7f\x85")
    refused["a storage that is cut off"] = tensor.replace(b"\x03\x00\x00\x00\x00\x00\x00\x00", b"")
    assert refused["a tensor beyond its storage"] != tensor != refused["a storage that is cut off"]
    for why, body in refused.items():
        with pytest.raises(BadMessage, match=r"^here: "):
            print(why, unpickled(body, "here"))  # noqa: T201  # names the one that was taken
    assert not marker.exists()
    assert isinstance(Values().array, np.ndarray)
    assert Kind("f4").dtype == np.float32


def test_results_of_two_models_become_segments_with_owners() -> None:
    spec = WorkflowSpec(workflow="x", policies=["planner", "solver"], generation={"temperature": 0.7})
    sequence = {
        "input_ids": torch.tensor([[1, 2, 3, 4, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 1, 0]]).bool(),
        "loss_mask": torch.tensor([[0, 1, 1, 1, 0]]), "logprobs": torch.full((1, 5), -0.25), "versions": torch.tensor([[0, 3, 4, 4, 0]]),
        "model_ids": torch.tensor([[-1, 0, 1, 1, 0]]), "rewards": torch.tensor([0.5]),
    }  # fmt: skip
    result = {"n_trajs": 2, "rewards": torch.tensor([1.0, float("nan")]), "trajectories": [{"sequences": [sequence]}] * 2}
    found = trajectories(unpickled(pickle.dumps(result), "here"), spec)
    assert [trajectory.reward for trajectory in found] == [1.0, None]
    (segment,) = found[0].segments
    assert (segment.policies, segment.credit, segment.temperature) == (["planner", "solver"], {"planner": 0.5, "solver": 0.5}, 0.7)
    assert segment.policy_of_token is not None
    columns = (segment.input_ids, segment.loss_mask, segment.logprobs, segment.versions, segment.policy_of_token)
    assert [codec.array(col).tolist() for col in columns] == [
        [1, 2, 3, 4], [0, 1, 1, 1], [0.0, -0.25, -0.25, -0.25], [-1, 3, 4, 4], [0, 0, 1, 1],
    ]  # fmt: skip
    del sequence["logprobs"]
    broken = [None, {"ok": False, "error": "it broke"}, result, 7, {"trajectories": []}, {"trajectories": [], "rewards": []}]
    kinds = [trajectories(odd if odd is None else unpickled(pickle.dumps({"r": odd}), "here")["r"], spec)[0] for odd in broken]
    assert [(t.finish, t.error.kind if t.error else "") for t in kinds] == [
        ("rejected", ""), ("error", "exception"), *[("error", "malformed")] * 4,
    ]  # fmt: skip
