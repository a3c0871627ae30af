"""Two policies: one solves, the other judges; a rejected solver tries again with that feedback.

Every policy is credited for its own work: the solver for the correctness of its last answer, the verifier, per verdict,
for agreeing with the truth. So each verdict is a segment of its own, and the attempts share the solver's segment.
"""

from __future__ import annotations

import re
from typing import Any

from astraflow.protocol.errors import AstraFlowError, UserError
from astraflow.protocol.rollout import Finish, Trajectory
from astraflow.workflows.api import EngineGroup, Episode, InferenceEngine, Options, RolloutWorkflow, Score, WorkflowContext, is_overlong
from astraflow.workflows.conversation import Conversation, fill, messages_of

VERIFY = "Problem:\n{problem}\n\nProposed solution:\n{answer}\n\nIs the solution right? Reply with yes or no only."
FEEDBACK = "A reviewer judged this wrong. Look at it again and give a new solution in the same form."


class SolveAndVerify(RolloutWorkflow):
    """`policies: [solver, verifier]`.

    Options: `max_rounds`; `correct` (reward from which a solution is true); `yes`, `no` (regular expressions at the start of a
    verdict, case ignored; a verdict that is neither counts as a wrong one and as a rejection); templates `solver_template`
    (fields of the task), `verifier_template` (those, `problem`, `answer`), `feedback_template` (those, `verdict`); `solver_system`,
    `verifier_system`; `solver_generation`, `verifier_generation` (overrides per role).
    """

    def __init__(self, context: WorkflowContext) -> None:
        super().__init__(context)
        if len(context.policies) != 2:
            raise UserError(f"workflow 'solve_and_verify' policies: {context.policies}, expected [solver, verifier]")
        self._solver, self._verifier = context.policies
        options = Options("solve_and_verify", context.options)
        self._max_rounds = options.take("max_rounds", 5)
        self._correct = options.take("correct", 1.0)
        self._yes = re.compile(options.take("yes", r"\W*(yes|correct|right)\b"), re.IGNORECASE)
        self._no = re.compile(options.take("no", r"\W*(no|incorrect|wrong)\b"), re.IGNORECASE)
        self._solver_template = options.take("solver_template", "{prompt}")
        self._verifier_template = options.take("verifier_template", VERIFY)
        self._feedback_template = options.take("feedback_template", FEEDBACK)
        self._solver_system = options.take("solver_system", "")
        self._verifier_system = options.take("verifier_system", "")
        self._solver_generation: dict[str, Any] = options.take("solver_generation", {})
        self._verifier_generation: dict[str, Any] = options.take("verifier_generation", {})
        options.done()
        if self._max_rounds < 1:
            raise UserError(f"workflow 'solve_and_verify' options.max_rounds: {self._max_rounds}, expected at least 1")

    async def arun_episode(self, engine: InferenceEngine | EngineGroup, data: dict[str, Any]) -> Episode:
        solver = Conversation(self.context, self._solver, messages_of(data, self._solver_template, self._solver_system))
        fields = {**data, "problem": solver.messages[-1]["content"]}
        verdicts: list[tuple[Conversation, float]] = []
        while True:
            try:
                fields["answer"] = await solver.answer(engine, **self._solver_generation)
            except AstraFlowError as error:
                if not (verdicts and is_overlong(error)):
                    raise
                break  # no room for another attempt: the last one counts
            score = await solver.score(data)
            if score.reward is None:
                break  # without a truth no verdict can be credited
            verifier, accepted = await self._judge(engine, fields)
            truth = score.reward >= self._correct
            verdicts.append((verifier, float(accepted is truth)))
            if accepted or len(verdicts) == self._max_rounds:
                break
            fields["verdict"] = verifier.last_text
            solver.say({"role": "user", "content": fill(self._feedback_template, fields)})
        return self._episode(solver, score, verdicts)

    async def _judge(self, engine: InferenceEngine | EngineGroup, fields: dict[str, Any]) -> tuple[Conversation, bool | None]:
        """The verifier's turn; its verdict, None when unreadable."""
        opening = [{"role": "system", "content": self._verifier_system}] if self._verifier_system else []
        question = {"role": "user", "content": fill(self._verifier_template, fields)}
        verifier = Conversation(self.context, self._verifier, [*opening, question])
        text = await verifier.answer(engine, **self._verifier_generation)
        if self._yes.match(text):
            return verifier, True
        return verifier, False if self._no.match(text) else None


    def _episode(self, solver: Conversation, score: Score, verdicts: list[tuple[Conversation, float]]) -> Episode:
        segments = solver.segments(score.reward, scored=True)
        record = solver.record()
        for verifier, credit in verdicts:
            segments += verifier.segments(credit, scored=True)
            record += verifier.record()
        cut = any(talk.finish == "length" for talk in (solver, *(verifier for verifier, _ in verdicts)))
        finish: Finish = "error" if score.error else "length" if cut else "stop"
        trajectory = Trajectory(index=0, segments=segments, reward=score.reward, error=score.error, finish=finish)
        metrics = {"rollout/rounds": float(len(verdicts)), "rollout/broken_prefix": float(solver.broken)}
        if verdicts:
            metrics["rollout/verdict_right"] = sum(credit for _, credit in verdicts) / len(verdicts)
        return Episode(trajectory, record, metrics)
