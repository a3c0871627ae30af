"""Batches at the trainer's door, and padding on request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from astraflow.protocol.batch import Batch
from astraflow.protocol.codec import column
from astraflow.protocol.errors import BadMessage
from astraflow.trainer.batch import pad, ragged


def test_masks_come_from_lengths_not_from_token_values(
    case: Callable[[str], dict[str, Any]], sample: Any, batch_of: Callable[..., Batch]
) -> None:
    recorded = case("G17")
    given, expected = recorded["input"], recorded["expected"]["values"]
    rows = [sample(row.get("prompt", [9]), row["ids"], 1.0, finish=row["finish"]) for row in given["rows"]]
    batch = ragged(batch_of([rows]))
    assert (batch.rows["finish"] == 1).tolist() == expected["truncated"]
    for side in ("left", "right"):
        padded = pad(batch, given["pad_id"], side, to_length=8)
        for r, row in enumerate(given["rows"]):
            prompt = row.get("prompt", [9])
            start = 8 - len(prompt) - len(row["ids"]) if side == "left" else 0
            assert padded.attention_mask[r].sum() == len(prompt) + len(row["ids"])
            response = padded.loss_mask[r, start + len(prompt) :][: given["pad_to"]].tolist()
            response += [0] * (given["pad_to"] - len(response))
            assert response == expected["response_mask"][r]
            if row["name"] == "pad id inside prompt":
                assert padded.attention_mask[r, start : start + 3].tolist() == expected["prompt_attention_pad_inside_prompt"]


def test_truncated_rows_can_be_left_out_of_the_loss_and_unscored_ones_always_are(sample: Any, batch_of: Callable[..., Batch]) -> None:
    batch = ragged(batch_of([[sample([3], [4, 5], 1.0, finish="length"), sample([3], [4], None), sample([3], [6], 0.0)]]))
    assert batch.loss_mask().tolist() == [False, True, True, False, False, False, True]
    assert batch.loss_mask("mask").tolist() == [False, False, False, False, False, False, True]


def test_padding_to_the_left_keeps_every_column_aligned(random_groups: Callable[..., Batch]) -> None:
    batch = ragged(random_groups(0))
    left, right = pad(batch, 7, "left"), pad(batch, 7, "right")
    for padded in (left, right):
        live = padded.attention_mask.astype(bool)
        np.testing.assert_array_equal(padded.input_ids[live], batch.tokens["input_ids"])
        np.testing.assert_array_equal(padded.columns["versions"][live], batch.tokens["versions"])
        assert (padded.input_ids[~live] == 7).all()
        assert (padded.loss_mask[~live] == 0).all()


def test_columns_that_contradict_each_other_are_refused_by_name(random_groups: Callable[..., Batch]) -> None:
    def broken(change: Callable[[Batch], None], message: str) -> None:
        batch = random_groups(0)
        change(batch)
        with pytest.raises(BadMessage, match=message):
            ragged(batch)

    def replace(family: str, name: str, values: Any, dtype: str) -> Callable[[Batch], None]:
        return lambda batch: getattr(batch, family).__setitem__(name, column(values, dtype))

    good = ragged(random_groups(0))
    n, r = len(good.row_of_token), good.n_rows
    broken(replace("tokens", "logprobs", np.zeros(n - 1), "float32"), "logprobs.*expected")
    broken(replace("tokens", "logprobs", np.full(n, np.nan), "float32"), "no finite behaviour log-prob")
    broken(replace("tokens", "loss_mask", np.ones(n), "uint8"), "nothing predicts it")
    broken(replace("rows", "temperature", np.zeros(r), "float32"), "temperatures > 0")
    broken(replace("rows", "group_index", np.full(r, 99), "int64"), "outside 0…3")
    broken(lambda batch: batch.rows.pop("reward_shaped"), "no column reward_shaped")
    broken(replace("extra", "teacher_logprobs", np.zeros(n + 1), "float32"), r"batch\.extra\['teacher_logprobs'\]")
    broken(lambda batch: setattr(batch, "media", [["abc"]]), f"batch.media: 1 entries, expected {r}")


def test_a_training_temperature_of_zero_or_less_is_refused(
    case: Callable[[str], dict[str, Any]], sample: Any, batch_of: Callable[..., Batch]
) -> None:
    for temperature in case("G15")["input"]["configs_to_reject"]:
        with pytest.raises(BadMessage, match="temperature"):
            ragged(batch_of([[sample([3], [4], 1.0, temperature=temperature), sample([3], [5], 0.0)]]))
