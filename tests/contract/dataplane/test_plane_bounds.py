"""Bounds of rows and bytes: producers wait when the plane is full, nothing is dropped, and nothing deadlocks."""

import asyncio
from typing import Any

import numpy as np
import pytest
from plane_rig import Rig, is_waiting, keys, put_all, tokens

from understudy.dataplane.base import GroupPolicy, Order
from understudy.errors import DataPlaneError, LeaseLost

KILOBYTE = np.arange(256, dtype=np.float32)


def test_producers_wait_at_max_rows_and_are_admitted_one_by_one(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        await put_all(plane, keys(3))
        late = [asyncio.create_task(plane.put("train", {f"z{i}_0_0": tokens(i)})) for i in range(2)]
        assert await is_waiting(late[0]) and (await plane.depth("train")).waiting_producers == 2
        await plane.put("train", {keys(3)[0]: {"score": 1.0}})
        await plane.ack(await plane.claim("train", 1), 1)
        await asyncio.wait_for(late[0], 1)
        assert await is_waiting(late[1])
        await plane.dead_letter("train", keys(3)[1], "poison")
        await asyncio.wait_for(late[1], 1)
        assert (await plane.depth("train")).rows == 3

    rig.run(body, max_rows=3)


def test_issue_waits_at_max_rows_but_puts_of_issued_rows_do_not(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        await plane.issue("train", keys(2), step=1)
        more = asyncio.create_task(plane.issue("train", ["z_0_0"], step=1))
        assert await is_waiting(more)
        await asyncio.wait_for(put_all(plane, keys(2)), 5)
        await asyncio.wait_for(plane.put("train", {keys(2)[0].replace("_0_0", "_0_1"): tokens(1)}), 5)
        await plane.ack(await plane.claim("train", 2), 1)
        await asyncio.wait_for(more, 1)
        for call in (
            plane.issue("train", keys(3, start=7), step=1),
            plane.put("train", {k: tokens(1) for k in keys(3, start=7)}),
        ):
            with pytest.raises(DataPlaneError, match="max_rows=2"):
                await call

    rig.run(body, max_rows=2)


def test_a_claim_in_key_order_does_not_deadlock_when_the_plane_is_full(rig: Rig) -> None:
    """Large keys fill the plane first, but the small key that the batch needs was admitted when it was issued."""

    async def body(plane: Any) -> None:
        await plane.issue("train", keys(4), step=1)
        producers = [asyncio.create_task(put_all(plane, [key])) for key in reversed(keys(4))]
        outside = asyncio.create_task(plane.issue("train", keys(4, start=4), step=2))
        lease = await asyncio.wait_for(plane.claim("train", 4, order=Order.KEY), 5)
        assert lease.meta.keys == tuple(keys(4))
        await asyncio.gather(*producers)
        await plane.ack(lease, 1)
        await asyncio.wait_for(outside, 5)

    rig.run(body, max_rows=4)


def test_all_rows_pass_through_a_plane_with_max_rows_of_one(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        producers = [asyncio.create_task(put_all(plane, [key])) for key in keys(20)]
        trained = []
        for _ in range(20):
            lease = await asyncio.wait_for(plane.claim("train", 1), 5)
            trained += lease.meta.keys
            await plane.ack(lease, 1)
        await asyncio.gather(*producers)
        assert sorted(trained) == keys(20)

    rig.run(body, max_rows=1)


def test_producers_wait_at_max_bytes(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        await put_all(plane, keys(3), big=KILOBYTE)
        late = asyncio.create_task(plane.put("train", {"z_0_0": {"big": KILOBYTE}}))
        assert await is_waiting(late)
        await plane.ack(await plane.claim("train", 1), 1)
        await asyncio.wait_for(late, 1)
        assert (await plane.depth("train")).resident_bytes <= 4096

    rig.run(body, max_bytes=4096)


def test_a_claim_larger_than_max_bytes_completes_by_spilling_columns_to_disk(rig: Rig) -> None:
    """The claim waits for 16 rows of a kilobyte in a plane of 4 kB: it lifts the byte bound, and columns spill."""

    async def body(plane: Any) -> None:
        highest = 0
        claim = asyncio.create_task(plane.claim("train", 16, order=Order.KEY))
        for i, key in enumerate(keys(16)):
            await asyncio.wait_for(plane.put("train", {key: {"big": KILOBYTE + i}}), 5)
            highest = max(highest, (await plane.depth("train")).resident_bytes)
        columns = await plane.get((await asyncio.wait_for(claim, 5)).meta)
        assert highest <= 4096
        assert [row[0].item() for row in columns["big"]] == list(range(16))

    rig.run(body, max_bytes=4096)


def test_rows_and_bytes_stay_within_their_bounds_while_many_rows_pass(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        names = keys(300)
        highest = {"rows": 0, "bytes": 0}

        async def produce(part: list[str]) -> None:
            await put_all(plane, part, big=KILOBYTE)

        async def consume() -> None:
            for _ in range(len(names) // 10):
                lease = await plane.claim("train", 10)
                depth = await plane.depth("train")
                highest["rows"] = max(highest["rows"], depth.rows)
                highest["bytes"] = max(highest["bytes"], depth.resident_bytes)
                await plane.ack(lease, 1)

        await asyncio.gather(consume(), *(produce(names[i::8]) for i in range(8)))
        assert highest["rows"] <= 20 and 8 * 1024 < highest["bytes"] <= 16 * 1024
        depth = await plane.depth("train")
        assert (depth.rows, depth.resident_bytes, depth.waiting_producers) == (0, 0, 0)

    rig.run(body, max_rows=20, max_bytes=16 * 1024)


def test_a_producer_cancelled_while_waiting_leaves_the_queue(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        await put_all(plane, keys(1))
        first = asyncio.create_task(plane.put("train", {"x_0_0": tokens(1)}))
        await asyncio.sleep(0)
        second = asyncio.create_task(plane.put("train", {"y_0_0": tokens(1)}))
        assert await is_waiting(second)
        first.cancel()
        await plane.ack(await plane.claim("train", 1), 1)
        await asyncio.wait_for(second, 1)
        assert set(await plane.list("train")) == {"y_0_0"}

    rig.run(body, max_rows=1)


def test_a_put_that_waited_until_its_row_was_trained_is_refused(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        await put_all(plane, keys(1))
        twin = [asyncio.create_task(plane.put("train", {"x_0_0": tokens(i)})) for i in range(2)]
        assert await is_waiting(twin[0])
        await plane.ack(await plane.claim("train", 1), 1)
        lease = await plane.claim("train", 1)
        await plane.ack(lease, 2)
        with pytest.raises(LeaseLost):
            await asyncio.wait_for(twin[1], 1)
        await asyncio.wait_for(put_all(plane, ["y_0_0"]), 1)

    rig.run(body, max_rows=1)


def test_large_columns_are_spilled_to_disk_and_read_back_also_after_reopening(rig: Rig) -> None:
    large = {"topk": np.random.default_rng(0).standard_normal((500, 64)).astype(np.float32)}

    async def write(plane: Any) -> None:
        await plane.issue("train", keys(4, sessions=2), step=1, group=GroupPolicy.TRAIN_REST)
        await put_all(plane, keys(4, sessions=2), **large)
        assert (await plane.depth("train")).resident_bytes < 1024
        await read(plane)
        await plane.ack(await plane.claim("train", 4, order=Order.KEY), 1)

    async def read(plane: Any) -> None:
        lease = await plane.claim("train", 2)
        columns = await plane.get(lease.meta)
        for row in columns["topk"]:
            assert row.numpy().tobytes() == large["topk"].tobytes()
        await plane.release(lease)

    rig.run(write, spill_bytes=4096)
    rig.run(read, spill_bytes=4096)


def test_reserved_rows_are_admitted_before_waiting_producers(rig: Rig) -> None:
    """A batch that lacks one row must not wait behind rows that themselves wait for this batch to be trained."""

    async def body(plane: Any) -> None:
        await plane.issue("train", keys(2), step=1, reserved=True)
        later = asyncio.create_task(plane.issue("train", keys(2, start=5), step=2))
        assert await is_waiting(later)
        await asyncio.wait_for(plane.evict("train", keys(1), "no signal"), 1)
        await asyncio.wait_for(plane.issue("train", ["z_0_0"], step=1, reserved=True), 1)
        assert await is_waiting(later)
        await put_all(plane, [keys(2)[1], "z_0_0"])
        await plane.ack(await asyncio.wait_for(plane.claim("train", 2), 1), 1)
        await asyncio.wait_for(later, 1)
        assert (await plane.depth("train")).rows == 2

    rig.run(body, max_rows=2)
