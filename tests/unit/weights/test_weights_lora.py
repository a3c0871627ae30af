"""Models with adapters, made by peft: what is published of them, against what peft merges and saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import nn
from transformers.pytorch_utils import Conv1D

from astraflow.protocol.errors import UserError
from astraflow.weights import copy, layout, lora
from astraflow.weights.lora import LowRank


class Model(nn.Module):
    """Each kind of layer that an adapter can be merged into, and one that is trained whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6)
        self.turned = Conv1D(9, 6)  # weight [in, out]
        self.linear = nn.Linear(9, 5)
        self.norm = nn.LayerNorm(5)


def adapted(**settings: Any) -> Any:
    chosen = {"r": 2, "lora_alpha": 3, "target_modules": ["embed", "turned", "linear"], "modules_to_save": ["norm"], **settings}
    model = get_peft_model(Model(), LoraConfig(**chosen))  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name or ".modules_to_save." in name:
                parameter.normal_()
    return model


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"rank_pattern": {"linear": 3}, "alpha_pattern": {"linear": 7}}])
def test_merged_is_what_peft_merges_under_the_names_of_the_base(settings: dict[str, Any]) -> None:
    model = adapted(**settings)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    tensors, ties = copy.collect(lora.published(model, "merged"), {})
    assert {name for name, source in tensors.items() if isinstance(source, LowRank)} == {"embed.weight", "turned.weight", "linear.weight"}
    shape = layout.build(copy.specs(tensors, "float32"), ties)
    half = bytearray(shape.size_bytes)
    copy.copy_into(memoryview(half), shape, tensors)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters()), "the model is not changed"
    expected = dict(model.merge_and_unload().named_parameters())
    assert set(shape.by_name) == set(expected) == set(dict(Model().named_parameters()))
    for name, parameter in expected.items():
        meta = shape.by_name[name]
        got = torch.frombuffer(half[meta.offset : meta.offset + meta.size_bytes], dtype=torch.float32).view(meta.shape)
        torch.testing.assert_close(got, parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_the_adapter_alone_has_the_names_and_values_that_peft_saves() -> None:
    model = adapted()
    found = dict(lora.published(model, "adapter"))
    expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    assert set(found) == set(expected)
    assert all(torch.equal(tensor.detach(), expected[name]) for name, tensor in found.items() if isinstance(tensor, torch.Tensor))


def test_a_model_without_adapters_and_one_merged_already_are_published_as_they_are() -> None:
    plain = Model()
    assert dict(lora.published(plain, "merged")).keys() == dict(plain.named_parameters()).keys()
    model = adapted(target_modules=["linear"])
    model.merge_adapter()
    assert not any(isinstance(source, LowRank) for _, source in lora.published(model, "merged"))


@pytest.mark.parametrize("mode", ["merged", "adapter"])
def test_what_a_low_rank_sum_does_not_say_is_refused_by_name(mode: Any) -> None:
    for settings, text in (({"use_dora": True}, "variant"), ({"lora_bias": True}, "variant")):
        with pytest.raises(UserError, match=f"linear.*{text}"):
            list(lora.published(adapted(target_modules=["linear"], **settings), mode))
    two = adapted(target_modules=["linear"], modules_to_save=None)
    two.add_adapter("other", LoraConfig(r=1, target_modules=["linear"]))
    two.base_model.set_adapter(["default", "other"])
    with pytest.raises(UserError, match=r"linear.*2 active adapters \(default, other\)"):
        list(lora.published(two, mode))


def test_an_adapter_of_one_of_two_tied_weights_cannot_be_merged() -> None:
    base = Model()
    base.head = nn.Linear(6, 11, bias=False)
    base.head.weight = base.embed.weight
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["embed"]))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"'embed\.weight' is tied"):
        list(lora.published(model, "merged"))
