"""Bridged functions: plain with columns, and by name with a meta; only names travel."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from understudy.dataplane.bridge import ColumnDict, bridged, serving
from understudy.dataplane.embedded import EmbeddedDataPlane
from understudy.errors import DataPlaneError, LeaseLost
from understudy.types.batch import BatchMeta
from understudy.types.jagged import Jagged

BOUNDS: dict[str, Any] = {"max_rows": 100, "max_bytes": 2**20, "spill_bytes": 2**20}
KEYS = ("a_0_0", "b_0_0")


@bridged("tokens")
def count(columns: ColumnDict, scale: int = 1) -> ColumnDict:
    assert set(columns) == {"tokens"}
    tokens = columns["tokens"]
    assert isinstance(tokens, Jagged)
    return {
        "length": [len(row) * scale for row in tokens],
        "doubled": Jagged(tokens.values * 2, tokens.offsets),
        "half": Jagged(torch.ones(len(tokens.values), 2, dtype=torch.bfloat16), tokens.offsets),
    }


@bridged()
async def total(columns: ColumnDict) -> int:
    await asyncio.sleep(0)
    return int(columns["tokens"].values.sum())  # type: ignore[union-attr]


def run(tmp_path: Path, body: Any) -> None:
    async def whole() -> None:
        plane = EmbeddedDataPlane.open(tmp_path, **BOUNDS)
        for i, key in enumerate(KEYS):
            await plane.put("train", {key: {"tokens": np.arange(i + 2, dtype=np.int32), "unused": "x"}})
        await body(plane)
        await plane.close()

    asyncio.run(whole())


def test_with_columns_it_is_the_plain_function() -> None:
    columns: ColumnDict = {"tokens": Jagged.from_rows([torch.tensor([5, 6])])}
    assert count(columns, scale=3)["length"] == [6]
    assert asyncio.run(total(columns)) == 11
    assert count.__name__ == "count"


def test_with_a_meta_columns_are_fetched_and_written_back(tmp_path: Path) -> None:
    async def body(plane: EmbeddedDataPlane) -> None:
        meta = BatchMeta("train", KEYS, ("tokens",))
        with serving(plane):
            told = await count(meta, scale=10)
            assert told == BatchMeta("train", KEYS, ("tokens", "length", "doubled", "half"))
            assert await total(meta) == 0 + 1 + 0 + 1 + 2
        found = await plane.get(told)
        assert found["length"] == [20, 30]
        assert found["doubled"].values.tolist() == [0, 2, 0, 2, 4]  # type: ignore[union-attr]
        half = found["half"].values  # type: ignore[union-attr]
        assert half.view(torch.bfloat16).tolist() == [[1.0, 1.0]] * 5, "bfloat16 travels as its bits"

    run(tmp_path, body)


def test_sync_bodies_leave_the_event_loop_free(tmp_path: Path) -> None:
    async def body(plane: EmbeddedDataPlane) -> None:
        ticked = threading.Event()

        @bridged("tokens")
        def slow(columns: ColumnDict) -> ColumnDict:
            assert ticked.wait(5), "the loop did not run meanwhile"
            return {}

        with serving(plane):
            work = asyncio.ensure_future(slow(BatchMeta("train", KEYS)))
            await asyncio.sleep(0.01)
            ticked.set()
            assert (await work).keys == KEYS

    run(tmp_path, body)


def test_from_a_thread_it_blocks_until_done(tmp_path: Path) -> None:
    async def body(plane: EmbeddedDataPlane) -> None:
        with serving(plane):
            told = await asyncio.to_thread(count, BatchMeta("train", KEYS))
            assert isinstance(told, BatchMeta)
        assert (await plane.get(told, ("length",)))["length"] == [2, 3]

    run(tmp_path, body)


def test_a_lease_fences_the_write(tmp_path: Path) -> None:
    async def body(plane: EmbeddedDataPlane) -> None:
        lease = await plane.claim("train", 2)
        with serving(plane):
            assert "length" in (await count(lease)).fields
            await plane.release(lease)
            with pytest.raises(LeaseLost):
                await count(lease)

    run(tmp_path, body)


def test_wrong_uses_say_what_to_do(tmp_path: Path) -> None:
    meta = BatchMeta("train", KEYS)
    with pytest.raises(DataPlaneError, match="serving"):
        count(meta)

    @bridged("tokens")
    def short(columns: ColumnDict) -> ColumnDict:
        return {"x": [1]}

    @bridged("tokens")
    def number(columns: ColumnDict) -> Any:
        return {"x": 3}

    async def body(plane: EmbeddedDataPlane) -> None:
        with serving(plane):
            with pytest.raises(DataPlaneError, match="'x' has 1 rows for 2 keys"):
                await short(meta)
            with pytest.raises(DataPlaneError, match="int holds no rows"):
                await number(meta)

    run(tmp_path, body)
