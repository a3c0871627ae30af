"""Reading YAML layers and overrides: what was written, where, and one line for every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from astraflow.config.load import load_layers, parse_scalar, put, split_override
from astraflow.protocol.errors import ConfigError


def write(tmp_path: Path, text: str, name: str = "a.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_layers([write(tmp_path, text)], overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("5e-5", 5e-5),
        ("1.0e-2", 0.01),
        ("-.5", -0.5),
        ("1e3", 1000.0),
        ("12", 12),
        ("-0", 0),
        ("08", "08"),
        ("007", "007"),
        ("1_000", "1_000"),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        (".inf", float("inf")),
        ("[a, 1e-3]", ["a", 1e-3]),
        ("{a: 1}", {"a": 1}),
        ("'1e-6'", "1e-6"),
    ],
)
def test_scalars_follow_the_core_schema_of_yaml_1_2(text: str, value: object) -> None:
    found = parse_scalar(text, "here")
    assert found == value
    assert type(found) is type(value)


def test_later_files_and_then_overrides_win_and_every_value_knows_its_origin(tmp_path: Path) -> None:
    first = write(tmp_path, "a: {x: 1, y: 2}\nlist: [1, 2]\n")
    second = write(tmp_path, "a:\n  x: 3\nlist: [9]\n", "b.yaml")
    layers = load_layers([first, second], ["a.y=5", "a.z=new"])
    assert layers.values == {"a": {"x": 3, "y": 5, "z": "new"}, "list": [9]}
    assert layers.origin("a.x") == f"{second}:2"
    assert layers.origin("a.y") == "override"
    assert layers.origin("list.0") == f"{second}:3"
    assert layers.origin("nowhere") == ""


def test_interpolations_see_the_merged_values(tmp_path: Path) -> None:
    layers = load_layers([write(tmp_path, "n: 4\nbatch: ${n}\nname: run-${n}\n")], ["n=8"])
    assert layers.values == {"n": 8, "batch": 8, "name": "run-8"}


def test_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    layers = load_layers([write(tmp_path, "base: &b {x: 1, y: 2}\nown: {<<: *b, y: 3}\n")])
    assert layers.values["own"] == {"x": 1, "y": 3}


def test_a_missing_file_names_its_closest_neighbour(tmp_path: Path) -> None:
    write(tmp_path, "a: 1", "quickstart.yaml")
    with pytest.raises(ConfigError, match=r"quickstrt\.yaml: no such file; did you mean .*quickstart\.yaml\?"):
        load_layers([tmp_path / "quickstrt.yaml"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("- a\n- b\n", "expected a mapping"),
        ("just text\n", "expected a mapping"),
        ("a: 1\nb: {c: 2\n", "broken YAML"),
        ("a: 1\n\tb: 2\n", "broken YAML"),
        ("a:\n  b: 1\n  b: 2\n", "a.b is given twice (first in line 2)"),
        ("a: !!python/object:os.system x\n", "broken YAML"),
        ("a: ${nowhere}\n", "nowhere"),
        ("a: ${b\n", "a"),
        ("a: ???\n", "a: required"),
        ("? [1, 2]\n: x\n", "a key must be a plain word"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(tmp_path, text)


def test_broken_yaml_and_double_keys_name_the_line(tmp_path: Path) -> None:
    assert "a.yaml:2: broken YAML" in refusal(tmp_path, "a: 1\nb: c: d\n")
    assert "a.yaml:3: a.b is given twice" in refusal(tmp_path, "a:\n  b: 1\n  b: 2\n")


def test_a_directory_a_data_file_and_a_binary_file_are_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory"):
        load_layers([tmp_path])
    (tmp_path / "weights.yaml").write_bytes(b"\xff\xfe\x00" * 10)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_layers([tmp_path / "weights.yaml"])
    (tmp_path / "big.yaml").write_bytes(b"a: 1\n" * 400_000)
    with pytest.raises(ConfigError, match="is no configuration"):
        load_layers([tmp_path / "big.yaml"])


@pytest.mark.parametrize("override", ["trainer.lr", "=3", ".a=1", "a..b=1", "a.=1"])
def test_an_override_without_a_dotted_key_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="expected key=value"):
        split_override(override)


def test_a_value_may_hold_equal_signs_and_be_empty() -> None:
    assert split_override("a.b=x=y") == ("a.b", "x=y")
    assert split_override("a.b=") == ("a.b", "")


def test_an_override_sets_its_key_to_exactly_the_value_given(tmp_path: Path) -> None:
    layers = load_layers([write(tmp_path, "a: {x: 1, y: 2}\nb: [1]\n")], ["a={z: 3}", "b=[]", "c.d.e=1"])
    assert layers.values == {"a": {"z": 3}, "b": [], "c": {"d": {"e": 1}}}
    values = {"a": {"x": 1, "y": 2}}
    put(values, "a.x", 3)
    put(values, "b.c", 4)
    assert values == {"a": {"x": 3, "y": 2}, "b": {"c": 4}}


def test_an_override_must_be_a_yaml_value(tmp_path: Path) -> None:
    assert "a: '[1' is not a YAML value" in refusal(tmp_path, "a: 1\n", "a=[1")
    assert "???" in refusal(tmp_path, "a: 1\n", "a=???")


def test_nothing_given_is_refused() -> None:
    with pytest.raises(ConfigError, match="no configuration file"):
        load_layers([])
