"""Batches that are made here, without Dataflow, for benchmarks and experiments in one process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from astraflow.trainer.batch import RaggedBatch


def rows_of(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[Sequence[int]]],
    rewards: npt.NDArray[np.float64],
    logprobs: npt.NDArray[np.float32] | None = None,
    version: int = 0,
) -> RaggedBatch:
    """One row per completion, groups of equal size, all scored, temperature 1, statistics as Dataflow stamps them (numerics 7).

    rewards [groups, samples]; logprobs: behaviour log-probs of all sampled tokens in the order of the rows, None = zeros.
    """
    n_groups, n_samples = rewards.shape
    n_rows = n_groups * n_samples
    group, index = np.divmod(np.arange(n_rows), n_samples)
    pairs = [(prompts[g], completions[g][i]) for g, i in zip(group, index, strict=True)]
    lengths = np.array([len(prompt) + len(answer) for prompt, answer in pairs])
    mask = np.concatenate([np.repeat([False, True], [len(prompt), len(answer)]) for prompt, answer in pairs])
    behaviour = np.zeros(len(mask), np.float32)
    if logprobs is not None:
        behaviour[mask] = logprobs
    flat = rewards.ravel()
    equal = np.ptp(rewards, axis=1) <= 1e-6 * np.abs(rewards[:, 0])
    return RaggedBatch(
        model_id="default",
        timeline=0,
        version=version,
        offsets=np.concatenate(([0], np.cumsum(lengths))),
        tokens={
            "input_ids": np.concatenate([np.concatenate((prompt, answer)) for prompt, answer in pairs]).astype(np.int32),
            "loss_mask": mask.astype(np.uint8),
            "logprobs": behaviour,
            "versions": np.where(mask, version, -1).astype(np.int32),
        },
        rows={
            "rewards": flat.astype(np.float32),
            "reward_shaped": flat,
            "credit": flat,
            "temperature": np.ones(n_rows, np.float32),
            "group_index": group,
            "trajectory_index": np.arange(n_rows),
            "group_reward_mean": rewards.mean(1)[group],
            "group_reward_std": rewards.std(1, ddof=1)[group],
            "group_size": np.full(n_rows, n_samples),
            "finish": np.zeros(n_rows, np.uint8),
            "scored": np.ones(n_rows, bool),
            "reward_all_equal": equal[group],
        },
        row_of_token=np.repeat(np.arange(n_rows), lengths),
        n_groups=n_groups,
        n_trajectories=n_rows,
    )
