"""How a model is laid out over ranks: FSDP2 and HSDP over data ranks, tensor, sequence and context parallelism within a pass.

Ranks form a grid replicate × shard × context × tensor, tensor innermost. Ranks that differ in the first two take other rows of a
batch, those that differ in the last two work on the same pass:

    shard, context   FSDP2: every parameter is split over them by rows and gathered layer by layer
    replicate        HSDP: each replica holds all shards; gradients are added over them
    tensor           the model's own plan (HF `base_model_tp_plan`) splits matrices by columns and rows; everything else is held by all
                     of them and sees only its part of the tokens (sequence parallel), so that its gradient is a part as well
    context          tokens are split; keys and values of all tokens are gathered for attention, whose mask is a token tree's

Every rank ends up with a part of the gradient of the same loss: parts are added, never averaged (numerics 9).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from astraflow.protocol.errors import ConfigError
from astraflow.trainer.config import ParallelConfig
from astraflow.trainer.logprobs import token_logprobs
from astraflow.trainer.models import hidden_states, output_embedding
from astraflow.trainer.packing import PackedRows

TOKENS = Shard(1)
"""Placement of activations [1, T, …] between the matrices."""
HEADS = Shard(2)
"""Placement of [1, T, heads, …] within attention."""
CONTEXT_ATTENTION = "astraflow_context"


@dataclass(frozen=True)
class Grid:
    """Where this rank stands."""

    parameters: DeviceMesh
    """(replicate,) shard·context: what FSDP2 splits over."""
    tensor: DeviceMesh | None
    """None = one."""
    work: DeviceMesh
    """data × context × tensor."""

    @classmethod
    def of(cls, ranks: int, config: ParallelConfig, device: torch.device) -> Grid:
        """The grid of all ranks; a collective."""
        shards = ranks // (config.replicate * config.tensor)
        whole = init_device_mesh(device.type, (config.replicate, shards, config.tensor), mesh_dim_names=("replicate", "shard", "tensor"))
        data = ranks // (config.context * config.tensor)
        work = init_device_mesh(device.type, (data, config.context, config.tensor), mesh_dim_names=("data", "context", "sequence"))
        parameters = whole["replicate", "shard"] if config.replicate > 1 else whole["shard"]
        return cls(parameters, whole["tensor"] if config.tensor > 1 else None, work)

    def place(self, axis: str) -> tuple[int, int]:
        """(index of this rank, number of ranks) along data, context or sequence."""
        return self.work.get_local_rank(axis), self.work[axis].size()

    @property
    def shares_passes(self) -> bool:
        """Whether several ranks work on one pass."""
        return self.work["context"].size() * self.work["sequence"].size() > 1

    @property
    def counts(self) -> bool:
        """Whether what this rank has summed counts; others that work on the same pass sum the same."""
        return self.work.get_local_rank("context") == 0 and self.work.get_local_rank("sequence") == 0


class PassModel(nn.Module):
    """What a head makes of one pass. All of it is one forward of FSDP's root, so that what the head needs is whole in it."""

    def __init__(self, model: nn.Module, grid: Grid):
        super().__init__()
        self.model, self.grid = model, grid

    def forward(self, packed: PackedRows) -> torch.Tensor:
        """[K, M]: K numbers per loss token of the pass, on every rank that works on it."""
        if self.grid.shares_passes:
            return self._shared(packed)
        return self._head(hidden_states(self.model, packed), packed)

    def _head(self, hidden: torch.Tensor, packed: PackedRows) -> torch.Tensor:
        """[K, M] from the hidden states [P, H] of the predictions."""
        raise NotImplementedError

    def _shared(self, packed: PackedRows) -> torch.Tensor:
        """The decoder on this rank's tokens, the head on the predictions that they make, then everybody's results."""
        context, n_context = self.grid.place("context")
        sequence, n_sequence = self.grid.place("sequence")
        padded = pad_nodes(packed, n_context * n_sequence)
        count = len(padded.input_ids)
        span = count // n_context
        mine = slice(context * span, (context + 1) * span)
        low = mine.start + sequence * (span // n_sequence)
        high = low + span // n_sequence
        decoder: nn.Module = self.model.get_decoder()  # type: ignore[operator]
        output = decoder(
            input_ids=padded.input_ids[None, low:high],
            position_ids=padded.position_ids[None, mine],
            attention_mask=padded.attention_mask()[None, None, mine],
            use_cache=False,
        )
        heads = (padded.head_node >= low) & (padded.head_node < high)
        tokens = heads[padded.token_head]
        index = torch.cumsum(heads, 0) - 1
        hidden = output.last_hidden_state[0][padded.head_node[heads] - low]
        temperature, head, target = padded.head_temperature[heads], index[padded.token_head[tokens]], padded.target[tokens]
        found = self._head(hidden, replace(padded, head_temperature=temperature, token_head=head, target=target))
        whole = found.new_zeros(len(found), len(tokens)).masked_scatter(tokens.expand(len(found), -1), found)
        groups = [self.grid.work.get_group(axis) for axis in ("context", "sequence")]
        total: torch.Tensor = _SumOverRanks.apply(whole, groups)  # type: ignore[no-untyped-call]
        return total


class TokenModel(PassModel):
    """Log-probs and entropies [2, M]."""

    def __init__(self, model: nn.Module, grid: Grid, head_chunk_bytes: int):
        super().__init__(model, grid)
        self.head_chunk_bytes = head_chunk_bytes

    def _head(self, hidden: torch.Tensor, packed: PackedRows) -> torch.Tensor:
        weight = own_part(output_embedding(self.model))
        found = token_logprobs(hidden, weight, packed.head_temperature, packed.token_head, packed.target, self.head_chunk_bytes)
        return torch.stack(found)


class ValueModel(PassModel):
    """Values [1, M] of a critic."""

    def __init__(self, model: nn.Module, head: nn.Linear, grid: Grid):
        super().__init__(model, grid)
        if grid.tensor is not None:
            for name, parameter in list(head.named_parameters()):
                setattr(head, name, held_by_all(parameter, grid.tensor))
        self.value_head = head

    def _head(self, hidden: torch.Tensor, packed: PackedRows) -> torch.Tensor:
        values = nn.functional.linear(hidden, own_part(self.value_head.weight), own_part(self.value_head.bias))
        return torch.stack([values[:, 0][packed.token_head].float()])


def held_by_all(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """The parameter as all ranks of a mesh hold it."""
    return nn.Parameter(DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False))


def own_part(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter that all tensor ranks hold, each of which sees only its own tokens: its gradient is a part."""
    return parameter.to_local(grad_placements=[Partial()]) if isinstance(parameter, DTensor) else parameter


class _SumOverRanks(torch.autograd.Function):
    """Sum of parts that ranks hold, for a loss that every one of them computes alike: it counts once, so its gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, groups: list[dist.ProcessGroup]) -> torch.Tensor:
        total = part.clone()
        for group in groups:
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def pad_nodes(packed: PackedRows, multiple: int) -> PackedRows:
    """The same tree with nodes behind it that nothing else sees, up to a multiple."""
    count = len(packed.input_ids)
    extra = -count % multiple
    zeros = packed.input_ids.new_zeros(extra)
    alone = torch.arange(count + 1, count + extra + 1, device=zeros.device)
    return replace(
        packed,
        input_ids=torch.cat((packed.input_ids, zeros)),
        position_ids=torch.cat((packed.position_ids, zeros)),
        end=torch.cat((packed.end, alone)),
    )


def parallelize(root: PassModel, compute: torch.dtype) -> None:
    """Split the root's model over its grid and shard what is left whole. Raises ConfigError for a model that cannot be split so."""
    model, grid = root.model, root.grid
    if grid.tensor is not None:
        _split_matrices(model, grid.tensor)
    if grid.work["context"].size() > 1:
        _gather_context(model, grid.work["context"])
    low = compute is not torch.float32
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()
    blocks = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=grid.parameters, mp_policy=policy)
    fully_shard(root, mesh=grid.parameters, mp_policy=policy)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # shares of the loss are those of the whole batch: gradients are added
            module.set_force_sum_reduction_for_comms(True)


def _split_matrices(model: nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallel by the model's plan, sequence parallel for what the plan leaves whole."""
    config: Any = model.config
    tied = config.tie_word_embeddings
    decoder: nn.Module = model.get_decoder()  # type: ignore[operator]
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    if not plan:
        raise ConfigError(f"trainer.parallel.tensor: {mesh.size()}, but {config.model_type} has no plan for tensor parallelism; expected 1")
    for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, field, 0) % mesh.size():
            raise ConfigError(f"trainer.parallel.tensor: {mesh.size()} does not divide {field} = {getattr(config, field)} of the model")
    styles: dict[str, ParallelStyle] = {}
    for name, module in decoder.named_modules():
        wanted = next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), "")
        if wanted:
            styles[name] = _style(wanted, config.model_type)
            parent = name.rpartition(".")[0]
            styles.setdefault(parent, _gather_tokens(parent))
        elif any(True for _ in module.parameters(recurse=False)):
            styles[name] = SequenceParallel(use_local_output=True)
    parallelize_module(decoder, mesh, styles)
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if tied:
        head.weight = model.get_input_embeddings().weight  # type: ignore[operator]
    else:
        head.weight = held_by_all(head.weight, mesh)
    # It tells at every gathering that rows split over two axes take two of them.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def _style(name: str, model_type: str) -> ParallelStyle:
    styles: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(output_layouts=TOKENS),
        "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=HEADS.dim, use_local_output=True),  # norms of single heads
    }
    if name not in styles:
        raise ConfigError(f"trainer.parallel.tensor: {model_type} wants {name!r} for some of its modules; known: {', '.join(styles)}")
    return styles[name]


def _gather_tokens(module: str) -> ParallelStyle:
    """Attention takes its input by name, the feed-forward block by position (all decoders of transformers do)."""
    if module.endswith("attn"):
        given: dict[str, Placement] = {"hidden_states": TOKENS}
        wanted: dict[str, Placement] = {"hidden_states": Replicate()}
        return PrepareModuleInput(input_kwarg_layouts=given, desired_input_kwarg_layouts=wanted, use_local_output=False)
    return PrepareModuleInput(input_layouts=(TOKENS,), desired_input_layouts=(Replicate(),), use_local_output=False)


def _gather_context(model: nn.Module, mesh: DeviceMesh) -> None:
    """Attention of this rank's tokens to those of all ranks: keys and values are gathered, their gradients added where they came from."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def whole(part: torch.Tensor) -> torch.Tensor:
        tokens = DTensor.from_local(part, mesh, [Shard(part.ndim - 2)], run_check=False)
        return tokens.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def attend(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any) -> Any:
        return sdpa_attention_forward(module, query, whole(key), whole(value), *rest, **options)

    AttentionInterface.register(CONTEXT_ATTENTION, attend)
    model.config._attn_implementation = CONTEXT_ATTENTION  # type: ignore[union-attr]
