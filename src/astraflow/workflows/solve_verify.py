"""Two policies: one solves, the other judges; a rejected solver tries again with that feedback.

    solve_and_verify   up to `max_rounds` attempts in one context, each judged, until one is accepted
    actor_and_verify   one verdict; when it rejects, one more attempt in a context of its own, which nobody judges

By their own scores the solver is credited for the correctness of its last answer (per attempt where each has its own context) and
the verifier, per verdict, for agreeing with the truth.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from astraflow.workflows.api import EngineGroup, Episode, InferenceEngine, Options, RolloutWorkflow, Score, WorkflowContext
from astraflow.workflows.conversation import Conversation
from astraflow.workflows.roles import RULES, Role, Team, check_policies, fields_of

VERIFY = "Problem:\n{problem}\n\nProposed solution:\n{answer}\n\nIs the solution right? Reply with yes or no only."
FEEDBACK = "A reviewer judged this wrong. Look at it again and give a new solution in the same form."
RETRY = (
    "{problem}\n\nAn earlier solution:\n{answer}\n\nA reviewer rejected it:\n{verdict}\n\n"
    "Look at both critically and give a new, whole solution in the form that the problem asks for."
)


class SolveAndVerify(RolloutWorkflow):
    """`policies: [solver, verifier]`.

    Options: `credit` (own, shared, team, difference: a verdict is worth what became better by it); `max_rounds` (verdicts);
    `separate` (each attempt has a context of its own, a segment with its own score); `retry_after_last` (the last rejection too gives
    another attempt); `correct` (reward from which a solution is true); `yes`, `no` (regular expressions at the start of a
    verdict, case ignored; a verdict that is neither counts as a wrong one and as a rejection); roles `solver` (fields of the task),
    `verifier` (those, `problem`, `answer`); `feedback_template` (those, `verdict`): the solver's next turn.
    """

    name, max_rounds, separate, retry_after_last = "solve_and_verify", 5, False, False

    def __init__(self, context: WorkflowContext) -> None:
        super().__init__(context)
        check_policies(context, self.name, "solver", "verifier")
        options = Options(self.name, context.options)
        self._credit = options.take("credit", "own", RULES)
        self._max_rounds = options.take("max_rounds", self.max_rounds, least=1)
        self._separate = options.take("separate", self.separate)
        self._retry_after_last = options.take("retry_after_last", self.retry_after_last)
        self._correct = options.take("correct", 1.0)
        self._yes = options.pattern("yes", r"\W*(yes|correct|right)\b", re.IGNORECASE)
        self._no = options.pattern("no", r"\W*(no|incorrect|wrong)\b", re.IGNORECASE)
        self._solver = Role.take(context, options, 0, "solver", adds=())
        self._verifier = Role.take(context, options, 1, "verifier", VERIFY, adds=("problem", "answer"))
        told = context.fields_with("problem", "answer", "verdict")
        again = options.template("feedback_template", RETRY if self._separate else FEEDBACK, told)
        self._again = replace(self._solver, template=again)
        options.done()

    async def arun_episode(self, engine: InferenceEngine | EngineGroup, data: dict[str, Any]) -> Episode:
        fields = fields_of(data)
        attempts = [self._solver.open(data)]
        scores: list[Score] = []
        verdicts: list[tuple[Conversation, bool | None]] = []
        while True:
            speak = self._solver.go_on if verdicts else self._solver.answer
            fields["answer"] = await speak(engine, attempts[-1])
            if fields["answer"] is None:
                break  # no room for another attempt: the last one counts
            scores.append(await attempts[-1].score(data))
            if scores[-1].reward is None or len(verdicts) == self._max_rounds:
                break  # without a truth no verdict can be credited
            verdicts.append(await self._judge(engine, fields))
            if verdicts[-1][1] or (len(verdicts) == self._max_rounds and not self._retry_after_last):
                break
            fields["verdict"] = verdicts[-1][0].last_text
            if self._separate:
                attempts.append(self._again.ask(fields))
            else:
                self._again.say(attempts[-1], fields)
        return self._episode(attempts, scores, verdicts)

    async def _judge(self, engine: InferenceEngine | EngineGroup, fields: dict[str, Any]) -> tuple[Conversation, bool | None]:
        """The verifier's turn; its verdict, None when unreadable."""
        talk = self._verifier.ask(fields)
        text = await self._verifier.answer(engine, talk)
        if self._yes.match(text):
            return talk, True
        return talk, False if self._no.match(text) else None

    def _episode(self, attempts: list[Conversation], scores: list[Score], verdicts: list[tuple[Conversation, bool | None]]) -> Episode:
        team = Team(self._credit)
        before: float | None = 0.0
        for place, talk in enumerate(attempts):
            own = scores[place] if self._separate and place < len(scores) else scores[-1]
            team.add(talk, own.reward, without=before)
            before = own.reward
        right = []
        for (talk, accepted), score in zip(verdicts, scores, strict=False):
            assert score.reward is not None
            right.append(float(accepted is (score.reward >= self._correct)))
            team.add(talk, right[-1], without=score.reward)
        metrics = {"rounds": float(len(verdicts))}
        if right:
            metrics["verdict_right"] = sum(right) / len(right)
        return team.episode(scores[-1], **metrics)


class ActorAndVerify(SolveAndVerify):
    """The same with other defaults: one verdict, and one retry in a context of its own when it rejects."""

    name, max_rounds, separate, retry_after_last = "actor_and_verify", 1, True, True
