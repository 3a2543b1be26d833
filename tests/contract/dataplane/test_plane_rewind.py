"""Rewinding to a checkpoint: rows trained since are untrained again, rows issued since are kept or dropped."""

import asyncio
from typing import Any

import numpy as np
import pytest
from plane_rig import Rig, keys, put_all, tokens

from understudy.dataplane.base import GroupPolicy, Order, Retain, RowStatus
from understudy.dataplane.ledger import Ledger, audit
from understudy.errors import DataPlaneError

BATCH = 4


async def train(plane: Any, step: int) -> list[str]:
    """One step of the trainer: issue, produce, claim, ack."""
    names = keys(BATCH, start=step * 100)
    new = await plane.issue("train", names, step=step)
    await put_all(plane, [key for key in names if key in new], made_at=step)
    lease = await plane.claim("train", BATCH, order=Order.KEY)
    await plane.ack(lease, step)
    return list(lease.meta.keys)


@pytest.mark.parametrize("keep_rows", [False, True])
@pytest.mark.parametrize("retain", list(Retain))
def test_a_rewound_run_trains_every_row_exactly_once(rig: Rig, keep_rows: bool, retain: Retain) -> None:
    async def before(plane: Any) -> None:
        for step in range(1, 5):
            await train(plane, step)
        await plane.issue("train", keys(BATCH, start=500), step=5)
        await put_all(plane, keys(2, start=500), made_at=5)

    async def after(plane: Any) -> None:
        await plane.rewind(2, keep_rows=keep_rows)
        depth = await plane.depth("train")
        if not keep_rows:
            assert depth.rows == 0
        elif retain is Retain.UNTIL_SETTLED:
            assert (depth.finished, depth.pending) == (2 * BATCH + 2, 2)
        else:
            assert (depth.finished, depth.pending) == (2, 2 * BATCH + 2)
        for step in range(3, 6):
            names = keys(BATCH, start=step * 100)
            await plane.issue("train", names, step=step)
            rows = await plane.list("train")
            await put_all(
                plane, [key for key in names if rows[key].status is RowStatus.PENDING], made_at=10 + step
            )
            lease = await plane.claim("train", BATCH, order=Order.KEY)
            assert lease.meta.keys == tuple(names)
            made = (await plane.get(lease.meta))["made_at"]
            if keep_rows and retain is Retain.UNTIL_SETTLED:
                assert made == [step] * (2 if step == 5 else BATCH) + [15] * (2 if step == 5 else 0)
            await plane.ack(lease, step)

    rig.run(before, retain=retain)
    rig.run(after, retain=retain)
    report = audit(rig.folder)
    assert report.balanced, str(report)
    assert report.per_step == dict.fromkeys(range(1, 6), BATCH)
    assert (report.issued, report.trained, report.in_flight) == (5 * BATCH, 5 * BATCH, 0)
    trained = list(Ledger.read(rig.folder).trained_keys("train"))
    assert trained == [(step, key) for step in range(1, 6) for key in keys(BATCH, start=step * 100)]


def test_a_rewind_with_keep_rows_keeps_rollouts_that_are_not_scored_yet(rig: Rig) -> None:
    async def before(plane: Any) -> None:
        await plane.issue("train", keys(2), step=1)
        await put_all(plane, keys(2))
        await plane.put("train", {keys(2)[0]: {"score": 1.0}})

    async def after(plane: Any) -> None:
        await plane.rewind(0, keep_rows=True)
        unscored = await plane.claim("train", 1, without=("score",))
        assert unscored.meta.keys == (keys(2)[1],)
        assert (await plane.get(unscored.meta))["tokens"].values.tolist() == [1, 2, 3]

    rig.run(before)
    rig.run(after)


def test_rewind_of_an_open_plane_voids_leases_and_is_idempotent(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        await train(plane, 1)
        await train(plane, 2)
        await plane.issue("train", keys(2, start=300), step=3, group=GroupPolicy.DROP_GROUP)
        producing = await plane.claim("train", 1, status=RowStatus.PENDING)
        for _ in range(3):
            await plane.rewind(1, keep_rows=True)
            depth = await plane.depth("train")
            assert (depth.finished, depth.pending, depth.running, depth.leased) == (BATCH, 2, 0, 0)
        for _ in range(2):
            await plane.rewind(1, keep_rows=False)
            assert (await plane.depth("train")).rows == 0
        with pytest.raises(DataPlaneError, match="void"):
            await plane.put("train", {producing.meta.keys[0]: tokens(1)}, lease=producing)

    rig.run(body)
    assert audit(rig.folder).balanced and audit(rig.folder).trained == BATCH


def test_rewind_removes_dead_letters_of_later_steps_and_keeps_earlier_ones(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        for step in (1, 2):
            await plane.issue("train", keys(3, start=step * 100), step=step)
            await plane.dead_letter("train", keys(1, start=step * 100)[0], f"poison {step}")
            await plane.evict("train", [keys(3, start=step * 100)[1]], f"stale {step}")
        await plane.rewind(1, keep_rows=False)
        assert set(await plane.list("train")) == {keys(3, start=100)[2]}
        again = await plane.issue("train", keys(3, start=100) + keys(3, start=200), step=2)
        assert again == tuple(keys(3, start=200))
        await plane.dead_letter("train", keys(1, start=200)[0], "poison again")

    rig.run(body)
    report = audit(rig.folder)
    assert report.balanced and (report.issued, report.dead, report.evicted, report.in_flight) == (6, 2, 1, 3)
    assert report.reasons == {"poison 1": 1, "stale 1": 1, "poison again": 1}
    assert [
        line.count("poison") for line in (rig.folder / "dead_letters.jsonl").read_text().splitlines()
    ] == [1, 1]


def test_a_rewind_to_before_the_settled_step_is_refused(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        for step in range(1, 5):
            await train(plane, step)
        await plane.settle(3)
        with pytest.raises(DataPlaneError, match=r"cannot rewind to step 2.*resume from step 3"):
            await plane.rewind(2, keep_rows=True)
        assert (await plane.depth("train")).rows == 0, "a refused rewind must change nothing"
        await plane.rewind(3, keep_rows=True)
        assert (await plane.depth("train")).finished == BATCH
        assert await train(plane, 4) == keys(BATCH, start=400)
        assert await plane.issue("train", keys(BATCH, start=100), step=9) == ()

    rig.run(body)
    report = audit(rig.folder)
    assert report.balanced and report.trained == 4 * BATCH


def test_rewind_restores_spilled_columns_and_settle_deletes_their_files(rig: Rig) -> None:
    big = np.arange(20_000, dtype=np.float32)

    async def body(plane: Any) -> None:
        for step in (1, 2, 3):
            await plane.put("train", {key: {"big": big * step} for key in keys(2, start=step * 100)})
            await plane.ack(await plane.claim("train", 2), step)
        await plane.rewind(1, keep_rows=True)
        columns = await plane.get((await plane.claim("train", 4, order=Order.KEY)).meta)
        assert [row[1].item() for row in columns["big"]] == [2, 2, 3, 3]

    rig.run(body, spill_bytes=1024)

    async def end(plane: Any) -> None:
        await plane.ack(await plane.claim("train", 4), 4)
        await plane.settle(4)

    rig.run(end, spill_bytes=1024)
    assert list((rig.folder / "spill").glob("*.seg")) == []


def test_max_bytes_holds_when_a_rewind_restores_more_than_fits(rig: Rig) -> None:
    async def body(plane: Any) -> None:
        for step in range(1, 11):
            await plane.put(
                "train", {key: {"x": np.full(100, step, np.float32)} for key in keys(2, start=step * 100)}
            )
            await plane.ack(await plane.claim("train", 2), step)
        await plane.rewind(0, keep_rows=True)
        depth = await plane.depth("train")
        assert depth.finished == 20 and (1000 if rig.reloads else -1) < depth.resident_bytes <= 2000
        blocked = asyncio.create_task(plane.issue("train", ["z_0_0"], step=1))
        lease = await plane.claim("train", 20, order=Order.KEY)
        assert [row[0].item() for row in (await plane.get(lease.meta))["x"]] == [
            step for step in range(1, 11) for _ in (0, 1)
        ]
        assert not blocked.done()
        await plane.ack(lease, 1)
        await asyncio.wait_for(blocked, 1)

    rig.run(body, max_rows=20, max_bytes=2000)
