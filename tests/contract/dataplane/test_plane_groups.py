"""Groups, the sessions of one prompt: group policies after a failure, and filters of groups without signal."""

import asyncio
import json
from typing import Any

import pytest
from plane_rig import Rig, is_waiting, keys, put_all, tokens

from understudy.dataplane.base import GroupPolicy, Order
from understudy.dataplane.groups import GroupFilter, no_signal
from understudy.dataplane.ledger import audit
from understudy.errors import LeaseLost


def test_train_rest_makes_a_group_claimable_without_its_dead_session(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        names = keys(1, sessions=3)
        await plane.issue("train", names, step=1, group=GroupPolicy.TRAIN_REST)
        await put_all(plane, names[:2])
        assert (await plane.depth("train")).ready == 0
        await plane.dead_letter("train", names[2], "tool hung", {"seconds": 60})
        assert (await plane.claim("train", 2)).meta.keys == tuple(names[:2])

    rig.run(body)
    report = audit(rig.folder)
    assert (
        report.balanced and (report.dead, report.in_flight) == (1, 2) and report.reasons == {"tool hung": 1}
    )


def test_drop_group_evicts_the_other_sessions_and_refuses_their_late_rollouts(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        names = keys(2, sessions=3)
        await plane.issue("train", names, step=1, group=GroupPolicy.DROP_GROUP)
        await put_all(plane, names[:1] + names[3:])
        await plane.dead_letter("train", names[1], "reward raised")
        with pytest.raises(LeaseLost, match="drop this work"):
            await plane.put("train", {names[2]: tokens(1)})
        assert (await plane.claim("train", 3, order=Order.KEY)).meta.keys == tuple(names[3:])

    rig.run(body)
    report = audit(rig.folder)
    assert report.balanced and (report.dead, report.evicted, report.in_flight) == (1, 2, 3)


def test_groups_and_their_policy_survive_reopening_the_plane(rig: Rig) -> None:
    names = keys(2, sessions=2)

    async def first(plane: Any) -> None:
        await plane.issue("train", names, step=1, group=GroupPolicy.DROP_GROUP)
        await put_all(plane, names[:3])

    async def second(plane: Any) -> None:
        assert (await plane.depth("train")).ready == 2
        await plane.dead_letter("train", names[3], "lost")
        assert set(await plane.list("train")) == set(names[:2])

    rig.run(first)
    rig.run(second)


def test_groups_without_signal_are_evicted_and_make_room_for_others(rig: Rig) -> None:
    """Rewards may come with the row or later; the filter looks at the group when its last reward is there."""

    async def body(plane: Any) -> None:
        plane.filter_groups("train", GroupFilter(no_signal))
        uniform, mixed, late = (keys(1, sessions=2, start=start) for start in range(3))
        refill = asyncio.create_task(plane.issue("train", keys(1, sessions=2, start=3), step=1))
        for names, rewards in ((uniform, (1.0, 1.0)), (mixed, (0.0, 1.0))):
            await plane.issue("train", names, step=1, group=GroupPolicy.TRAIN_REST)
            for key, reward in zip(names, rewards, strict=True):
                await plane.put("train", {key: tokens(1)}, tags={key: {"reward": reward}})
        await refill
        assert set(await plane.list("train")) == {*mixed, *keys(1, sessions=2, start=3)}
        await plane.issue("train", late, step=1, group=GroupPolicy.TRAIN_REST)
        await put_all(plane, late)
        await plane.put_tags("train", {key: {"reward": 0.0} for key in late})
        assert not set(late) & set(await plane.list("train"))
        with pytest.raises(LeaseLost):
            await plane.put("train", {uniform[0]: {"score": 1.0}})

    rig.run(body, max_rows=6)
    report = audit(rig.folder)
    assert report.balanced and report.evicted == 4
    assert report.reasons == {"no signal: all 2 rewards are 1": 2, "no signal: all 2 rewards are 0": 2}


def test_a_dead_session_can_complete_a_group_for_the_filter(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        plane.filter_groups("train", GroupFilter(no_signal))
        names = keys(1, sessions=3)
        await plane.issue("train", names, step=1, group=GroupPolicy.TRAIN_REST)
        for key in names[:2]:
            await plane.put("train", {key: tokens(1)}, tags={key: {"reward": 1.0}})
        await plane.dead_letter("train", names[2], "boom")
        assert await plane.list("train") == {}

    rig.run(body)


def test_a_waiting_claim_in_key_order_skips_a_group_evicted_by_the_filter(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        plane.filter_groups("train", GroupFilter(no_signal))
        names = keys(2, sessions=2)
        await plane.issue("train", names, step=1, group=GroupPolicy.TRAIN_REST)
        claim = asyncio.create_task(plane.claim("train", 2, order=Order.KEY))
        for key in names[:2]:
            await plane.put("train", {key: tokens(1)}, tags={key: {"reward": 1.0}})
        assert await is_waiting(claim), (
            "the smaller group was evicted and the next one is not complete, so the claim must wait"
        )
        for key, reward in zip(names[2:], (0.0, 1.0), strict=True):
            await plane.put("train", {key: tokens(1)}, tags={key: {"reward": reward}})
        assert (await claim).meta.keys == tuple(names[2:])

    rig.run(body)


def test_dead_letters_are_json_lines_with_reason_and_evidence_and_are_rewritten_if_torn(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        await plane.issue("train", keys(2), step=4)
        await plane.dead_letter(
            "train", keys(2)[0], "reward raised", {"error": ValueError("x"), "input": "1+1="}
        )
        await plane.dead_letter("train", keys(2)[1], "too long")

    rig.run(body)
    lines = [json.loads(line) for line in (rig.folder / "dead_letters.jsonl").read_text().splitlines()]
    assert lines == [
        {"partition": "train", "key": keys(2)[0], "step": 4, "reason": "reward raised",
         "evidence": {"error": "ValueError('x')", "input": "1+1="}},
        {"partition": "train", "key": keys(2)[1], "step": 4, "reason": "too long", "evidence": {}},
    ]  # fmt: skip
    (rig.folder / "dead_letters.jsonl").write_text("torn li")

    async def nothing(plane: Any) -> None: ...

    rig.run(nothing)
    assert [
        json.loads(line) for line in (rig.folder / "dead_letters.jsonl").read_text().splitlines()
    ] == lines
