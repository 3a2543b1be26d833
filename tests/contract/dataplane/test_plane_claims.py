"""Claims wait for the rows and columns they name, return them in the requested order, and lease each row once."""

import asyncio
from typing import Any

import pytest
from plane_rig import Rig, is_waiting, keys, put_all, tokens

from understudy.dataplane.base import Count, GroupPolicy, Order, RowStatus
from understudy.errors import DataPlaneError, LeaseLost


def test_a_claim_waits_for_its_columns_and_wakes_when_they_are_written(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        await put_all(plane, ["a_0_0", "b_0_0"])
        claim = asyncio.create_task(plane.claim("train", 2, fields=("tokens", "score")))
        assert await is_waiting(claim)
        await plane.put("train", {"b_0_0": {"score": 1.0}})
        assert await is_waiting(claim)
        await plane.put("train", {"a_0_0": {"score": 2.0}})
        lease = await asyncio.wait_for(claim, 1)
        assert set(lease.meta.keys) == {"a_0_0", "b_0_0"} and set(lease.meta.fields) == {"tokens", "score"}

    rig.run(body)


def test_two_claims_never_get_the_same_row(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        claims = [
            asyncio.create_task(plane.claim("train", 3, order=order))
            for order in (Order.ARRIVAL, Order.KEY) * 4
        ]
        await asyncio.sleep(0)
        await asyncio.gather(*(plane.put("train", {key: tokens(1)}) for key in keys(24)))
        got = [key for claim in claims for key in (await claim).meta.keys]
        assert sorted(got) == keys(24)

    rig.run(body)


def test_arrival_order_is_order_of_completion_and_a_released_row_keeps_its_place(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        for key in ("c_0_0", "a_0_0", "b_0_0"):
            await plane.put("train", {key: tokens(1)})
        first = await plane.claim("train", 1)
        assert first.meta.keys == ("c_0_0",)
        await plane.release(first)
        assert (await plane.claim("train", 3)).meta.keys == ("c_0_0", "a_0_0", "b_0_0")

    rig.run(body)


def test_key_order_waits_for_the_smallest_outstanding_key(rig: Rig) -> None:
    """Numbers in keys count as numbers: session 10 comes after session 9."""

    async def body(plane: Any) -> None:
        names = [f"p_{session}_0" for session in range(12)]
        await plane.issue("train", names, step=1)
        for key in reversed(names[1:]):
            await plane.put("train", {key: tokens(1)})
        claim = asyncio.create_task(plane.claim("train", 4, order=Order.KEY))
        assert await is_waiting(claim), "p_0_0 is outstanding, so the claim must wait for it"
        assert (await plane.claim("train", 1)).meta.keys == ("p_11_0",), "arrival order must not wait"
        await plane.put("train", {"p_0_0": tokens(1)})
        assert (await claim).meta.keys == ("p_0_0", "p_1_0", "p_2_0", "p_3_0")
        assert (await plane.claim("train", 7, order=Order.KEY)).meta.keys == tuple(
            f"p_{i}_0" for i in range(4, 11)
        )

    rig.run(body)


def test_a_claim_in_key_order_continues_when_the_smallest_key_becomes_a_dead_letter(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        await plane.issue("train", keys(4), step=1)
        for key in keys(4)[1:]:
            await plane.put("train", {key: tokens(1)})
        claim = asyncio.create_task(plane.claim("train", 3, order=Order.KEY))
        assert await is_waiting(claim)
        await plane.dead_letter("train", keys(4)[0], "reward raised")
        assert (await claim).meta.keys == tuple(keys(4)[1:])

    rig.run(body)


def test_key_order_serves_a_smaller_claim_after_larger_ones_timed_out(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        names = keys(5)
        await plane.issue("train", names, step=1)
        await put_all(plane, [names[0], names[2], names[3], names[4]])
        for n in (3, 2):
            with pytest.raises(TimeoutError):
                await plane.claim("train", n, order=Order.KEY, timeout=0)
        small = await plane.claim("train", 3, at_least=1, order=Order.KEY, timeout=0)
        assert list(small.meta.keys) == names[:1]
        await put_all(plane, [names[1]])
        rest = await plane.claim("train", 4, order=Order.KEY, timeout=0)
        assert list(rest.meta.keys) == names[1:]

    rig.run(body)


def test_key_order_does_not_skip_an_incomplete_group_that_may_still_fit(rig: Rig) -> None:
    """The group may lose a session and then fit. If it were skipped, the batch would depend on timing."""

    async def body(plane: Any) -> None:
        await plane.issue("train", ["a_0_0"], step=1)
        await plane.issue("train", ["b_0_0", "b_1_0"], step=1, group=GroupPolicy.TRAIN_REST)
        await plane.issue("train", ["c_0_0"], step=1)
        await put_all(plane, ["a_0_0", "c_0_0", "b_0_0"])
        with pytest.raises(TimeoutError):
            await plane.claim("train", 2, order=Order.KEY, timeout=0)
        await plane.dead_letter("train", "b_1_0", "poison")
        lease = await plane.claim("train", 2, order=Order.KEY, timeout=0)
        assert list(lease.meta.keys) == ["a_0_0", "b_0_0"]

    rig.run(body)


def test_a_waiting_claim_in_key_order_takes_smaller_keys_that_arrive_later(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        await plane.issue("train", ["e_0_0"], step=1)
        await put_all(plane, ["f_0_0", "g_0_0"])
        claim = asyncio.create_task(plane.claim("train", 2, order=Order.KEY))
        assert await is_waiting(claim), "the claim must wait for e, which is outstanding"
        await put_all(plane, ["a_0_0", "b_0_0"])
        assert (await asyncio.wait_for(claim, 1)).meta.keys == ("a_0_0", "b_0_0")

    rig.run(body)


def test_where_selects_rows_by_tags(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        for i, source in enumerate(("math", "code", "math", "chat")):
            await plane.put("train", {keys(4)[i]: tokens(i)}, tags={keys(4)[i]: {"source": source}})
        assert (await plane.claim("train", 2, where={"source": "math"})).meta.keys == (keys(4)[0], keys(4)[2])
        both = await plane.claim("train", 2, where={"source": ["code", "chat"]}, order=Order.KEY)
        assert both.meta.keys == (keys(4)[1], keys(4)[3])
        with pytest.raises(DataPlaneError, match="where"):
            await plane.claim("train", 1, where={"source": {"a": 1}})

    rig.run(body)


def test_without_selects_rows_that_lack_a_column(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        await put_all(plane, keys(2))
        await plane.put("train", {keys(2)[0]: {"score": 1.0}})
        lease = await plane.claim("train", 1, without=("score",))
        assert lease.meta.keys == (keys(2)[1],)
        await plane.put("train", {keys(2)[1]: {"score": 2.0}}, lease=lease)
        await plane.release(lease)
        assert (await plane.depth("train", fields=("score",))).ready == 2

    rig.run(body)


def test_a_claim_respects_at_least_and_timeout_and_refuses_invalid_values(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        await put_all(plane, keys(3))
        assert len((await plane.claim("train", 8, at_least=2)).meta) == 3
        with pytest.raises(TimeoutError, match=r"0 of 1 rows.*'train'.*3 finished, 3 leased"):
            await plane.claim("train", 1, timeout=0.01)
        for n, least in ((0, None), (2, 3), (2, 0)):
            with pytest.raises(DataPlaneError, match="at_least"):
                await plane.claim("train", n, at_least=least)
        with pytest.raises(DataPlaneError, match="max_rows=10000"):
            await plane.claim("train", 10_001)
        with pytest.raises(DataPlaneError, match="running"):
            await plane.claim("train", 1, status=RowStatus.RUNNING)

    rig.run(body)


def test_waiting_claims_are_served_in_order_so_that_a_large_one_is_not_starved(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        large = asyncio.create_task(plane.claim("train", 4))
        await asyncio.sleep(0)
        small = asyncio.create_task(plane.claim("train", 1))
        for key in keys(4):
            assert not small.done()
            await plane.put("train", {key: tokens(1)})
        assert len((await large).meta) == 4 and await is_waiting(small)
        await plane.put("train", {"z_0_0": tokens(1)})
        assert (await small).meta.keys == ("z_0_0",)

    rig.run(body)


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 4, 5])
def test_a_claim_cancelled_at_any_moment_loses_no_row(rig: Rig, turns: int) -> None:
    async def body(plane: Any) -> None:
        claim = asyncio.create_task(plane.claim("train", 1, lease_seconds=None))
        await asyncio.sleep(0)
        put = asyncio.create_task(plane.put("train", {"a_0_0": tokens(1)}))
        for _ in range(turns):
            await asyncio.sleep(0)
        claim.cancel()
        result = (await asyncio.gather(claim, return_exceptions=True))[0]
        await put
        if isinstance(result, asyncio.CancelledError):
            assert (await plane.claim("train", 1, timeout=1)).meta.keys == ("a_0_0",)
        else:
            assert result.meta.keys == ("a_0_0",)

    rig.run(body)


def test_a_claim_that_timed_out_does_not_block_later_claims(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        with pytest.raises(TimeoutError):
            await plane.claim("train", 5, timeout=0.01)
        claim = asyncio.create_task(plane.claim("train", 1))
        await asyncio.sleep(0)
        await plane.put("train", {"a_0_0": tokens(1)})
        assert (await asyncio.wait_for(claim, 1)).meta.keys == ("a_0_0",)

    rig.run(body)


def test_a_group_is_claimed_as_a_whole_once_it_is_complete(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        names = keys(3, sessions=4)
        await plane.issue("train", names, step=1, group=GroupPolicy.TRAIN_REST)
        for key in names[:3] + names[4:8]:
            await plane.put("train", {key: tokens(1)})
        assert (await plane.depth("train")).ready == 4
        lease = await plane.claim("train", 4)
        assert lease.meta.keys == tuple(names[4:8]), "prompt 1 is complete, prompt 0 is not"
        claim = asyncio.create_task(plane.claim("train", 2, count=Count.GROUPS, order=Order.KEY))
        await plane.put("train", {names[3]: tokens(1)})
        assert await is_waiting(claim)
        await put_all(plane, names[8:])
        assert (await claim).meta.keys == (*names[:4], *names[8:])

    rig.run(body)


def test_a_claim_takes_only_whole_groups_and_is_refused_if_the_first_does_not_fit(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        names = keys(2, sessions=3)
        await plane.issue("train", names, step=1, group=GroupPolicy.TRAIN_REST)
        await put_all(plane, names)
        with pytest.raises(DataPlaneError, match="group"):
            await plane.claim("train", 2)
        assert len((await plane.claim("train", 5)).meta) == 3
        waiting = asyncio.create_task(plane.claim("train", 2, order=Order.KEY))
        with pytest.raises(DataPlaneError, match="group"):
            await waiting

    rig.run(body)


def test_a_pending_row_is_written_only_under_the_current_producers_lease(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        await plane.issue("train", keys(2), step=1)
        first = await plane.claim("train", 1, status=RowStatus.PENDING, lease_seconds=5)
        key = first.meta.keys[0]
        assert key == keys(2)[0] and first.meta.extra["attempts"] == {key: 1}
        assert (await plane.list("train"))[key].status is RowStatus.RUNNING
        with pytest.raises(LeaseLost, match="being made under lease"):
            await plane.put("train", {key: tokens(1)})
        rig.clock.now += 6
        second = await plane.claim("train", 1, status=RowStatus.PENDING, order=Order.KEY)
        assert second.meta.keys == (key,) and second.meta.extra["attempts"] == {key: 2}
        with pytest.raises(LeaseLost, match="void"):
            await plane.put("train", {key: tokens(666)}, lease=first)
        await plane.put("train", {key: tokens(7)}, lease=second)
        row = (await plane.list("train"))[key]
        assert row.status is RowStatus.FINISHED and not row.leased
        assert (await plane.get((await plane.claim("train", 1)).meta))["tokens"].values.tolist() == [7]
        with pytest.raises(LeaseLost):
            await plane.put("train", {key: tokens(8)}, lease=second)

    rig.run(body)


def test_a_failed_row_keeps_its_place_in_key_order_until_it_is_retried(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        await plane.issue("train", keys(2), step=1)
        await plane.put("train", {keys(2)[0]: {}}, status=RowStatus.FAILED)
        await plane.put("train", {keys(2)[1]: tokens(1)})
        claim = asyncio.create_task(plane.claim("train", 1, order=Order.KEY))
        assert await is_waiting(claim)
        retry = await plane.claim("train", 1, status=RowStatus.FAILED)
        await plane.put("train", {keys(2)[0]: tokens(5)}, lease=retry)
        assert (await claim).meta.keys == (keys(2)[0],)

    rig.run(body)


def test_wait_returns_at_the_first_depth_that_meets_its_condition(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        await plane.issue("train", keys(3), step=1)
        quiet = asyncio.create_task(plane.wait("train", lambda depth: depth.pending == 0))
        scored = asyncio.create_task(plane.wait("train", lambda depth: depth.ready == 3, fields=("score",)))
        await put_all(plane, keys(3)[:2])
        assert await is_waiting(quiet)
        await put_all(plane, keys(3)[2:])
        assert (await quiet).finished == 3 and await is_waiting(scored)
        for key in keys(3):
            await plane.put("train", {key: {"score": 1.0}})
        assert (await scored).ready == 3
        with pytest.raises(TimeoutError, match="finished=3"):
            await plane.wait("train", lambda depth: depth.rows == 0, timeout=0.01)

    rig.run(body)


def test_close_ends_waiting_claims_waits_and_producers_with_an_error(rig: Rig) -> None:
    async def body() -> None:
        plane = rig.open(max_rows=1)
        await plane.issue("train", ["a_0_0"], step=1)
        waiting = [
            asyncio.create_task(plane.claim("train", 1)),
            asyncio.create_task(plane.wait("train", lambda depth: depth.finished == 9)),
            asyncio.create_task(plane.issue("train", ["b_0_0"], step=1)),
        ]
        await asyncio.sleep(0)
        await plane.close()
        for task in waiting:
            with pytest.raises(DataPlaneError, match="closed"):
                await task
        with pytest.raises(DataPlaneError, match="closed"):
            await plane.depth("train")
        await plane.close()

    asyncio.run(body())


def test_a_claim_for_a_step_sees_only_the_rows_of_that_step(rig: Rig) -> None:
    """After a resume that kept rows, the plane holds rows of several steps, some of them unfinished."""

    async def body(plane: Any) -> None:
        for step in (3, 4, 5):
            await plane.issue("train", keys(2, start=10 * step), step=step)
        await put_all(plane, keys(2, start=30) + keys(2, start=40)[:1] + keys(2, start=50))
        assert (await plane.depth("train", step=3)).finished == 2
        depth = await plane.depth("train", step=4)
        assert (depth.pending, depth.finished, depth.ready, depth.rows) == (1, 1, 1, 2)
        later = await plane.claim("train", 2, step=5, order=Order.KEY)
        assert later.meta.keys == tuple(keys(2, start=50)), (
            "pending rows of other steps must not delay the claim"
        )
        middle = asyncio.create_task(plane.claim("train", 2, step=4, order=Order.KEY))
        assert await is_waiting(middle)
        await put_all(plane, keys(2, start=40)[1:])
        assert (await middle).meta.keys == tuple(keys(2, start=40))
        assert (await plane.depth("train", step=99)).rows == 0

    rig.run(body)


def test_claims_stay_correct_with_more_filters_than_indexes_are_kept(rig: Rig) -> None:
    """Indexes that were dropped are rebuilt."""

    async def body(plane: Any) -> None:
        for step in range(30):
            await plane.issue("train", keys(2, start=10 * step), step=step)
        waiting = [asyncio.create_task(plane.claim("train", 2, step=step)) for step in range(0, 30, 2)]
        await asyncio.sleep(0)
        for step in range(29, -1, -1):
            await put_all(plane, keys(2, start=10 * step))
        for step in range(1, 30, 2):
            assert (await plane.claim("train", 2, step=step, timeout=1)).meta.keys == tuple(
                keys(2, start=10 * step)
            )
        assert [(await claim).meta.keys for claim in waiting] == [
            tuple(keys(2, start=10 * step)) for step in range(0, 30, 2)
        ]

    rig.run(body)
