"""Leases become groups: always n members, each failure with its address, deadlines kept."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from astraflow.dashboard.index import Record
from astraflow.environments.api import register_environment
from astraflow.protocol.codec import array
from astraflow.protocol.errors import UnknownName, UserError
from astraflow.protocol.rollout import Group, Pull
from astraflow.raas.engines.base import Weights
from astraflow.rewards.api import register_reward
from astraflow.workflows.api import EngineGroup, EpisodeError, RolloutWorkflow, register_workflow

Rig = Any
MakeRig = Callable[..., Rig]


async def _exits(error: type[BaseException] = SystemExit) -> None:
    raise error


class Unreadable(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


FATAL = {error.__name__: error for error in (SystemExit, GeneratorExit, asyncio.CancelledError)}


@register_reward("test_raas_exit", blocking=False)
def exits(prompt: str, *given: Any, **data: Any) -> Any:
    if "at once" in prompt:
        raise FATAL[data["raises"]]
    return _exits(FATAL[data["raises"]])


class Slow:
    """An environment whose `step` ends with the test."""

    release = threading.Event()

    def __init__(self, options: Any) -> None:
        pass

    def reset(self, data: Any) -> str:
        self.release.clear()  # the one that was made to try the options has been closed
        return "2 + 3 ="

    def step(self, action: str) -> tuple[str, float, bool]:
        self.release.wait(60)
        return "", 1.0, True

    def close(self) -> None:
        self.release.set()


register_environment("test_raas_slow")(Slow)


@register_workflow("test_raas_moody")
class Moody(RolloutWorkflow):
    """Does what its data says."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        request = self.context.request(self.context.tokenizers["default"].encode("2 + 2 ="))
        match data["mood"]:
            case "none":
                return None
            case "raise":
                raise ValueError("broken\nworkflow")
            case "surrogate":
                raise ValueError("name \udc80")
            case "exit":
                raise SystemExit(3)
            case "generator exit":
                raise GeneratorExit
            case "generator exit in a subtask":
                await asyncio.gather(asyncio.wait_for(_exits(GeneratorExit), 60), asyncio.sleep(99))
            case "unreadable":
                raise Unreadable
            case "group":
                raise BaseExceptionGroup("both", [KeyboardInterrupt()])
            case "subtask":
                task = asyncio.create_task(asyncio.sleep(99))
                task.cancel()
                await task
            case "exit in a subtask":
                await asyncio.gather(asyncio.wait_for(_exits(), 60), asyncio.sleep(99))
            case "inventive":
                raise EpisodeError("tool", data["kind"], "a kind of its own each time")
            case "tool":
                raise EpisodeError("tool", "timeout", "the tool is slow")
            case "hang":
                await asyncio.Event().wait()
            case "deaf":
                while True:
                    try:
                        await asyncio.sleep(30)
                    except asyncio.CancelledError:
                        continue
            case "bad":
                return {"input_ids": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, float("nan")], "versions": [-1, 0], "reward": 1.0}
            case "greedy":
                request.greedy = True
            case "unscored":
                pass
        response = await engine.agenerate(request)
        n = len(response.output_ids)
        return {
            "input_ids": request.input_ids + response.output_ids,
            "loss_mask": [0] * len(request.input_ids) + [1] * n,
            "logprobs": [0.0] * len(request.input_ids) + response.logprobs,
            "versions": [-1] * len(request.input_ids) + response.versions,
            "reward": None if data["mood"] == "unscored" else 1.0,
            "finish": response.finish,
        }


def run(test: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(90):
            return await test()

    return asyncio.run(bounded())


def one_group(
    rig: MakeRig, lease: dict[str, Any], workflow: dict[str, Any] | None = None, lane: str = "", **options: Any
) -> tuple[Group, Rig]:
    async def test() -> tuple[Group, Rig]:
        made = rig(**options)
        made.register(**(workflow or {"workflow": "test_raas_moody"}))
        verdicts = made.executor.submit([made.lease(**lease)], lane)
        assert [v.verdict for v in verdicts] == ["accepted"], verdicts
        groups = await made.groups(lane=lane)
        await made.tasks.stop()
        assert not made.failures
        return groups[0], made

    return run(test)  # type: ignore[no-any-return]


def test_a_group_has_its_n_members_in_order_with_scored_tokens(rig: MakeRig) -> None:
    group, made = one_group(rig, {"n": 4, "seed": 9}, {"workflow": "rlvr", "reward": "last_number"}, correct=1.0)
    assert [t.index for t in group.trajectories] == [0, 1, 2, 3]
    assert {t.reward for t in group.trajectories} == {1.0}
    assert (group.lease_id, group.attempt, group.task_id) == ("l1", 1, "t")
    assert (group.versions["default"].min, group.versions["default"].max) == (0, 0)
    segment = group.trajectories[0].segments[0]
    mask = array(segment.loss_mask)
    assert mask.tolist() == [0] * (len(mask) - 2) + [1, 1]
    assert array(segment.input_ids)[-1] == 2, "the end token is one of the sampled ones"
    assert {request.prefix_group for request in made.engine.seen} == {"l1"}
    assert len({request.request_id for request in made.engine.seen}) == 4
    assert group.metrics["rollout/new_tokens"] == 2


def test_the_same_lease_gives_the_same_tokens_and_its_samples_differ(rig: MakeRig) -> None:
    def tokens(seed: int) -> list[list[int]]:
        group, _ = one_group(
            rig, {"n": 4, "seed": seed, "data": {"prompt": "say"}}, {"workflow": "rlvr", "reward": "exact_match"}, solver="none"
        )
        return [array(t.segments[0].input_ids).tolist() for t in group.trajectories]

    first = tokens(1)
    assert tokens(1) == first
    assert len({tuple(row) for row in first}) == 4
    assert tokens(2) != first


@pytest.mark.parametrize(
    ("mood", "boundary", "kind"),
    [
        ("raise", "workflow", "exception"),
        ("tool", "tool", "timeout"),
        ("bad", "workflow", "bad_result"),
        ("greedy", "workflow", "generation"),
    ],
)
def test_a_failure_is_a_member_with_its_address(rig: MakeRig, mood: str, boundary: str, kind: str) -> None:
    group, _ = one_group(rig, {"n": 2, "data": {"mood": mood}})
    for trajectory in group.trajectories:
        assert trajectory.error is not None
        assert (trajectory.error.boundary, trajectory.error.kind, trajectory.finish) == (boundary, kind, "error")
        assert trajectory.error.message
        assert "\n" not in trajectory.error.message


def test_a_text_that_cannot_cross_the_wire_costs_no_group(rig: MakeRig) -> None:
    group, _ = one_group(rig, {"data": {"mood": "surrogate"}})
    assert group.trajectories[0].error is not None
    assert group.trajectories[0].error.message == "ValueError: name ?"


@pytest.mark.parametrize(
    ("mood", "kind"),
    [
        ("exit", ("workflow", "exception")),
        ("group", ("workflow", "exception")),
        ("exit in a subtask", ("workflow", "exception")),
        ("generator exit", ("workflow", "exception")),
        ("generator exit in a subtask", ("workflow", "exception")),
        ("unreadable", ("workflow", "exception")),
        ("subtask", ("cancelled", "cancelled")),
    ],
)
def test_what_is_no_exception_but_raised_by_a_workflow_is_data_as_well(rig: MakeRig, mood: str, kind: tuple[str, str]) -> None:
    group, _ = one_group(rig, {"data": {"mood": mood}, "n": 2})
    assert [(t.error.boundary, t.error.kind) for t in group.trajectories if t.error is not None] == [kind] * 2


@pytest.mark.parametrize("raises", FATAL)
@pytest.mark.parametrize("prompt", ["at once 2 + 3 =", "later 2 + 3 ="])
def test_a_reward_that_ends_the_process_is_an_error_of_the_reward(rig: MakeRig, prompt: str, raises: str) -> None:
    data = {"prompt": prompt, "answer": "5", "raises": raises}
    group, _ = one_group(rig, {"data": data, "n": 2}, {"workflow": "rlvr", "reward": "test_raas_exit"})
    assert [(t.error.boundary, t.error.kind) for t in group.trajectories if t.error is not None] == [("reward", "exception")] * 2
    assert all(raises in t.error.message for t in group.trajectories if t.error is not None)


def test_a_lease_that_ends_inside_of_an_environment_is_charged_to_it(rig: MakeRig) -> None:
    workflow = {"workflow": "env", "options": {"environment": "test_raas_slow"}}
    group, made = one_group(rig, {"deadline_s": 1.0, "data": {"seed": 1}}, workflow)
    assert [(t.error.boundary, t.error.kind) for t in group.trajectories if t.error is not None] == [("environment", "timeout")]
    assert "raas/hung_calls/environment" in made.programs.counts()


def test_kinds_of_failure_are_counted_by_name_up_to_a_bound(rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astraflow.raas.executor.MAX_KINDS", 2)

    async def test() -> None:
        made = rig()
        made.register(workflow="test_raas_moody")
        made.executor.submit([made.lease(str(n), data={"mood": "inventive", "kind": f"k{n % 4}"}) for n in range(8)])
        await made.groups(8)
        found = {name: n for name, n in made.executor.counts.values().items() if name.startswith("raas/error/")}
        assert (len(found), found["raas/error/tool/other"], sum(found.values())) == (3, 4, 8)
        await made.tasks.stop()

    run(test)


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_lease_needs_a_deadline_that_ends_it(rig: MakeRig, deadline_s: float) -> None:
    async def test() -> None:
        made = rig()
        made.register(workflow="test_raas_moody")
        verdict = made.executor.submit([made.lease(data={"mood": "none"}, deadline_s=deadline_s)])[0]
        assert (verdict.verdict, "deadline_s" in verdict.reason) == ("refused", True)
        for wait_s in (-1.0, float("nan")):
            assert await made.executor.pull(Pull(wait_s=wait_s, max_items=-3), "") == ([], 0)

    run(test)


def test_none_is_rejected_and_counted_and_unscored_stays_unscored(rig: MakeRig) -> None:
    group, made = one_group(rig, {"n": 2, "data": {"mood": "none"}})
    assert [t.finish for t in group.trajectories] == ["rejected", "rejected"]
    assert made.executor.counts["raas/finish/rejected"] == 2
    group, _ = one_group(rig, {"data": {"mood": "unscored"}})
    assert group.trajectories[0].reward is None
    assert group.trajectories[0].error is None


def test_evaluation_may_be_greedy_and_training_may_not(rig: MakeRig) -> None:
    group, _ = one_group(rig, {"data": {"mood": "greedy"}}, lane="eval")
    assert group.trajectories[0].error is None

    async def refused() -> None:
        made = rig()
        made.register(workflow="rlvr", generation={"top_p": 0.9})
        verdict = made.executor.submit([made.lease()])[0]
        assert verdict.verdict == "refused"
        assert "top_p" in verdict.reason
        assert made.executor.submit([made.lease()], "eval")[0].verdict == "accepted"
        await made.tasks.stop()

    run(refused)


@pytest.mark.parametrize("mood", ["hang", "deaf"])
def test_past_its_deadline_a_lease_goes_out_with_timeouts(rig: MakeRig, mood: str) -> None:
    async def test() -> None:
        made = rig()
        made.register(workflow="test_raas_moody")
        made.executor.submit([made.lease(n=2, deadline_s=0.1, data={"mood": mood})])
        group = (await made.groups())[0]
        assert [(t.error.boundary, t.error.kind) for t in group.trajectories if t.error] == [("workflow", "timeout")] * 2
        assert made.executor.slots.free_slots == 16
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            if mood == "deaf":
                task.get_coro().close()  # type: ignore[union-attr]
        assert made.executor.counts["raas/episodes_abandoned"] == (2 if mood == "deaf" else 0)

    if mood == "deaf":
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda *_: None)
        loop.run_until_complete(test())
        loop.close()
    else:
        run(test)


def test_a_deadline_inside_the_engine_is_charged_to_the_engine_and_frees_its_request(rig: MakeRig) -> None:
    group, made = one_group(rig, {"n": 2, "deadline_s": 2.0, "data": {"mood": "good"}}, stuck_requests=[1])
    assert [t.error is None for t in sorted(group.trajectories, key=lambda t: t.error is not None)] == [True, False]
    failed = next(t for t in group.trajectories if t.error)
    assert failed.error is not None
    assert (failed.error.boundary, failed.error.kind) == ("engine", "timeout")
    assert made.engine.report().status.running == 0


def test_an_engine_failure_is_retried_a_bounded_number_of_times(rig: MakeRig) -> None:
    group, made = one_group(rig, {"data": {"mood": "good"}}, fail_requests=[0, 1])
    assert group.trajectories[0].error is None
    assert made.executor.counts["raas/episode_retries"] == 2
    group, _ = one_group(rig, {"data": {"mood": "good"}}, fail_requests=[0, 1, 2])
    assert group.trajectories[0].error is not None
    assert group.trajectories[0].error.boundary == "engine"


def test_case_g20_the_context_limit_clips_the_answer_and_never_the_prompt(rig: MakeRig, case: Callable[[str], dict[str, Any]]) -> None:
    given, expected = case("G20")["input"], case("G20")["expected"]["values"]["max_new_tokens_sent"]

    class Exact(RolloutWorkflow):
        async def arun_episode(self, engine: EngineGroup, data: dict[str, Any]) -> Any:
            request = self.context.request([7] * data["length"], max_new_tokens=given["max_new_tokens"])
            response = await engine.agenerate(request)
            n, m = len(request.input_ids), len(response.output_ids)
            return {
                "input_ids": request.input_ids + response.output_ids,
                "loss_mask": [0] * n + [1] * m,
                "logprobs": [0.0] * n + response.logprobs,
                "versions": [-1] * n + response.versions,
                "reward": 0.0,
                "finish": response.finish,
            }

    register_workflow("test_raas_exact")(Exact)

    async def test() -> None:
        made = rig(context=given["context"], solver="none", answer_tokens=40)
        made.register(workflow="test_raas_exact")
        for length in given["prompt_lens"]:
            made.executor.submit([made.lease(str(length), data={"length": length})])
        groups = {group.lease_id: group.trajectories[0] for group in await made.groups(len(given["prompt_lens"]))}
        sent = {len(request.input_ids): request.max_new_tokens for request in made.engine.seen}
        assert [sent.get(length) for length in given["prompt_lens"]] == expected
        assert groups["30"].finish == "length"
        for length in ("32", "40"):
            error = groups[length].error
            assert error is not None
            assert (error.boundary, error.kind, groups[length].segments) == ("prompt", "overlong", [])
        assert made.executor.counts["raas/error/prompt/overlong"] == 2
        made.executor.submit([made.lease("cut", data={"length": 10}, max_prompt_tokens=9)])
        assert (await made.groups())[0].trajectories[0].error.kind == "overlong"
        await made.tasks.stop()

    run(test)


def test_the_finish_is_the_engines_word_and_the_mask_comes_from_lengths(rig: MakeRig) -> None:
    """Case G17: a second end token, an answer cut off, and end or padding ids inside the prompt."""
    script = [
        {"tokens": [5, 6, 2], "finish": "stop"},
        {"tokens": [5, 6, 7], "finish": "stop"},
        {"tokens": [5, 6, 8], "finish": "length"},
        {"tokens": [2, 0, 2], "finish": "stop"},
    ]
    group, _ = one_group(rig, {"n": 4, "data": {"prompt": "a"}}, {"workflow": "rlvr", "reward": "exact_match"}, script=script)
    assert [t.finish for t in group.trajectories] == ["stop", "stop", "length", "stop"]
    for trajectory in group.trajectories:
        mask = array(trajectory.segments[0].loss_mask).tolist()
        assert mask == [0] * (len(mask) - 3) + [1] * 3


def test_faults_18_and_26_truncated_is_what_the_engine_says_and_not_what_text_or_padding_counts(rig: MakeRig) -> None:
    """Tokens whose text encodes to fewer (here to none): an answer that was cut off is cut off, and one that ends with the very last
    token of its budget is not."""
    cut, ended, short = [0, 5] * 8, [0, 5] * 7 + [0, 2], [5, 2]
    script = [{"tokens": tokens, "finish": finish} for tokens, finish in ((cut, "length"), (ended, "stop"), (short, "stop"))]
    group, made = one_group(rig, {"n": 3, "data": {"prompt": "a"}}, {"workflow": "rlvr", "reward": "exact_match"}, script=script)
    assert [t.finish for t in group.trajectories] == ["length", "stop", "stop"]
    assert [int(array(t.segments[0].loss_mask).sum()) for t in group.trajectories] == [16, 16, 2]
    tokenizer = made.engine._setup.tokenizer
    assert len(tokenizer.encode(tokenizer.decode([0, 5] * 8))) < 16


def test_a_cancelled_lease_leaves_nothing_and_may_come_again(rig: MakeRig) -> None:
    async def test() -> None:
        made = rig(stuck_requests=[0])
        made.register(workflow="test_raas_moody")
        made.executor.submit([made.lease(data={"mood": "good"})])
        await asyncio.sleep(0)
        made.executor.cancel(["l1", "unknown"])
        assert made.executor.slots.in_flight == 0
        assert made.executor.submit([made.lease(data={"mood": "good"})])[0].verdict == "accepted"
        assert len(await made.groups()) == 1
        assert made.executor.idle
        await made.tasks.stop()
        assert not made.failures

    run(test)


def test_a_reset_cancels_training_names_it_and_delivers_nothing_of_it_later(rig: MakeRig) -> None:
    async def test() -> None:
        made = rig()
        made.register(workflow="test_raas_moody")
        hanging = made.lease("running", n=2, data={"mood": "hang"})
        made.executor.submit([made.lease("finished", data={"mood": "fine"})])
        (finished,) = (await made.executor.pull(Pull(wait_s=5.0), ""))[0]
        made.executor.submit([hanging])
        made.executor.submit([made.lease("of the evaluation", data={"mood": "hang"})], "lane")
        await asyncio.sleep(0)
        assert await made.executor.reset_training(5.0) == ["running"]
        assert not [task for task in made.executor._episodes if task.get_name() == "episode running" and not task.done()]
        assert {held.lease_id: held.state for held in made.executor.slots.listing()} == {"finished": "done", "of the evaluation": "running"}
        assert await made.executor.reset_training(5.0) == [], "nothing is cancelled twice"
        again, _ = await made.executor.pull(Pull(wait_s=0.0), "")
        assert [delivery.lease_id for delivery in again] == [finished.lease_id], "what was finished is still handed out"
        assert [v.verdict for v in made.executor.submit([hanging])] == ["accepted"], "the same attempt runs again"
        await made.tasks.stop()

    run(test)


def test_a_higher_attempt_replaces_a_waiting_result(rig: MakeRig) -> None:
    async def test() -> None:
        made = rig()
        made.register(workflow="test_raas_moody")
        made.executor.submit([made.lease(data={"mood": "none"})])
        deliveries, _ = await made.executor.pull(Pull(wait_s=5), "")
        made.executor.submit([made.lease(attempt=2, data={"mood": "none"})])
        again, _ = await made.executor.pull(Pull(wait_s=5), "")
        assert [d.attempt for d in (*deliveries, *again)] == [1, 2]
        await made.executor.pull(Pull(ack=[deliveries[0].delivery_id], max_items=0), "")
        assert len(made.executor.outbox) == 1, "a late acknowledgement of the old result leaves the new one"
        await made.tasks.stop()

    run(test)


def test_a_group_over_two_timelines_belongs_to_the_older_one(rig: MakeRig) -> None:
    async def test() -> None:
        made = rig(token_s=0.004, answer_tokens=30, solver="none", verify=False)
        made.register(workflow="test_raas_moody")
        assert made.executor.submit([made.lease(n=2, data={"mood": "good"})], "e")[0].verdict == "accepted"
        while not made.engine.seen:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        await made.engine.load(Weights(path="", timeline=2, version=5, digest=""))
        group = (await made.groups(lane="e"))[0]
        span = group.versions["default"]
        assert (span.timeline, span.min, span.max) == (0, 0, 5)
        assert set(array(group.trajectories[0].segments[0].versions).tolist()) == {-1, 0, 5}
        await made.tasks.stop()

    run(test)


def test_a_rollback_forgets_running_and_finished_work_of_the_dead_timeline(rig: MakeRig) -> None:
    async def test() -> None:
        made = rig(stuck_requests=[1])
        made.register(workflow="test_raas_moody")
        made.executor.submit([made.lease("done", data={"mood": "good"})])
        await made.executor.pull(Pull(wait_s=5), "")
        made.executor.submit([made.lease("running", data={"mood": "good"})])
        assert sorted(made.executor.rollback("default", 1)) == ["done", "running"]
        assert made.executor.idle
        assert made.executor.slots.listing() == []
        await made.tasks.stop()

    run(test)


def test_records_tell_what_was_said(rig: MakeRig) -> None:
    async def test() -> None:
        made = rig(correct=1.0)
        made.register(workflow="rlvr", reward="last_number")
        made.executor.submit([made.lease(n=2)])
        group = (await made.groups())[0]
        while made.tasks.names:
            await asyncio.sleep(0.005)
        record = json.loads(made.executor._records.load(group.trajectories[1].record_ref))
        assert record["calls"][0]["answer"] == "5"
        assert record["reward"] == 1.0
        assert record["turns"][-1]["content"] == "5"
        given, sampled = record["segments"][0]
        assert "2 + 3 =" in given["text"]
        assert (sampled["policy"], sampled["version"], "".join(sampled["tokens"])) == ("default", 0, "5" + sampled["tokens"][-1])
        assert len(sampled["tokens"]) == len(sampled["logprobs"]) == record["calls"][0]["new_tokens"]
        indexed = msgspec.json.decode(made.executor._records.load(group.trajectories[1].record_ref), type=Record)
        assert (indexed.lease_id, indexed.index, indexed.reward, indexed.calls[0].new_tokens) == ("l1", 1, 1.0, len(sampled["tokens"]))
        with pytest.raises(UnknownName):
            made.executor._records.load("../../etc/passwd")

    run(test)


def test_wrong_names_and_settings_are_refused_with_the_closest_one(rig: MakeRig) -> None:
    async def test() -> None:
        made = rig()
        for fields, text in [
            ({"workflow": "rlvrr"}, "did you mean 'rlvr'"),
            ({"workflow": "os:system"}, "only names are accepted"),
            ({"workflow": "rlvr", "reward": "last_numbr"}, "did you mean 'last_number'"),
            ({"workflow": "rlvr", "reward": "os:system"}, "only names are accepted"),
            ({"workflow": "rlvr", "policies": ["defualt"]}, "did you mean 'default'"),
        ]:
            with pytest.raises(UnknownName, match=text):
                made.register(**fields)
        with pytest.raises(UserError, match="min_p"):
            made.register(workflow="rlvr", generation={"min_p": 0.1})
        with pytest.raises(UserError, match="generation"):
            made.register(workflow="rlvr", generation={"temperature": "hot"})
        assert len(made.programs) == 0
        verdict = made.executor.submit([made.lease()])[0]
        assert verdict.verdict == "refused"
        assert "register_workflow" in verdict.reason

    run(test)


def test_a_bug_in_the_executor_costs_the_group_and_not_the_instance(rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        made = rig()
        made.register(workflow="test_raas_moody")

        def broken(*_: Any) -> Any:
            raise AssertionError("a bug")

        monkeypatch.setattr(made.executor, "_group_metrics", broken)
        made.executor.submit([made.lease(n=2, data={"mood": "good"})])
        group = (await made.groups())[0]
        assert [(t.error.boundary, t.error.kind) for t in group.trajectories if t.error] == [("workflow", "internal")] * 2
        assert made.executor.idle
        await made.tasks.stop()
        assert not made.failures

    run(test)


def test_a_workflow_that_changes_its_data_changes_nobody_elses(rig: MakeRig) -> None:
    class Greedy(RolloutWorkflow):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            data["list"].append(1)
            assert data["list"] == [1]

    register_workflow("test_raas_mutating")(Greedy)
    group, _ = one_group(rig, {"n": 3, "data": {"list": []}}, {"workflow": "test_raas_mutating"})
    assert [t.finish for t in group.trajectories] == ["rejected"] * 3
