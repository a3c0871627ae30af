"""Choices of the encoder: which magnitudes form a class of places, and which form a context of steps. Kernels, integers and sums only."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from astraflow.weights.scan import INTS, INTS_IN, array_of
from astraflow.weights.simd import inlined, kernel

TALLY_TOKENS = 128
APART = 1e30


@inlined
def _bernoulli_bits(changed: Any, every: Any) -> Any:
    if changed <= 0 or changed >= every:
        return 0.0
    p = changed / every
    return every * (-p * np.log2(p) - (1 - p) * np.log2(1 - p))


@kernel(types.int64(INTS_IN, INTS_IN, types.int64, types.int64, types.int64, types.float64, INTS))
def partition(every: Any, changed: Any, first: Any, end: Any, most: Any, overhead_bits: Any, out: Any) -> Any:
    """Cheapest partition of the exponents first … end − 1 into at most `most` classes, each costing `overhead_bits` besides its places.

    every, changed: words by exponent. out: the first exponent of each class; returns their number (dynamic programming).
    """
    present = np.array([e for e in range(first, end) if every[e] > 0])
    m = present.size
    if m == 0:
        return 0
    sums = np.zeros((2, m + 1), np.float64)
    for j in range(m):
        sums[0, j + 1] = sums[0, j] + every[present[j]]
        sums[1, j + 1] = sums[1, j] + changed[present[j]]
    cost = np.full((most + 1, m + 1), 1e30)
    back = np.zeros((most + 1, m + 1), np.int64)
    cost[0, 0] = 0.0
    for j in range(1, m + 1):
        for i in range(j):
            part = overhead_bits + _bernoulli_bits(sums[1, j] - sums[1, i], sums[0, j] - sums[0, i])
            for k in range(1, most + 1):
                if cost[k - 1, i] + part < cost[k, j]:
                    cost[k, j], back[k, j] = cost[k - 1, i] + part, i
    k = int(np.argmin(cost[1:, m])) + 1
    count, j = k, m
    while k > 0:
        j = back[k, j]
        k -= 1
        out[k] = present[j]
    return count


@kernel(types.int64(INTS_IN, INTS_IN, types.float64, types.float64))
def first_wide(every: Any, changed: Any, most_share: Any, least_rate: Any) -> Any:
    """The exponent below which every word is looked at by itself: words there are few (`most_share` of all) and change often."""
    total, reached = every.sum(), 0
    found = 0
    for e in range(256):
        if every[e] == 0:
            continue
        reached += every[e]
        if changed[e] < least_rate * every[e] or reached > most_share * total:
            break
        found = e + 1
    return found


@inlined
def _row_bits(row: Any, parameter_bits: Any) -> Any:
    total, used, bits = 0.0, 0, 0.0
    for t in range(row.size):
        if row[t]:
            total += row[t]
            used += 1
            bits -= row[t] * np.log2(row[t])
    return bits + total * np.log2(total) + used * parameter_bits if used else 0.0


@inlined
def _joined(tally: Any, rows: Any, own: Any, parts: Any, n: Any, parameter_bits: Any) -> Any:
    if parts[rows[n]] != parts[rows[n + 1]]:
        return APART
    return _row_bits(tally[rows[n]] + tally[rows[n + 1]], parameter_bits) - own[n] - own[n + 1]


@kernel(types.float64(array_of(types.int64, axes=2, readonly=True)))
def bits(rows: Any) -> Any:
    """Bits of all tokens, each row by its own frequencies."""
    total = 0.0
    for k in range(rows.shape[0]):
        total += _row_bits(rows[k], 0.0)
    return total


@kernel(types.int64(array_of(types.int64, axes=2), INTS_IN, types.int64, types.float64, INTS))
def merge(tally: Any, parts: Any, most: Any, parameter_bits: Any, out: Any) -> Any:
    """Merge neighbouring bins into contexts for as long as that saves bits, tables included, and down to `most` if that is possible.

    tally: (bins, tokens), the rows are used up. parts: bins of different parts are never merged. out: the first bin of each context;
    returns their number.
    """
    rows = np.array([b for b in range(tally.shape[0]) if tally[b].any()])
    m = rows.size
    if m == 0:
        out[0] = 0
        return 1
    own, joined = np.empty(m), np.full(m, APART)
    for k in range(m):
        own[k] = _row_bits(tally[rows[k]], parameter_bits)
    for k in range(m - 1):
        joined[k] = _joined(tally, rows, own, parts, k, parameter_bits)
    while m > 1:
        k = int(np.argmin(joined[: m - 1]))
        if joined[k] == APART or (joined[k] >= 0 and m <= most):
            break
        tally[rows[k]] += tally[rows[k + 1]]
        own[k] = _row_bits(tally[rows[k]], parameter_bits)
        for n in range(k + 1, m - 1):
            rows[n], own[n], joined[n] = rows[n + 1], own[n + 1], joined[n + 1]
        m -= 1
        joined[m - 1] = APART
        for n in (k - 1, k):
            if 0 <= n < m - 1:
                joined[n] = _joined(tally, rows, own, parts, n, parameter_bits)
    for k in range(m):
        out[k] = rows[k] if k else 0
    return m
