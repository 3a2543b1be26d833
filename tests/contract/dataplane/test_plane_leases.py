"""Leases expire: afterwards their rows can be claimed again, and calls with the old lease are refused."""

import asyncio
import math
from typing import Any

import pytest
from plane_rig import Rig, is_waiting, keys, put_all, tokens

from understudy.errors import DataPlaneError, LeaseLost


def test_rows_of_an_expired_lease_become_claimable_and_its_ack_is_refused(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        await put_all(plane, keys(2))
        lost = await plane.claim("train", 2, lease_seconds=10)
        rig.clock.now += 9.9
        assert (await plane.depth("train")).ready == 0
        rig.clock.now += 0.1
        assert (await plane.depth("train")).ready == 2
        for call in (plane.ack(lost, 1), plane.release(lost), plane.renew(lost)):
            with pytest.raises(LeaseLost, match="void"):
                await call
        fresh = await plane.claim("train", 2)
        await plane.ack(fresh, 1)
        assert (await plane.depth("train")).rows == 0
        with pytest.raises(LeaseLost):
            await plane.ack(fresh, 1)

    rig.run(body)


def test_a_waiting_claim_wakes_when_a_lease_expires(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        await put_all(plane, keys(1))
        await plane.claim("train", 1, lease_seconds=0.05)
        claim = asyncio.create_task(plane.claim("train", 1))
        assert await is_waiting(claim)
        rig.clock.now += 1
        assert (await asyncio.wait_for(claim, 2)).meta.keys == (keys(1)[0],)

    rig.run(body)


def test_renew_extends_a_lease_and_a_lease_may_be_endless(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        await put_all(plane, keys(2))
        lease = await plane.claim("train", 1, lease_seconds=10)
        rig.clock.now += 8
        lease = await plane.renew(lease, 10)
        endless = await plane.claim("train", 1, lease_seconds=None)
        assert endless.expires == math.inf
        rig.clock.now += 8
        assert (await plane.depth("train")).leased == 2
        rig.clock.now += 1e9
        assert (await plane.depth("train")).leased == 1
        await plane.ack(endless, 1)

    rig.run(body)


def test_part_of_a_lease_can_be_acked_or_released(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        a, b, c = keys(3)
        await put_all(plane, [a, b, c])
        lease = await plane.claim("train", 3)
        await plane.ack(lease, 1, [a])
        await plane.release(lease, [b])
        assert set(await plane.list("train")) == {b, c}
        with pytest.raises(LeaseLost, match=f"does not cover {b}"):
            await plane.ack(lease, 1, [c, b])
        other = await plane.claim("train", 1)
        assert other.meta.keys == (b,)
        await plane.ack(lease, 1)
        assert set(await plane.list("train")) == {b}

    rig.run(body)


def test_a_lease_is_void_after_reopening_or_rewinding_although_its_number_is_reused(rig: Rig) -> None:
    async def first(plane: Any) -> Any:
        await put_all(plane, keys(2))
        return await plane.claim("train", 2, lease_seconds=None)

    lease = rig.run(first)

    async def second(plane: Any) -> None:
        assert (await plane.depth("train")).ready == 2
        own = await plane.claim("train", 1)
        assert own.id == lease.id, "the reopened plane must reuse the lease's number, or this tests nothing"
        with pytest.raises(LeaseLost, match="reopened or rewound"):
            await plane.ack(lease, 1)
        with pytest.raises(LeaseLost, match="reopened or rewound"):
            await plane.put("train", {keys(2)[0]: tokens(9)}, lease=lease)
        await plane.rewind(0, keep_rows=True)
        with pytest.raises(LeaseLost, match="reopened or rewound"):
            await plane.ack(own, 1)

    rig.run(second)


def test_a_producers_lease_cannot_be_acked(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        await plane.issue("train", keys(1), step=1)
        lease = await plane.claim("train", 1, status="pending")
        with pytest.raises(DataPlaneError, match="making rows"):
            await plane.ack(lease, 1)
        await plane.release(lease)
        assert (await plane.depth("train")).pending == 1

    rig.run(body)


def test_evicting_or_clearing_leased_rows_voids_the_lease_for_them(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        a, b = keys(2)
        await put_all(plane, [a, b])
        lease = await plane.claim("train", 2)
        await plane.evict("train", [a], "too stale", lease=lease)
        with pytest.raises(LeaseLost, match=a):
            await plane.ack(lease, 1, [a, b])
        await plane.clear("train", [b])
        with pytest.raises(LeaseLost):
            await plane.ack(lease, 1)

    rig.run(body)
