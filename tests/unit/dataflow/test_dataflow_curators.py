"""Curators against references that look at the whole history each time."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.dataflow.admission import statistics
from astraflow.dataflow.policies import CURATORS
from astraflow.dataflow.policies.base import GroupStats, build
from astraflow.dataflow.policies.curate import AcceptAll, FilterSolved
from astraflow.dataflow.policies.curation import Curation, chance
from astraflow.dataflow.policies.curriculum import Curriculum
from astraflow.dataflow.policies.greso import Greso
from astraflow.dataflow.source import TaskSource
from astraflow.datasets.api import Task

MODELS, TASKS = ("a", "b"), ("t0", "t1", "t2")
REWARDS = st.lists(st.sampled_from([0.0, 0.2, 0.5, 1.0]), min_size=1, max_size=4)
EASY, HARD, MIXED = [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]
GROUP = st.tuples(st.just("group"), st.sampled_from(MODELS), st.sampled_from(TASKS), st.one_of(REWARDS, st.sampled_from([EASY, HARD])))
VERSION = st.tuples(st.just("version"), st.sampled_from(MODELS), st.integers(0, 3))
EVENTS = st.lists(st.one_of(GROUP, GROUP, VERSION), max_size=60)


def stats(task_id: str, rewards: list[float]) -> GroupStats:
    values = dict(enumerate(rewards))
    mean, std, equal = statistics(rewards)
    return GroupStats(
        task_id=task_id, n_samples=len(rewards), values=values, shaped=values, mean=mean, std=std, all_equal=equal,
        timeline=0, min_version=0, max_version=0, loss_tokens=1,
    )  # fmt: skip


def feed(curator: Any, events: list[Any]) -> None:
    for number, event in enumerate(events):
        if event[0] == "group":
            curator.observe(event[1], stats(event[2], event[3]))
        else:
            curator.on_version(event[1], number, event[2])


def resumed(fresh: Any, old: Any, prompts: dict[tuple[str, str], Any]) -> Any:
    """What the ledger would bring back, through msgpack."""
    prompts.update({(policy, task): value for policy, task, value in old.changed()})
    rows = [(policy, task, msgspec.msgpack.decode(msgspec.msgpack.encode(value))) for (policy, task), value in prompts.items()]
    fresh.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(old.state())), rows)
    return fresh


# --- GRESO ------------------------------------------------------------------------------------------------------------------


def kind_of(rewards: list[float], threshold: float) -> str:
    if len(rewards) < 2 or len(set(rewards)) > 1:
        return ""
    return "easy" if rewards[0] >= threshold else "hard"


def greso_by_history(events: list[Any], model: str, task: str, o: dict[str, float]) -> float:
    """Probability of submission: the streak is read backwards, p is added up over the versions."""
    kinds = [kind_of(event[3], o["threshold"]) for event in events if event[:3] == ("group", model, task)]
    last = kinds[-1] if kinds else ""
    z = len(list(itertools.takewhile(lambda kind: kind == last, reversed(kinds)))) if last else 0
    if z == 0:
        return 1.0
    p = o[f"p_{last}"]
    since: list[str] = []
    for event in events:
        if event[0] == "group" and event[1] == model:
            since.append(kind_of(event[3], o["threshold"]))
        if event[0] == "version" and event[1] == model:
            if since and event[2] >= o["warmup"]:
                p = p - o["delta"] if since.count(last) / len(since) >= o[f"alpha_{last}"] else p + o["delta"]
                p = min(max(p, o["p_min"]), o["p_max"])
            since = []
    return max(p**z, o[f"floor_{last}"])


@settings(max_examples=150, deadline=None)
@given(EVENTS, st.integers(0, 60), st.sampled_from([0.01, 0.3]), st.integers(0, 2))
def test_greso_is_its_definition_and_a_resume_changes_nothing(events: list[Any], cut: int, delta: float, warmup: int) -> None:
    o = {
        "p_easy": 0.5, "p_hard": 0.6, "alpha_easy": 0.083, "alpha_hard": 0.167, "delta": delta, "p_min": 0.01, "p_max": 0.9,
        "floor_easy": 0.1, "floor_hard": 0.4, "threshold": 0.5, "warmup": warmup,
    }  # fmt: skip

    def new() -> Greso:
        return Greso(p_hard=0.6, delta_p=delta, p_max=0.9, warmup_epochs=warmup)

    curator = new()
    feed(curator, events[:cut])
    curator = resumed(new(), curator, {})
    feed(curator, events[cut:])
    for model in MODELS:
        for task in TASKS:
            expected = greso_by_history(events, model, task, o)
            assert curator.probability(model, task) == pytest.approx(expected, abs=1e-12)
            assert curator.wants(model, task, expected - 1e-9)
            assert not curator.wants(model, task, expected + 1e-9)


def test_the_streak_grows_with_its_kind_starts_again_with_the_other_and_ends_with_variance() -> None:
    curator = Greso(warmup_epochs=0, floor_easy=0.0, floor_hard=0.0)
    seen = []
    for rewards in (EASY, EASY, EASY, HARD, HARD, MIXED, EASY):
        curator.observe("m", stats("t", rewards))
        seen.append(curator.probability("m", "t"))
    assert seen == [0.5, 0.25, 0.125, 0.5, 0.25, 1.0, 0.5]
    assert curator.probability("m", "never seen") == 1.0
    assert curator.probability("another", "t") == 1.0


def test_floors_hold_and_differ_by_kind() -> None:
    curator = Greso()
    for _ in range(9):
        curator.observe("m", stats("easy", EASY))
        curator.observe("m", stats("hard", HARD))
    assert (curator.probability("m", "easy"), curator.probability("m", "hard")) == (0.10, 0.40)


def test_p_moves_only_after_the_warm_up_only_with_groups_and_tallies_begin_again_at_each_version() -> None:
    curator = Greso()

    def p() -> tuple[float, float]:
        odds = curator.state()["m"]["p"]
        return round(odds["easy"], 9), round(odds["hard"], 9)

    for _ in range(4):
        curator.observe("m", stats("t", EASY))
    curator.on_version("m", 1, 0)
    assert p() == (0.5, 0.5), "the first epoch is the warm-up"
    curator.on_version("m", 2, 1)
    assert p() == (0.5, 0.5), "the tallies of the warm-up are gone, and without a group nothing moves"
    for rewards in (EASY, *[MIXED] * 11):  # easy 1/12 = 0.0833 is at least alpha
        curator.observe("m", stats("t", rewards))
    curator.on_version("m", 3, 1)
    assert p() == (0.49, 0.51)
    for rewards in (HARD, HARD, *[MIXED] * 10):  # hard 2/12 = 0.1667 is not
        curator.observe("m", stats("t", rewards))
    curator.on_version("m", 4, 1)
    assert p() == (0.5, 0.52)
    assert curator.state()["m"]["groups"] == 0


def test_p_stays_between_its_bounds() -> None:
    curator = Greso(p_easy=0.02, p_hard=0.98, warmup_epochs=0)
    for version in range(3):
        curator.observe("m", stats("t", EASY))
        curator.on_version("m", version, 0)
    assert curator.state()["m"]["p"] == {"easy": 0.01, "hard": 0.99}


def test_one_scored_member_and_equal_rewards_that_are_neither_end_a_streak() -> None:
    curator = Greso()
    curator.observe("m", stats("t", HARD))
    curator.observe("m", stats("t", [0.0]))
    assert curator.probability("m", "t") == 1.0
    partly = stats("t", [0.2, 1.0])
    partly.all_equal = True  # as after a penalty that makes a wrong and a right member equal
    curator.observe("m", partly)
    assert curator.probability("m", "t") == 1.0
    assert curator.state()["m"]["without_variance"] == {"easy": 0, "hard": 1}


# --- filter_solved ----------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(REWARDS, min_size=1, max_size=30), st.sampled_from([0.0, 0.5, 0.9, 0.99]), st.sampled_from([0.3, 0.95, 1.0]))
def test_filter_solved_is_the_debiased_average_in_closed_form(groups: list[list[float]], decay: float, threshold: float) -> None:
    curator = FilterSolved(threshold=threshold, decay=decay)
    for rewards in groups:
        curator.observe("m", stats("t", rewards))
    shares = [sum(reward >= 0.5 for reward in rewards) / len(rewards) for rewards in groups]
    n = len(shares)
    average = math.fsum((1 - decay) * decay ** (n - 1 - i) * share for i, share in enumerate(shares)) / (1 - decay**n)
    if abs(average - threshold) > 1e-12:
        assert curator.wants("m", "t", 0.999) == (average < threshold)
    elif all(share == 1 for share in shares):
        assert not curator.wants("m", "t", 0.0), "a threshold of 1 leaves out what was never wrong"
    assert curator.wants("m", "other", 0.999)
    assert curator.wants("other", "t", 0.999)
    again = resumed(FilterSolved(threshold=threshold, decay=decay), curator, {})
    assert again.wants("m", "t", 0.999) == curator.wants("m", "t", 0.999)


def test_one_right_group_is_enough_to_be_solved_and_a_wrong_one_brings_it_back() -> None:
    curator = FilterSolved()
    verdicts = []
    for rewards in (EASY, HARD, EASY):
        curator.observe("m", stats("t", rewards))
        verdicts.append(curator.wants("m", "t", 0.5))
    assert verdicts == [False, True, True]


# --- curriculum -------------------------------------------------------------------------------------------------------------

BANDS = [{"low": 0.0, "high": 0.25, "weight": 1.0}, {"low": 0.25, "high": 0.75, "weight": 4.0}, {"low": 0.8, "high": 1.0, "weight": 0.5}]


def curriculum(**options: Any) -> Curriculum:
    (built,) = build(CURATORS, "f", {"name": "curriculum", **options}).values()
    assert isinstance(built, Curriculum)
    return built


@pytest.mark.parametrize(
    ("right", "of", "probability"), [(0, 4, 0.25), (1, 4, 1.0), (2, 4, 1.0), (3, 4, 0.0), (4, 4, 0.125), (4, 5, 0.125)]
)
def test_a_prompt_is_submitted_by_the_weight_of_the_band_of_its_rate(right: int, of: int, probability: float) -> None:
    curator = curriculum(bands=BANDS)
    assert curator.probability("m", "t") == 1.0, "never measured"
    curator.observe("m", stats("t", [1.0] * right + [0.0] * (of - right)))
    assert curator.probability("m", "t") == probability
    assert (curator.wants("m", "t", max(probability - 1e-9, 0.0)), curator.wants("m", "t", probability)) == (probability > 0, False)


def test_submissions_of_a_curriculum_are_in_proportion_to_weights_and_to_the_prompts_of_a_band() -> None:
    """Counts over many epochs against n_band · weight / largest weight."""
    curation = Curation({"curriculum": curriculum(bands=BANDS)}, seed=3)
    rates = {f"t{i}": (i % 5) / 4 for i in range(50)}
    for task, rate in rates.items():
        curation.observe("m", stats(task, [1.0] * round(4 * rate) + [0.0] * (4 - round(4 * rate))))
    epochs = 400
    source, counts = TaskSource([Task(task, {}) for task in rates], seed=0, epochs=epochs), Counter[float]()
    while (draw := source.draw(lambda task, number: curation.wants(["m"], task, number))) is not None:
        counts[rates[draw.task.task_id]] += 1
    expected = {0.0: 10 * 0.25, 0.25: 10.0, 0.5: 10.0, 1.0: 10 * 0.125}
    assert source.state.forced == 0
    assert set(counts) == set(expected), "0.75 lies in no band"
    for rate, per_epoch in expected.items():
        p = per_epoch / 10
        assert abs(counts[rate] - epochs * per_epoch) <= 5 * math.sqrt(10 * epochs * p * (1 - p))


def test_the_bands_that_are_given_when_none_are_named_cover_every_rate_and_prefer_the_middle() -> None:
    curator = curriculum()
    seen = []
    for right in range(11):
        curator.observe("m", stats(f"t{right}", [1.0] * right + [0.0] * (10 - right)))
        seen.append(curator.probability("m", f"t{right}"))
    assert seen == [0.25, *[1.0] * 8, 0.25, 0.25]


def test_a_prompt_changes_its_band_when_the_policy_has_learned_it() -> None:
    curator, rates = curriculum(bands=BANDS, decay=0.5), []
    for rewards in (HARD, MIXED, EASY, EASY, EASY):
        curator.observe("m", stats("t", rewards))
        rates.append(curator.probability("m", "t"))
    # debiased averages 0, 1/3, 5/7, 13/15, 29/31
    assert rates == [0.25, 1.0, 1.0, 0.125, 0.125]
    assert resumed(curriculum(bands=BANDS, decay=0.5), curator, {}).probability("m", "t") == 0.125


# --- together ---------------------------------------------------------------------------------------------------------------


def test_a_prompt_is_submitted_iff_some_live_model_wants_it_and_a_model_wants_it_iff_every_curator_does() -> None:
    curation = Curation({"filter_solved": FilterSolved(), "curriculum": curriculum(bands=BANDS)})
    for model, rewards in (("solver", EASY), ("verifier", MIXED)):
        curation.observe(model, stats("t", rewards))
    curation.observe("verifier", stats("u", [1.0, 1.0, 1.0, 0.0]))  # 0.75: filter_solved wants it, no band does
    assert [curation.wants(models, "t", 0) for models in (["solver"], ["verifier"], ["solver", "verifier"], [])] == [
        False, True, True, False,
    ]  # fmt: skip
    assert not curation.wants(["verifier"], "u", 0)
    assert curation.wants(["solver", "verifier"], "u", 0), "the solver never saw it"


def test_models_share_their_chance_so_that_a_prompt_goes_out_with_the_largest_of_their_probabilities() -> None:
    curation = Curation({"greso": Greso()}, seed=1)
    for _ in range(2):
        curation.observe("a", stats("t", EASY))
    curation.observe("b", stats("t", HARD))
    wanted = {models: sum(curation.wants(models, "t", n) for n in range(4000)) / 4000 for models in (("a",), ("b",), ("a", "b"))}
    assert wanted[("a",)] == pytest.approx(0.25, abs=0.035)
    assert wanted[("b",)] == pytest.approx(0.5, abs=0.04)
    assert wanted[("a", "b")] == wanted[("b",)]


def test_chance_is_uniform_and_depends_on_seed_name_and_number_alone() -> None:
    values = [chance(0, "greso", number) for number in range(5000)]
    assert values == [chance(0, "greso", number) for number in range(5000)]
    assert all(0 <= value < 1 for value in values)
    buckets = Counter(int(10 * value) for value in values)
    assert all(abs(buckets[b] - 500) < 110 for b in range(10)), "five standard deviations"
    assert chance(1, "greso", 0) != chance(0, "greso", 0) != chance(0, "curriculum", 0)


def test_what_is_written_is_what_changed_and_nothing_for_curators_without_knowledge() -> None:
    curation = Curation({"accept_all": AcceptAll(), "greso": Greso()})
    assert curation.learned().prompts == []
    curation.observe("a", stats("t", EASY))
    curation.observe("a", stats("u", EASY))
    curation.observe("a", stats("t", EASY))
    learned = curation.learned()
    assert [(row.curator, row.policy, row.task_id, msgspec.msgpack.decode(row.state)) for row in learned.prompts] == [
        ("greso", "a", "t", [2, "easy"]),
        ("greso", "a", "u", [1, "easy"]),
    ]
    assert list(learned.meta) == ["curators"]
    assert curation.learned().prompts == []
    nothing = Curation({"accept_all": AcceptAll()})
    nothing.observe("a", stats("t", EASY))
    assert nothing.learned().prompts == []
    assert nothing.meta() == {}


def test_equal_ids_of_two_data_sets_are_two_groups_and_two_prompts(case: Any) -> None:
    given_, expected = case("G10")["input"], case("G10")["expected"]["values"]
    rewards: dict[str, list[float]] = defaultdict(list)
    for rollout in given_["rollouts"]:
        rewards[f"{rollout['dataset']}:{rollout['id']}"].append(rollout["reward"])
    groups = [stats(task, values) for task, values in rewards.items()]
    curator = Greso()
    for one in groups:
        curator.observe("m", one)
    tally = curator.state()["m"]
    assert tally["groups"] == expected["num_groups"]
    assert tally["without_variance"]["easy"] / tally["groups"] == expected["solved_all_fraction"]
    assert tally["without_variance"]["hard"] / tally["groups"] == expected["solved_none_fraction"]
    assert sum(one.all_equal for one in groups) == expected["zero_variance_groups"]
