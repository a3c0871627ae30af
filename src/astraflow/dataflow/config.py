"""The `dataflow:` and `workflow:` sections, and everything that `service.run` needs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from astraflow.datasets.config import DatasetConfig, ValidDatasetConfig
from astraflow.lib.tls import PLAIN, Tls
from astraflow.protocol.errors import ConfigError

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
OLD_WIRE = "pickle+"
"""Before the address of an instance that speaks the seed's wire (`compat`)."""
PolicyChoice = str | dict[str, Any] | list[str | dict[str, Any]]
"""`keep_all`, `{name: reward_band, low: .1, high: .9}`, `module:attr`, or a list of these (filters: all must agree)."""


class ReplayConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Trained groups may be seen again (numerics 17)."""

    ratio: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of a batch that replayed groups fill; 0 = no replay."""
    size: NotNegative = 512
    """Groups kept per model."""
    selection: Literal["latest", "uniform", "prioritised"] = "latest"
    """How replayed groups are chosen; `prioritised` = large reward spread first."""
    max_staleness: int | None = 8
    """Own staleness limit; None = no limit."""


class BufferConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Per model."""

    max_staleness: Annotated[int, Meta(ge=0)] | None = 2
    """Keep a group iff trainer version − its smallest version ≤ this (inclusive; numerics 5); None = no limit."""
    unit: Literal["groups", "sequences"] = "groups"
    """`groups` = a batch is train_batch_size / n_samples whole groups, whatever of them is scored. `sequences` = it is exactly
    train_batch_size scored trajectories, any number of them; a group may straddle two batches, its statistics stay its own."""
    order: Literal["edf", "fifo"] = "edf"
    """`edf` = nearest to its expiry first."""
    lookahead: NotNegative | None = None
    """With `pace`: batches generated ahead of the one in training, at most max_staleness (None = just that). Fewer give fresher
    data where generation is faster than training; too few make the trainer wait."""
    treatment: Literal["pace", "drop"] = "pace"
    """`pace` admits no more than can be trained in time (numerics 6); `drop` generates freely and drops what is stale."""
    max_groups: Positive = 4096
    """Bound of queued groups plus groups in flight; beyond it submission waits."""
    max_policy_lead: NotNegative = 0
    """Versions that one policy may be ahead of the slowest live one."""
    hold_s: Seconds = 60.0
    """How long a group waits for the receipt of its weights before it is dropped(unconfirmed)."""
    max_rejected_groups: Positive | None = None
    """Groups rejected in a row before a batch request is answered `starved`; None = 16 batches' worth."""
    starvation_s: Seconds = 600.0
    """… or this time without an accepted group while groups were rejected."""
    replay: ReplayConfig = msgspec.field(default_factory=ReplayConfig)


class PoolConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Rollout services."""

    heartbeat_s: Seconds = 30.0
    """Pause between checks of all instances (suspects are checked at once)."""
    status_timeout_s: Seconds = 5.0
    """An instance that does not answer /status in this time failed one heartbeat."""
    max_failures: Positive = 2
    """Consecutive failed heartbeats until an instance is out."""
    call_timeout_s: Seconds = 30.0
    """Deadline of submit and other short calls."""
    pull_wait_s: Annotated[float, Meta(gt=0, le=30)] = 10.0
    """Long-poll for results."""
    load_timeout_s: Seconds = 600.0
    """An instance that has not loaded announced weights by then is reported in the events (it is asked again all the same)."""
    introduce_s: Seconds = 120.0
    """An instance that has not taken the workflows by then (it imports what they need) leaves the pool until it registers again."""
    max_attempts: Positive = 3
    """A lease is issued at most this often, then dropped(max_attempts)."""
    lease_deadline_s: Seconds = 600.0
    """Episodes are cancelled by the rollout service after this time."""
    trainer_deadline_s: Seconds = 900.0
    """A trainer not heard of for this long is dead and leaves the version minimum until it re-attaches."""


class PoliciesConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Data algorithms (docs/data-algorithms.md) by name (`astraflow list policies`), by name and options, or as `module:attr` of one's
    own; a list of these for several."""

    filter: PolicyChoice = "keep_all"
    """Which complete groups are trained on, e.g. [complete_only, filter_zero_adv]: a group must pass all of them."""
    curator: PolicyChoice = "accept_all"
    """Which prompts are submitted, e.g. {name: greso, p_easy: 0.4}. A prompt is, iff all of them want it for some live model."""
    shaper: PolicyChoice = "none"
    """What is added to rewards before statistics, e.g. {name: overlong, max_len: 512, tail: 64, factor: 1.0}."""


class EvalConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Evaluation on the `valid_datasets`."""

    at_start: bool = False
    """Evaluate the version of /ready before training."""
    mode: Literal["pinned", "synchronous"] = "pinned"
    """`pinned` = on one instance, which holds newer weights back meanwhile; training goes on. `synchronous` = all policies reach the
    version, training rollouts are cancelled (and run again), every instance evaluates exactly that version, training goes on."""
    deadline_s: Seconds = 300.0
    """One evaluation, from its first lane on; what is not back by then is missing and counted as wrong. Also the longest wait for
    slower policies to reach the version, and for an instance that serves it."""
    correct_threshold: float = 0.5
    """A sample is right iff its reward is at least this."""
    k: list[Positive] = msgspec.field(default_factory=lambda: [1, 2, 4, 8, 16])
    """pass@k that are reported (null if n_samples < k)."""


class LedgerConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Durability; see contracts.md."""

    segment_bytes: Positive = 64 << 20
    """Payload files are closed at this size and deleted when all their rows are final."""


class DataflowConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The `dataflow:` section."""

    buffer: BufferConfig = msgspec.field(default_factory=BufferConfig)
    pool: PoolConfig = msgspec.field(default_factory=PoolConfig)
    policies: PoliciesConfig = msgspec.field(default_factory=PoliciesConfig)
    eval: EvalConfig = msgspec.field(default_factory=EvalConfig)
    ledger: LedgerConfig = msgspec.field(default_factory=LedgerConfig)
    stall_s: Seconds | None = 3600.0
    """When nothing has moved for this long (no row, version, evaluation or joining instance), `stall.json` names who is stuck and
    the run ends with exit code 3. Longer than every deadline above, the longest step of a trainer, and the longest time that a
    pool may stay empty; None = wait for ever."""
    metrics_s: Seconds = 5.0
    """Pause between lines in metrics.jsonl (a line is also written at every served batch)."""


class WorkflowConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The `workflow:` section: names of the rollout service's registry, never code."""

    workflow: str = "rlvr"
    """Registered workflow (`astraflow list workflows`)."""
    reward: str = ""
    """Registered reward (`astraflow list rewards`); empty = the workflow scores by itself."""
    options: dict[str, Any] = {}
    """Options of the workflow."""
    generation: dict[str, Any] = {}
    """temperature, max_new_tokens, stop …"""
    n_samples: Positive = 8
    """Group size: trajectories per prompt."""
    policies: list[str] = []
    """Policies in the order that the workflow's roles name them; empty = all models in the order of `models`."""


class DataflowProcess(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Everything that one Dataflow process needs (`service.run`)."""

    run_id: str
    """Messages of another run are refused."""
    run_dir: str
    """ledger/, metrics.jsonl and logs/ live here."""
    trace: bool = False
    """Write spans (lib/trace.py)."""
    token: str = ""
    """Cluster token; required off loopback. Never written to config.yaml."""
    tls: Tls = PLAIN
    """What its services show and its clients trust."""
    seed: int = 0
    """Order of the tasks, seeds of the samples, choice of replayed groups."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 = any free port; `run_dir/dataflow.url` names it."""
    plugins: list[str] = []
    """Modules imported first (they register datasets and policies)."""
    allow_pickle: bool = False
    """Peers of the seed's pickle wire may take part (`compat`). Set by the operator's --allow-pickle alone, never by a file."""
    models: list[str] = msgspec.field(default_factory=lambda: ["default"])
    """Expected trainers: acquisition starts when all of them are ready."""
    workflow: WorkflowConfig = msgspec.field(default_factory=WorkflowConfig)
    train_dataset: DatasetConfig = msgspec.field(default_factory=DatasetConfig)
    valid_datasets: dict[str, ValidDatasetConfig] = {}
    eval_workflows: dict[str, WorkflowConfig] = {}
    """Other workflows that a valid dataset may name."""
    dataflow: DataflowConfig = msgspec.field(default_factory=DataflowConfig)
    group_relative: dict[str, bool] = {}
    """Per model, whether its estimator compares a group's members (GRPO, RLOO …: groups with fewer than two scored members
    are useless and dropped). Default true."""
    log_file: str = ""
    """Empty = run_dir/logs/dataflow.log."""
    experiment: dict[str, Any] = {}
    """The resolved experiment, answered by GET /config."""

    @property
    def policies(self) -> list[str]:
        """Policies of the training workflow."""
        return self.workflow.policies or self.models

    def validate(self) -> None:
        """Raise ConfigError for values that contradict each other."""
        if not self.models or len(set(self.models)) != len(self.models):
            raise ConfigError(f"models: {self.models!r}: expected at least one name, each once")
        for name in self.policies:
            if name not in self.models:
                raise ConfigError(f"workflow.policies: {name!r} is not a model; known: {', '.join(self.models)}")
        for name in self.models:
            if name not in self.policies:
                raise ConfigError(f"workflow.policies: model {name!r} is trained, but not among them ({', '.join(self.policies)})")
        if self.workflow.n_samples == 1:
            for name in self.policies:
                if self.group_relative.get(name, True):
                    raise ConfigError(
                        f"workflow.n_samples: 1 for model {name!r}, whose advantage compares the members of a group; expected at least 2"
                    )
        for name, valid in self.valid_datasets.items():
            if valid.workflow and valid.workflow not in self.eval_workflows:
                known = ", ".join(self.eval_workflows) or "none"
                raise ConfigError(f"valid_datasets.{name}.workflow: {valid.workflow!r} is not in eval_workflows; known: {known}")
            chosen = self.eval_workflows[valid.workflow] if valid.workflow else self.workflow
            if (chosen.generation | valid.generation).get("greedy") and valid.n_samples != 1:
                raise ConfigError(f"valid_datasets.{name}.n_samples: {valid.n_samples} with greedy decoding; expected 1 (numerics 20)")
