"""Calls with one row each take a fast path; its results must equal those of calls with many rows."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.dataplane.base import Count, GroupPolicy, Order, RowStatus
from understudy.dataplane.embedded import EmbeddedDataPlane
from understudy.dataplane.ledger import Ledger, audit
from understudy.errors import DataPlaneError, LeaseLost
from understudy.types.batch import BatchMeta

BOUNDS: dict[str, Any] = {"max_rows": 1000, "max_bytes": 2**20, "spill_bytes": 2**16}


def row_of(number: int) -> dict[str, Any]:
    return {"tokens": np.arange(number, dtype=np.int32), "reward": float(number), "note": f"row {number}"}


def run(folder: Path, body: Callable[[Any], Awaitable[Any]], **bounds: Any) -> Any:
    async def whole() -> Any:
        plane = EmbeddedDataPlane.open(folder, **{**BOUNDS, **bounds})
        try:
            return await asyncio.wait_for(body(plane), 20)
        finally:
            await plane.close()

    return asyncio.run(whole())


async def rows_and_depth(plane: Any) -> Any:
    depth = await plane.depth("train", fields=("tokens",))
    return await plane.list("train"), depth


def test_rows_put_one_by_one_equal_rows_put_in_one_call(tmp_path: Path) -> None:
    keys = [f"{i:02d}_0_0" for i in range(20)]
    tags = {keys[3]: {"source": "a"}}

    async def one_by_one(plane: Any) -> Any:
        for i, key in enumerate(keys):
            await plane.put("train", {key: row_of(i)}, tags={key: tags[key]} if key in tags else None)
        return await rows_and_depth(plane)

    async def together(plane: Any) -> Any:
        await plane.put("train", {key: row_of(i) for i, key in enumerate(keys)}, tags=tags)
        return await rows_and_depth(plane)

    assert run(tmp_path / "a", one_by_one) == run(tmp_path / "b", together)
    assert run(tmp_path / "a", rows_and_depth) == run(tmp_path / "b", rows_and_depth), (
        "also after the journal was read again"
    )


def test_columns_of_a_row_put_alone_are_read_back_in_memory_and_from_spill_files(tmp_path: Path) -> None:
    async def write(plane: Any) -> None:
        for i in (5, 400):
            await plane.put("train", {f"{i}_0_0": row_of(i)})

    async def read(plane: Any) -> None:
        for i in (5, 400):
            found = await plane.get(BatchMeta("train", (f"{i}_0_0",)))
            assert found["tokens"][0].tolist() == list(range(i)) and found["note"] == [f"row {i}"]

    run(tmp_path, write, spill_bytes=1000)
    assert list((tmp_path / "spill").iterdir())
    run(tmp_path, read, spill_bytes=1000)


@pytest.mark.parametrize("order", Order)
def test_claims_of_one_row_follow_the_order_and_each_row_is_trained_once(
    tmp_path: Path, order: Order
) -> None:
    keys = ["c_0_0", "a_0_0", "d_0_0", "b_0_0"]

    async def body(plane: Any) -> None:
        for key in keys:
            await plane.put("train", {key: row_of(1)})
        released = await plane.claim("train", 1, order=order)
        await plane.release(released)
        for step in range(1, 5):
            lease = await plane.claim("train", 1, order=order)
            await plane.ack(lease, step)
            with pytest.raises(LeaseLost):
                await plane.ack(lease, step)
        with pytest.raises(LeaseLost):
            await plane.put("train", {keys[0]: row_of(1)})

    run(tmp_path, body)
    expected = sorted(keys) if order is Order.KEY else keys
    assert [key for _, key in Ledger.read(tmp_path).trained_keys("train")] == expected
    report = audit(tmp_path)
    assert report.balanced and report.trained == 4 and report.in_flight == 0


def test_a_claim_of_one_row_does_not_split_a_group(tmp_path: Path) -> None:
    async def body(plane: Any) -> None:
        await plane.issue("train", ["p_0_0", "p_1_0"], step=1, group=GroupPolicy.TRAIN_REST)
        for key in ("p_0_0", "p_1_0", "q_0_0"):
            await plane.put("train", {key: row_of(2)})
        with pytest.raises(DataPlaneError, match="cannot hold the next group"):
            await plane.claim("train", 1)
        group = await plane.claim("train", 1, count=Count.GROUPS)
        assert group.meta.keys == ("p_0_0", "p_1_0")
        assert (await plane.claim("train", 1)).meta.keys == ("q_0_0",)
        await plane.release(group)
        await plane.ack(await plane.claim("train", 1, count=Count.GROUPS), 1)

    run(tmp_path, body)


def test_an_acked_row_whose_status_changed_during_its_lease_is_not_waited_for(tmp_path: Path) -> None:
    """In key order, a claim waits for a row that is running again. Once the row is trained it must not."""

    async def body(plane: Any) -> None:
        await plane.put("train", {"a_0_0": row_of(1)})
        lease = await plane.claim("train", 1, order=Order.KEY)
        await plane.put("train", {"a_0_0": {"more": 1.0}}, status=RowStatus.RUNNING)
        await plane.put("train", {"b_0_0": row_of(1)})
        await plane.ack(lease, 1)
        assert (await plane.claim("train", 1, order=Order.KEY, timeout=5)).meta.keys == ("b_0_0",)

    run(tmp_path, body)


def test_a_released_row_can_be_claimed_with_other_fields_and_another_order(tmp_path: Path) -> None:
    async def body(plane: Any) -> None:
        await plane.put("train", {"a_0_0": row_of(1)})
        for fields, order in ((("tokens",), Order.KEY), ((), Order.ARRIVAL), (("reward",), Order.KEY)):
            lease = await plane.claim("train", 1, fields=fields, order=order, timeout=5)
            assert (await plane.depth("train")).ready == 0
            await plane.release(lease)
            assert (await plane.depth("train")).ready == 1

    run(tmp_path, body)


def test_keys_with_non_ascii_and_escaped_characters_are_counted_once(tmp_path: Path) -> None:
    keys = ['ключ"_0_0', "鍵\\_0_0", "emoji 🙂_0_0"]

    async def body(plane: Any) -> None:
        for key in keys:
            await plane.put("train", {key: row_of(1)})
        await plane.ack(await plane.claim("train", 3), 1)

    run(tmp_path, body)
    assert [key for _, key in Ledger.read(tmp_path).trained_keys("train")] == keys and audit(
        tmp_path
    ).balanced


def test_interleaved_rows_of_different_kinds_in_one_commit_are_read_back_equal(tmp_path: Path) -> None:
    """Rows of other partitions, steps, statuses and groups are between those that are alike."""

    async def fill(plane: Any) -> Any:
        calls = []
        for i in range(120):
            partition, step, key = f"p{i % 2}", 1 + i % 3, f"{i:03d}_0_0"
            tags = {key: {"number": i}} if i % 7 == 0 else None
            group = GroupPolicy.TRAIN_REST if i % 5 == 0 else None
            calls.append(plane.issue(partition, [key], step=step, group=group, tags=tags))
            if i % 4 == 0:
                calls.append(plane.put(partition, {f"{key}_put_0_0": row_of(i)}))
        await asyncio.gather(*calls)
        return await rows_of(plane)

    async def rows_of(plane: Any) -> Any:
        return {partition: await plane.list(partition) for partition in ("p0", "p1")}

    before = run(tmp_path, fill)
    assert sum(map(len, before.values())) == 150
    assert run(tmp_path, rows_of) == before and audit(tmp_path).balanced
