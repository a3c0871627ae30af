from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from astraflow.lib.registry import Registry, closest, import_attr
from astraflow.protocol.errors import UnknownName


def test_a_name_is_imported_only_when_it_is_chosen() -> None:
    program = (
        "import sys; from astraflow.lib.registry import Registry;"
        "r = Registry('readers', {'wave': 'wave:open', 'none': 'no_such_module:x'});"
        "assert 'wave' not in sys.modules and r.names() == ['none', 'wave']; import wave; assert r.get('wave') is wave.open"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_an_unknown_name_gives_the_closest_and_all_known_ones() -> None:
    rewards = Registry("rewards", {"math_verify": "m:a", "exact_match": "m:b"})
    with pytest.raises(UnknownName) as caught:
        rewards.get("math_verfy")
    text = str(caught.value)
    assert "'math_verfy'" in text
    assert "did you mean 'math_verify'?" in text
    assert "exact_match, math_verify" in text
    assert text.startswith("reward ")
    with pytest.raises(UnknownName, match=r"^loss 'x'"):
        Registry("losses", {}).get("x")
    assert closest("zzz", rewards.names()) == ""


def test_decorators_write_into_the_table_and_refuse_a_second_owner() -> None:
    rewards = Registry("rewards", {"json": "json:dumps"})

    @rewards.register("half")
    def half() -> float:
        return 0.5

    assert rewards.get("half") is half
    assert "half" in rewards
    assert rewards.register("half")(half) is half
    with pytest.raises(UnknownName, match="registered already"):
        rewards.register("half")(len)
    with pytest.raises(UnknownName, match="registered already"):
        rewards.register("json")(len)


def test_the_owner_of_a_table_line_may_use_the_decorator_too() -> None:
    rewards = Registry("rewards", {"mine": f"{__name__}:test_the_owner_of_a_table_line_may_use_the_decorator_too"})
    rewards.register("mine")(test_the_owner_of_a_table_line_may_use_the_decorator_too)


def test_names_never_lead_to_code_but_the_own_configuration_may() -> None:
    rewards = Registry("rewards", {})
    with pytest.raises(UnknownName):
        rewards.get("os:system")
    import os

    assert rewards.resolve("os:path.join") is os.path.join


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("os", "module:attribute"),
        ("os:", "module:attribute"),
        ("no_such_module_here:x", "no_such_module_here"),
        ("os.no_part:x", "os.no_part"),
        ("json:dmps", "did you mean 'dumps'?"),
    ],
)
def test_a_target_that_does_not_exist_is_named(target: str, text: str) -> None:
    with pytest.raises(UnknownName, match=target.split(":")[0]) as caught:
        import_attr(target)
    assert text in str(caught.value)


def test_a_missing_dependency_of_a_plug_in_is_not_mistaken_for_a_wrong_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugin_with_needs.py").write_text("import not_installed_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_here"):
        import_attr("plugin_with_needs:x")


def test_entry_points_are_names_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[astraflow.readers]\nfancy = csv:reader\n")
    monkeypatch.syspath_prepend(tmp_path)
    import csv

    readers = Registry("readers", {"plain": "csv:writer"})
    assert readers.names() == ["fancy", "plain"]
    assert "fancy" in readers
    assert readers.get("fancy") is csv.reader
