"""Sixty-four 16-bit words at a time: comparisons whose outcome is one 64-bit mask, for numba kernels.

Bit j of a mask belongs to word i + j. LLVM lowers the vectors to what the processor has (AVX-512, AVX2, NEON).
Nothing here checks bounds: the caller has made sure that words i … i + 63 exist.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import extending, njit, types


def kernel(signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile at import, without the interpreter's lock at run time. The machine code is kept beside the source, or in the user's
    cache where that cannot be written; where neither can, it is compiled each time."""

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            made: Callable[..., Any] = njit(signature, nogil=True, cache=True)(function)
        except (RuntimeError, OSError):  # nowhere to write, or no room
            made = njit(signature, nogil=True)(function)
        return made

    return compiled


inlined = njit(nogil=True)
"""For parts of kernels: compiled with the kernel that calls them."""
intrinsic: Any = extending.intrinsic
"""Called without the typing context inside kernels."""
LANES = 64
MAGNITUDE = 0x7FFF
"""A word without its sign: floats of equal sign are sorted by it."""
_WORDS = ir.VectorType(ir.IntType(16), LANES)
_BIT, _INDEX, _MASK = ir.IntType(1), ir.IntType(32), ir.IntType(64)
U = np.uint64


def _load(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    found = builder.load(builder.bitcast(builder.gep(data, [index]), _WORDS.as_pointer()))
    found.align = 2  # a tensor may begin at any word
    return found


@intrinsic
def fetch_ahead(typing: Any, words: Any, index: Any) -> Any:
    """Begin to load the cache line of words[index]; an index outside does no harm."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.gep(data, [arguments[1]])
        flag = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, flag, flag, flag])
        name = "llvm.prefetch.p0"
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        builder.call(function, [place, ir.Constant(flag, 0), ir.Constant(flag, 3), ir.Constant(flag, 1)])
        return context.get_dummy_value()

    return types.void(words, types.int64), generate


@intrinsic
def mask_ne(typing: Any, old: Any, index: Any, new: Any) -> Any:
    """Words that differ."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        left = _load(context, builder, signature.args[0], arguments[0], arguments[1])
        right = _load(context, builder, signature.args[2], arguments[2], arguments[1])
        return builder.bitcast(builder.icmp_unsigned("!=", left, right), _MASK)

    return types.uint64(old, types.int64, new), generate


@intrinsic
def mask_below(typing: Any, words: Any, index: Any, bound: Any) -> Any:
    """Words whose magnitude is below `bound`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        found = _load(context, builder, signature.args[0], arguments[0], arguments[1])
        found = builder.and_(found, ir.Constant(_WORDS, [MAGNITUDE] * LANES))
        one = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), arguments[2], ir.Constant(_INDEX, 0))
        zeros = ir.Constant(ir.VectorType(_INDEX, LANES), [0] * LANES)
        every = builder.shuffle_vector(one, ir.Constant(_WORDS, ir.Undefined), zeros)
        return builder.bitcast(builder.icmp_unsigned("<", found, every), _MASK)

    return types.uint64(words, types.int64, types.uint16), generate


@intrinsic
def popcount(typing: Any, mask: Any) -> Any:
    """Set bits."""
    return types.int64(types.uint64), lambda context, builder, signature, arguments: builder.ctpop(arguments[0])


@intrinsic
def lowest(typing: Any, mask: Any) -> Any:
    """Index of the lowest set bit; 64 for an empty mask."""
    return types.int64(types.uint64), lambda context, builder, signature, arguments: builder.cttz(arguments[0], ir.Constant(_BIT, 0))


@intrinsic
def leading_zeros(typing: Any, value: Any) -> Any:
    """Zero bits above the highest set one; 64 for zero."""
    return types.int64(types.uint64), lambda context, builder, signature, arguments: builder.ctlz(arguments[0], ir.Constant(_BIT, 0))


@intrinsic
def high_product(typing: Any, left: Any, right: Any) -> Any:
    """Upper 64 bits of the product."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(arguments[0], wide), builder.zext(arguments[1], wide))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), _MASK)

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic
def _deposit(typing: Any, bits: Any, mask: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_MASK, [_MASK, _MASK])
        module = builder.module
        function = module.globals.get("llvm.x86.bmi.pdep.64") or ir.Function(module, kind, "llvm.x86.bmi.pdep.64")
        return builder.call(function, arguments)

    return types.uint64(types.uint64, types.uint64), generate


def _has_deposit() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64") and bool(llvm.get_host_cpu_features().get("bmi2"))


if _has_deposit():

    @inlined
    def select(mask: Any, rank: Any) -> Any:
        """Index of the set bit that has `rank` set bits below it; 64 when there is none."""
        return lowest(_deposit(U(1) << U(rank), mask)) if rank < 64 else np.int64(64)

else:

    @inlined
    def select(mask: Any, rank: Any) -> Any:
        """Index of the set bit that has `rank` set bits below it; 64 when there is none."""
        at, width = np.int64(0), np.int64(32)
        if rank >= popcount(mask):
            return np.int64(64)
        while width:
            low = popcount((mask >> U(at)) & ((U(1) << U(width)) - U(1)))
            if rank >= low:
                rank -= low
                at += width
            width >>= 1
        return at


@inlined
def below(index: Any) -> Any:
    """The bits below `index` (0 … 63)."""
    return (U(1) << U(index)) - U(1)
