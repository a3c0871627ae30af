from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from astraflow.protocol.codec import DTYPES, Column, array, check_column, column, decode, decode_json, encode, encode_json
from astraflow.protocol.errors import BadMessage

shapes = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)
arrays = st.sampled_from(DTYPES).flatmap(lambda name: hnp.arrays(np.dtype(name), shapes | st.just(())))


class Carrier(msgspec.Struct):
    columns: dict[str, Column]


@given(arrays)
def test_columns_survive_the_wire_bit_for_bit(values: np.ndarray[Any, Any]) -> None:
    col = column(values, values.dtype.name)
    for back in (
        decode(encode(Carrier({"x": col})), Carrier),
        decode_json(encode_json(Carrier({"x": col})), Carrier),
    ):
        read = array(back.columns["x"])
        assert back.columns["x"] == col
        assert read.shape == values.shape
        assert read.dtype.name == values.dtype.name
        assert read.tobytes() == values.tobytes()
        assert len(col) == (values.shape[0] if values.ndim else 1)


@given(arrays)
def test_layout_and_byte_order_of_the_source_do_not_matter(values: np.ndarray[Any, Any]) -> None:
    expected = column(values, values.dtype.name)
    assert column(values.copy(order="F"), values.dtype.name) == expected
    assert column(values.astype(values.dtype.newbyteorder(">")), values.dtype.name) == expected
    assert column(np.repeat(values[..., None], 2, axis=-1)[..., 0], values.dtype.name) == expected


@given(arrays, st.data())
def test_columns_whose_parts_contradict_each_other_are_refused(values: np.ndarray[Any, Any], data: st.DataObject) -> None:
    good = column(values, values.dtype.name)
    wrong = data.draw(
        st.sampled_from(
            [
                Column(good.dtype, good.shape, good.data + b"\0"),
                Column(good.dtype, (*good.shape, 2), 2 * good.data + b"\0"),
                Column(good.dtype, (*good.shape, -1), good.data),
                Column("object", good.shape, good.data),
                Column(">i4", good.shape, good.data),
                Column("float16", good.shape, good.data),
                Column("", good.shape, good.data),
            ]
        )
    )
    with pytest.raises(BadMessage, match=r"\$\.columns\.x"):
        check_column(wrong, "$.columns.x")
    with pytest.raises(BadMessage):
        array(wrong)


@given(st.sampled_from(DTYPES), st.lists(st.integers(-(2**70), 2**70), max_size=4), st.binary(max_size=64))
def test_whatever_shape_arrives_is_viewed_or_refused(dtype: str, shape: list[int], data: bytes) -> None:
    col = Column(dtype, tuple(shape), data)
    try:
        view = array(col)
    except BadMessage:
        return
    assert view.nbytes == len(data)
    assert view.shape == tuple(shape)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [([1.5], "int32"), ([300], "uint8"), ([-1], "uint16"), ([2**40], "int32"), ([float("nan")], "int64"), ([1e30], "int64")],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_integers_are_never_rounded_or_wrapped_silently(values: list[Any], dtype: str) -> None:
    with pytest.raises((BadMessage, OverflowError)):
        column(values, dtype)
    with pytest.raises(BadMessage):
        column(np.array(values), dtype)


def test_views_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        array(column([1, 2], "int32"))[0] = 5


def test_empty_lists_become_empty_columns() -> None:
    for dtype in DTYPES:
        assert array(column([], dtype)).shape == (0,)


def test_messages_are_decoded_from_views_too() -> None:
    data = encode(Carrier({"x": column([1], "uint8")}))
    assert decode(memoryview(data), Carrier) == decode(msgspec.Raw(data), Carrier)
