"""Entropy coding of numbers whose distributions both sides know: tokens with range asymmetric numeral systems (rANS).

A number is a *token* (its magnitude and a few leading bits, coded by frequency) and *extra* bits (the rest, coded as they are).
Tokens come in *runs* of one distribution each. Four rANS states take turns, so that the processor works on four symbols at once;
a state is 64 bits and moves 32 at a time. The encoder works backwards, the decoder forwards.
Frequencies sum to 4096 and are made by integer arithmetic alone, so that all machines make the same ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from astraflow.weights.scan import BYTES, BYTES_IN, GAPS, GAPS_IN, INTS, INTS_IN, SHORTS, array_of, bit_length
from astraflow.weights.simd import U, high_product, inlined, kernel

SCALE_BITS = 12
SCALE = 1 << SCALE_BITS
LOW = 1 << 31
"""A state is at least this between two symbols, and below 2⁶³."""
STATES = 4
TOKENS = 256
GAP_BITS, STEP_BITS = 3, 2
"""Leading bits below the highest one that belong to the token."""
MAX_EXTRA = 19
STATE_WORDS = 2 * STATES
LEVELS = 50
"""Frequencies travel as quarter powers of two: 0 = does not occur, 1 + 4·log₂(frequency)."""
_QUARTERS = np.array([16, 19, 23, 27], np.int64)
_SHIFTS = np.array([0, *(max((f - 1).bit_length() - 1, 0) for f in range(1, SCALE + 1))], np.uint64)
_INVERSES = np.array(
    [0, (1 << 64) - 1, *(-(-(1 << ((f - 1).bit_length() + 63)) // f) for f in range(2, SCALE + 1))],
    np.uint64,
)
"""x // f = high_product(x, _INVERSES[f]) >> _SHIFTS[f] for x below 2⁶³ and f above 1 (Alverson 1991); for f = 1 it is x − 1."""
FREQUENCIES, FREQUENCIES_IN = array_of(types.uint16, axes=2), array_of(types.uint16, True, axes=2)
TABLES, TABLES_IN = array_of(types.uint32, axes=2), array_of(types.uint32, True, axes=2)
STATE = array_of(types.uint64)


@inlined
def _token(value: Any, kept: Any) -> Any:
    extra = max(bit_length(value) - kept, 0)
    return (extra << kept) + (value >> extra), extra


@inlined
def _extra(token: Any, kept: Any) -> Any:
    return max((token >> kept) - 1, 0)


@inlined
def _step_token(step: Any) -> Any:
    token, extra = _token(np.int64(step) >> 1, STEP_BITS)
    return (token << 1) | (np.int64(step) & 1), extra


@kernel(types.void(SHORTS, GAPS_IN, types.int64, types.int64, array_of(types.int64, axes=2)))
def count_steps(bins: Any, steps: Any, count: Any, grain_bits: Any, tally: Any) -> None:
    """tally[bin >> grain_bits, token of step] += 1 for the first `count` changes."""
    for n in range(min(count, bins.size, steps.size)):
        token, _ = _step_token(steps[n])
        tally[bins[n] >> grain_bits, token] += 1


@kernel(types.boolean(GAPS_IN, BYTES_IN, array_of(types.uint16, True), GAPS_IN, BYTES_IN, INTS, INTS, INTS, BYTES, GAPS))
def arrange(
    gaps: Any, classes: Any, bins: Any, steps: Any, context_of: Any, ends: Any, sums: Any, most: Any, tokens: Any, extras: Any
) -> Any:
    """Sort the tokens into runs: first the gaps by class, then the steps by context. False when something does not fit.

    Fills ends: where each run ends (classes, then contexts); per class: sums of the gaps, most: the largest gap token.
    """
    count, runs = gaps.size, sums.size
    if min(tokens.size, extras.size) < 2 * count or min(classes.size, bins.size, steps.size) < count or most.size < runs:
        return False
    at = np.zeros(ends.size + 1, np.int64)
    sums[:] = 0
    most[:] = 0
    for n in range(count):
        c, x = np.int64(classes[n]), runs + np.int64(context_of[bins[n]])
        if c >= runs or x >= ends.size:
            return False
        at[c + 1] += 1
        at[x + 1] += 1
        sums[c] += gaps[n]
        most[c] = max(most[c], np.int64(gaps[n]))
    for run in range(runs):
        most[run] = _token(most[run], GAP_BITS)[0]
    for r in range(ends.size):
        at[r + 1] += at[r]
        ends[r] = at[r + 1]
    for n in range(count):
        token, extra = _token(np.int64(gaps[n]), GAP_BITS)
        c = classes[n]
        s = at[c]
        at[c] = s + 1
        tokens[s], extras[s] = token, np.int64(gaps[n]) & ((1 << extra) - 1)
        token, extra = _step_token(steps[n])
        x = runs + np.int64(context_of[bins[n]])
        s = at[x]
        at[x] = s + 1
        tokens[s], extras[s] = token, (np.int64(steps[n]) >> 1) & ((1 << extra) - 1)
    return True


@inlined
def normalise(weights: Any, used: Any, frequencies: Any) -> None:
    """Integer weights of the first `used` tokens → frequencies that sum to `SCALE`, at least 1 for a weight above 0."""
    total = np.int64(0)
    for t in range(used):
        total += weights[t]
    left, largest = np.int64(SCALE), 0
    for t in range(frequencies.size):
        frequencies[t] = 0
    for t in range(used):
        if weights[t] > 0:
            frequencies[t] = max(np.int64(weights[t] * SCALE // total), np.int64(1))
            left -= frequencies[t]
            if frequencies[t] > frequencies[largest]:
                largest = t
    if left > 0:
        frequencies[largest] += left
    while left < 0:  # rare tokens were rounded up: the frequent ones pay
        for t in range(used):
            if left < 0 and frequencies[t] > 1 + (SCALE >> 8):
                frequencies[t] -= 1
                left += 1
        if left < 0:
            for t in range(used):
                if left < 0 and frequencies[t] > 1:
                    frequencies[t] -= 1
                    left += 1


@kernel(types.boolean(types.int64, types.int64, array_of(types.uint16)))
def geometric(parameter: Any, most: Any, frequencies: Any) -> Any:
    """Frequencies of gap tokens 0 … most where each word changes with the probability that `parameter` names. False if it names none."""
    if not (0 <= parameter < 2048 and 0 <= most < TOKENS and frequencies.size == TOKENS):
        return False
    rare = (U(32 + (parameter & 31)) << U(26)) >> U((parameter >> 5) & 31)
    one = U(1) << U(32)
    stays = rare if parameter >> 10 else one - rare
    weights = np.zeros(TOKENS, np.int64)
    reached, power, extra = one, stays, 0  # probabilities in units of 2⁻³²
    for t in range(most + 1):
        while extra < _extra(t, GAP_BITS):
            power = (power * power) >> U(32)
            extra += 1
        beyond = (reached * power) >> U(32)
        weights[t] = max(np.int64(reached - beyond), np.int64(1))
        reached = beyond
    normalise(weights, most + 1, frequencies)
    return True


@kernel(types.int64(types.int64, types.int64))
def parameter_of(changed: Any, unchanged: Any) -> Any:
    """The parameter closest to a share of `changed` among all."""
    flag = 1 if changed > unchanged else 0
    rare = (unchanged if flag else changed) / max(changed + unchanged, 1)
    rare = max(rare, 2.0**-30)
    shift = 0
    while rare * 64 < 31.75 and shift < 31:
        rare *= 2
        shift += 1
    return (flag << 10) | (shift << 5) | min(max(int(rare * 64 + 0.5) - 32, 0), 31)


@kernel(types.void(BYTES_IN, array_of(types.uint16)))
def from_levels(levels: Any, frequencies: Any) -> None:
    """Frequencies of one table as it travels; a table without tokens is all zero."""
    weights = np.zeros(TOKENS, np.int64)
    used = min(levels.size, TOKENS)
    for t in range(used):
        if levels[t]:
            level = min(np.int64(levels[t]), np.int64(LEVELS)) - np.int64(1)
            weights[t] = _QUARTERS[level & 3] << (level >> 2)
    normalise(weights, used, frequencies)


@kernel(types.boolean(array_of(types.uint16, True), array_of(types.uint32)))
def lookup(frequencies: Any, table: Any) -> Any:
    """By slot: token, frequency − 1 and distance from the token's first slot. False unless the frequencies fill the table."""
    slot = np.int64(0)
    for t in range(min(frequencies.size, TOKENS)):
        f = np.int64(frequencies[t])
        if slot + f > table.size:
            return False
        for k in range(f):
            table[slot + k] = (t << 24) | ((f - 1) << 12) | k
        slot += f
    return slot == table.size == SCALE


@kernel(types.int64(BYTES_IN, GAPS_IN, INTS_IN, types.int64, FREQUENCIES_IN, GAPS))
def encode_runs(tokens: Any, extras: Any, ends: Any, gap_runs: Any, frequencies: Any, out: Any) -> Any:
    """Write all runs to the end of `out`; the index of the first word written, or −1 when there is no room or no frequency."""
    at = out.size
    x0 = x1 = x2 = x3 = U(LOW)
    widths, biases = np.zeros(TOKENS, np.uint64), np.zeros(TOKENS, np.uint64)
    inverses, shifts = np.zeros(TOKENS, np.uint64), np.zeros(TOKENS, np.uint64)
    total = ends[ends.size - 1] if ends.size else 0
    if total > min(tokens.size, extras.size) or at < total + STATE_WORDS:
        return -1
    if frequencies.shape[0] < ends.size or frequencies.shape[1] != TOKENS:
        return -1
    for run in range(ends.size - 1, -1, -1):
        begin = ends[run - 1] if run else 0
        if begin == ends[run]:
            continue
        kept, shift = (GAP_BITS, 0) if run < gap_runs else (STEP_BITS, 1)
        slot = U(0)
        for t in range(TOKENS):
            width = min(np.int64(frequencies[run, t]), np.int64(SCALE))
            widths[t], inverses[t], shifts[t] = width, _INVERSES[width], _SHIFTS[width]
            biases[t] = slot + U(SCALE - 1) if width == 1 else slot
            slot += U(width)
        for s in range(ends[run] - 1, begin - 1, -1):
            token = np.int64(tokens[s])
            wide, bits = widths[token], U(_extra(token >> shift, kept))
            if wide == U(0):
                return -1
            x = x3
            if x >> (U(63 - SCALE_BITS) - bits) >= wide:
                at -= 1
                out[at] = np.uint32(x & U(0xFFFFFFFF))
                x >>= U(32)
            x = (x << bits) | U(extras[s])
            q = high_product(x, inverses[token]) >> shifts[token]
            x3, x2, x1, x0 = x2, x1, x0, x + biases[token] + q * (U(SCALE) - wide)
    for x in (x3, x2, x1, x0):
        at -= 2
        out[at], out[at + 1] = np.uint32(x & U(0xFFFFFFFF)), np.uint32(x >> U(32))
    return at


@kernel(types.boolean(GAPS_IN, STATE))
def open_states(source: Any, state: Any) -> Any:
    """Read the four states; state[4] is the next word of `source`."""
    if source.size < STATE_WORDS or state.size < STATES + 1:
        return False
    for k in range(STATES):
        state[k] = U(source[2 * k]) | (U(source[2 * k + 1]) << U(32))
    state[STATES] = U(STATE_WORDS)
    return True


@kernel(types.boolean(GAPS_IN, STATE))
def closed(source: Any, state: Any) -> Any:
    """All words but the padding one are read and the states are where the encoder began: otherwise something was damaged."""
    if state[STATES] != U(source.size - 1):
        return False
    same = 0
    for k in range(STATES):
        same += state[k] == U(LOW)
    return same == STATES


@inlined
def _next(x: Any, table: Any, source: Any, at: Any, kept: Any, shift: Any) -> Any:
    """One number; the caller has made sure that source[at] exists."""
    entry = np.int64(table[np.int64(x & U(SCALE - 1))])
    x = U(((entry >> 12) & 0xFFF) + 1) * (x >> U(SCALE_BITS)) + U(entry & 0xFFF)
    token = entry >> 24
    sign = token & shift
    token >>= shift
    bits = min(max((token >> kept) - 1, 0), MAX_EXTRA)
    value = ((token - (bits << kept)) << bits) | np.int64(x & ((U(1) << U(bits)) - U(1)))
    x >>= U(bits)
    word = U(source[at])
    short = x < U(LOW)
    x = (x << U(32)) | word if short else x
    return np.uint32((value << shift) | sign), x, at + np.int64(short)


@inlined
def _decode_run(source: Any, state: Any, table: Any, begin: Any, end: Any, kept: Any, shift: Any, out: Any) -> Any:
    """Numbers begin … end of `out`, all by one table. `source` has one word more than the encoder wrote."""
    x0, x1, x2, x3, at = state[0], state[1], state[2], state[3], np.int64(state[STATES])
    size, s = source.size, begin
    while s + STATES <= end and at + STATES <= size:
        out[s], x0, at = _next(x0, table, source, at, kept, shift)
        out[s + 1], x1, at = _next(x1, table, source, at, kept, shift)
        out[s + 2], x2, at = _next(x2, table, source, at, kept, shift)
        out[s + 3], x3, at = _next(x3, table, source, at, kept, shift)
        s += STATES
    while s < end:
        if at >= size:
            return False
        out[s], x, at = _next(x0, table, source, at, kept, shift)
        x0, x1, x2, x3 = x1, x2, x3, x
        s += 1
    state[0], state[1], state[2], state[3], state[STATES] = x0, x1, x2, x3, U(at)
    return True


@kernel(types.boolean(GAPS_IN, STATE, INTS_IN, INTS_IN, INTS_IN, GAPS))
def decode_gaps(source: Any, state: Any, starts: Any, parameters: Any, most: Any, out: Any) -> Any:
    """The gaps of all classes; class c at starts[c] … starts[c + 1]. False when they are damaged."""
    frequencies, table = np.zeros(TOKENS, np.uint16), np.zeros(SCALE, np.uint32)
    if state.size <= STATES or min(parameters.size, most.size) < starts.size - 1:
        return False
    for c in range(starts.size - 1):
        if starts[c] == starts[c + 1]:
            continue
        if not 0 <= starts[c] < starts[c + 1] <= out.size or not geometric(parameters[c], most[c], frequencies):
            return False
        if not lookup(frequencies, table) or not _decode_run(source, state, table, starts[c], starts[c + 1], GAP_BITS, 0, out):
            return False
    return True


@kernel(types.boolean(GAPS_IN, STATE, INTS_IN, TABLES_IN, GAPS))
def decode_steps(source: Any, state: Any, starts: Any, tables: Any, out: Any) -> Any:
    """The steps of all contexts; context x at starts[x] … starts[x + 1]. False when they are damaged."""
    if state.size <= STATES or tables.shape[1] != SCALE or tables.shape[0] < starts.size - 1:
        return False
    for x in range(starts.size - 1):
        if starts[x] == starts[x + 1]:
            continue
        if not 0 <= starts[x] < starts[x + 1] <= out.size:
            return False
        if not _decode_run(source, state, tables[x], starts[x], starts[x + 1], STEP_BITS, 1, out):
            return False
    return True
