"""The fsdp backend on gloo, as real processes: every layout takes the local backend's steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import ranks
import trainer_ranks
from ranks import Results, all_ranks

pytestmark = pytest.mark.timeout(400)  # all cases run in the first test's fixture; alone they take a dozen seconds


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks")
    ranks.run_all(trainer_ranks.__file__, made)
    return made


@pytest.fixture(scope="module")
def results(directory: Path) -> Results:
    return ranks.results_of(directory)


def test_the_oracle_is_the_local_backend(results: Results, directory: Path) -> None:
    all_ranks(results, directory, "the_local_backend", 1, 1)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_sharded_ranks_take_the_local_backends_steps_and_export_its_words(
    results: Results, directory: Path, world: int
) -> None:
    """Also fault 29: M2PO's bound depends on packing and rank count."""
    all_ranks(results, directory, "sharded", world, world)


@pytest.mark.parametrize(
    ("case", "world"),
    [
        ("tensor_parallel", 2),
        ("context_parallel", 2),
        ("replicated_and_sharded", 4),
        ("tensor_parallel_and_sharded", 4),
        ("tensor_and_context_parallel", 4),
        ("adapters", 2),
        ("critic", 2),
        ("images", 2),
    ],
)
def test_every_layout_takes_the_local_backends_steps(results: Results, directory: Path, case: str, world: int) -> None:
    all_ranks(results, directory, case, world, world)


def test_half_precision_is_near_and_keeps_masters_in_fp32(results: Results, directory: Path) -> None:
    all_ranks(results, directory, "half_precision", 2, 2)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_run_goes_on_on_another_number_of_ranks(results: Results, directory: Path, world: int) -> None:
    all_ranks(results, directory, "goes_on_from_another_number_of_ranks", world, world)


def test_the_other_ranks_do_what_rank_0_says_and_every_node_serves_the_whole_model(results: Results, directory: Path) -> None:
    all_ranks(results, directory, "rank_0_leads", 4, 4)


def test_a_model_that_cannot_be_split_is_refused_by_field(results: Results, directory: Path) -> None:
    all_ranks(results, directory, "what_cannot_be_split", 4, 4)


def test_a_rank_that_does_not_answer_is_given_up(results: Results, directory: Path) -> None:
    all_ranks(results, directory, "a_rank_that_does_not_answer", 2, 2)


def test_a_rank_that_is_killed_is_noticed_by_the_others_at_once(results: Results, directory: Path) -> None:
    all_ranks(results, directory, "a_rank_is_killed", 4, 3)


def test_every_case_has_a_test() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in trainer_ranks.cases() if f'"{name}"' not in text] == []
