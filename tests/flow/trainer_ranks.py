"""The ranks of an fsdp trainer as processes (the rig of ranks.py): every layout against the local backend, step by step.

World 1 comes first and leaves what the local backend does; the other worlds compare with it.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import ranks
from ranks import Rank

LAST = ("a_rank_is_killed", "a_rank_that_does_not_answer")
"""After these a world of ranks ends."""
IMPORTS = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.qwen3.modeling_qwen3",
    "safetensors.torch",
    "astraflow.trainer.attention",
    "astraflow.trainer.backends.fsdp",
    "astraflow.trainer.team",
)
STEPS = 5
IMAGE_STEPS = 2
"""A word at a boundary that falls to the other side moves a vision-language model's later gradients more than CLOSE."""
CLOSE = 1e-5


def cases() -> dict[str, tuple[int, ...]]:
    """Case → world sizes."""
    return {
        "the_local_backend": (1,),
        "sharded": (1, 2, 4),
        "tensor_parallel": (2,),
        "context_parallel": (2,),
        "replicated_and_sharded": (4,),
        "tensor_parallel_and_sharded": (4,),
        "tensor_and_context_parallel": (4,),
        "adapters": (2,),
        "critic": (2,),
        "images": (2,),
        "half_precision": (2,),
        "goes_on_from_another_number_of_ranks": (1, 2, 4),
        "rank_0_leads": (4,),
        "what_cannot_be_split": (4,),
        "a_rank_that_does_not_answer": (2,),
        "a_rank_is_killed": (4,),
    }


@functools.cache
def helpers(name: str = "conftest") -> ModuleType:
    import importlib.util

    path = Path(__file__).parent.parent / "unit" / "trainer" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"trainer_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def algorithms() -> dict[str, Any]:
    """A loss that is a sum over tokens; one with a bound over the whole batch and all else that a step may need."""
    from astraflow.trainer.config import PPOConfig

    return {
        "tis": PPOConfig(tis_c=2.0),
        "adapters": PPOConfig(kl_loss=0.1),
        "gae": PPOConfig(advantage="gae", gamma=0.9, kl_loss=0.1),
        "images": PPOConfig(advantage="gae"),
        "m2po": PPOConfig(loss="m2po", m2po_tau=0.05, kl_loss=0.1, entropy=0.01),
    }


def config_of(algorithm: str, ranks: int = 1, media: str = "", **parallel: int) -> Any:
    from astraflow.trainer.config import CriticConfig, OptimizerConfig, PackingConfig, ParallelConfig, ReferenceConfig, TrainEngineConfig

    return TrainEngineConfig(
        backend="fsdp" if ranks > 1 else "local",
        ranks=ranks,
        parallel=ParallelConfig(**parallel),
        algorithm=algorithms()[algorithm],
        # eps: AdamW divides rounding noise by itself where a gradient is nearly zero
        optimizer=OptimizerConfig(lr=1e-3, eps=1e-4, warmup_steps=2, weight_decay=0.01),
        packing=PackingConfig(max_nodes=64),
        reference=ReferenceConfig(kind="initial" if algorithm == "adapters" else "ema", ema_decay=0.9),
        gradient_checkpointing=algorithm == "m2po",
        critic=CriticConfig(lr=1e-3, value_clip=0.01),
        media_dir=media,
        max_steps=STEPS,
    )


def batch_of(step: int, media: str = "") -> Any:
    """With `media`, a group with images and one without: of two ranks one has a pass without any."""
    from astraflow.trainer.batch import ragged

    if media:
        made, sight = helpers(), helpers("test_trainer_vision")
        groups = [("ab", [7, 3]), ("", [5, 8, 9 + step, *[6, 8, 4] * 6])]
        return sight.batch_with(made.Sample, made.make_batch, json.loads(Path(f"{media}.json").read_text()), groups)
    return ragged(helpers().random_batch(step, n_groups=5, n_samples=4))


def steps_of(algorithm: str) -> range:
    return range(IMAGE_STEPS if algorithm == "images" else STEPS)


def media_of(algorithm: str, root: Path) -> str:
    return str(root / "media") if algorithm == "images" else ""


def backend_of(make: Any, config: Any, directory: Path, adapters: bool = False) -> Any:
    import torch

    from astraflow.weights.config import LoraConfig, ModelConfig

    torch.manual_seed(7)  # adapters begin at random
    lora = LoraConfig(rank=3, targets=["q_proj", "down_proj"]) if adapters else None
    path = str(directory / ("sight" if config.media_dir else "model"))
    return make(config, ModelConfig(path=path, lora=lora), "bfloat16", max_new_tokens=5)


def the_local_backend(me: Rank) -> None:
    from astraflow.trainer.backends.local import LocalBackend

    root = me.directory.parent
    helpers().write_tiny_model(root / "model")
    helpers("test_trainer_vision").write_model(root / "sight")
    (root / "media").mkdir()
    (root / "media.json").write_text(json.dumps(helpers("test_trainer_vision").write_media(root / "media")))
    for algorithm in algorithms():
        media = media_of(algorithm, root)
        backend = backend_of(LocalBackend, config_of(algorithm, media=media), root, adapters=algorithm == "adapters")
        metrics = [backend.train_step(batch_of(step, media), lambda: None) for step in steps_of(algorithm)]
        keep(root / algorithm, backend, metrics)
        if algorithm == "adapters":
            backend.export(root / "adapted")


def keep(path: Path, backend: Any, metrics: list[dict[str, float]]) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.detach().contiguous() for name, tensor in backend.state().tensors.items()}, f"{path}.safetensors")
    Path(f"{path}.json").write_text(json.dumps(metrics), encoding="utf-8")


def compare(me: Rank, *names: str, **parallel: int) -> Any:
    """Five steps of each algorithm as the local backend takes them; the last backend."""
    from astraflow.trainer.backends.fsdp import FsdpBackend

    for algorithm in names or ("tis",):
        media = media_of(algorithm, me.directory.parent)
        config = config_of(algorithm, me.world, media, **parallel)
        backend = backend_of(FsdpBackend, config, me.directory.parent, algorithm == "adapters")
        metrics = [backend.train_step(batch_of(step, media), lambda: None) for step in steps_of(algorithm)]
        expected = json.loads((me.directory.parent / f"{algorithm}.json").read_text(encoding="utf-8"))
        for step, (found, wanted) in enumerate(zip(metrics, expected, strict=True)):
            for name in wanted.keys() - {"perf/micro_batches", "perf/nodes"}:
                assert abs(found[name] - wanted[name]) <= CLOSE * max(1.0, abs(wanted[name])), (step, name, found[name], wanted[name])
        same(me, backend, algorithm)
    return backend


def same(me: Rank, backend: Any, algorithm: str) -> None:
    """Masters and moments within CLOSE of the local ones, the same words except where a master lies that close to a boundary."""
    import torch
    from safetensors.torch import load_file

    wanted = load_file(me.directory.parent / f"{algorithm}.safetensors")
    found = {name: whole(tensor) for name, tensor in backend.state().tensors.items()}
    assert {name for name in wanted if "rng" not in name} == {name for name in found if "rng" not in name}
    for name, tensor in wanted.items():
        assert "rng" in name or (found[name] - tensor).abs().max() <= CLOSE, name
    certain = total = 0
    for name, published in backend.published() if algorithm != "adapters" else ():
        words, master, local = whole(published), found[f"master.{name}"], wanted[f"master.{name}"]
        assert torch.equal(words.bfloat16(), master.bfloat16()), name
        near = (local - CLOSE).bfloat16() != (local + CLOSE).bfloat16()
        certain, total = certain + int((~near).sum()), total + near.numel()
        assert torch.equal(words.bfloat16()[~near], local.bfloat16()[~near]), name
    assert certain >= total / 2, "most masters are far from a boundary"


def whole(tensor: Any) -> Any:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def sharded(me: Rank) -> None:
    """Also a bound over the whole batch (M2PO), a moving reference and an entropy bonus; and what is exported."""
    from astraflow.trainer.backends.local import LocalBackend

    backend = compare(me, *(("tis", "m2po") if me.world == 2 else ("m2po",)))
    backend.export(me.directory / "export")
    if me.rank == 0:
        import torch

        from astraflow.weights.config import ModelConfig

        again = LocalBackend(config_of("tis"), ModelConfig(path=str(me.directory / "export")), "bfloat16", 5)
        exported = dict(again.published())
    for name, tensor in backend.published():
        words = whole(tensor)
        assert me.rank or torch.equal(exported[name], words), name


def adapters(me: Rank) -> None:
    """LoRA: the sums of base and adapter are published in the words that the local backend publishes."""
    from safetensors.torch import load_file

    backend = compare(me, "adapters")
    backend.export(me.directory / "export")
    if me.rank == 0:
        alone, ours = (load_file(path / "model.safetensors") for path in (me.directory.parent / "adapted", me.directory / "export"))
        assert alone.keys() == ours.keys()
        different = sum(int((alone[name] != ours[name]).sum()) for name in alone)
        assert different <= sum(tensor.numel() for tensor in alone.values()) / 1000, "but for masters at a boundary"


def critic(me: Rank) -> None:
    """Values, their clipped loss and GAE."""
    compare(me, "gae")


def images(me: Rank) -> None:
    """A rank whose pass has no images takes part where the other gathers the vision tower."""
    compare(me, "images")


def tensor_parallel(me: Rank) -> None:
    """Also of a critic: the gradient of its value head is a part on each rank, like that of the output embedding."""
    compare(me, "gae", tensor=2)


def context_parallel(me: Rank) -> None:
    compare(me, context=2)


def replicated_and_sharded(me: Rank) -> None:
    compare(me, replicate=2)


def tensor_parallel_and_sharded(me: Rank) -> None:
    compare(me, tensor=2)


def tensor_and_context_parallel(me: Rank) -> None:
    compare(me, tensor=2, context=2)


def half_precision(me: Rank) -> None:
    """Forward and backward in bf16 on words that FSDP rounds itself: near the local step, and what is published is what was computed on."""
    from astraflow.trainer.backends.fsdp import FsdpBackend
    from astraflow.weights.config import ModelConfig

    model = ModelConfig(path=str(me.directory.parent / "model"), dtype="bfloat16")
    backend = FsdpBackend(config_of("tis", me.world), model, "bfloat16", max_new_tokens=5)
    expected = json.loads((me.directory.parent / "tis.json").read_text(encoding="utf-8"))
    found = [backend.train_step(batch_of(step), lambda: None) for step in range(STEPS)]
    for step, wanted in enumerate(expected):
        for name in ("loss/policy", "policy/ratio", "policy/entropy"):
            assert abs(found[step][name] - wanted[name]) <= 0.02 * max(1.0, abs(wanted[name])), (step, name)
    for name, tensor in backend.published():
        assert tensor.to_local().dtype == backend.state().tensors[f"master.{name}"].to_local().dtype, "masters are published, in fp32"


def goes_on_from_another_number_of_ranks(me: Rank) -> None:
    """Two steps on one local process, one more on two ranks, the last two on four, and the local backend holds what they hold;
    of policy, critic and moving reference."""
    from astraflow.trainer.backends.fsdp import FsdpBackend
    from astraflow.trainer.backends.local import LocalBackend
    from astraflow.trainer.checkpoint import Checkpoints
    from astraflow.trainer.config import CheckpointConfig
    from astraflow.trainer.ranks import Ranks

    root = me.directory.parent
    begin, end, parallel = {1: (0, 2, {}), 2: (2, 3, {}), 4: (3, 5, {"tensor": 2})}[me.world]
    make = LocalBackend if me.world == 1 else FsdpBackend
    backend = backend_of(make, config_of("gae", me.world, **parallel), root)
    checkpoints = Checkpoints(root / "checkpoints", CheckpointConfig(), "run", Ranks(me.rank, me.world, me.group(), 60.0, 60.0))
    resume(backend, checkpoints, begin)
    for step in range(begin, end):
        backend.train_step(batch_of(step), checkpoints.wait)
    checkpoints.save(end, backend.state(), {"window": []})
    checkpoints.wait()
    assert checkpoints.complete()[-1] == end
    if me.world == 4:
        same(me, backend, "gae")
        if me.rank == 0:
            alone = backend_of(LocalBackend, config_of("gae"), root)
            resume(alone, Checkpoints(root / "checkpoints", CheckpointConfig(), "run"), end)
            same(me, alone, "gae")


def resume(backend: Any, checkpoints: Any, version: int) -> None:
    saved = checkpoints.newest()
    assert (saved.version if saved else 0) == version
    if saved:
        backend.load_state(saved.backend, lambda into: checkpoints.fill(saved, into))


def rank_0_leads(me: Rank) -> None:
    """The others do what it says, in the same order; each of two nodes serves the whole model."""
    from astraflow.trainer.backends.fsdp import FsdpBackend
    from astraflow.trainer.checkpoint import Checkpoints
    from astraflow.trainer.config import CheckpointConfig
    from astraflow.trainer.ranks import Ranks
    from astraflow.trainer.team import Team

    everybody = Ranks(me.rank, me.world, me.group(), 60.0, 60.0)
    backend = backend_of(FsdpBackend, config_of("tis", me.world, tensor=2), me.directory.parent)
    checkpoints = Checkpoints(me.directory / "checkpoints", CheckpointConfig(), "run", everybody)
    with me.manager(node="ab"[me.rank // 2]) as manager:
        team = Team(backend, manager, checkpoints, everybody)
        if everybody.leads:
            assert team.resume() is None
            for version in range(2):
                team.publish(version)
                team.train_step(helpers().random_batch(version, n_groups=5, n_samples=4), batch_of(version))
            team.save(2, {"window": [0.5]})
            team.export(me.directory / "export")
            team.check()
            assert team.durable() == 2
            team.publish(2)
            team.end(7)
        else:
            assert team.follow() == 7
        assert len(set(team.senders)) == 2
        assert team.senders[me.rank // 2] == (manager.endpoint if manager.serves else team.senders[me.rank // 2])
        me.compare(manager, 2, {name: whole(tensor) for name, tensor in backend.published()})
    assert backend.position == 2
    assert sorted(path.name for path in (me.directory / "checkpoints" / "step-00000002").iterdir()) == [
        "checkpoint.json", *(f"state-{rank}-of-4.safetensors" for rank in range(1, 5)),
    ]  # fmt: skip


def what_cannot_be_split(me: Rank) -> None:
    from astraflow.protocol.errors import ConfigError
    from astraflow.trainer.backends.fsdp import FsdpBackend

    odd = config_of("tis", me.world, tensor=4)
    text = "trainer.parallel.tensor: 4 does not divide num_key_value_heads = 2"
    ranks._raises(ConfigError, text, lambda: backend_of(FsdpBackend, odd, me.directory.parent))


def a_rank_that_does_not_answer(me: Rank) -> None:
    """It is given up by a deadline, whatever it does."""
    from astraflow.trainer.ranks import RankLost, Ranks

    both = Ranks(me.rank, me.world, me.group(0.5), 0.5, 0.5)
    both.exchange(b"")
    if me.rank == 0:
        ranks._raises(RankLost, "did not come within 0.5 s", lambda: both.exchange(b""))


def a_rank_is_killed(me: Rank) -> None:
    """In the middle of training: the others hear of it at once, whether they train or wait for an order."""
    from astraflow.trainer.backends.fsdp import FsdpBackend
    from astraflow.trainer.ranks import RankLost, Ranks

    backend = backend_of(FsdpBackend, config_of("tis", me.world), me.directory.parent)
    team = Ranks(me.rank, me.world, me.group(3600.0), 3600.0, 3600.0)
    backend.train_step(batch_of(0), lambda: None)
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def train() -> None:
        with team.guarded():
            backend.train_step(batch_of(1), lambda: None)

    ranks._raises(RankLost, "another rank has ended", train if me.rank < 3 else lambda: team.exchange(b""))


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(ranks.main(Path(sys.argv[1]), sys.modules[__name__]))
