"""The forward pass over one step's segments, and the key-value store it reads and writes.

Shapes: T tokens of the step, laid flat without padding; D hidden; H query heads in G groups over K key heads; P head size; L keys.
Matrix products run once over all T tokens, whatever their sequences; only attention looks at sequences. Segments of equal
length and start in evenly spaced rows attend in one call. A run that several sequences share is computed by its owner; within
the layer its keys go to those that still compute behind it in this step, and after the step, all layers at once, to the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from astraflow.raas.engines.embedded_arch import Architecture, inverse_frequencies
from astraflow.raas.engines.embedded_batch import Move, Resize, Segment, Sequence
from astraflow.raas.engines.embedded_weights import Weights

EXPLICIT_SCORES = 1 << 22
"""Up to so many scores on a CPU, two matrix products beat torch's fused attention by a fifth (64 sequences, 80 keys, measured)."""


Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def _onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def choose_linear(device: torch.device, dtype: torch.dtype) -> Linear:
    """fp32 on a CPU: oneDNN, which uses AVX-512 on every maker's chips; torch's default there (MKL) was 2.4× slower on an AMD EPYC."""
    onednn = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return _onednn_linear if device.type == "cpu" and dtype == torch.float32 and onednn else F.linear


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
    """Segments that attend in one call: `count` rows, evenly spaced in one pool, `length` query tokens each."""

    capacity: int
    rows: slice
    count: int
    first: int
    """Place of the first query in the flat step."""
    length: int
    keys: int
    """L: keys that the longest row sees."""
    mask: torch.Tensor | None
    """Additive, broadcast against [count, K, G · length, L]; None = every row sees all L keys."""
    segments: list[Segment]
    row_index: torch.Tensor
    positions: torch.Tensor
    """[count] of the first query token."""
    copies: list[tuple[Sequence, Segment, int]]
    """(receiver, segment, its first flat place): keys handed on within the layer."""


@dataclass
class Step:
    """A plan as tensors."""

    ids_T: torch.Tensor
    cos_T1P: torch.Tensor
    sin_T1P: torch.Tensor
    blocks: list[Block]
    last: torch.Tensor
    """Flat places whose logits are wanted, in the order of the segments that end a sequence."""


class Model:
    """Weights, rotary tables and the forward pass."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, device: torch.device, max_len: int) -> None:
        self.arch, self.dtype, self.device = arch, dtype, device
        self.vocab_size = arch.vocab_size
        self.kv_token_bytes = arch.kv_token_bytes(dtype.itemsize)
        self.weights = Weights(arch, dtype, device)
        self.kv = KVStore(arch, dtype, device)
        self._linear = choose_linear(device, dtype)
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
        return self._logits(x_TD.index_select(0, step.last))

    def _logits(self, x_SD: torch.Tensor) -> torch.Tensor:
        return self._product(self._norm(x_SD, self.weights.norm), self.weights.head, None).float()

    def _product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._linear(x, weight, bias)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.arch.norm_eps)
        return weight * wide.to(x.dtype)

    def _layer(self, index: int, x_TD: torch.Tensor, step: Step) -> torch.Tensor:
        layer = self.weights.layers[index]
        attended = self._attention(index, self._norm(x_TD, layer.norm_attention), step)
        x_TD = x_TD + self._product(attended, layer.o, layer.o_bias)
        gate, up = self._product(self._norm(x_TD, layer.norm_mlp), layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return x_TD + self._product(F.silu(gate) * up, layer.down, layer.down_bias)

    def _attention(self, index: int, x_TD: torch.Tensor, step: Step) -> torch.Tensor:
        arch, layer = self.arch, self.weights.layers[index]
        total = x_TD.shape[0]
        qkv = self._product(x_TD, layer.qkv, layer.qkv_bias).view(total, arch.heads + 2 * arch.kv_heads, arch.head_dim)
        queries, keys = qkv[:, : arch.heads], qkv[:, arch.heads : arch.heads + arch.kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            queries.copy_(self._norm(queries, layer.q_norm))
            keys.copy_(self._norm(keys, layer.k_norm))
        _rotate(qkv[:, : arch.heads + arch.kv_heads], step.cos_T1P, step.sin_T1P)
        kv = qkv[:, arch.heads :].view(total, 2, arch.kv_heads, arch.head_dim)
        out = torch.empty(total, arch.heads * arch.head_dim, dtype=x_TD.dtype, device=x_TD.device)
        for block in step.blocks:
            self._store(index, block, kv)
            end = block.first + block.count * block.length
            out[block.first : end] = self._attend(index, block, queries[block.first : end])
        return out

    def _store(self, index: int, block: Block, kv_T2KP: torch.Tensor) -> None:
        pool = self.kv.pools[block.capacity][index]  # [2, rows, K, capacity, P]
        end = block.first + block.count * block.length
        if block.length == 1:
            # Two index arrays around a slice put their axis in front: [count, 2, K, P].
            pool[:, block.row_index, :, block.positions] = kv_T2KP[block.first : end]
        else:
            start = block.segments[0].start
            words = kv_T2KP[block.first : end].view(block.count, block.length, *kv_T2KP.shape[1:]).permute(2, 0, 3, 1, 4)
            pool[:, block.rows, :, start : start + block.length] = words
        for receiver, segment, first in block.copies:
            words = kv_T2KP[first : first + segment.length].permute(1, 2, 0, 3)
            self.kv.pools[receiver.capacity][index][:, receiver.row, :, segment.start : segment.end] = words

    def _attend(self, index: int, block: Block, q_THP: torch.Tensor) -> torch.Tensor:
        """[count · length, H · P]. Query heads of one key head become query tokens of it, so keys are never repeated."""
        arch, n, m = self.arch, block.count, block.length
        keys, values = self.kv.pools[block.capacity][index][:, block.rows, :, : block.keys].unbind(0)
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
        return out.reshape(n * m, arch.heads * arch.head_dim)

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
        for segment in segments:
            ids += segment.owner.tokens[segment.start : segment.end]
            positions += range(segment.start, segment.end)
        last: list[int] = []
        flat = 0
        for segment in segments:
            flat += segment.length
            if segment.ends:
                last.append(flat - 1)
        index = torch.tensor(positions, device=self.device)
        return Step(
            ids_T=torch.tensor(ids, device=self.device),
            cos_T1P=self._cos[index].unsqueeze(1),
            sin_T1P=self._sin[index].unsqueeze(1),
            blocks=self._blocks(segments),
            last=torch.tensor(last, dtype=torch.int64, device=self.device),
        )

    def _blocks(self, segments: list[Segment]) -> list[Block]:
        owners = {id(segment.owner) for segment in segments}
        blocks: list[Block] = []
        flat, start = 0, 0
        while start < len(segments):
            end = _same_shape(segments, start)
            blocks.append(self._block(segments[start:end], flat, owners))
            flat += sum(segment.length for segment in segments[start:end])
            start = end
        return blocks

    def _block(self, group: list[Segment], first: int, owners: set[int]) -> Block:
        head = group[0]
        row, length = head.owner.row, head.length
        step = group[1].owner.row - row if len(group) > 1 else 1
        starts = [segment.start for segment in group]
        keys = max(starts) + length
        copies = [
            (receiver, segment, first + place * length)
            for place, segment in enumerate(group)
            for receiver in segment.rows[1:]
            if id(receiver) in owners
        ]
        return Block(
            capacity=head.owner.capacity,
            rows=slice(row, row + (len(group) - 1) * step + 1, step),
            count=len(group),
            first=first,
            length=length,
            keys=keys,
            mask=self._mask(starts, length, keys),
            segments=group,
            row_index=torch.tensor([segment.owner.row for segment in group], device=self.device),
            positions=torch.tensor(starts, device=self.device),
            copies=copies,
        )

    def _mask(self, starts: list[int], length: int, keys: int) -> torch.Tensor | None:
        if length == 1 and min(starts) == max(starts):
            return None
        if length == 1:
            seen = torch.tensor(starts, device=self.device).view(-1, 1, 1, 1)
        else:  # one start for all rows; the queries repeat for every query head of a group
            seen = torch.arange(starts[0], starts[0] + length, device=self.device).repeat(self.arch.group).view(1, 1, -1, 1)
        hidden = torch.arange(keys, device=self.device) > seen
        return torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, float("-inf"))


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


def _same_shape(segments: list[Segment], start: int) -> int:
    """End of the run of segments that can attend in one call: same pool, length and (but for single tokens) start, evenly spaced rows."""
    head = segments[start]
    end, step = start + 1, 0
    while end < len(segments):
        this, before = segments[end], segments[end - 1]
        gap = this.owner.row - before.owner.row
        same = this.owner.capacity == head.owner.capacity and this.length == head.length
        if not same or gap < 1 or (step and gap != step) or (head.length > 1 and this.start != head.start):
            break
        step, end = gap, end + 1
    return end
