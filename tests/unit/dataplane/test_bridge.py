"""Bridged functions: plain functions when given columns; given a meta, only keys and field names travel."""

import asyncio
import importlib.util
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from understudy.dataplane.embedded import EmbeddedDataPlane
from understudy.dataplane.transfer_queue.bridge import ColumnDict, bridged, bridging
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


def test_a_bridged_function_called_with_columns_is_the_plain_function() -> None:
    columns: ColumnDict = {"tokens": Jagged.from_rows([torch.tensor([5, 6])])}
    assert count(columns, scale=3)["length"] == [6]
    assert asyncio.run(total(columns)) == 11
    assert count.__name__ == "count"


def test_a_bridged_function_called_with_a_meta_fetches_columns_and_writes_results_back(
    tmp_path: Path,
) -> None:
    async def body(plane: EmbeddedDataPlane) -> None:
        meta = BatchMeta("train", KEYS, ("tokens",))
        with bridging(plane):
            counted = await count(meta, scale=10)
            assert counted == BatchMeta("train", KEYS, ("tokens", "length", "doubled", "half"))
            assert await total(meta) == 0 + 1 + 0 + 1 + 2
        found = await plane.get(counted)
        assert found["length"] == [20, 30]
        assert found["doubled"].values.tolist() == [0, 2, 0, 2, 4]  # type: ignore[union-attr]
        half = found["half"].values  # type: ignore[union-attr]
        assert half.view(torch.bfloat16).tolist() == [[1.0, 1.0]] * 5, "bfloat16 is stored as its bits"

    run(tmp_path, body)


def test_a_synchronous_bridged_function_does_not_block_the_event_loop(tmp_path: Path) -> None:
    async def body(plane: EmbeddedDataPlane) -> None:
        ticked = threading.Event()

        @bridged("tokens")
        def slow(columns: ColumnDict) -> ColumnDict:
            assert ticked.wait(5), "the event loop did not run while the function waited"
            return {}

        with bridging(plane):
            work = asyncio.ensure_future(slow(BatchMeta("train", KEYS)))
            await asyncio.sleep(0.01)
            ticked.set()
            assert (await work).keys == KEYS

    run(tmp_path, body)


def test_a_bridged_function_called_from_a_thread_blocks_until_it_is_done(tmp_path: Path) -> None:
    async def body(plane: EmbeddedDataPlane) -> None:
        with bridging(plane):
            counted = await asyncio.to_thread(count, BatchMeta("train", KEYS))
            assert isinstance(counted, BatchMeta)
        assert (await plane.get(counted, ("length",)))["length"] == [2, 3]

    run(tmp_path, body)


def test_a_bridged_function_called_with_a_released_lease_raises_lease_lost(tmp_path: Path) -> None:
    async def body(plane: EmbeddedDataPlane) -> None:
        lease = await plane.claim("train", 2)
        with bridging(plane):
            assert "length" in (await count(lease)).fields
            await plane.release(lease)
            with pytest.raises(LeaseLost):
                await count(lease)

    run(tmp_path, body)


class Meter:
    """Bridged functions as methods, as a worker class has them."""

    def __init__(self, scale: int) -> None:
        self.scale = scale

    @bridged("tokens")
    def measure(self, data: ColumnDict, plus: int = 0) -> ColumnDict:
        return {"length": [len(row) * self.scale + plus for row in data["tokens"]]}

    @bridged("tokens")
    async def longest(self, data: ColumnDict) -> int:
        return max(len(row) for row in data["tokens"]) * self.scale

    @classmethod
    @bridged("tokens")
    async def rows(cls, data: ColumnDict) -> int:
        return len(data["tokens"])


@bridged("tokens")
def after(scale: int, columns: ColumnDict) -> ColumnDict:
    return {"length": [len(row) * scale for row in columns["tokens"]]}


def test_bridged_methods_and_functions_accept_a_meta_or_lease_in_any_argument(tmp_path: Path) -> None:
    async def body(plane: EmbeddedDataPlane) -> None:
        meta, meter = BatchMeta("train", KEYS, ("tokens",)), Meter(10)

        async def lengths(given: Any) -> Any:
            assert given == meta.but(fields=("tokens", "length"))
            return (await plane.get(given, ("length",)))["length"]

        with bridging(plane):
            assert await lengths(await meter.measure(meta)) == [20, 30]
            assert await lengths(await meter.measure(data=meta, plus=1)) == [21, 31]
            assert await lengths(await Meter.measure(Meter(2), meta, 1)) == [5, 7]
            assert await lengths(await after(3, meta)) == [6, 9]
            assert await lengths(await after(columns=meta, scale=4)) == [8, 12]
            assert await lengths(await asyncio.to_thread(meter.measure, data=meta)) == [20, 30]
            assert await meter.longest(meta) == 30 and await meter.longest(data=meta) == 30
            assert await Meter.rows(data=meta) == 2
            lease = await plane.claim("train", 2)
            assert (await meter.measure(data=lease)).fields[-1] == "length"
            await plane.release(lease)
            with pytest.raises(LeaseLost):
                await meter.measure(data=lease)

    run(tmp_path, body)
    columns: ColumnDict = {"tokens": Jagged.from_rows([torch.tensor([5, 6])])}
    assert Meter(10).measure(columns) == Meter(10).measure(data=columns) == {"length": [20]}


@bridged("tokens")
def scaled(columns: ColumnDict, extra: dict[str, Any] | None = None) -> ColumnDict:
    factor = (extra or {}).get("factor", 1)
    return {"length": [len(row) * factor for row in columns["tokens"]]}


@bridged("tokens")
async def extras_of(columns: ColumnDict, *, extra: dict[str, Any]) -> Any:
    return list(extra.items())


def test_the_extra_values_of_a_meta_reach_the_function_and_stay_in_the_result(tmp_path: Path) -> None:
    async def body(plane: EmbeddedDataPlane) -> None:
        meta = BatchMeta("train", KEYS, ("tokens",), extra={"factor": 7})
        with bridging(plane):
            answer = await scaled(meta)
            assert answer.extra == {"factor": 7}
            assert (await plane.get(answer, ("length",)))["length"] == [14, 21]
            assert await extras_of(meta) == [("factor", 7)]
            assert await extras_of(meta, extra={"own": 1}) == [("own", 1)], (
                "the caller's argument takes precedence"
            )
            assert (await scaled(meta, {"factor": 2})).fields[-1] == "length"
            assert (await plane.get(answer, ("length",)))["length"] == [4, 6]

    run(tmp_path, body)


def test_a_meta_of_no_rows_gives_empty_columns(tmp_path: Path) -> None:
    async def body(plane: EmbeddedDataPlane) -> None:
        nothing = BatchMeta("train", (), ("tokens",))
        with bridging(plane):
            assert await count(nothing) == nothing.but(fields=("tokens", "length", "doubled", "half"))
            assert await total(nothing) == 0
            assert await after(2, BatchMeta("train", ())) == BatchMeta("train", (), ("length",))

    run(tmp_path, body)


def test_bridged_functions_accept_metas_of_transfer_queue_in_any_argument(tmp_path: Path) -> None:
    # Not "transfer_queue" alone: without the package that would be the folder of tests beside this file.
    pytest.importorskip("transfer_queue.metadata")
    import transfer_queue as queue

    async def body(plane: EmbeddedDataPlane) -> None:
        queue_meta = queue.KVBatchMeta(
            keys=list(KEYS), tags=[{}, {}], partition_id="train", fields=["tokens"], extra_info={"factor": 3}
        )
        with bridging(plane):
            answer = await Meter(10).measure(data=queue_meta)
            assert isinstance(answer, queue.KVBatchMeta) and answer.fields == ["tokens", "length"]
            assert answer.extra_info == {"factor": 3} and await extras_of(queue_meta) == [("factor", 3)]
            assert (await after(2, queue_meta)).keys == list(KEYS)
            none = queue.KVBatchMeta(keys=[], tags=[])
            assert (await after(2, none)).fields == ["length"]
            assert (await after(columns=queue.BatchMeta.empty(), scale=2)).size == 0

    run(tmp_path, body)


def test_wrong_uses_of_bridged_functions_raise_errors_that_say_what_to_do(tmp_path: Path) -> None:
    meta = BatchMeta("train", KEYS)
    with pytest.raises(DataPlaneError, match="bridging"):
        count(meta)
    with pytest.raises(DataPlaneError, match="bridging"):
        Meter(1).measure(data=meta)
    with pytest.raises(TypeError, match=r"write @bridged\(\)"):
        bridged(count)  # type: ignore[arg-type]
    with pytest.raises(DataPlaneError, match="in 2 arguments; one call works on one batch"):
        count(meta, meta)

    @bridged("tokens")
    def short(columns: ColumnDict) -> ColumnDict:
        return {"x": [1]}

    @bridged("tokens")
    def number(columns: ColumnDict) -> Any:
        return {"x": 3}

    async def body(plane: EmbeddedDataPlane) -> None:
        with bridging(plane):
            with pytest.raises(DataPlaneError, match="'x' has 1 rows for 2 keys"):
                await short(meta)
            with pytest.raises(DataPlaneError, match="int holds no rows"):
                await number(meta)

    run(tmp_path, body)


def test_the_bridged_columns_example_runs_and_gives_the_expected_values(tmp_path: Path) -> None:
    path = Path(__file__).parents[3] / "examples" / "bridged_columns.py"
    spec = importlib.util.spec_from_file_location("bridged_columns", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    found = asyncio.run(example.main(tmp_path))
    assert found["fields"] == ("advantage", "confidence") and found["rows of an empty batch"] == 0
    assert found["advantage"] == pytest.approx([0.5**0.5, -(0.5**0.5), 0.0, 0.0], abs=1e-5)
    assert found["confidence"] == [-0.5, -1.0, -1.5, -2.0]
