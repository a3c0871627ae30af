"""Declared types: what is converted, what is refused, and that the line names path, value and the nearest right thing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.config.check import known_paths, typed, typed_part
from astraflow.config.load import Layers, load_layers
from astraflow.protocol.errors import ConfigError


class Case(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    lr: float
    lr2: float
    wd: float
    max_tokens: int
    flag: bool
    name: str


class Inner(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    steps: Annotated[int, msgspec.Meta(ge=1)] = 1
    rate: float = 0.5
    order: Literal["edf", "fifo"] = "edf"
    limit: int | None = None
    choice: str | dict[str, Any] | list[str] = "a"
    betas: tuple[float, float] = (0.9, 0.999)
    flag: bool = False
    name: str = ""
    options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if self.rate > 1:
            raise ValueError(f"rate is {self.rate}, expected at most 1")


class Outer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    inner: Inner = msgspec.field(default_factory=Inner)
    many: dict[str, Inner] = {}
    plugins: list[str] = []


def read(tmp_path: Path, text: str, *overrides: str) -> Outer:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    return typed(load_layers([path], overrides), Outer)


def refusal(tmp_path: Path, *overrides: str, text: str = "model: m\ninner: {steps: 3}\n") -> str:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_g37_every_value_has_its_declared_type(case: Callable[[str], dict[str, Any]], tmp_path: Path) -> None:
    recorded = case("G37")
    path = tmp_path / "g37.yaml"
    path.write_text(recorded["input"]["yaml"])
    values = typed(load_layers([path]), Case)
    expected = recorded["expected"]["values"]
    assert (values.lr, values.lr2, values.wd) == (expected["lr"], expected["lr2"], expected["wd"])
    assert (values.max_tokens, values.flag, values.name) == (1000, False, "08")
    declared = recorded["input"]["declared_types"]
    assert {name: type(getattr(values, name)).__name__ for name in declared} == declared
    good, *bad = recorded["input"]["cli"]
    assert typed(load_layers([path], [good]), Case).lr == expected["cli_lr"]
    for override in bad:
        with pytest.raises(ConfigError, match=rf"^{override.split('=')[0]}: .*{override.split('=')[1]}"):
            typed(load_layers([path], [override]), Case)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("inner.stps=3", "inner.stps: unknown key; did you mean inner.steps? (override)"),
        ("steps=3", "steps: unknown key; did you mean inner.steps? (override)"),
        ("many.a.steps=0", "many.a.steps: 0 is out of range, expected a whole number >= 1 (override)"),
        ("inner.steps=1.5", "inner.steps: 1.5 is not a whole number >= 1 (override)"),
        ("inner.steps=true", "inner.steps: true is not a whole number >= 1 (override)"),
        ("inner.steps=null", "inner.steps: null is no value for it, expected a whole number >= 1 (override)"),
        ("inner.rate=fast", "inner.rate: 'fast' is not a number (override)"),
        ("inner.rate=.nan", "inner.rate: nan is not a number (override)"),
        ("inner.rate=2", "inner.rate: 2.0, expected at most 1 (override)"),
        ("many.a.rate=2", "2.0, expected at most 1"),
        ("inner.order=ed", "inner.order: 'ed' is not one of edf, fifo; did you mean edf? (override)"),
        ("inner.limit=x", "inner.limit: 'x' is not a whole number (override)"),
        ("inner.choice=3", "inner.choice: 3 is not text or a mapping or a list"),
        ("inner.betas=[1]", "inner.betas: [1] has 1 items, expected 2 (override)"),
        ("inner.betas=[1,x]", "inner.betas.1: 'x' is not a number (override)"),
        ("inner.flag=1", "inner.flag: 1 is not true or false (override)"),
        ("inner.flag=maybe", "inner.flag: 'maybe' is not true or false (override)"),
        ("plugins=x", "plugins: 'x' is not a list (override)"),
        ("plugins=[1.5]", "plugins.0: 1.5 is not text; put it in quotes if it is one (override)"),
        ("inner=3", "inner: 3 is not a section with the keys"),
        ("model=null", "model: null is no value for it, expected text (override)"),
    ],
)
def test_a_mistake_names_path_value_and_what_is_accepted(tmp_path: Path, override: str, said: str) -> None:
    if override == "inner.choice=3":
        assert read(tmp_path, "model: m\n", override).inner.choice == "3"  # a whole number is its own text
        return
    assert said in refusal(tmp_path, override)


def test_a_mistake_in_a_file_names_file_and_line(tmp_path: Path) -> None:
    assert "inner.stpes: unknown key; did you mean inner.steps?" in refusal(tmp_path, text="model: m\ninner:\n  stpes: 3\n")
    assert "x.yaml:3)" in refusal(tmp_path, text="model: m\ninner:\n  stpes: 3\n")


def test_what_is_required_must_be_given(tmp_path: Path) -> None:
    assert refusal(tmp_path, text="inner: {steps: 3}\n") == "model: required, but not given; expected text"


def test_omitted_keys_take_their_declared_defaults_and_never_none(tmp_path: Path) -> None:
    """Fault 28: omitted config keys became None and crashed later."""
    values = read(tmp_path, "model: m\n")
    assert values.inner == Inner()
    assert read(tmp_path, "model: m\ninner: {}\n").inner == Inner()
    assert "inner: null is no value" in refusal(tmp_path, text="model: m\ninner:\n")


def test_text_fields_take_overrides_as_they_were_typed(tmp_path: Path) -> None:
    for text in ("2024", "08", "1e-6", "1.10", "true", "yes"):
        assert read(tmp_path, "model: m\n", f"model={text}").model == text
    assert read(tmp_path, "model: m\n", 'model="null"').model == "null"
    assert read(tmp_path, "model: m\n", "model=${inner.name}", "inner.name=n").model == "n"
    assert read(tmp_path, "model: 2024\n").model == "2024"
    assert "model: 1.1 is not text; put it in quotes" in refusal(tmp_path, text="model: 1.10\n")


def test_optional_fields_take_null_and_values(tmp_path: Path) -> None:
    assert read(tmp_path, "model: m\ninner: {limit: null}\n").inner.limit is None
    assert read(tmp_path, "model: m\ninner: {limit: 1e1}\n").inner.limit == 10
    assert read(tmp_path, "model: m\n", "inner.limit=null").inner.limit is None
    assert read(tmp_path, "model: m\n", "inner.choice={name: x}").inner.choice == {"name": "x"}


def test_free_options_keep_their_yaml_types(tmp_path: Path) -> None:
    values = read(tmp_path, "model: m\n", "inner.options={a: 1e-3, b: [x, 2], c: null}")
    assert values.inner.options == {"a": 1e-3, "b": ["x", 2], "c": None}


def test_part_of_a_section_is_checked_and_nothing_is_filled_in() -> None:
    assert typed_part(Layers({}), {"steps": "1e1"}, Inner, "here") == {"steps": 10}
    with pytest.raises(ConfigError, match=r"here\.step: unknown key; did you mean here\.steps\?"):
        typed_part(Layers({}), {"step": 1}, Inner, "here")


def test_known_paths_list_every_key() -> None:
    assert {"model", "inner.steps", "many.*.rate", "plugins"} <= set(known_paths(Outer))


@given(st.integers(-(10**18), 10**18))
def test_whole_numbers_survive_as_numbers_and_as_text(value: int) -> None:
    assert typed_part(Layers({}), {"limit": value}, Inner, "") == {"limit": value}
    assert typed_part(Layers({}), {"limit": str(value)}, Inner, "") == {"limit": value}
    assert typed_part(Layers({}), {"name": value}, Inner, "") == {"name": str(value)}


@given(st.floats(allow_nan=False))
def test_numbers_survive_as_numbers_and_as_text(value: float) -> None:
    texts = [repr(value)] if math.isfinite(value) else []
    for given_value in [value, *texts]:
        assert typed_part(Layers({}), {"rate": given_value}, Inner, "") == {"rate": value}
    if math.isfinite(value) and not value.is_integer():
        with pytest.raises(ConfigError, match="is not a whole number"):
            typed_part(Layers({}), {"limit": value}, Inner, "")
