"""Ranks of a trainer as processes: `python ranks.py DIRECTORY` runs every case on every world size and leaves results/<world>-<rank>.jsonl.

One process imports everything and forks the ranks (one process group per world size, gloo over a file). A case is a function that every
rank runs; it raises when something is wrong. What is published is compared by the sender's own digest, so that the bytes are those that
another process sees, with words that are made here from whole tensors.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

Results = dict[tuple[str, int], dict[int, str]]
"""(case, world size) → what went wrong on each rank."""
RANKS_S = 100.0
"""Longest run of all cases of one world size."""
RUN_ID = f"ranks-{os.getpid()}"
"""Part of the name that the shared memory has in /proc; of the process that forks the ranks."""

LAST = ("a_rank_that_does_not_come", "a_rank_is_killed", "the_first_rank_is_killed")
"""After these a world of ranks ends."""
IMPORTS = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
    "peft",
    "safetensors.torch",
    "astraflow.weights.manager",
    "astraflow.weights.receiver",
)


def cases() -> dict[str, tuple[int, ...]]:
    """Case → world sizes."""
    return {
        "uneven_shards_of_fsdp": (2, 3, 4),
        "every_placement": (2, 3, 4),
        "adapters": (2,),
        "a_rank_that_fails": (2, 3),
        "hsdp": (4,),
        "fsdp_on_top_of_tensor_parallel": (4,),
        "two_nodes": (4,),
        "a_rank_that_does_not_come": (2,),
        "a_rank_is_killed": (3,),
        "the_first_rank_is_killed": (4,),
    }


class Rank:
    """What a case gets."""

    def __init__(self, rank: int, world: int, directory: Path):
        self.rank, self.world, self.directory = rank, world, directory

    def group(self, wait_s: float = 60.0) -> Any:
        """Connections of all ranks with a deadline of their own."""
        from datetime import timedelta

        import torch.distributed as dist

        return dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s))

    @contextmanager
    def manager(self, node: str = "", **settings: Any) -> Iterator[Any]:
        from astraflow.lib.wire import Identity
        from astraflow.weights.config import WeightsConfig
        from astraflow.weights.manager import WeightManager

        identity = Identity(RUN_ID, "one", "token")
        config = WeightsConfig(**{"hash_threads": 1, "ranks_wait_s": 60.0, **settings})
        manager = WeightManager("policy", config, identity, self.directory / f"rank-{self.rank}", node=node)
        try:
            yield manager
        finally:
            manager.close()

    def publish(self, manager: Any, named: Iterable[tuple[str, Any]], version: int, expected: dict[str, Any]) -> None:
        """Offload and compare every word with `expected`, whole tensors by name."""
        manager.offload(named, version, self.rank, self.world)
        self.compare(manager, version, expected)

    def compare(self, manager: Any, version: int, expected: dict[str, Any]) -> None:
        import torch

        from astraflow.weights import copy, layout

        if not manager._at.leads:
            return
        shape = manager._layout
        assert set(shape.by_name) == set(expected), set(shape.by_name) ^ set(expected)
        half = bytearray(shape.size_bytes)
        for meta in shape.tensors:
            words = expected[meta.name].detach().to(copy.TORCH[meta.dtype]).contiguous().reshape(-1).view(torch.uint8)
            half[meta.offset : meta.offset + meta.size_bytes] = words.numpy().tobytes()
        if manager.published(version, 60.0) != layout.digest(shape, memoryview(half)):
            written = manager._memory.half(1 - manager._link.target())
            spans = {t.name: slice(t.offset, t.offset + t.size_bytes) for t in shape.tensors}
            wrong = [name for name, span in spans.items() if written[span] != half[span]]
            raise AssertionError(f"version {version}: other words than the unsharded ones in {wrong}")


def awkward() -> Any:
    """A module of shapes that no number of ranks divides, a tie, a frozen parameter, a scalar and one that stays float32."""
    import torch
    from torch import nn

    class Awkward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.embed = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight
            self.one_row = nn.Parameter(torch.randn(1, 7))
            self.vector = nn.Parameter(torch.randn(7))
            self.square = nn.Parameter(torch.randn(2, 2))
            self.cube = nn.Parameter(torch.randn(10, 3, 2))
            self.large = nn.Parameter(torch.randn(97, 64))
            self.frozen = nn.Parameter(torch.randn(9, 2), requires_grad=False)
            self.router_bias = nn.Parameter(torch.randn(6) * 1e-3)
            self.scale = nn.Parameter(torch.tensor(1.7))

    return Awkward()


def advance(model: Any) -> None:
    """The same change of every element, sharded or not."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25).add_(0.01)


def whole(model: Any) -> dict[str, Any]:
    return dict(model.named_parameters())


def uneven_shards_of_fsdp(me: Rank) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.debug import CommDebugMode

    from astraflow.protocol.errors import UserError

    plain, sharded = awkward(), awkward()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (me.world,)), ignored_params={sharded.scale})
    lengths = {name: len(p.to_local()) for name, p in sharded.named_parameters() if hasattr(p, "to_local")}
    assert me.world == 2 or me.rank < me.world - 1 or 0 in lengths.values(), "some shards are empty"
    with me.manager() as manager:
        _raises(UserError, "is sharded over several ranks", lambda: manager.offload(sharded.named_parameters(), 0))
    with me.manager(float32_names=["router*"]) as manager:
        for version in range(3):
            expected = whole(plain)
            if version == 1:  # the tie under both names, as a trainer that lists duplicates would give it
                me.publish(manager, sharded.named_parameters(remove_duplicate=False), version, expected)
            elif version == 2:
                with CommDebugMode() as traffic:
                    me.publish(manager, sharded.named_parameters(), version, expected)
                assert traffic.get_total_counts() == 0, "no communication"
            else:
                me.publish(manager, ((n, p.detach()) for n, p in sharded.named_parameters(remove_duplicate=False)), version, expected)
            assert manager._layout.tied == {"head.weight": "embed.weight"}
            assert manager._layout.by_name["router_bias"].dtype == "F32"
            assert manager._layout.by_name["vector"].dtype == "BF16"
            advance(plain)
            advance(sharded)
        _pull(me, manager, whole(plain))


def _pull(me: Rank, manager: Any, later: dict[str, Any]) -> None:
    """What a receiver stages is what was published."""
    import torch
    from safetensors.torch import load_file

    from astraflow.weights.receiver import WeightReceiver

    if not manager._at.leads:
        return
    receiver = WeightReceiver("policy", "raas-0", me.directory / "staging", manager.config, manager._identity)
    try:
        loaded = load_file(receiver.pull(manager.endpoint, 2, manager.published(2, 60.0), deadline_s=60.0).path)
    finally:
        receiver.close()
    assert (loaded["router_bias"].dtype, loaded["vector"].dtype) == (torch.float32, torch.bfloat16), "mixed dtypes survive the way"
    assert not torch.equal(loaded["vector"], later["vector"].detach().bfloat16())


def every_placement(me: Rank) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    line = init_device_mesh("cpu", (me.world,))
    meshes = [(line, [[Shard(0)], [Shard(1)], [Replicate()]])]
    if me.world == 4:
        grid = init_device_mesh("cpu", (2, 2))
        kinds: list[Any] = [Replicate(), Shard(0), Shard(1)]
        meshes.append((grid, [[first, second] for first in kinds for second in kinds]))
    expected: dict[str, Any] = {}
    named: dict[str, Any] = {}
    for number, (mesh, layouts) in enumerate(meshes):
        for placements in layouts:
            for extent in ((5, 3), (1, 7), (2, 2), (17, 4)):
                name = f"{number} {placements} {extent}"
                torch.manual_seed(len(named))
                expected[name] = torch.randn(extent)
                named[name] = distribute_tensor(expected[name], mesh, placements)
    torch.manual_seed(9)
    expected["sum"] = torch.randn(3, 3)
    named["sum"] = DTensor.from_local(expected["sum"] / me.world if me.world != 3 else expected["sum"], line, [Partial()])
    expected["sum"] = expected["sum"] if me.world != 3 else sum(expected["sum"] for _ in range(3))
    expected["scalar"] = torch.tensor(0.3)
    named["scalar"] = distribute_tensor(expected["scalar"], line, [Replicate()])
    expected["plain"] = named["plain"] = torch.randn(3)
    with me.manager() as manager:
        me.publish(manager, named.items(), 0, expected)


def adapters(me: Rank) -> None:
    import torch
    from peft import LoraConfig, get_peft_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from astraflow.weights import copy, layout, lora

    mesh = init_device_mesh("cpu", (me.world,))
    settings = LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], modules_to_save=["norm"])
    plain, sharded = tiny_llama(settings), tiny_llama(settings)
    fully_shard(sharded, mesh=mesh)
    names = set(base_names())
    with me.manager() as merged, me.manager(lora="adapter") as alone:
        for version in range(2):
            tensors, ties = copy.collect(lora.published(plain, "merged"), {"lm_head.weight": "model.embed_tokens.weight"})
            shape = layout.build(copy.specs(tensors, "bfloat16"), ties)
            half = bytearray(shape.size_bytes)
            copy.copy_into(memoryview(half), shape, tensors)
            words = {t.name: torch.frombuffer(half[t.offset : t.offset + t.size_bytes], dtype=torch.bfloat16) for t in shape.tensors}
            assert set(words) == names, "the names that an HF engine knows"
            me.publish(merged, merged.tensors_of(sharded), version, {n: w.view(shape.by_name[n].shape) for n, w in words.items()})
            me.publish(alone, alone.tensors_of(sharded), version, get_peft_model_state_dict(plain))
            advance(plain)
            advance(sharded)
        merged_by_peft = dict(plain.merge_and_unload().named_parameters())
        merged.offload(merged.tensors_of(sharded), 2, me.rank, me.world)
        if me.rank == 0:
            for meta in merged._layout.tensors:
                span = bytearray(merged._memory.half(1 - merged._link.target())[meta.offset : meta.offset + meta.size_bytes])
                got = torch.frombuffer(span, dtype=torch.bfloat16).view(meta.shape).float()
                torch.testing.assert_close(got, merged_by_peft[meta.name].detach(), rtol=2**-8, atol=1e-6)


def base_names() -> list[str]:
    return [name for name, _ in tiny_llama(None).named_parameters()]


def tiny_llama(settings: Any) -> Any:
    """A model with an adapter whose B is not zero (at the start of a training it is)."""
    import torch
    from peft import get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    sizes = {"vocab_size": 37, "hidden_size": 20, "intermediate_size": 26, "num_attention_heads": 2, "num_key_value_heads": 1}
    model: Any = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, tie_word_embeddings=True, **sizes))
    if settings is not None:
        model = get_peft_model(model, settings)
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter)
    return model


def a_rank_that_fails(me: Rank) -> None:
    """All ranks raise, nothing is served, and the next version is right again."""
    import torch

    from astraflow.protocol.errors import AstraFlowError, LayoutMismatch, RemoteError

    good = {"w": torch.full((4, 3), 0.5), "v": torch.ones(5)}
    with me.manager() as manager:

        def offload(tensors: dict[str, Any], version: int) -> Callable[[], None]:
            return lambda: manager.offload(tensors.items(), version, me.rank, me.world)

        wrong = {**good, "v": torch.ones(5, dtype=torch.int64)} if me.rank == 1 else good
        _raises(AstraFlowError, "only floating point", offload(wrong, 0))
        other = {**good, "v": torch.ones(6)} if me.rank == 1 else good
        _raises(AstraFlowError, r"ranks \[1\] publish other names, shapes or ties", offload(other, 0))
        me.publish(manager, good.items(), 1, good)
        short = {"w": good["w"]} if me.rank == me.world - 1 else good
        expected = LayoutMismatch if me.rank == me.world - 1 else RemoteError
        _raises(expected, "'v' was published before and is missing", offload(short, 2))
        if me.rank == 0:
            assert manager._link._switch.versions() == [1], "nothing of version 2 is served"
        later = {name: tensor * 3 for name, tensor in good.items()}
        me.publish(manager, later.items(), 3, later)
        _raises(AstraFlowError, "is at 'version", offload(later, 4 + (me.rank == 1)))
        me.publish(manager, good.items(), 6, good)


def _raises(kind: type[Exception], text: str, call: Callable[[], None]) -> None:
    import re

    try:
        call()
    except kind as error:
        if not re.search(text, str(error)):
            raise AssertionError(f"{text!r} was expected, not {error}") from error
        return
    raise AssertionError(f"{kind.__name__} was expected: {text}")


def hsdp(me: Rank) -> None:
    """Two replicas of two shards: of the ranks with equal rows one writes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from astraflow.weights import copy

    plain, sharded = awkward(), awkward()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), ignored_params={sharded.scale})
    with me.manager() as manager:
        for version in range(2):
            me.publish(manager, sharded.named_parameters(), version, whole(plain))
            advance(plain)
            advance(sharded)
        part = copy._part(dict(sharded.named_parameters())["large"], manager._at)
        assert (part is not None) == (me.rank < 2), "the second replica skips"


def fsdp_on_top_of_tensor_parallel(me: Rank) -> None:
    """Rows that two axes of a mesh split in an order of their own, beside columns and replicas."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, sharded = two_layers(), two_layers()
    parallelize_module(sharded, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(sharded, mesh=mesh["dp"])
    with me.manager() as manager:
        me.publish(manager, sharded.named_parameters(), 0, whole(plain))


def two_layers() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 7), nn.LayerNorm(7))


def two_nodes(me: Rank) -> None:
    """Each node has a sender with the whole model: by gathering where shards are spread, without where each node has a replica."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.debug import CommDebugMode

    from astraflow.protocol.errors import UserError

    node = "ab"[me.rank // 2]
    spread, replicated, plain = two_layers(), two_layers(), two_layers()
    fully_shard(spread, mesh=init_device_mesh("cpu", (4,)))
    fully_shard(replicated, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    with me.manager(node) as manager:
        me.publish(manager, spread.named_parameters(), 0, whole(plain))
        assert manager._at.leads == (me.rank in (0, 2))
        if not manager._at.leads:
            _raises(UserError, "has this node's sender", lambda: manager.endpoint)
        with CommDebugMode() as traffic:
            manager.offload(spread.named_parameters(), 1, me.rank, me.world)
        assert traffic.get_total_counts() == len(whole(plain))
        with CommDebugMode() as traffic:
            me.publish(manager, replicated.named_parameters(), 2, whole(plain))
        assert traffic.get_total_counts() == 0


def a_rank_that_does_not_come(me: Rank) -> None:
    """The first offload has a deadline of its own, whatever that of the trainer's process group is."""
    import torch

    from astraflow.protocol.errors import DeadlinePassed

    with me.manager(ranks_wait_s=0.5) as manager:
        if me.rank == 0:
            named = [("w", torch.ones(3))]
            _raises(DeadlinePassed, "not all ranks came within 0.5 s", lambda: manager.offload(named, 0, me.rank, me.world))


def a_rank_is_killed(me: Rank) -> None:
    _dies(me, 1, "is gone")  # of rank 1, or of the first rank, which heard of it before this one came


def the_first_rank_is_killed(me: Rank) -> None:
    _dies(me, 0, "the first rank of the node is gone")


def _dies(me: Rank, victim: int, text: str) -> None:
    """One rank is killed -9 between two versions: the others hear of it at once, and nothing waits for a deadline."""
    import torch

    from astraflow.protocol.errors import RemoteError

    tensors = {"w": torch.ones(300, 7)}
    with me.manager(ranks_wait_s=3600.0) as manager:
        me.publish(manager, tensors.items(), 0, tensors)
        assert any(RUN_ID in line for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())
        if me.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        _raises(RemoteError, text, lambda: manager.offload(tensors.items(), 1, me.rank, me.world))


def holders(seconds: float) -> list[str]:
    """Processes that have the memory of our ranks mapped or open, after at most `seconds` of waiting for them to end."""
    end = time.monotonic() + seconds
    while True:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                files = [os.readlink(entry) for entry in (process / "fd").iterdir()]
                if RUN_ID in "".join(files) or RUN_ID in (process / "maps").read_text(encoding="utf-8", errors="replace"):
                    found.append(f"{process.name}: {(process / 'cmdline').read_text(encoding='utf-8')}")
        if not found or time.monotonic() >= end:
            return found
        time.sleep(0.05)


def run_rank(rank: int, world: int, directory: Path, module: ModuleType) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store-{world}", rank=rank, world_size=world)
    with open(directory / "results" / f"{world}-{rank}.jsonl", "w", encoding="utf-8") as results:
        for name, worlds in module.cases().items():
            if world not in worlds:
                continue
            where = directory / f"{name}-{world}"
            where.mkdir(exist_ok=True)
            trouble, began = "", time.monotonic()
            try:
                getattr(module, name)(Rank(rank, world, where))
            except Exception:
                trouble = traceback.format_exc()
            results.write(json.dumps({"case": name, "trouble": trouble, "s": time.monotonic() - began}) + "\n")
            results.flush()
            if name in module.LAST:
                return  # there is no whole process group any more
            dist.barrier()
    dist.destroy_process_group()


def run_all(script: str, directory: Path) -> None:
    """All cases of a script like this one, once: most of the time is the import of torch and the start of processes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script, str(directory)], capture_output=True, text=True, timeout=330, env=environment)
    (directory / "log").write_text(done.stdout + done.stderr, encoding="utf-8")


def results_of(directory: Path) -> Results:
    found: Results = {}
    for path in sorted((directory / "results").glob("*.jsonl")):
        world, rank = map(int, path.stem.split("-"))
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            found.setdefault((row["case"], world), {})[rank] = row["trouble"]
    return found


def all_ranks(results: Results, directory: Path, case: str, world: int, ended: int) -> None:
    """Assert that a case went well on all ranks, of which `ended` live to tell."""
    found = results.get((case, world), {})
    assert [text for text in found.values() if text] == [], "\n".join(found.values())
    assert len(found) == ended, (directory / "log").read_text(encoding="utf-8")[-3000:]


def main(directory: Path, module: ModuleType) -> int:
    """All cases of a module on all their world sizes; the number of ranks that failed."""
    for name in module.IMPORTS:
        importlib.import_module(name)  # once, before the ranks are forked
    (directory / "results").mkdir()
    failed = 0
    forked = multiprocessing.get_context("fork")
    for world in sorted({world for worlds in module.cases().values() for world in worlds}):
        ranks = [forked.Process(target=run_rank, args=(rank, world, directory, module), daemon=True) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(RANKS_S)
            if process.exitcode is None:
                process.kill()
            failed += process.exitcode not in (0, -signal.SIGKILL)
    left = {"processes": holders(30.0), "names": [name for name in os.listdir("/dev/shm") if RUN_ID in name]}
    (directory / "results" / "held.json").write_text(json.dumps(left), encoding="utf-8")
    return failed


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(main(Path(sys.argv[1]), sys.modules[__name__]))
