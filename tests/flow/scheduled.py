"""Scheduled replay (numerics): a scripted engine under a simulated clock, and a serial oracle that takes the steps of its batches.

The schedule goes through Dataflow's own cores: leases begin at the version of their instant, last for a seeded time, and are delivered
in the order in which they end; queue and collation make the batches. The oracle is plain: it shares the packing, the products and
the optimizer with the trainer (bits depend on them), and writes out everything else.
"""

from __future__ import annotations

import heapq
from pathlib import Path

import numpy as np
import torch

from astraflow.dataflow.admission import make_share
from astraflow.dataflow.buffer import RolloutBuffer, fresh_enough, make_entry
from astraflow.dataflow.collate import Item, collate
from astraflow.dataflow.config import BufferConfig
from astraflow.protocol import codec
from astraflow.protocol.batch import Batch
from astraflow.protocol.rollout import Group, Segment, Trajectory, VersionSpan
from astraflow.trainer.batch import ragged
from astraflow.trainer.logprobs import token_logprobs
from astraflow.trainer.models import hidden_states, load_model, output_embedding
from astraflow.trainer.packing import micro_batches, pack
from astraflow.weights.config import ModelConfig

MODEL, SAMPLES, GROUPS, STALENESS = "default", 4, 4, 2


def scripted_group(lease: int, began: int, ended: int) -> Group:
    """The engine's script: tokens, log-probs and rewards follow from the lease; a load comes in the middle of long ones."""
    rng = np.random.default_rng(lease)
    prompt = [5, 6, 7, *rng.integers(3, 40, 2)]
    members = []
    for index in range(SAMPLES):
        count = int(rng.integers(1, 6))
        stamps = np.sort(rng.integers(began, ended + 1, count)).tolist()
        segment = Segment(
            policies=[MODEL],
            input_ids=codec.column([*prompt, *rng.integers(3, 9, count)], "int32"),
            loss_mask=codec.column([0] * len(prompt) + [1] * count, "uint8"),
            logprobs=codec.column([0.0] * len(prompt) + rng.normal(-3.5, 0.3, count).tolist(), "float32"),
            versions=codec.column([-1] * len(prompt) + stamps, "int32"),
        )
        reward = None if rng.random() < 0.1 else float(rng.integers(0, 3)) / 2
        members.append(Trajectory(index=index, segments=[segment], reward=reward))
    span = {MODEL: VersionSpan(timeline=0, min=began, max=ended)}
    return Group(lease_id=f"lease-{lease:04d}", attempt=1, task_id=f"task-{lease}", versions=span, trajectories=members)


def scheduled_batches(count: int) -> list[Batch]:
    """The batches of so many versions; stale groups are dropped when they would be served."""
    rng = np.random.default_rng(7)
    buffer = RolloutBuffer(MODEL, BufferConfig(max_staleness=STALENESS))
    running: list[tuple[float, int, int]] = []
    items: dict[str, Item] = {}
    batches: list[Batch] = []
    now, lease = 0.0, 0
    while len(batches) < count:
        version = len(batches)
        while len(running) < 2 * GROUPS:
            heapq.heappush(running, (now + float(rng.exponential(1.0)), lease, version))
            lease += 1
        now, number, began = heapq.heappop(running)
        group = scripted_group(number, began, version)
        stats = make_share(group, MODEL, []).stats
        if stats is None:
            continue
        items[group.lease_id] = Item(codec.encode(group), stats, False)
        buffer.add(make_entry(group.lease_id, number, stats, "groups"))
        buffer.expire(lambda entry, at=version: "" if fresh_enough(at, entry.min_version, STALENESS) else "stale")  # type: ignore[misc]
        taken = buffer.take(GROUPS * SAMPLES, SAMPLES, version)
        if taken is not None:
            batches.append(collate([items[entry.lease_id] for entry in taken.fresh], MODEL, 0, version))
    return batches


def serial_oracle(directory: Path, batches: list[Batch], lr: float, warmup: int, total: int) -> dict[str, np.ndarray]:
    """fp32 masters after one GRPO step with truncated importance weights (C = 2) on each batch, by name."""
    model = load_model(ModelConfig(path=str(directory)), "tree")
    named = dict(model.named_parameters())
    masters = {name: parameter.detach().clone().requires_grad_() for name, parameter in named.items()}
    matrices = [master for master in masters.values() if master.ndim >= 2]
    others = [master for master in masters.values() if master.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others}], weight_decay=0.0, fused=True)
    for step, served in enumerate(batches, start=1):
        batch = ragged(served)
        own = batch.tokens["loss_mask"].astype(bool)
        rewards, group = batch.rows["reward_shaped"], batch.rows["group_index"]
        advantage = np.zeros(batch.n_rows)
        for index in np.unique(group):
            scored = rewards[group == index]
            if len(scored) > 1 and np.ptp(scored) > 1e-6 * abs(scored[0]):
                advantage[group == index] = (scored - scored.mean()) / (scored.std(ddof=1) + 1e-4)
        rows = np.flatnonzero(advantage != 0)
        for members in micro_batches(batch, own, rows, 2048):
            packed = pack(batch, own, members)
            hidden = hidden_states(model, packed)
            logp, _ = token_logprobs(
                hidden, output_embedding(model), packed.head_temperature, packed.token_head, packed.target, 64 * 1024 * 1024
            )
            row = batch.row_of_token[packed.flat]
            behav, a = torch.from_numpy(batch.tokens["logprobs"][packed.flat]), torch.from_numpy(advantage[row]).float()
            u = (logp - logp.detach()).exp()
            weight = (logp.detach() - behav).exp().clamp(max=2.0)
            loss = weight * torch.maximum(-u * a, -u.clamp(0.8, 1.2) * a)
            (loss * torch.tensor(1.0 / float(own.sum()), dtype=torch.float64).float()).sum().backward()
        rate = lr * step / warmup if step < warmup else lr * 0.5 * (1 + np.cos(np.pi * (step - warmup) / (total - warmup)))
        for settings in optimizer.param_groups:
            settings["lr"] = rate
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in named.values() if parameter.grad is not None])
        if norm > 1.0:
            torch.nn.utils.clip_grads_with_norm_(named.values(), 1.0, norm)
        for name, parameter in named.items():
            masters[name].grad, parameter.grad = parameter.grad, None
        if len(rows):
            optimizer.step()
        for name, parameter in named.items():
            masters[name].grad = None
            parameter.data.copy_(masters[name].detach().to(torch.bfloat16))
    return {name: master.detach().numpy() for name, master in masters.items()}
