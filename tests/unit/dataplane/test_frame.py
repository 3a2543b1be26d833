"""The byte encoding of cells: exact, self-describing, and refused when damaged."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from understudy.dataplane.base import ARRAY_DTYPES
from understudy.dataplane.columns import gather
from understudy.dataplane.frame import JSON_HEAD, SpillRef, decode, encode, pack, unpack
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
def test_arrays_are_decoded_bit_for_bit_and_read_only(array: np.ndarray) -> None:
    found = decode(encode("x", array))
    assert found.dtype == array.dtype and found.shape == array.shape and found.tobytes() == array.tobytes()
    assert not found.flags.writeable


@given(JSON)
@settings(max_examples=200, deadline=None)
def test_json_values_are_decoded_as_equal_values_of_the_same_type(value: Any) -> None:
    found = decode(encode("x", value))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.0, 5e-324, 0.1])
def test_floats_are_decoded_bit_for_bit(value: float) -> None:
    found = decode(encode("x", value))
    assert np.float64(found).tobytes() == np.float64(value).tobytes()


def test_numpy_scalars_are_decoded_as_numbers_and_tuples_as_lists() -> None:
    assert decode(encode("x", np.float32(0.5))) == 0.5
    assert decode(encode("x", np.int64(7))) == 7
    assert decode(encode("x", np.True_)) is True
    assert decode(encode("x", (1, (2, 3)))) == [1, [2, 3]]


def test_packed_frames_and_spill_references_are_unpacked_unchanged() -> None:
    frames = {"α": encode("α", "text"), "": encode("", None), "big": SpillRef(3, 2**40, 2**33, 0xFFFFFFFF)}
    assert unpack(pack(frames)) == frames
    assert unpack(pack({})) == {}


def test_a_truncated_pack_and_an_unknown_kind_of_frame_raise() -> None:
    body = pack({"x": encode("x", np.arange(100, dtype=np.int32))})
    with pytest.raises(DataPlaneError, match=r"'x'.*damaged"):
        unpack(body[:-1])
    with pytest.raises(DataPlaneError, match="unknown kind 9"):
        decode(bytes([9]) + bytes(15))


def test_big_endian_arrays_are_refused_rather_than_read_wrong() -> None:
    with pytest.raises(DataPlaneError, match=">i4"):
        encode("x", np.array([1], ">i4"))


@given(JSON | st.floats())
@settings(max_examples=200, deadline=None)
def test_the_encoding_of_json_values_does_not_change_between_versions(value: Any) -> None:
    """This version reads the journals of earlier versions, and they read its journals."""
    if isinstance(value, float | str):  # these have frame kinds of their own
        value = {"inside": value}
    frame = encode("x", value)
    assert frame == JSON_HEAD + json.dumps(value, separators=(",", ":")).encode()
    assert repr(decode(frame)) == repr(value)


@given(
    st.sampled_from(ARRAY_DTYPES),
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.none() | st.integers(0, 3),
)
@settings(max_examples=100, deadline=None)
def test_a_gathered_column_is_the_concatenation_of_its_cells(
    dtype: np.dtype[Any], lengths: list[int], width: int | None
) -> None:
    rng = np.random.default_rng(sum(lengths))
    shapes = [(length,) if width is None else (length, width) for length in lengths]
    cells = [rng.integers(0, 2, shape).astype(dtype) for shape in shapes]
    column = gather("x", [encode("x", cell) for cell in cells], [str(i) for i in range(len(cells))])
    assert not isinstance(column, list)
    expected = np.concatenate(cells)
    assert column.values.numpy().dtype == expected.dtype and column.values.shape == expected.shape
    assert column.values.numpy().tobytes() == expected.tobytes()
    assert column.offsets.tolist() == [0, *np.cumsum(lengths)]
    column.values.zero_()  # allowed: the column does not share memory with the frames


def test_a_large_column_is_gathered_in_order() -> None:
    cells = [np.arange(start, start + 3000, dtype=np.int32) for start in (0, 3000)]
    column = gather("x", [encode("x", cell) for cell in cells], ["a", "b"])
    assert not isinstance(column, list) and column.values.tolist() == list(range(6000))


def test_rows_with_equal_json_values_get_separate_copies() -> None:
    cells: list[Any] = [{"tokens": 3}, {"tokens": 3}, {"deep": [1]}, {"deep": [1]}, "eos", 1, True, None, {}]
    column = gather("x", [encode("x", cell) for cell in cells], [str(i) for i in range(len(cells))])
    assert isinstance(column, list) and repr(column) == repr(cells)
    column[0]["tokens"] = 4
    column[2]["deep"].append(2)
    assert column[1] == {"tokens": 3} and column[3] == {"deep": [1]}


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (np.zeros((2, 4), np.float32), r"float32 \(2, 4\) on row c"),
        (np.zeros((2, 3), np.int32), r"int32 \(2, 3\) on row c"),
        (np.zeros(2, np.float32), r"float32 \(2,\) on row c"),
        ("words", "str on row c"),
    ],
)
def test_a_column_whose_cells_differ_in_type_or_width_is_refused(odd: Any, message: str) -> None:
    cells = [np.zeros((1, 3), np.float32), np.zeros((5, 3), np.float32), odd]
    with pytest.raises(DataPlaneError, match=rf"'x' is float32 \(1, 3\) on row a and {message}"):
        gather("x", [encode("x", cell) for cell in cells], ["a", "b", "c"])
