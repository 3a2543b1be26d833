"""Rows are written by key and column and read back unchanged, also after the plane is reopened."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from plane_rig import Rig, keys, put_all, tokens

from understudy.dataplane.base import RowStatus
from understudy.errors import DataPlaneError, LeaseLost
from understudy.types.batch import BatchMeta
from understudy.types.jagged import Jagged

ARRAYS = {
    "bits": np.array([True, False, True]),
    "small": np.array([-(2**31), 2**31 - 1, 0], np.int32),
    "large": np.array([-(2**63), 2**63 - 1], np.int64),
    "real": np.array([0.1, -0.0, np.nan, np.inf, 1e-45], np.float32),
    "bfloat16_bits": np.array([[0x3F80, 0x7FC0], [0, 0xFFFF]], np.uint16),
    "topk": np.arange(12, dtype=np.float32).reshape(4, 3),
    "nothing": np.empty(0, np.int32),
    "no_positions": np.empty((0, 5), np.float32),
    "turned": np.arange(6, dtype=np.int64).reshape(2, 3).T,
}
OTHERS: dict[str, Any] = {
    "reward": 0.1 + 0.2,
    "missing": None,
    "count": 3,
    "text": "naïve \ud800 🙂",
    "flag": True,
    "extra": {"a": [1, 2.5, "x", None], "b": {"c": False}},
}


async def check_round_trip(plane: Any, names: list[str]) -> None:
    columns = await plane.get(BatchMeta("train", tuple(names)))
    assert set(columns) == {*ARRAYS, *OTHERS, "loss"}
    for name, array in ARRAYS.items():
        column = columns[name]
        assert isinstance(column, Jagged) and len(column) == len(names)
        for row in column:
            assert row.numpy().dtype == array.dtype and row.shape == array.shape
            assert row.numpy().tobytes() == array.tobytes(), name
    for name, value in OTHERS.items():
        assert columns[name] == [value] * len(names), name
        assert {type(cell) for cell in columns[name]} == {type(value)}
    assert all(math.isnan(cell) for cell in columns["loss"])


def test_every_kind_of_cell_is_read_back_to_the_bit_also_after_reopening(rig: Rig) -> None:
    names = keys(3)

    async def write(plane: Any) -> None:
        for name in names:
            await plane.put("train", {name: {**ARRAYS, **OTHERS, "loss": math.nan}})
        await check_round_trip(plane, names)

    async def read(plane: Any) -> None:
        await check_round_trip(plane, names)
        assert (await plane.depth("train")).finished == 3

    rig.run(write)
    rig.run(read)


def test_columns_may_be_written_at_different_times_and_the_last_write_wins(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        await plane.put("train", {"a_0_0": tokens(1, 2), "b_0_0": tokens(3)})
        await plane.put("train", {"b_0_0": {"score": 1.5}})
        await plane.put("train", {"b_0_0": {"score": 2.5}, "a_0_0": {"score": 0.5}})

    async def read(plane: Any) -> None:
        columns = await plane.get(BatchMeta("train", ("b_0_0", "a_0_0")), ("score", "tokens"))
        assert columns["score"] == [2.5, 0.5]
        assert columns["tokens"].values.tolist() == [3, 1, 2] and columns["tokens"].offsets.tolist() == [
            0,
            1,
            3,
        ]
        assert columns["tokens"].values.dtype == torch.int32

    async def both(plane: Any) -> None:
        await body(plane)
        await read(plane)

    rig.run(both)
    rig.run(read)


def test_changing_an_array_after_put_does_not_change_the_row(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        array, nested = np.array([1, 2, 3], np.int32), {"list": [1]}
        await plane.put("train", {"a_0_0": {"x": array, "y": nested}})
        array[:] = 9
        nested["list"].append(2)
        columns = await plane.get(BatchMeta("train", ("a_0_0",)))
        assert columns["x"].values.tolist() == [1, 2, 3] and columns["y"] == [{"list": [1]}]

    rig.run(body)


@pytest.mark.parametrize(
    ("cell", "word"),
    [
        (np.zeros(2, np.float64), "float64"),
        (np.zeros((1, 1, 1), np.float32), "2-D"),
        (np.array(["a"]), "<U1"),
        (torch.zeros(2), "numpy"),
        ({1: "x"}, "not a string"),
        ([{"deep": {2: "x"}}], "not a string"),
        (object(), "JSON"),
    ],
)
def test_cells_of_unsupported_types_are_refused_by_name_and_nothing_is_written(
    rig: Rig, cell: Any, word: str
) -> None:
    async def body(plane: Any) -> None:
        with pytest.raises(DataPlaneError, match=word) as caught:
            await plane.put("train", {"a_0_0": tokens(1), "b_0_0": {"bad": cell}})
        assert "'bad'" in str(caught.value)
        assert await plane.list("train") == {}
        with pytest.raises(DataPlaneError, match="tags of a_0_0"):
            await plane.put("train", {"a_0_0": tokens(1)}, tags={"a_0_0": {"x": object()}})
        assert await plane.list("train") == {}

    rig.run(body)


def test_get_names_a_missing_column_a_missing_row_and_different_widths(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        await plane.put(
            "train",
            {"a_0_0": {"x": np.zeros((1, 2), np.float32)}, "b_0_0": {"x": np.zeros((1, 3), np.float32)}},
        )
        with pytest.raises(DataPlaneError, match=r"'y'.*a_0_0"):
            await plane.get(BatchMeta("train", ("a_0_0",)), ("y",))
        with pytest.raises(DataPlaneError, match=r"c_0_0.*never issued"):
            await plane.get(BatchMeta("train", ("c_0_0",)))
        with pytest.raises(DataPlaneError, match=r"\(1, 2\) on row a_0_0 and .*\(1, 3\) on row b_0_0"):
            await plane.get(BatchMeta("train", ("a_0_0", "b_0_0")), ("x",))

    rig.run(body)


def test_tags_are_merged_and_appear_in_the_lease_also_after_reopening(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        await plane.put("train", {"a_0_0": tokens(1)}, tags={"a_0_0": {"source": "math", "reward": 0.0}})
        await plane.put_tags("train", {"a_0_0": {"reward": 1.0}})
        with pytest.raises(DataPlaneError, match="never issued"):
            await plane.put_tags("train", {"zzz": {"reward": 1.0}})

    async def read(plane: Any) -> None:
        expected = {"source": "math", "reward": 1.0}
        assert (await plane.list("train"))["a_0_0"].tags == expected
        lease = await plane.claim("train", 1)
        assert lease.meta.tags == (expected,) and lease.meta.fields == ("tokens",)

    rig.run(body)
    rig.run(read)


def test_partitions_are_independent(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        await put_all(plane, ["a_0_0"], "train")
        await put_all(plane, ["a_0_0", "b_0_0"], "eval")
        await plane.clear("eval", ["b_0_0"])
        assert set(await plane.list("train")) == {"a_0_0"} and set(await plane.list("eval")) == {"a_0_0"}
        await plane.clear("eval")
        assert (await plane.depth("eval")).rows == 0 and (await plane.depth("train")).rows == 1

    rig.run(body)


def test_issue_returns_only_new_rows_and_trained_rows_cannot_be_written_again(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        assert await plane.issue("train", ["a_0_0", "b_0_0", "a_0_0"], step=3) == ("a_0_0", "b_0_0")
        assert await plane.issue("train", ["b_0_0", "c_0_0"], step=4, tags={"c_0_0": {"n": 1}}) == ("c_0_0",)
        rows = await plane.list("train")
        assert {key: row.step for key, row in rows.items()} == {"a_0_0": 3, "b_0_0": 3, "c_0_0": 4}
        assert {row.status for row in rows.values()} == {RowStatus.PENDING} and rows["c_0_0"].tags == {"n": 1}
        await plane.put("train", {"a_0_0": tokens(1)})
        await plane.ack(await plane.claim("train", 1), step=3)
        assert await plane.issue("train", ["a_0_0"], step=5) == ()
        with pytest.raises(LeaseLost, match=r"a_0_0.*already"):
            await plane.put("train", {"a_0_0": tokens(1)})

    async def again(plane: Any) -> None:
        assert await plane.issue("train", ["a_0_0", "b_0_0", "d_0_0"], step=6) == ("d_0_0",)
        with pytest.raises(LeaseLost, match=r"a_0_0.*already"):
            await plane.put("train", {"x_0_0": tokens(1), "a_0_0": tokens(1)})
        assert "x_0_0" not in await plane.list("train"), "a refused put must write nothing"

    rig.run(body)
    rig.run(again)


def test_further_outputs_of_a_session_belong_to_its_step(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        await plane.issue("train", ["a_0_0"], step=7)
        await plane.put("train", {"a_0_0": tokens(1), "a_0_1": tokens(2)})
        await plane.put("train", {"a_0_2": tokens(3), "b_0_0": tokens(4)})
        assert {key: row.step for key, row in (await plane.list("train")).items()} == {
            "a_0_0": 7,
            "a_0_1": 7,
            "a_0_2": 7,
            "b_0_0": 1,
        }

    rig.run(body)


def test_empty_put_get_and_issue_calls_do_nothing(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        assert len(await plane.put("train", {})) == 0
        assert await plane.get(BatchMeta("train", ())) == {}
        assert await plane.issue("train", [], step=1) == ()

    rig.run(body)
