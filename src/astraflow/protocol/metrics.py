"""Every number that a process logs: the one table of names. `docs/metrics.md` and `/metrics` of every service are made from it.

`{word}` in a name is a part that only a run knows (a policy, a reason), `[…]` a part that may be missing. A name may mean something
else in another process, so a row belongs to processes: `dataflow`, `raas` (every rollout service), `trainer` (with its sender agent).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
DATAFLOW, RAAS, TRAINER = "dataflow", "raas", "trainer"

NAMESPACES: dict[str, str] = {
    "reward": "What rollouts earned.",
    "rollout": "Trajectories, groups and leases: how many, how long, what became of them.",
    "buffer": "The queues between rollout services and trainers.",
    "staleness": "How many versions behind the trained data is.",
    "loss": "What the optimizer minimises.",
    "policy": "The policy under training and its update.",
    "mismatch": "Log-probs of the rollout engine against those of the trainer, on the same tokens.",
    "weights": "Publishing, transferring and loading of weights.",
    "raas": "Rollout services and their engines.",
    "time": "Where a step's time goes.",
    "perf": "Throughput and shares.",
    "eval": "Evaluation results.",
}
LABEL = re.compile(r"\{(\w+)\}")
OWN = "own"
"""The label of a row that stands for names of a user's own code."""


@dataclass(frozen=True)
class Metric:
    """One row."""

    name: str
    """As in metrics.jsonl, with `{word}` and `[…]`."""
    by: tuple[str, ...]
    """Kinds of process that log it."""
    unit: str
    """Empty = a plain number."""
    meaning: str
    """One line."""
    kind: Kind = "gauge"
    """A counter only grows while its process lives; a histogram is in `/metrics` alone."""
    when: str = ""
    """Empty = in every run; otherwise the condition under which it is logged."""
    shown_by: tuple[str, ...] = ()
    """Kinds of process whose `/metrics` and status have it; the others write it to metrics.jsonl alone."""
    family: str = ""
    """Name for Prometheus when the constant parts of `name` do not make a good one."""

    @property
    def namespace(self) -> str:
        return self.name.partition("/")[0]

    @property
    def labels(self) -> list[str]:
        """The words in braces, in their order."""
        return LABEL.findall(self.name)

    @property
    def own(self) -> bool:
        """It stands for names that are not ours."""
        return OWN in self.labels

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches whole names; a group per word."""
        text = re.escape(self.name).replace(r"\[", "(?:").replace(r"\]", ")?")
        return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.+)", text))

    @property
    def prometheus(self) -> str:
        """`astraflow_<constant parts>`, with `_total` for a counter."""
        constant = LABEL.sub("", self.name.replace("[", "").replace("]", ""))
        base = re.sub(r"[^a-zA-Z0-9]+", "_", self.family or constant).strip("_")
        return f"astraflow_{base}" + ("_total" if self.kind == "counter" else "")


def _counts(name: str, by: str, unit: str, meaning: str, when: str = "", family: str = "") -> Metric:
    return Metric(name, (by,), unit, meaning, "counter", when, (by,), family)


def _shows(name: str, by: str, unit: str, meaning: str, when: str = "", family: str = "") -> Metric:
    return Metric(name, (by,), unit, meaning, "gauge", when, (by,), family)


def _logs(name: str, by: tuple[str, ...], unit: str, meaning: str, when: str = "") -> Metric:
    return Metric(name, by, unit, meaning, "gauge", when)


def _batch(name: str, unit: str, meaning: str) -> Metric:
    """Dataflow logs it when it serves a batch, and the trainer again with the batch's step."""
    return Metric(name, (DATAFLOW, TRAINER), unit, meaning, shown_by=(TRAINER,))


HAPPENED = "once it happened"
ENDED = "once a batch was trained"
CAME = "once groups came"
SCORED = "with a scored trajectory"
CANARY = "raas.canary, an engine with a model"
MODELS = "with weights from a trainer"
EMBEDDED = "engine embedded"

_DATAFLOW: tuple[Metric, ...] = (
    _shows("reward/rollout_mean", DATAFLOW, "reward", "mean over the newest 512 groups, before any filter", CAME),
    _shows("reward/mean_generated/{model}", DATAFLOW, "reward", "mean over all scored trajectories", CAME),
    _shows("reward/mean_trained/{model}", DATAFLOW, "reward", "mean over those that were trained on", ENDED),
    _logs("reward/mean_generated", (DATAFLOW,), "reward", "over scored trajectories since the last such line of its model", CAME),
    _logs("reward/mean_trained", (DATAFLOW,), "reward", "over what was trained on since the last such line of its model", ENDED),
    _logs("reward/mean", (DATAFLOW,), "reward", "mean over the trajectories of a served batch, from group statistics"),
    _logs("reward/std", (DATAFLOW,), "reward", "mean over a served batch of the groups' own standard deviations"),
    _logs("reward/zero_variance_groups", (DATAFLOW,), "groups", "groups of a served batch whose rewards are all equal"),
    _counts("rollout/made", DATAFLOW, "rows", "rows (trajectory, policy) ever leased"),
    _shows("rollout/trained", DATAFLOW, "rows", "rows in committed batches; falls when a trainer goes back to a checkpoint"),
    _counts("rollout/dropped/{reason}", DATAFLOW, "rows", "rows that end untrained, by reason (`astraflow explain`)", HAPPENED),
    _shows("rollout/in_flight/{state}", DATAFLOW, "rows", "rows that are leased, rolled, buffered or served now"),
    _counts("rollout/replayed", DATAFLOW, "rows", "extra uses of trained rows"),
    _counts("rollout/stop", DATAFLOW, "trajectories", "came back finished", HAPPENED),
    _counts("rollout/length", DATAFLOW, "trajectories", "came back cut at the limit of new tokens", HAPPENED),
    _counts("rollout/error", DATAFLOW, "trajectories", "came back failed", HAPPENED),
    _counts("rollout/rejected", DATAFLOW, "trajectories", "the workflow returned None", HAPPENED),
    _counts("rollout/{verdict}_deliveries", DATAFLOW, "groups", "results that were not wanted (any more)", HAPPENED),
    _counts("rollout/{verdict}_leases", DATAFLOW, "leases", "leases that an instance did not take, or that were cancelled", HAPPENED),
    _counts("rollout/versions_without_batch", DATAFLOW, "versions", "versions that a trainer made without a batch from here", HAPPENED),
    _counts("rollout/curator_skipped", DATAFLOW, "tasks", "tasks that the curator passed over"),
    _counts("rollout/curator_forced", DATAFLOW, "tasks", "tasks that went out although the curator said no"),
    _shows("rollout/trajectories_per_s", DATAFLOW, "trajectories/s", "arrivals, mean of the last minute"),
    _shows("rollout/tokens_per_s", DATAFLOW, "tokens/s", "sampled tokens that arrived, mean of the last minute"),
    _counts("rollout/groups_generated/{model}", DATAFLOW, "groups", "groups that came back", CAME),
    _counts("rollout/groups_trained/{model}", DATAFLOW, "groups", "groups that were trained on", CAME),
    _counts("rollout/effective_groups/{model}", DATAFLOW, "groups", "trained groups whose rewards differ: they carry a gradient", CAME),
    _shows("rollout/groups_per_trained_group/{model}", DATAFLOW, "", "groups generated for each one that was trained on", ENDED),
    _shows("rollout/tokens_mean_generated/{model}", DATAFLOW, "tokens", "own sampled tokens per scored trajectory", CAME),
    _shows("rollout/tokens_mean_trained/{model}", DATAFLOW, "tokens", "own sampled tokens per trajectory that was trained on", ENDED),
    _logs("rollout/groups_generated", (DATAFLOW,), "groups", "since the last such line of its model", CAME),
    _logs("rollout/groups_trained", (DATAFLOW,), "groups", "since the last such line of its model", CAME),
    _logs("rollout/groups_per_trained_group", (DATAFLOW,), "", "since the last such line of its model", ENDED),
    _logs("rollout/tokens_mean_generated", (DATAFLOW,), "tokens", "since the last such line of its model", CAME),
    _logs("rollout/tokens_mean_trained", (DATAFLOW,), "tokens", "since the last such line of its model", ENDED),
    _batch("rollout/effective_groups", "groups", "groups of a served batch (with `over`: trained lately) whose rewards differ"),
    _logs("rollout/groups", (DATAFLOW,), "groups", "groups of a served batch"),
    _logs("rollout/trajectories", (DATAFLOW,), "trajectories", "trajectories of a served batch"),
    _batch("rollout/tokens_mean", "tokens", "loss tokens per trajectory of a served batch"),
    _shows("buffer/fresh_groups/{model}", DATAFLOW, "groups", "complete groups that wait to be served"),
    _shows("buffer/fresh_trajectories/{model}", DATAFLOW, "trajectories", "their trajectories, which wait to be served"),
    _shows("buffer/replay_groups/{model}", DATAFLOW, "groups", "groups kept for replay"),
    _shows("buffer/held_groups/{model}", DATAFLOW, "groups", "groups that wait for the receipt of their version"),
    _shows("buffer/served/{model}", DATAFLOW, "rows", "rows of a batch that is served and not yet committed"),
    _shows("buffer/in_flight_trajectories", DATAFLOW, "trajectories", "leased, or about to be leased again"),
    _shows("buffer/room", DATAFLOW, "trajectories", "that may be leased now without making what could only grow stale"),
    _batch("buffer/groups", "groups", "groups that still wait when a batch was taken"),
    _batch("buffer/in_flight", "groups", "leases that are out when a batch was taken"),
    _batch("buffer/held", "groups", "groups held back when a batch was taken"),
    _batch("buffer/replayed_groups", "groups", "replayed groups of a served batch"),
    _shows("staleness/mean/{model}", DATAFLOW, "versions", "mean gap between a trained trajectory's oldest token and its batch", ENDED),
    Metric("staleness/trained/{model}", (DATAFLOW,), "versions", "trained trajectories by their gap", "histogram", ENDED, (DATAFLOW,)),
    _logs("staleness/mean", (DATAFLOW,), "versions", "mean gap of a served batch: its version − the oldest version of each trajectory"),
    _logs("staleness/max", (DATAFLOW,), "versions", "largest gap of a served batch"),
    _shows("policy/version/{model}", DATAFLOW, "versions", "newest published version"),
    _shows("policy/checkpoint_version/{model}", DATAFLOW, "versions", "newest durable checkpoint; −1 = none"),
    _shows("policy/timeline/{model}", DATAFLOW, "", "life of the policy's history; more than 1 after a rollback"),
    _shows("raas/instances/{state}", DATAFLOW, "instances", "instances in this state"),
    _counts("raas/suspicions", DATAFLOW, "", "calls to instances that failed: suspect until their own status clears them", HAPPENED),
    _counts("raas/removed", DATAFLOW, "instances", "instances that were taken out of the pool", HAPPENED),
    _counts("raas/late_status", DATAFLOW, "", "status answers that came after their deadline", HAPPENED),
    _counts("raas/rests", DATAFLOW, "", "suspect instances that were cleared, and get no work for a moment", HAPPENED),
    _shows("time/idle_s", DATAFLOW, "s", "since anything moved: a row, a version, an evaluation, an instance that joined"),
    _shows("time/uptime_s", DATAFLOW, "s", "age of this process"),
    _logs("eval/{dataset}/avg@{n}", (DATAFLOW, TRAINER), "", "share of right samples, mean over tasks", "with valid_datasets"),
    _logs("eval/{dataset}/pass@{k}", (DATAFLOW, TRAINER), "", "unbiased pass@k, mean over tasks", "with valid_datasets"),
    _logs("eval/{dataset}/reward/mean", (DATAFLOW, TRAINER), "reward", "mean over the samples that have a reward", "with valid_datasets"),
    _logs("eval/{dataset}/missing", (DATAFLOW,), "samples", "samples without a result; counted as wrong", "with valid_datasets"),
)

_ROLLOUTS: tuple[Metric, ...] = (
    _logs("rollout/calls", (DATAFLOW, RAAS), "calls", "model calls per trajectory"),
    _logs("rollout/new_tokens", (DATAFLOW, RAAS), "tokens", "sampled tokens per trajectory"),
    _logs("rollout/turns", (DATAFLOW, RAAS), "turns", "turns per trajectory", "workflows of several turns"),
    _logs("rollout/broken_prefix", (DATAFLOW, RAAS), "", "turns whose prompt does not continue the last", "workflows of several turns"),
    _logs("rollout/rounds", (DATAFLOW, RAAS), "", "rounds of solving and verifying", "solve_and_verify and its kin"),
    _logs("rollout/verdict_right", (DATAFLOW, RAAS), "", "share of verdicts that agree with the truth", "solve_and_verify and its kin"),
    _logs("rollout/attempts", (DATAFLOW, RAAS), "", "programs written per trajectory", "code_actor_and_verify"),
    _logs("rollout/tests_valid", (DATAFLOW, RAAS), "", "share of generated tests that a right program passes", "code_actor_and_verify"),
    _logs("rollout/unreadable", (DATAFLOW, RAAS), "", "share of choices that could not be read", "sm_lg_router, code_solve_and_select"),
    _logs("rollout/to_small", (DATAFLOW, RAAS), "", "share of tasks that went to the small model", "sm_lg_router"),
    _logs("rollout/proposed", (DATAFLOW, RAAS), "", "share of proposals that can be used", "propose_and_solve"),
    _logs("rollout/sub_agents", (DATAFLOW, RAAS), "", "agents that the main one spawned", "spawn"),
    _logs("rollout/done", (DATAFLOW, RAAS), "", "share of episodes that the environment ended", "env"),
    _logs("rollout/no_action", (DATAFLOW, RAAS), "", "turns without a readable action", "env"),
    _logs("rollout/close_failed", (DATAFLOW, RAAS), "", "share of environments that could not be closed", "env"),
    _logs("rollout/{own}", (DATAFLOW, RAAS), "", "of a workflow of your own (`Episode.metrics`), mean over trajectories", "own workflows"),
    _logs("raas/group_s", (DATAFLOW, RAAS), "s", "from a group's start to its result"),
    _logs("raas/engine_s", (DATAFLOW, RAAS), "s", "per trajectory, inside of the engine"),
)

_RAAS: tuple[Metric, ...] = (
    _shows("reward/{reward}/error_rate", RAAS, "", "share of errors in the last minute's verdicts", "with a reward", "reward_error_rate"),
    _counts("reward/{reward}/{verdict}", RAAS, "verdicts", "scored, unscored, timeout, crash, exception; restarts of its workers", HAPPENED,
            "reward_verdicts"),
    _counts("weights/syncs_{mode}", RAAS, "loads", "versions that were loaded: full, delta, or held already", MODELS),
    _counts("weights/bytes_{mode}", RAAS, "bytes", "bytes that came for loaded versions", MODELS),
    _counts("weights/fallbacks", RAAS, "loads", "full transfers where a delta was asked for", HAPPENED),
    _counts("weights/failures", RAAS, "loads", "loads that failed; the next notice tries again", HAPPENED),
    _counts("weights/notices_coalesced", RAAS, "notices", "notices that a newer one overtook", HAPPENED),
    _counts("weights/damaged_files", RAAS, "files", "staged files that no longer held what was written", HAPPENED),
    _counts("weights/damaged_chunks[/{model}]", RAAS, "chunks", "chunks whose checksum was wrong; fetched again"),
    _counts("weights/streams_broken[/{model}]", RAAS, "streams", "streams that broke; resumed by range"),
    _shows("weights/pull_s[/{model}]", RAAS, "s", "last transfer", MODELS),
    _shows("weights/load_s[/{model}]", RAAS, "s", "last load into the engine", MODELS),
    _shows("weights/size_bytes[/{model}]", RAAS, "bytes", "last transfer", MODELS),
    _shows("weights/changed_elements[/{model}]", RAAS, "elements", "of the last delta; −1 = it was a full transfer", MODELS),
    _shows("raas/slots", RAAS, "trajectories", "trajectories that may run at once"),
    _shows("raas/free_slots", RAAS, "trajectories", "trajectories that can still be taken"),
    _shows("raas/in_flight", RAAS, "trajectories", "trajectories that run now"),
    _shows("raas/outbox_groups", RAAS, "groups", "groups that wait to be pulled"),
    _counts("raas/trajectories", RAAS, "trajectories", "trajectories made"),
    _counts("raas/finish/{finish}", RAAS, "trajectories", "by how they ended", HAPPENED),
    _counts("raas/error/{boundary}/{kind}", RAAS, "trajectories", "failed ones by boundary and kind", HAPPENED, "raas_errors"),
    _counts("raas/leases_{verdict}", RAAS, "leases", "leases by verdict", HAPPENED),
    _counts("raas/episode_retries", RAAS, "episodes", "episodes run again after a failure of the engine", HAPPENED),
    _counts("raas/episodes_abandoned", RAAS, "episodes", "cancelled episodes that did not end", HAPPENED),
    _counts("raas/internal_errors", RAAS, "groups", "groups lost to a bug of ours", HAPPENED),
    _counts("raas/records_left_out", RAAS, "trajectories", "trajectories without a record: the disk did not keep up", HAPPENED),
    _counts("raas/door_episodes", RAAS, "episodes", "episodes that the agents' door was opened for", HAPPENED),
    _counts("raas/door_calls", RAAS, "calls", "calls of agents with the key of a running episode", HAPPENED),
    _counts("raas/door_wrong_key", RAAS, "calls", "calls of the agents' door with a key that is none", HAPPENED),
    _counts("raas/door_after_end", RAAS, "calls", "calls of the agents' door with the key of an episode that has ended", HAPPENED),
    _shows("raas/hung_calls/{of}", RAAS, "calls", "calls of tools and environments that do not return, now"),
    _counts("raas/canary/passed", RAAS, "checks", "loaded weights that gave the log-probs that they should", HAPPENED),
    _counts("raas/canary/failed", RAAS, "checks", "loaded weights that gave others; they are not served", HAPPENED),
    _counts("raas/canary/unchecked", RAAS, "checks", "loaded weights that could not be checked", HAPPENED),
    _shows("raas/canary/seconds[/{model}]", RAAS, "s", "last check", CANARY),
    _shows("raas/canary/max_error[/{model}]", RAAS, "nats", "last check: largest difference of a log-prob", CANARY),
    _shows("raas/canary/mean_error[/{model}]", RAAS, "nats", "last check: mean difference", CANARY),
    _counts("raas/engine/requests[/{model}]", RAAS, "requests", "requests to the engine", "engines scripted and openai"),
    _counts("raas/engine/failures[/{model}]", RAAS, "requests", "requests that failed", "engine openai"),
    _counts("raas/engine/generated_tokens[/{model}]", RAAS, "tokens", "sampled tokens", EMBEDDED),
    _counts("raas/engine/prefill_tokens[/{model}]", RAAS, "tokens", "prompt tokens computed", EMBEDDED),
    _counts("raas/engine/prefix_hit_tokens[/{model}]", RAAS, "tokens", "prompt tokens found in the prefix cache", EMBEDDED),
    _counts("raas/engine/shared_tokens[/{model}]", RAAS, "tokens", "prompt tokens computed once for several members of a group", EMBEDDED),
    _counts("raas/engine/recomputed_tokens[/{model}]", RAAS, "tokens", "tokens computed again under new weights", EMBEDDED),
    _counts("raas/engine/steps[/{model}]", RAAS, "steps", "forward passes", EMBEDDED),
    _counts("raas/engine/cancelled[/{model}]", RAAS, "requests", "requests cancelled", EMBEDDED),
    _counts("raas/engine/failed[/{model}]", RAAS, "requests", "requests that failed", EMBEDDED),
    _shows("raas/engine/load_stall_ms[/{model}]", RAAS, "ms", "decoding stood still for the last load", EMBEDDED),
    _shows("raas/engine/load_s[/{model}]", RAAS, "s", "last load, as the engine's process measured it", "engines with a process"),
    _shows("raas/engine/kv_use[/{model}]", RAAS, "", "share of the key-value memory in use", "engines with a model"),
    _shows("raas/engine/prefix_cache_use[/{model}]", RAAS, "", "share of the prefix cache in use", EMBEDDED),
    _shows("raas/engine/tokens_per_s[/{model}]", RAAS, "tokens/s", "sampled tokens per second of work, newest steps", EMBEDDED),
    _shows("raas/engine/{own}[/{model}]", RAAS, "", "of an engine of your own (`EngineReport.metrics`)", "own engines"),
    _logs("perf/trajectories_per_s", (RAAS,), "trajectories/s", "trajectories made since the last line"),
)

_TRAINER: tuple[Metric, ...] = (
    _shows("reward/mean", TRAINER, "reward", "this policy's own reward (credit), mean over the batch", SCORED),
    _shows("reward/std", TRAINER, "reward", "standard deviation of this policy's own reward over the batch", SCORED),
    _shows("reward/max", TRAINER, "reward", "largest own reward of the batch", SCORED),
    _shows("reward/shaped_mean", TRAINER, "reward", "mean over rows after shaping (overlong penalty)", SCORED),
    _shows("reward/trajectory_mean", TRAINER, "reward", "mean of what the user sees, the trajectories' own rewards", SCORED),
    _shows("reward/zero_variance_groups", TRAINER, "", "share of the batch's groups whose rewards are all equal"),
    _shows("rollout/rows", TRAINER, "rows", "rows (segments) of the batch"),
    _shows("rollout/groups", TRAINER, "groups", "groups of the batch"),
    _shows("rollout/trajectories", TRAINER, "trajectories", "trajectories of the batch"),
    _shows("rollout/loss_tokens", TRAINER, "tokens", "tokens that the policy sampled"),
    _shows("rollout/truncated", TRAINER, "", "share of trajectories that were cut at the limit of new tokens"),
    _shows("rollout/trajectories_per_s", TRAINER, "trajectories/s", "Dataflow's arrivals when it served the batch"),
    _shows("rollout/tokens_per_s", TRAINER, "tokens/s", "Dataflow's arrivals when it served the batch"),
    _shows("staleness/mean", TRAINER, "versions", "mean over loss tokens of version − the version that sampled them"),
    _shows("staleness/max", TRAINER, "versions", "largest such gap"),
    _shows("loss/policy", TRAINER, "", "mean over the batch's optimizer steps"),
    _shows("loss/kl", TRAINER, "", "the KL term, before its coefficient", "with a KL coefficient"),
    _shows("loss/value", TRAINER, "", "of the critic", "advantage gae"),
    _shows("policy/lr", TRAINER, "", "learning rate of the last optimizer step"),
    _shows("policy/grad_norm", TRAINER, "", "largest norm over the batch's optimizer steps, before clipping"),
    _shows("policy/skipped_updates", TRAINER, "steps", "without an update: nothing to learn, or a gradient that is not finite"),
    _shows("policy/loss_tokens", TRAINER, "tokens", "loss tokens over all optimizer steps"),
    _shows("policy/computed_tokens", TRAINER, "tokens", "those whose advantage is not zero: only they are computed"),
    _shows("policy/effective_rows", TRAINER, "rows", "rows of the batch that were computed"),
    _shows("policy/ratio", TRAINER, "", "mean probability ratio against the proximal policy", "with a gradient"),
    _shows("policy/clip_frac", TRAINER, "", "share of loss tokens whose ratio was clipped", "with a gradient"),
    _shows("policy/entropy", TRAINER, "nats", "mean entropy over computed tokens", "with a gradient"),
    _shows("policy/kl_ref", TRAINER, "nats", "mean log-prob of the rollout minus that of the reference", "with a reference model"),
    _shows("policy/value_clip_frac", TRAINER, "", "share of loss tokens whose value was clipped", "advantage gae"),
    _shows("policy/value_explained", TRAINER, "", "share of the returns' variance that the critic explains", "advantage gae"),
    _shows("mismatch/log_ratio_mean", TRAINER, "nats", "mean of trainer's minus engine's log-prob", "with a gradient"),
    _shows("mismatch/log_ratio_abs", TRAINER, "nats", "mean absolute difference of the log-probs", "with a gradient"),
    _shows("mismatch/log_ratio_max", TRAINER, "nats", "largest absolute difference", "with a gradient"),
    _shows("mismatch/k3", TRAINER, "nats", "k3 estimate of KL(engine, trainer)", "with a gradient"),
    _shows("mismatch/weight", TRAINER, "", "mean capped weight of the behaviour policy's tokens", "with a gradient"),
    _shows("mismatch/ess", TRAINER, "", "effective sample size of the raw weights, as a share", "with a gradient"),
    _counts("weights/offloads", TRAINER, "versions", "versions published by this process"),
    _shows("weights/offload_s", TRAINER, "s", "last publish: copy into shared memory"),
    _shows("weights/offload_wait_s", TRAINER, "s", "last publish: wait for readers of the half that is overwritten"),
    _counts("weights/{mode}_transfers", TRAINER, "transfers", "full, delta, failed and cancelled ones"),
    _counts("weights/{mode}_bytes", TRAINER, "bytes", "bytes of full, delta and failed ones"),
    _counts("weights/{mode}_s", TRAINER, "s", "seconds of full, delta and failed ones, from ticket to verdict", HAPPENED),
    _counts("weights/chain_transfers", TRAINER, "transfers", "transfers of several deltas at once", HAPPENED),
    _counts("weights/chain_links", TRAINER, "deltas", "deltas in transfers of several at once", HAPPENED),
    _counts("weights/fallback: {why}", TRAINER, "transfers", "full ones where a delta was asked for", HAPPENED, "weights_fallbacks"),
    _counts("weights/registrations", TRAINER, "receivers", "receivers that said hello", HAPPENED),
    _counts("weights/streams_{what}", TRAINER, "streams", "streams accepted, refused, broken", HAPPENED),
    _counts("weights/streamed_bytes", TRAINER, "bytes", "bytes that left over streams", HAPPENED),
    _counts("weights/sender_restarts", TRAINER, "", "restarts of the sender agent"),
    _shows("weights/digest_s", TRAINER, "s", "digest of the newest version"),
    _shows("weights/delta_encode_s", TRAINER, "s", "encoding of the newest delta", "once there was a delta"),
    _shows("weights/delta_size_bytes", TRAINER, "bytes", "size of the newest delta", "once there was a delta"),
    _shows("weights/changed_fraction", TRAINER, "", "share of the words that the newest delta changes", "once there was a delta"),
    _logs("weights/sender_exit_code", (TRAINER,), "", "exit code of the sender agent, at the end"),
    _shows("time/step_s", TRAINER, "s", "one step: wait, train, offload"),
    _shows("time/wait_s", TRAINER, "s", "of it, waiting for the batch"),
    _shows("time/train_s", TRAINER, "s", "of it, forward, backward, update"),
    _shows("time/offload_s", TRAINER, "s", "of it, publishing the weights"),
    _shows("time/checkpoint_s", TRAINER, "s", "writing the last checkpoint, beside the training; 0 = none yet"),
    _shows("perf/wait_share", TRAINER, "", "time/wait_s by time/step_s"),
    _shows("perf/tokens_per_s", TRAINER, "tokens/s", "tokens of the batch by time/step_s"),
    _shows("perf/train_tokens_per_s", TRAINER, "tokens/s", "tokens of the batch by time/train_s"),
    _shows("perf/micro_batches", TRAINER, "", "forward and backward passes of the batch"),
    _shows("perf/nodes", TRAINER, "nodes", "tokens computed after shared prefixes were merged"),
    _shows("perf/row_tokens", TRAINER, "tokens", "tokens of the same rows before"),
)

METRICS: tuple[Metric, ...] = _DATAFLOW + _ROLLOUTS + _RAAS + _TRAINER


def kind_of(process: str) -> str:
    """`dataflow`, `trainer:solver` or the name of a rollout service → the word in `Metric.by`."""
    word = process.partition(":")[0]
    return word if word in (DATAFLOW, TRAINER) else RAAS


def find(name: str, by: str) -> Metric | None:
    """The row of a name that this kind of process logs: the one with the fewest open parts that matches, None for an undeclared name."""
    fitting = [metric for metric in METRICS if by in metric.by and metric.pattern.fullmatch(name)]
    return min(fitting, key=lambda metric: (metric.own, len(metric.labels)), default=None)
