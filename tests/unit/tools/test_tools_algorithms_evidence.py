"""The table of docs/data-algorithms.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from astraflow.config.experiment import load_experiment
from astraflow.launch.names import check_names
from astraflow.protocol.errors import UserError
from astraflow.tools.algorithms_evidence import BEGIN, END, RECIPE, VARIANTS, Evidence, Measured, main, page, table

ROOT = Path(__file__).parents[3]


def run(variant: str, seed: int, spent: float, heldout: float, length_dropped: float | None = 6.0) -> Measured:
    return Measured(
        variant=variant, seed=seed, steps=60, groups_made=100, groups_trained=75, groups_replayed=0, rollouts_per_trained_group=spent,
        rollouts_per_varied_group=spent + 2, dropped={"zero_variance": 20, "stale": 5}, skipped=3, forced=0, length_trained=5.0,
        length_dropped=length_dropped, reward_trained=0.5, reward_dropped=None, reward_last=0.75, heldout_first=0.25,
        heldout_last=heldout, wall_s=20.0,
    )  # fmt: skip


def evidence() -> Evidence:
    runs = [run("keep_all", 0, 8.0, 0.5), run("keep_all", 1, 9.0, 0.6, None), run("greso", 0, 10.0, 0.7), run("greso", 1, 10.0, 0.7)]
    return Evidence(command="c", date="d", commit="abc", machine={"cores": 2, "cpu": "x"}, runs=runs)


def test_a_row_is_the_mean_over_seeds_with_the_ends_of_what_is_noisy() -> None:
    rows = table(evidence()).splitlines()
    assert rows[2] == (
        "| baseline: `keep_all`, `accept_all` | 8.50 | 10.50 | 25% | 5.00 / 6.00 | 0.50 / – | 0.75 (0.75 … 0.75) | 0.55 (0.50 … 0.60) |"
    )
    assert rows[3].startswith("| `greso` | 10.00 | 12.00 |")
    assert rows[4] == "", "variants that were not measured have no row"
    assert "seeds 0, 1" in rows[5]
    assert "commit abc" in rows[5]
    assert {row.count("|") for row in rows[:4]} == {9}


def test_only_what_stands_between_the_markers_is_replaced_and_again_by_the_same() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    once = page(text, evidence())
    assert once == page(once, evidence())
    assert once.startswith(f"before\n{BEGIN}\n| |")
    assert once.endswith(f"{END}\nafter\n")
    assert "old" not in once
    with pytest.raises(UserError, match="markers"):
        page("no markers", evidence())


def test_every_variant_is_a_run_that_can_start_and_the_page_has_the_markers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)
    for variant in VARIANTS:
        check_names(load_experiment([RECIPE], list(variant.overrides)))
    text = Path("docs/data-algorithms.md").read_text(encoding="utf-8")
    assert (text.count(BEGIN), text.count(END)) == (1, 1)


def test_an_unknown_argument_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tabel"]) == 2
    assert "--table" in capsys.readouterr().err
