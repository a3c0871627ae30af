"""Offload by several ranks, as real processes with gloo: every published word against the unsharded ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import ranks
from ranks import Results, all_ranks

pytestmark = pytest.mark.timeout(400)  # all cases run in the first test's fixture; alone they take a dozen seconds


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks")
    ranks.run_all(ranks.__file__, made)
    return made


@pytest.fixture(scope="module")
def results(directory: Path) -> Results:
    return ranks.results_of(directory)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_fault_8_uneven_shards_give_the_words_of_the_whole_tensor(results: Results, directory: Path, world: int) -> None:
    """Fault 8: shard copy wrong for unevenly sharded tensors. FSDP2, shapes that nothing divides, fewer rows than ranks."""
    all_ranks(results, directory, "uneven_shards_of_fsdp", world, world)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_placement_on_lines_and_grids_gives_the_words_of_the_whole_tensor(results: Results, directory: Path, world: int) -> None:
    all_ranks(results, directory, "every_placement", world, world)


def test_replicas_of_hsdp_skip(results: Results, directory: Path) -> None:
    all_ranks(results, directory, "hsdp", 4, 4)


def test_what_is_split_over_two_axes_in_an_order_of_its_own_is_gathered(results: Results, directory: Path) -> None:
    all_ranks(results, directory, "fsdp_on_top_of_tensor_parallel", 4, 4)


def test_every_node_serves_the_whole_model(results: Results, directory: Path) -> None:
    all_ranks(results, directory, "two_nodes", 4, 4)


def test_adapters_are_published_merged_or_alone_under_names_that_engines_know(results: Results, directory: Path) -> None:
    all_ranks(results, directory, "adapters", 2, 2)


@pytest.mark.parametrize("world", [2, 3])
def test_when_one_rank_fails_all_raise_and_nothing_is_served_and_the_next_version_is_right(
    results: Results, directory: Path, world: int
) -> None:
    all_ranks(results, directory, "a_rank_that_fails", world, world)


def test_the_first_offload_does_not_wait_for_ever_for_a_rank(results: Results, directory: Path) -> None:
    all_ranks(results, directory, "a_rank_that_does_not_come", 2, 2)


@pytest.mark.parametrize(("case", "world"), [("a_rank_is_killed", 3), ("the_first_rank_is_killed", 4)])
def test_a_rank_that_is_killed_is_noticed_by_the_others_at_once(results: Results, directory: Path, case: str, world: int) -> None:
    all_ranks(results, directory, case, world, world - 1)


def test_fault_34_ranks_that_were_killed_leave_no_shared_memory(directory: Path) -> None:
    """Fault 34: the memory has no name, and nobody holds it any more: the kernel has freed it."""
    assert json.loads((directory / "results" / "held.json").read_text(encoding="utf-8")) == {"processes": [], "names": []}


def test_every_case_has_a_test() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in ranks.cases() if f'"{name}"' not in text] == []
