"""The forward pass over one step's segments, and the key-value store it reads and writes.

Shapes: T tokens of the step, laid flat without padding; D hidden; H query heads in G groups over K key heads; P head size; L keys.
Matrix products run once over all T tokens, whatever their sequences; only attention looks at sequences, and pads where one call
for many is worth it. A run that several sequences share is computed by its owner; within the layer its keys go to those that still
compute behind it in this step, and after the step, all layers at once, to the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from astraflow.raas.engines.embedded_arch import Architecture, inverse_frequencies
from astraflow.raas.engines.embedded_batch import Move, Resize, Segment, Sequence
from astraflow.raas.engines.embedded_weights import Weights

EXPLICIT_SCORES = 1 << 22
"""Up to so many scores on a CPU, two matrix products beat torch's fused attention: by a third at 64 sequences of 75 keys, by half at
64 prompts of 54 tokens (measured)."""
SMALL_SCORES = 4096
"""So many scores per head may be padding in any call: they cost less than a call of their own."""


class KVStore:
    """Per capacity one tensor [layers, 2 (keys, values), rows, K, capacity, P]. Zeros, so that masked places are finite."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self._arch, self._dtype, self._device = arch, dtype, device
        self.pools: dict[int, torch.Tensor] = {}

    def resize(self, change: Resize) -> None:
        arch, old = self._arch, self.pools.pop(change.capacity, None)
        if not change.rows:
            return
        shape = (arch.layers, 2, change.rows, arch.kv_heads, change.capacity, arch.head_dim)
        new = torch.zeros(shape, dtype=self._dtype, device=self._device)
        if old is not None:
            kept = min(old.shape[2], change.rows)
            new[:, :, :kept] = old[:, :, :kept]
        self.pools[change.capacity] = new

    def move(self, change: Move) -> None:
        pool = self.pools[change.capacity]
        pool[:, :, change.target, :, : change.length] = pool[:, :, change.source, :, : change.length]

    def clean(self) -> None:
        """What is not finite becomes 0: behind its mask it would still spoil whoever gets the row next (0 · NaN)."""
        for pool in self.pools.values():
            pool.nan_to_num_(0.0, 0.0, 0.0)

    def read(self, sequence: Sequence, start: int, end: int) -> torch.Tensor:
        """View [layers, 2, K, end − start, P]."""
        return self.pools[sequence.capacity][:, :, sequence.row, :, start:end]

    def write(self, sequences: list[Sequence], start: int, end: int, words: torch.Tensor) -> None:
        """Give [layers, 2, K, end − start, P] to each of them."""
        for run in _adjacent(sequences):
            first = run[0].row
            self.pools[run[0].capacity][:, :, first : first + len(run), :, start:end] = words.unsqueeze(2)


@dataclass
class Block:
    """Runs that attend in one call: `count` evenly spaced rows of one pool with `queries` query tokens each, the shorter ones padded."""

    capacity: int
    rows: slice
    count: int
    queries: int
    keys: int
    """L: keys that the longest row sees."""
    first: int
    end: int
    """Its tokens in the flat step."""
    mask: torch.Tensor | None
    """Additive, broadcast against [count, K, G · queries, L]; None = every row sees all L keys."""
    padded: torch.Tensor | None
    """Per [count · queries] place a token from `first` on; None = nothing is padded."""
    real: torch.Tensor | None
    """Per token its place in [count · queries]."""


@dataclass
class Store:
    """Where the keys of a step go in one pool."""

    capacity: int
    tokens: torch.Tensor | None
    """Flat places to take, None = all in order."""
    rows: torch.Tensor
    positions: torch.Tensor


@dataclass
class Step:
    """A plan as tensors. Keys are stored before anything attends, so within a layer the order of the runs is free."""

    ids_T: torch.Tensor
    cos_T1P: torch.Tensor
    sin_T1P: torch.Tensor
    stores: list[Store]
    blocks: list[Block]
    last: torch.Tensor
    """Flat places whose logits are wanted, in the order of the segments that end a sequence."""
    hidden_TI: torch.Tensor
    """Room for the MLP's inner activations, used by every layer: fresh memory costs more than the arithmetic."""


class Model:
    """Weights, rotary tables and the forward pass."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, device: torch.device, max_len: int) -> None:
        self.arch, self.dtype, self.device = arch, dtype, device
        self.vocab_size = arch.vocab_size
        self.kv_token_bytes = arch.kv_token_bytes(dtype.itemsize)
        self.weights = Weights(arch, dtype, device)
        self.kv = KVStore(arch, dtype, device)
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), torch.tensor(inverse_frequencies(arch), dtype=torch.float32))
        self._cos, self._sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)

    @torch.inference_mode()
    def forward(self, segments: list[Segment]) -> torch.Tensor:
        """Compute a plan's tokens into the cache. Returns float32 logits [segments with `ends`, vocabulary]."""
        step = self._prepare(segments)
        x_TD = F.embedding(step.ids_T, self.weights.embedding)
        for index in range(self.arch.layers):
            x_TD = self._layer(index, x_TD, step)
        self._hand_on(segments)
        return self.weights.head(self._norm(x_TD.index_select(0, step.last), self.weights.norm)).float()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.arch.norm_eps)
        return weight * wide.to(x.dtype)

    def _layer(self, index: int, x_TD: torch.Tensor, step: Step) -> torch.Tensor:
        layer = self.weights.layers[index]
        x_TD = layer.o(self._attention(index, self._norm(x_TD, layer.norm_attention), step)).add_(x_TD)
        gate, up = layer.gate_up(self._norm(x_TD, layer.norm_mlp)).chunk(2, dim=-1)
        torch.mul(F.silu(gate, inplace=True), up, out=step.hidden_TI)
        return layer.down(step.hidden_TI).add_(x_TD)

    def _attention(self, index: int, x_TD: torch.Tensor, step: Step) -> torch.Tensor:
        arch, layer = self.arch, self.weights.layers[index]
        total = x_TD.shape[0]
        qkv = layer.qkv(x_TD).view(total, arch.heads + 2 * arch.kv_heads, arch.head_dim)
        queries, keys = qkv[:, : arch.heads], qkv[:, arch.heads : arch.heads + arch.kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            queries.copy_(self._norm(queries, layer.q_norm))
            keys.copy_(self._norm(keys, layer.k_norm))
        _rotate(qkv[:, : arch.heads + arch.kv_heads], step.cos_T1P, step.sin_T1P)
        kv_T2KP = qkv[:, arch.heads :].view(total, 2, arch.kv_heads, arch.head_dim)
        for store in step.stores:
            # Two index arrays around a slice put their axis in front: [tokens, 2, K, P] into [2, rows, K, capacity, P].
            words = kv_T2KP if store.tokens is None else kv_T2KP.index_select(0, store.tokens)
            self.kv.pools[store.capacity][index][:, store.rows, :, store.positions] = words
        outputs = [self._attend(index, block, queries[block.first : block.end]) for block in step.blocks]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(self, index: int, block: Block, q_THP: torch.Tensor) -> torch.Tensor:
        """[tokens, H · P]. Query heads of one key head become query tokens of it, so keys are never repeated."""
        arch, n, m = self.arch, block.count, block.queries
        keys, values = self.kv.pools[block.capacity][index][:, block.rows, :, : block.keys].unbind(0)
        if block.padded is not None:
            q_THP = q_THP.index_select(0, block.padded)
        q = q_THP.reshape(n, m, arch.kv_heads, arch.group, arch.head_dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(n, arch.kv_heads, arch.group * m, arch.head_dim)
        if self.device.type == "cpu" and n * arch.heads * m * block.keys <= EXPLICIT_SCORES:
            scores = torch.matmul(q * arch.head_dim**-0.5, keys.transpose(-1, -2))
            if block.mask is not None:
                scores += block.mask
            out = torch.matmul(torch.softmax(scores, -1), values)
        else:
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=block.mask)
        out = out.view(n, arch.kv_heads, arch.group, m, arch.head_dim).permute(0, 3, 1, 2, 4)
        out = out.reshape(n * m, arch.heads * arch.head_dim)
        return out if block.real is None else out.index_select(0, block.real)

    def _hand_on(self, segments: list[Segment]) -> None:
        """After the layers: keys of shared runs to the sequences that computed nothing themselves."""
        owners = {id(segment.owner) for segment in segments}
        first: dict[int, int] = {}
        last: dict[int, Segment] = {}
        for segment in segments:
            for row in segment.rows[1:]:
                if id(row) not in owners:
                    first.setdefault(id(row), segment.start)
                    last[id(row)] = segment
        for segment in segments:
            receivers = [row for row in segment.rows[1:] if last.get(id(row)) is segment]
            if receivers:
                # The owner of a later run has been given the earlier ones, so the last owner has them all.
                start = first[id(receivers[0])]
                self.kv.write(receivers, start, segment.end, self.kv.read(segment.owner, start, segment.end))

    def _prepare(self, segments: list[Segment]) -> Step:
        ids: list[int] = []
        positions: list[int] = []
        places: dict[int, int] = {}
        ordered = _laid_out(segments)
        for segment in ordered:
            places[id(segment)] = len(ids)
            ids += segment.owner.tokens[segment.start : segment.end]
            positions += range(segment.start, segment.end)
        index = self._tensor(positions)
        return Step(
            ids_T=self._tensor(ids),
            cos_T1P=self._cos[index].unsqueeze(1),
            sin_T1P=self._sin[index].unsqueeze(1),
            stores=self._stores(ordered, len(ids)),
            blocks=[self._block(run, places[id(run[0])]) for run in _runs(ordered)],
            last=self._tensor([places[id(segment)] + segment.length - 1 for segment in segments if segment.ends]),
            hidden_TI=torch.empty(len(ids), self.arch.intermediate, dtype=self.dtype, device=self.device),
        )

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _stores(self, ordered: list[Segment], total: int) -> list[Store]:
        """To the owners of the runs, and to those receivers that compute behind them in this step."""
        owners = {id(segment.owner) for segment in ordered}
        tables: dict[int, tuple[list[int], list[int], list[int]]] = {}
        flat = 0
        for segment in ordered:
            for receiver in segment.rows:
                if receiver is segment.owner or id(receiver) in owners:
                    tokens, rows, positions = tables.setdefault(receiver.capacity, ([], [], []))
                    tokens += range(flat, flat + segment.length)
                    rows += [receiver.row] * segment.length
                    positions += range(segment.start, segment.end)
            flat += segment.length
        return [
            Store(capacity, None if tokens == list(range(total)) else self._tensor(tokens), self._tensor(rows), self._tensor(positions))
            for capacity, (tokens, rows, positions) in tables.items()
        ]

    def _block(self, run: list[Segment], first: int) -> Block:
        row = run[0].owner.row
        step = run[1].owner.row - row if len(run) > 1 else 1
        lengths = [segment.length for segment in run]
        queries, total, keys = max(lengths), sum(lengths), max(segment.end for segment in run)
        padded = real = None
        if total < queries * len(run):
            # A padded query computes some other token again, and nobody looks at the result.
            places = [(place, offset) for place, length in enumerate(lengths) for offset in range(length)]
            real = self._tensor([place * queries + offset for place, offset in places])
            padded = torch.zeros(len(run) * queries, dtype=torch.int64, device=self.device)
            padded[real] = torch.arange(total, device=self.device)
        return Block(
            capacity=run[0].owner.capacity,
            rows=slice(row, row + (len(run) - 1) * step + 1, step),
            count=len(run),
            queries=queries,
            keys=keys,
            first=first,
            end=first + total,
            mask=self._mask([segment.start for segment in run], queries, keys),
            padded=padded,
            real=real,
        )

    def _mask(self, starts: list[int], queries: int, keys: int) -> torch.Tensor | None:
        equal = min(starts) == max(starts)
        if queries == 1 and equal:
            return None
        seen = self._tensor(starts[:1] if equal else starts).unsqueeze(1) + torch.arange(queries, device=self.device)
        if queries > 1:  # the queries repeat for every query head of a group
            seen = seen.repeat(1, self.arch.group)
        hidden = torch.arange(keys, device=self.device) > seen.unsqueeze(-1)
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, float("-inf"))
        return mask.unsqueeze(1)


def _laid_out(segments: list[Segment]) -> list[Segment]:
    """Such that runs which can attend together are neighbours: single tokens first, then every owner's first run, second run …"""
    seen: dict[int, int] = {}
    keys = {}
    for segment in segments:
        owner = segment.owner
        nth = seen[id(owner)] = seen.get(id(owner), 0) + 1
        keys[id(segment)] = (owner.capacity, segment.length > 1, nth, owner.row)
    return sorted(segments, key=lambda segment: keys[id(segment)])


def _runs(ordered: list[Segment]) -> Iterator[list[Segment]]:
    """Cut into runs that attend in one call: one pool, evenly spaced rows, and at most half as much padding as work."""
    run: list[Segment] = []
    longest = keys = useful = step = 0
    for this in ordered:
        gap = this.owner.row - run[-1].owner.row if run else 0
        wider, taller, work = max(longest, this.length), max(keys, this.end), useful + this.length * this.end
        even = bool(run) and this.owner.capacity == run[0].owner.capacity and gap >= 1 and gap == (step or gap)
        if even and (len(run) + 1) * wider * taller <= 1.5 * work + SMALL_SCORES:
            run.append(this)
            longest, keys, useful, step = wider, taller, work, gap
            continue
        if run:
            yield run
        run, longest, keys, useful, step = [this], this.length, this.end, this.length * this.end, 0
    if run:
        yield run


def _adjacent(sequences: list[Sequence]) -> list[list[Sequence]]:
    """Cut into runs of neighbouring rows of one pool."""
    runs: list[list[Sequence]] = []
    for sequence in sequences:
        before = runs[-1][-1] if runs else None
        if before is not None and before.capacity == sequence.capacity and before.row + 1 == sequence.row:
            runs[-1].append(sequence)
        else:
            runs.append([sequence])
    return runs


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotary positions in place (Su et al. 2021, half-split layout as in HF): x [T, heads, P], cos and sin [T, 1, P / 2]."""
    one, two = x.chunk(2, dim=-1)
    turned = one * sin
    one.mul_(cos).sub_(two * sin)
    two.mul_(cos).add_(turned)
