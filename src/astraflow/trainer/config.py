"""Settings of a trainer process. Torch-free: the attic reads this file."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from astraflow.lib.tls import PLAIN, Tls
from astraflow.weights.config import ModelConfig, WeightsConfig

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
AboveZero = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
CLIPS = {"gspo": (3e-4, 4e-4)}
"""Clip distances of losses whose ratio is another quantity than a token's: a sequence mean moves far less (numerics 14)."""
SELF_WEIGHING = ("m2po", "cispo", "sapo")
"""Losses whose own ratio is θ/behav already, so that a weight prox/behav would count it twice (numerics 13 to 15)."""


class Section(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: unknown keys and wrong types are refused with the field's path."""


class PPOConfig(Section, kw_only=True):
    """How rewards become advantages and advantages a loss (numerics 8 to 15)."""

    advantage: str = "grpo"
    """Name in the `advantages` family: grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, gae (needs the critic), distill (needs
    teacher log-probs), reward, uniform, or `module:attr`."""
    loss: str = "ppo"
    """Name in the `losses` family: ppo, m2po, gspo, cispo, sapo, sft, or `module:attr`."""
    clip_low: NotNegative | None = None
    """Lower clip distance: ratios below 1 − clip_low carry no gradient for A < 0; None = the loss's own: 0.2, for gspo 3e-4."""
    clip_high: NotNegative | None = None
    """Upper clip distance; DAPO's clip-higher sets it above clip_low; None = the loss's own: 0.2, for gspo 4e-4."""
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    """c > 1: the loss of tokens with A < 0 is at most c·|A|; None = off."""
    tis_c: AboveZero | None = None
    """Truncated importance sampling: weight sg(min(prox/behav, C)) and ratio θ/prox (decoupled PPO); None = ratio θ/behav."""
    mis_low: NotNegative | None = None
    """Masked importance sampling: weights prox/behav below this are zeroed; None = no lower bound."""
    mis_high: AboveZero | None = None
    """Weights above this are zeroed; None = no upper bound."""
    weight_level: Literal["token", "sequence"] = "token"
    """Whether prox/behav is taken per token or as the product over a row's own loss tokens."""
    m2po_tau: AboveZero = 0.01
    """Bound on the second moment of log(θ/behav) (numerics 15)."""
    sapo_tau_positive: AboveZero = 1.0
    """SAPO's temperature for A > 0."""
    sapo_tau_negative: AboveZero = 1.05
    """SAPO's temperature for A ≤ 0."""
    gamma: Share = 1.0
    """γ of GAE."""
    lam: Share = 0.95
    """λ of GAE."""
    std_eps: NotNegative = 1e-4
    """Added to the unbiased group standard deviation."""
    denominator: Literal["token_mean", "sequence_mean", "constant"] | None = None
    """token_mean: N = the policy's loss tokens of the whole optimizer batch; None = the estimator's own (constant B·L_max for dr_grpo)."""
    denominator_tokens: AboveZero | None = None
    """Value of `constant`; None = trajectories of the optimizer batch × max_new_tokens."""
    truncated: Literal["train", "mask"] = "train"
    """What to do with rows that the engine cut off (`finish: length`); `mask` = loss 0 and out of N (numerics 11)."""
    kl_reward: NotNegative = 0.0
    """Coefficient of k1 on (log behav − log ref) in the token rewards; needs a reference."""
    kl_loss: NotNegative = 0.0
    """Coefficient of the KL loss term; needs a reference."""
    kl_loss_kind: str = "k3"
    """k2 or k3; k1 is refused: its expected gradient is zero."""
    entropy: NotNegative = 0.0
    """Coefficient of the entropy bonus over loss tokens."""

    def __post_init__(self) -> None:
        if self.kl_loss_kind not in ("k2", "k3"):
            raise ValueError(f"kl_loss_kind is {self.kl_loss_kind!r}, expected k2 or k3 (k1 as a loss has zero expected gradient)")
        if self.mis_low is not None and self.mis_high is not None and self.mis_low > self.mis_high:
            raise ValueError(f"mis_low is {self.mis_low}, expected at most mis_high = {self.mis_high}")
        if self.loss in SELF_WEIGHING and self.is_corrected:
            raise ValueError(f"loss is {self.loss!r}, which weighs by θ/behav itself; tis_c and mis_* go with ppo and gspo")

    @property
    def clip(self) -> tuple[float, float]:
        """Bounds of the clipped ratio, around 1."""
        low, high = CLIPS.get(self.loss, (0.2, 0.2))
        return 1 - (low if self.clip_low is None else self.clip_low), 1 + (high if self.clip_high is None else self.clip_high)

    @property
    def is_corrected(self) -> bool:
        """Whether prox/behav enters as a detached weight (TIS or MIS)."""
        return self.tis_c is not None or self.mis_low is not None or self.mis_high is not None

    @property
    def needs_critic(self) -> bool:
        """Whether values enter the advantages."""
        return self.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probs enter the step."""
        return self.kl_loss > 0 or self.kl_reward > 0


class OptimizerConfig(Section, kw_only=True):
    """AdamW on the fp32 masters and its learning-rate schedule."""

    lr: NotNegative = 1e-6
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: AboveZero = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay."""
    max_grad_norm: NotNegative = 1.0
    """Gradients are scaled down to this global norm; 0 = off."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    warmup_steps: Count = 0
    """Optimizer steps of linear warm-up; step k (from 1) uses k/warmup of the peak."""
    total_steps: Positive | None = None
    """Where linear and cosine end; None = max_steps × optimizer steps per batch."""
    min_lr_fraction: Share = 0.0
    """Where linear and cosine end, as a fraction of the peak."""


class CheckpointConfig(Section, kw_only=True):
    """Durable training state under `<run_dir>/checkpoints/<model_id>/`."""

    every: Count = 10
    """Steps between checkpoints; 0 = only at the end."""
    keep: Positive = 2
    """Complete checkpoints that are kept."""
    at_end: bool = True
    """Save when training ends or is drained."""
    export: bool = True
    """Write a plain HF directory (bf16) at the end."""
    resume: bool = True
    """Start from the newest complete checkpoint of this run directory; false ignores those of other runs."""


class StopRule(Section, kw_only=True):
    """End early when the mean of a metric over the last steps reaches a bound."""

    metric: str = "reward/mean"
    """A metric of the step."""
    window: Positive = 5
    """Steps in the mean."""
    at_least: float
    """Bound that ends the run."""
    not_before: Count = 0
    """Steps that are taken in any case."""


class PackingConfig(Section, kw_only=True):
    """How rows become forward passes."""

    max_nodes: Positive = 2048
    """Tokens of one packed forward after prefix sharing; activations grow with it. One longer row is a pass of its own."""
    head_chunk_bytes: Positive = 64 * 1024 * 1024
    """fp32 logits that exist at once; more are recomputed in the backward pass."""
    attention: Literal["tree", "sdpa", "eager"] = "tree"
    """`tree` = only what a token can see is computed; the others are the model's own with a mask over all tokens of a pass."""


class ReferenceConfig(Section, kw_only=True):
    """The policy that KL terms compare with."""

    kind: Literal["initial", "ema"] = "initial"
    """`initial` = the model as loaded (with LoRA: without its adapters, which costs no memory); `ema` = a moving average of the trained
    weights."""
    ema_decay: Decay = 0.99
    """Share of the old reference kept per step."""


class CriticConfig(Section, kw_only=True):
    """The value model of `advantage: gae`: the policy's model as loaded, with a linear head."""

    lr: NotNegative = 1e-5
    """Learning rate of its AdamW, constant; betas and eps are those of `optimizer`."""
    value_clip: AboveZero = 0.2
    """How far a value may move per batch before the loss stops pulling."""
    max_grad_norm: NotNegative = 1.0
    """Gradients are scaled down to this global norm; 0 = off."""


class DeadlineConfig(Section, kw_only=True):
    """Every wait of the trainer, in seconds."""

    batch_poll_s: AboveZero = 5.0
    """One long-poll of /batch; a drain waits for it at most."""
    batch_s: AboveZero = 1800.0
    """Longest wait for one batch."""
    dataflow_s: AboveZero = 300.0
    """How long Dataflow may be unreachable before the trainer gives up."""
    call_s: AboveZero = 60.0
    """One call to Dataflow."""
    publish_s: AboveZero = 120.0
    """Digest of a published version."""
    drain_s: AboveZero = 20.0
    """How long an unreachable Dataflow is called once the trainer is told to end."""
    final_eval_s: AboveZero = 600.0
    """The evaluation after the last step."""
    ranks_s: AboveZero = 600.0
    """How long the ranks of one trainer wait for each other in a step: longer than the longest forward and backward pass."""
    stay_s: AboveZero = 604800.0
    """How long the sender of a trainer that is done stays for rollout services that join while other policies still train; it ends
    with the run. A week: longer than the others train."""


class ParallelConfig(Section, kw_only=True):
    """How the ranks of one trainer share the work. What of `ranks` is left over shards parameters and data (FSDP)."""

    replicate: Positive = 1
    """Groups of ranks that each hold a whole sharded copy (HSDP)."""
    context: Positive = 1
    """Ranks that share the tokens of one forward pass, each attending to all of them."""
    tensor: Positive = 1
    """Ranks that share every matrix, and the tokens in between (tensor and sequence parallel)."""

    @property
    def unit(self) -> int:
        """Ranks that one shard of the data needs at least."""
        return self.replicate * self.context * self.tensor


class TrainEngineConfig(Section, kw_only=True):
    """Section `trainer` (or `trainer.<policy>`)."""

    backend: str = "local"
    """Name in the `backends` family: local (one process, CPU) or fsdp."""
    ranks: Positive = 1
    """Processes of this trainer; `local` has one. With GPUs: one each."""
    parallel: ParallelConfig = msgspec.field(default_factory=ParallelConfig)
    """What the ranks share."""
    train_batch_size: Positive = 64
    """Trajectories per batch."""
    max_steps: Positive = 100
    """Versions after which training ends."""
    eval_freq: Count = 0
    """Steps between evaluations; 0 = none during training."""
    final_eval: bool = True
    """Evaluate the last version and wait for the result (only when eval_freq > 0)."""
    minibatches: Positive = 1
    """Optimizer steps that one batch is cut into, on group boundaries."""
    epochs: Positive = 1
    """Passes over one batch."""
    threads: Count = 1
    """torch threads; 0 = torch's default (all cores). More threads than free cores cost far more than they give: they wait for
    each other at every operation (measured: 3 s per step with one thread, 20 s with two on a busy two-core machine)."""
    forward_masters: bool = False
    """Forward the fp32 masters instead of the published words (numerics 1); mismatch/* shows the price."""
    algorithm: PPOConfig = msgspec.field(default_factory=PPOConfig)
    """Advantages and loss."""
    optimizer: OptimizerConfig = msgspec.field(default_factory=OptimizerConfig)
    """AdamW and schedule."""
    checkpoint: CheckpointConfig = msgspec.field(default_factory=CheckpointConfig)
    """What is saved when."""
    stop: StopRule | None = None
    """Early end; None = only max_steps."""
    packing: PackingConfig = msgspec.field(default_factory=PackingConfig)
    """Token budget of a forward pass."""
    media_dir: str = ""
    """Where the images of batches lie under their sha256; empty = `media` in the run directory."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of layers and compute them again in the backward pass: less memory for a third more time."""
    critic: CriticConfig = msgspec.field(default_factory=CriticConfig)
    """Used with `advantage: gae`."""
    reference: ReferenceConfig = msgspec.field(default_factory=ReferenceConfig)
    """Used when a KL coefficient is set."""
    deadlines: DeadlineConfig = msgspec.field(default_factory=DeadlineConfig)
    """Named waits."""

    def __post_init__(self) -> None:
        if self.backend == "local" and self.ranks > 1:
            raise ValueError(f"ranks is {self.ranks}, but backend local is one process; expected 1, or backend fsdp")
        if self.ranks % self.parallel.unit:
            shared = f"parallel.replicate · context · tensor = {self.parallel.unit}"
            raise ValueError(f"ranks is {self.ranks}, expected a multiple of {shared}")

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per batch."""
        return self.minibatches * self.epochs


class TrainerProcess(Section, kw_only=True):
    """All that one trainer process needs; `trainer.main.run` takes it."""

    run_id: str
    """Run that every message is stamped with."""
    run_dir: str
    """Directory of logs, metrics and checkpoints."""
    trace: bool = False
    """Write spans (lib/trace.py)."""
    region: str = ""
    """Told to Dataflow, for people."""
    token: str = ""
    """Cluster token; never written to config.yaml."""
    tls: Tls = PLAIN
    """What its services show and its clients trust."""
    seed: int = 0
    """Seeds torch, numpy and random."""
    host: str = "127.0.0.1"
    """Interface that the sender agent binds to."""
    dataflow_url: str
    """Address of Dataflow."""
    model_id: str = "default"
    """Policy that this trainer trains."""
    max_new_tokens: int = 1
    """L_max of numerics 8: the configured maximum of new tokens per trajectory."""
    model: ModelConfig
    """HF directory and tokenizer."""
    trainer: TrainEngineConfig = msgspec.field(default_factory=TrainEngineConfig)
    """Section `trainer`."""
    weights: WeightsConfig
    """Section `weights`."""
    plugins: list[str] = []
    """Modules that are imported first; they register losses, advantages, backends."""
    log_level: str = "INFO"
    """Level of the process log."""
