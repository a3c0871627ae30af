"""The `raas:` section, and everything that `service.run` needs."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from astraflow.lib.tls import PLAIN, Tls
from astraflow.weights.config import ModelConfig, WeightsConfig
from astraflow.workflows.config import AgentConfig

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]


UNTIED = ("vllm", "sglang")
"""Kinds of engine whose servers are given tied models untied, because they may keep the old output matrix of a tied one."""


class EngineConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The inference engine; one per model."""

    kind: str = "embedded"
    """Registered engine (`astraflow list engines`)."""
    threads: NotNegative = 1
    """Compute threads of one engine; 0 = the engine's own choice."""
    dtype: str = ""
    """Compute dtype; empty = that of `models.<policy>.dtype`."""
    device: str = "auto"
    """`auto`, `cpu` or `cuda`."""
    max_restarts: NotNegative = 5
    """Restarts of a dead engine within `restart_window_s` before the whole instance gives up (its supervisor starts it again)."""
    restart_window_s: Seconds = 300.0
    start_s: Seconds = 120.0
    """Deadline from the start of an engine to its first answer."""
    ping_s: Seconds = 5.0
    """Pause between health checks."""
    ping_deadline_s: Seconds = 60.0
    """An engine silent for this long is killed and started again: far above the slowest step (2–3 s for a full prefill on a CPU);
    while it loads weights, `load_s` counts where that is longer."""
    load_s: Seconds = 120.0
    """Deadline of one weight load."""
    options: dict[str, Any] = {}
    """Settings of this kind of engine."""


class GenerationConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Generation settings where the workflow does not override them."""

    max_new_tokens: Positive = 256
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Below 1 in evaluation only (numerics 2)."""
    top_k: NotNegative = 0
    """Above 0 in evaluation only; 0 = off."""
    stop: list[str] = []
    stop_ids: list[int] = []
    greedy: bool = False
    """Evaluation only."""


class RewardsConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Worker processes for blocking rewards."""

    workers: Positive = 1
    """Per reward."""
    deadline_s: Seconds = 10.0
    """Per sample; its worker is then killed and the sample is unscored."""
    max_error_rate: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Share of errors among a reward's verdicts of the last minute (of 20 at least) above which its workflows get no new work here;
    1 = never. They get it again when the minute is over."""


class CanaryConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """After a weight load: the engine's log-probs of fixed prompts against a forward with the published words."""

    every: NotNegative = 1
    """Versions divisible by this are checked; 0 = none. A check costs one reading of the staged file and some hundred tokens of
    computing on the CPU (0.3 s for 135M parameters): space it out for models that take longer than a training step."""
    max_error: Annotated[float, Meta(ge=0)] = 0.0
    """Largest |Δ log-prob| (nats) that is accepted; above it the instance gets no work until a later load passes.
    0 = 0.001 for float32 compute, 0.5 otherwise."""
    deadline_s: Seconds = 60.0
    """A check that takes longer is given up and counted as `raas/canary/unchecked`; the weights are served."""


class RecordsConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Texts of trajectories for the rollout viewer."""

    keep: NotNegative = 2000
    """Newest trajectories kept per instance; 0 = none."""


class RaaSConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The `raas:` section; the same for every instance."""

    engine: EngineConfig = msgspec.field(default_factory=EngineConfig)
    engines: dict[str, EngineConfig] = {}
    """By policy, where it is another one than `engine`: on other GPUs, or a service that has a frozen helper."""
    generation: GenerationConfig = msgspec.field(default_factory=GenerationConfig)
    rewards: RewardsConfig = msgspec.field(default_factory=RewardsConfig)
    canary: CanaryConfig = msgspec.field(default_factory=CanaryConfig)
    records: RecordsConfig = msgspec.field(default_factory=RecordsConfig)
    slots: Positive = 64
    """Most episodes that run at once; must be at least `workflow.n_samples`. Fewer run while requests wait inside an engine or its
    key-value memory is nearly full."""
    outbox_groups: Positive = 256
    """Groups that run or wait to be acknowledged; when it is full no new work is taken."""
    engine_retries: NotNegative = 2
    """How often one episode is run again after a failure of the engine that may pass (its process died)."""
    cancel_grace_s: Seconds = 2.0
    """Time that a cancelled episode gets to end; then its group goes out without it."""
    pull_s: Seconds = 600.0
    """Deadline of one weight transfer."""
    drain_s: Seconds = 20.0
    """After SIGTERM: time to finish what runs and to hand the results out."""
    silence_s: Seconds = 90.0
    """Without a call from Dataflow for this long the instance registers again; longer than Dataflow's heartbeat."""
    weight: Annotated[float, Meta(gt=0)] = 1.0
    """Routing weight: expected speed relative to the other instances."""
    workflows: dict[str, str] = {}
    """Local workflows: name → `module:attr`. Only this process's own configuration may name code."""
    reward_functions: dict[str, str] = {}
    """Local rewards: name → `module:attr`."""
    environments: dict[str, str] = {}
    """Local environments: name → `module:attr`."""
    agents: dict[str, AgentConfig] = {}
    """Programs that the workflow `agent` may run, by name."""

    def engine_of(self, policy: str) -> EngineConfig:
        """The engine that serves a policy."""
        return self.engines.get(policy, self.engine)


class RaaSProcess(msgspec.Struct, kw_only=True):
    """Everything that one instance needs to start."""

    run_id: str
    """Empty = learned from Dataflow."""
    run_dir: str
    trace: bool = False
    """Write spans (lib/trace.py)."""
    region: str = ""
    """Told to Dataflow, for people."""
    token: str = ""
    """Cluster token, read from its file; never part of a configuration file."""
    tls: Tls = PLAIN
    """What its services show and its clients trust."""
    seed: int = 0
    instance_id: str
    """Unique in the run, the same after a restart, e.g. `raas0`."""
    dataflow_url: str = ""
    """Empty = nobody to register with (tests, manual use)."""
    host: str = "127.0.0.1"
    port: NotNegative = 0
    advertise_url: str = ""
    """Address under which Dataflow reaches this instance; empty = where it listens."""
    models: dict[str, ModelConfig]
    """By policy; `path` is a local HF directory here."""
    raas: RaaSConfig = msgspec.field(default_factory=RaaSConfig)
    weights: WeightsConfig = msgspec.field(default_factory=WeightsConfig)
    plugins: list[str] = []
    """Modules imported first."""
    staging_dir: str = ""
    """Parent of the staged weights; empty = shared memory where there is some, else the run directory."""
    log_level: str = "INFO"
