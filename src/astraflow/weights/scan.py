"""Kernels that look at every word: find what changed and name it by ranks within classes, and find it again by those ranks.

A *class* is a range of magnitudes of the old word, because a change is far more likely where |w| is small. A changed word's *gap* is
the number of unchanged words of its class since the last changed one of that class. Receiver and sender hold the same old words, so
a gap says where. Classes are of two kinds:
    wide    told apart by comparisons of 64 words at a time and ranks by popcount: costs next to nothing per unchanged word
    single  every word below `small` is looked at by itself, its class looked up by exponent: for the few words that change often
Words are taken in blocks that stay in the first cache, so that one simple loop per class is cheap. Loops over changes avoid branches
that depend on the data: a mispredicted one costs more than all the rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from astraflow.weights.simd import (
    MAGNITUDE,
    U,
    below,
    fetch_ahead,
    inlined,
    kernel,
    leading_zeros,
    lowest,
    mask_below,
    mask_ne,
    popcount,
    select,
)

BINS = 2048
"""Magnitudes in steps of 16 words: exponent and the three upper bits of the mantissa."""
NEVER = 1 << 60
BLOCK = 128
"""Groups; 16 KiB of words."""
AHEAD = 48
"""Changes between the one that is looked up and the one whose cache line is asked for."""
WHOLE = np.uint16(MAGNITUDE + 1)


def array_of(kind: Any, readonly: bool = False, axes: int = 1) -> Any:
    """Type of a contiguous array; one that is only read may be read-only memory."""
    return types.Array(kind, axes, "C", readonly=readonly)


WORDS = array_of(types.uint16, readonly=True)
BYTES_IN, GAPS_IN, INTS_IN = array_of(types.uint8, True), array_of(types.uint32, True), array_of(types.int64, True)
BYTES, SHORTS, GAPS, INTS, INTS2 = (
    array_of(types.uint8),
    array_of(types.uint16),
    array_of(types.uint32),
    array_of(types.int64),
    array_of(types.int64, axes=2),
)


@inlined
def _differ(old: Any, new: Any, start: Any, groups: Any, masks: Any) -> Any:
    """Masks of the words that differ, of `groups` groups from word `start` on; the last group may be short."""
    whole = min(groups, (old.size - start) >> 6)
    for g in range(whole):
        masks[g] = mask_ne(old, start + (g << 6), new)
    if whole < groups:
        masks[whole] = U(0)
        for i in range(start + (whole << 6), old.size):
            masks[whole] |= U(old[i] != new[i]) << U(i & 63)


@inlined
def _upto(old: Any, start: Any, groups: Any, bound: Any, masks: Any) -> Any:
    """Masks of the words of smaller magnitude than `bound` (WHOLE: all)."""
    whole = min(groups, (old.size - start) >> 6)
    if bound == WHOLE:
        for g in range(whole):
            masks[g] = ~U(0)
    else:
        for g in range(whole):
            masks[g] = mask_below(old, start + (g << 6), bound)
    if whole < groups:
        masks[whole] = U(0)
        for i in range(start + (whole << 6), old.size):
            masks[whole] |= U((old[i] & MAGNITUDE) < bound) << U(i & 63)


@inlined
def _step(old: Any, new: Any) -> Any:
    """Distance in ulp order, as 2 · (|distance| − 1) + (1 if downwards). Downwards means towards zero and beyond: −0 follows 0."""
    flip = np.int64(old ^ new) >> 15
    distance = (np.int64(new & MAGNITUDE) ^ -flip) - np.int64(old & MAGNITUDE)
    down = np.int64(distance < 0)
    return (((distance - 1 + down) ^ -down) << 1) | down


@inlined
def _stepped(old: Any, step: Any) -> Any:
    """Inverse of `_step`."""
    down, size = np.int64(step) & 1, (np.int64(step) >> 1) + 1
    there = np.int64(old & MAGNITUDE) + ((size ^ -down) + down)
    flip = np.int64(there < 0)
    return np.uint16(((there ^ -flip) & MAGNITUDE) | (((np.int64(old) >> 15) ^ flip) << 15))


@inlined
def _ranks(old: Any, start: Any, groups: Any, bound: Any, under: Any, masks: Any, before: Any, total: Any) -> Any:
    """Masks of the class of magnitudes that are not `under` and below `bound`, and how many of its words came before each group;
    `total`, with this block's words. `under` is moved on."""
    _upto(old, start, groups, bound, masks)
    for g in range(groups):
        upto = masks[g]
        of_class = upto & ~under[g]
        masks[g], under[g] = of_class, upto
        before[g] = total
        total += popcount(of_class)
    return total


@inlined
def _spots(old: Any, new: Any, start: Any, differ: Any, groups: Any, spots: Any) -> Any:
    """Indices in the block of all set bits; their number. The first of each group is written whether it is there or not."""
    count = np.int64(0)
    for g in range(groups):
        # The next block comes into the cache while this one is worked on.
        following = start + ((g + BLOCK) << 6)
        fetch_ahead(old, following)
        fetch_ahead(new, following)
        fetch_ahead(old, following + 32)
        fetch_ahead(new, following + 32)
        rest = differ[g]
        spots[count] = (g << 6) + lowest(rest)
        count += np.int64(rest != U(0))
        rest &= rest - U(1)
        while rest != U(0):
            spots[count] = (g << 6) + lowest(rest)
            count += 1
            rest &= rest - U(1)
    return count


@kernel(types.int64(WORDS, WORDS, types.uint16, BYTES_IN, array_of(types.uint16, True), types.int64, GAPS, BYTES, SHORTS, GAPS))
def extract(old: Any, new: Any, small: Any, class_of: Any, cuts: Any, wide: Any, gaps: Any, classes: Any, bins: Any, steps: Any) -> Any:
    """Changes of `new` against `old`: gap, class, bin and step of each, those of a class in order of place; their number, or −1 when
    the outputs are too short.

    class_of: class by exponent (256), for words below `small`. cuts: bounds between the wide classes, ascending, which are numbered
    from `wide` on.
    """
    count, room, wides = 0, min(gaps.size, classes.size, bins.size, steps.size), cuts.size + 1
    if new.size != old.size or class_of.size < 256:
        return -2
    since, total, last = np.zeros(256, np.int64), np.zeros(wides, np.int64), np.full(wides, -1, np.int64)
    differ, under = np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.uint64)
    masks, before = np.zeros((wides, BLOCK), np.uint64), np.zeros((wides, BLOCK), np.int64)
    spots = np.empty(64 * BLOCK + 1, np.uint16)
    for start in range(0, old.size, BLOCK << 6):
        groups = min(BLOCK, (old.size - start + 63) >> 6)
        _differ(old, new, start, groups, differ)
        hits = 0
        for g in range(groups):
            hits += popcount(differ[g])
        if count + hits > room:
            return -1
        if small > 0:
            _upto(old, start, groups, small, under)
            for g in range(groups):
                rest = under[g]
                while rest != U(0):
                    i = start + (g << 6) + lowest(rest)
                    rest &= rest - U(1)
                    c = class_of[(old[i] >> 7) & 0xFF]
                    if old[i] != new[i]:
                        gaps[count], classes[count] = since[c], c
                        bins[count], steps[count] = (old[i] & MAGNITUDE) >> 4, _step(old[i], new[i])
                        since[c] = 0
                        count += 1
                    else:
                        since[c] += 1
                differ[g] &= ~under[g]
        elif wides > 1:
            under[:] = U(0)
        if small > 0 or wides > 1:
            for k in range(wides):
                total[k] = _ranks(old, start, groups, cuts[k] if k < cuts.size else WHOLE, under, masks[k], before[k], total[k])
        for n in range(_spots(old, new, start, differ, groups, spots)):
            spot = np.int64(spots[n])
            word, there = old[start + spot], new[start + spot]
            kind, rank = np.int64(0), start + spot
            if small > 0 or wides > 1:
                for q in range(wides - 1):
                    kind += np.int64((word & MAGNITUDE) >= cuts[q])
                rank = before[kind, spot >> 6] + popcount(masks[kind, spot >> 6] & below(spot & 63))
            gaps[count], classes[count] = rank - last[kind] - 1, wide + kind
            bins[count], steps[count] = (word & MAGNITUDE) >> 4, _step(word, there)
            last[kind] = rank
            count += 1
    return count


@inlined
def _locate_two(old: Any, cut: Any, gaps: Any, starts: Any, places: Any, held: Any, first: Any, second: Any) -> Any:
    """`locate` for two wide classes with few changes: both in one go, without a block's masks being kept."""
    count, low, high = np.int64(0), starts[0], starts[1]
    for start in range(0, old.size, 64):
        fetch_ahead(old, start + (BLOCK << 6))
        fetch_ahead(old, start + (BLOCK << 6) + 32)
        if start + 64 <= old.size:
            below_cut, members = mask_below(old, start, cut), np.int64(64)
        else:
            below_cut, members = U(0), old.size - start
            for i in range(start, old.size):
                below_cut |= U((old[i] & MAGNITUDE) < cut) << U(i - start)
        under = popcount(below_cut)
        while first < under:
            i = start + select(below_cut, first)
            places[count], held[count] = i, old[i]
            count += 1
            low += 1
            first = first + 1 + np.int64(gaps[low]) if low < starts[1] else NEVER
        first -= under
        over = members - under
        while second < over:
            i = start + select(~below_cut, second)
            places[count], held[count] = i, old[i]
            count += 1
            high += 1
            second = second + 1 + np.int64(gaps[high]) if high < starts[2] else NEVER
        second -= over
    return low == starts[1] and high == starts[2]


@kernel(types.boolean(WORDS, types.uint16, BYTES_IN, array_of(types.uint16, True), types.int64, GAPS_IN, INTS_IN, GAPS, SHORTS))
def locate(old: Any, small: Any, class_of: Any, cuts: Any, wide: Any, gaps: Any, starts: Any, places: Any, held: Any) -> Any:
    """Where the changes are, and the old words there; those of a class in order of place. False unless all gaps fit.

    gaps: those of class c at starts[c] … starts[c + 1], and one number more. places, held: room for one more than there are gaps.
    """
    total = starts.size - 1
    if class_of.size < 256 or not 0 <= wide == total - cuts.size - 1 or starts[0] != 0 or starts[total] < 0:
        return False
    if starts[total] >= min(places.size, held.size, gaps.size) or not old.size:
        return False
    at, left = np.empty(total, np.int64), np.empty(total, np.int64)
    for c in range(total):
        if starts[c + 1] < starts[c]:
            return False
        at[c] = starts[c]
        left[c] = np.int64(gaps[at[c]]) if starts[c] < starts[c + 1] else NEVER
    for e in range(256):
        if class_of[e] >= total:
            return False
    # `count` stays within starts[total]: each class puts out no more places than it has gaps.
    count, final = np.int64(0), old.size - 1
    if small == 0 and cuts.size == 1 and wide == 0 and 4 * starts[2] < old.size >> 6:
        return _locate_two(old, cuts[0], gaps, starts, places, held, left[0], left[1])
    under, upto = np.zeros(BLOCK, np.uint64), np.empty(BLOCK, np.uint64)
    for start in range(0, old.size, BLOCK << 6):
        groups = min(BLOCK, (old.size - start + 63) >> 6)
        if small > 0:
            _upto(old, start, groups, small, under)
            for g in range(groups):
                rest = under[g]
                while rest != U(0):
                    i = start + (g << 6) + lowest(rest)
                    rest &= rest - U(1)
                    c = class_of[(old[i] >> 7) & 0xFF]
                    left[c] -= 1
                    if left[c] < 0:
                        places[count], held[count] = i, old[i]
                        count += 1
                        at[c] += 1
                        left[c] = np.int64(gaps[at[c]]) if at[c] < starts[c + 1] else NEVER
        else:
            under[:] = U(0)
        for k in range(cuts.size + 1):
            _upto(old, start, groups, cuts[k] if k < cuts.size else WHOLE, upto)
            need, s, end = left[wide + k], at[wide + k], starts[wide + k + 1]
            final_class = k == cuts.size
            eager = 4 * (end - starts[wide + k]) > old.size >> 6
            for g in range(groups):
                of_class = upto[g] & ~under[g]
                under[g] = upto[g]
                members = popcount(of_class)
                if final_class:  # the next block comes into the cache while this one is worked on
                    fetch_ahead(old, start + ((g + BLOCK) << 6))
                    fetch_ahead(old, start + ((g + BLOCK) << 6) + 32)
                if eager:  # the first change of a group is written whether it is there or not: most often it is
                    i = min(start + (g << 6) + select(of_class, need & 63), final)
                    places[count], held[count] = i, old[i]
                    hit = np.int64(need < members)
                    count += hit
                    s += hit
                    following = need + 1 + np.int64(gaps[s]) if s < end else NEVER
                    need = following if hit else need
                while need < members:
                    i = start + (g << 6) + select(of_class, need)
                    places[count], held[count] = i, old[i]
                    count += 1
                    s += 1
                    need = need + 1 + np.int64(gaps[s]) if s < end else NEVER
                need -= members
            left[wide + k], at[wide + k] = need, s
    unused = 0
    for c in range(total):
        unused += starts[c + 1] - at[c]
    return unused == 0


@kernel(types.boolean(WORDS, GAPS_IN, types.int64, GAPS, SHORTS))
def locate_plain(old: Any, gaps: Any, count: Any, places: Any, held: Any) -> Any:
    """`locate` for a single class: no word between two changes is looked at."""
    if count > min(gaps.size, places.size, held.size):
        return False
    place = ahead = np.int64(-1)
    for n in range(min(AHEAD, count)):
        ahead += 1 + np.int64(gaps[n])
    for n in range(count):
        place += 1 + np.int64(gaps[n])
        ahead += 1 + np.int64(gaps[min(n + AHEAD, count - 1)])
        fetch_ahead(old, ahead)
        if place >= old.size:
            return False
        places[n], held[n] = place, old[place]
    return True


@kernel(types.boolean(array_of(types.uint16), GAPS_IN, types.int64, GAPS_IN))
def patch_plain(words: Any, gaps: Any, count: Any, steps: Any) -> Any:
    """`locate_plain` and `patch` at once, for a single class and a single context."""
    if count > min(gaps.size, steps.size):
        return False
    place = ahead = np.int64(-1)
    for n in range(min(AHEAD, count)):
        ahead += 1 + np.int64(gaps[n])
    for n in range(count):
        place += 1 + np.int64(gaps[n])
        ahead += 1 + np.int64(gaps[min(n + AHEAD, count - 1)])
        fetch_ahead(words, ahead)
        if place >= words.size:
            return False
        words[place] = _stepped(words[place], steps[n])
    return True


@kernel(types.boolean(array_of(types.uint16, True), types.int64, BYTES_IN, BYTES, INTS))
def assign(held: Any, count: Any, context_of: Any, contexts: Any, counts: Any) -> Any:
    """Context of each old word by its bin; counts[x + 1] += how often context x occurs."""
    if count > min(held.size, contexts.size) or context_of.size < BINS or counts.size < 257:
        return False
    for n in range(count):
        x = context_of[(held[n] & MAGNITUDE) >> 4]
        contexts[n] = x
        counts[np.int64(x) + 1] += 1
    return True


@kernel(types.boolean(array_of(types.uint16), GAPS_IN, array_of(types.uint16, True), BYTES_IN, types.int64, GAPS_IN, INTS))
def patch(words: Any, places: Any, held: Any, contexts: Any, count: Any, steps: Any, at: Any) -> Any:
    """Step every changed word. steps: sorted by context; at: where each context begins (moved on). False when something is outside."""
    if at.size < 256 or count > min(places.size, held.size, contexts.size):
        return False
    for n in range(count):
        place, x = np.int64(places[n]), contexts[n]
        s = at[x]
        if place >= words.size or s < 0 or s >= steps.size:
            return False
        at[x] = s + 1
        words[place] = _stepped(held[n], steps[s])
    return True


@kernel(types.void(WORDS, WORDS, types.int64, types.int64, INTS, INTS))
def sample(old: Any, new: Any, length: Any, stride: Any, every: Any, changed: Any) -> Any:
    """Words and changed words by exponent, counted in stretches of `length` words that begin `stride` apart."""
    if min(every.size, changed.size) < 256 or min(length, stride) < 1 or new.size != old.size:
        return
    for start in range(0, old.size, stride):
        for i in range(start, min(start + length, old.size)):
            e = (old[i] >> 7) & 0xFF
            every[e] += 1
            changed[e] += old[i] != new[i]


@inlined
def bit_length(value: Any) -> Any:
    """Index of the highest set bit; 0 for 0 and 1."""
    return 63 - leading_zeros(U(value) | U(1))
