"""Cells as bytes: exact, self-describing, and refused when damaged."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from understudy.dataplane.base import ARRAY_DTYPES
from understudy.dataplane.frame import SpillRef, decode, encode, pack, unpack
from understudy.errors import DataPlaneError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
ARRAYS = st.sampled_from(ARRAY_DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=5))
)


@given(ARRAYS)
@settings(max_examples=200, deadline=None)
def test_arrays_come_back_to_the_bit(array: np.ndarray) -> None:
    found = decode(encode("x", array))
    assert found.dtype == array.dtype and found.shape == array.shape and found.tobytes() == array.tobytes()
    assert not found.flags.writeable


@given(JSON)
@settings(max_examples=200, deadline=None)
def test_json_comes_back_equal(value: Any) -> None:
    found = decode(encode("x", value))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.0, 5e-324, 0.1])
def test_floats_come_back_to_the_bit(value: float) -> None:
    found = decode(encode("x", value))
    assert np.float64(found).tobytes() == np.float64(value).tobytes()


def test_numpy_scalars_are_numbers_and_tuples_lists() -> None:
    assert decode(encode("x", np.float32(0.5))) == 0.5
    assert decode(encode("x", np.int64(7))) == 7
    assert decode(encode("x", np.True_)) is True
    assert decode(encode("x", (1, (2, 3)))) == [1, [2, 3]]


def test_a_pack_keeps_columns_apart_and_references_as_they_are() -> None:
    frames = {"α": encode("α", "text"), "": encode("", None), "big": SpillRef(3, 2**40, 2**33, 0xFFFFFFFF)}
    assert unpack(pack(frames)) == frames
    assert unpack(pack({})) == {}


def test_a_cut_pack_and_an_unknown_kind_are_errors() -> None:
    body = pack({"x": encode("x", np.arange(100, dtype=np.int32))})
    with pytest.raises(DataPlaneError, match=r"'x'.*damaged"):
        unpack(body[:-1])
    with pytest.raises(DataPlaneError, match="unknown kind 9"):
        decode(bytes([9]) + bytes(15))


def test_big_endian_arrays_are_refused_rather_than_read_wrong() -> None:
    with pytest.raises(DataPlaneError, match=">i4"):
        encode("x", np.array([1], ">i4"))
