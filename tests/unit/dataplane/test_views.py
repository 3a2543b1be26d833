"""Views refresh changed rows when they are queried, and then equal a view built at that moment."""

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest

from understudy.dataplane.base import Count, GroupPolicy, Order, RowStatus
from understudy.dataplane.embedded import EmbeddedDataPlane
from understudy.dataplane.memory.claim_view import View, ViewSpec
from understudy.dataplane.memory.partition import Partition

HOME = "train"


def open_plane(folder: Path) -> EmbeddedDataPlane:
    return EmbeddedDataPlane.open(folder, max_rows=1000, max_bytes=2**20, spill_bytes=2**16)


def partition_of(plane: EmbeddedDataPlane) -> Partition:
    return plane._store.partitions[HOME]


def built_now(partition: Partition, spec: ViewSpec) -> View:
    singles = [row for row in partition.rows.values() if row.group is None]
    return View(spec, [*singles, *partition.groups.values()])


@pytest.mark.parametrize("group", [None, GroupPolicy.TRAIN_REST])
@pytest.mark.parametrize("seed", range(6))
def test_a_view_updated_on_demand_equals_a_view_built_anew(
    tmp_path: Path, seed: int, group: GroupPolicy | None
) -> None:
    rng = Random(seed)
    specs = [
        ViewSpec.of(RowStatus.FINISHED, fields, (), where, None, order)
        for fields in ((), ("score",))
        for where in (None, {"step": 1})
        for order in Order
    ][:7]

    async def body() -> None:
        plane = open_plane(tmp_path)
        partition = partition_of(plane)
        for turn in range(60):
            prompt, step = rng.randrange(12), rng.randrange(2)
            keys = [f"p{prompt}_{session}_0" for session in range(3)]
            await plane.issue(HOME, keys, step=step, group=group, tags={key: {"step": step} for key in keys})
            known = sorted(partition.rows)
            for key in rng.sample(known, min(len(known), 4)):
                await plane.put(HOME, {key: {rng.choice(("tokens", "score")): turn}})
            if known and rng.random() < 0.3:
                await plane.dead_letter(HOME, rng.choice(sorted(partition.rows)), "poison")
            if rng.random() < 0.3 and (await plane.depth(HOME)).ready >= 3:
                lease = await plane.claim(HOME, 3, at_least=1, timeout=5)
                if rng.random() < 0.5:
                    await plane.ack(lease, step=1)
                else:
                    await plane.release(lease)
            for spec in rng.sample(specs, 2):  # most views are queried long after a change was made
                view, new = partition.view(spec), built_now(partition, spec)
                for count in Count:
                    assert view.ready(count) == new.ready(count), (turn, spec)
                assert _in_order(view) == _in_order(new), (turn, spec)
        await plane.close()

    asyncio.run(body())


def _in_order(view: View) -> list[str]:
    """The ready units in their order, without claiming them."""
    return [
        name
        for _, _, unit in sorted(view._members[unit] for unit in view._ready)
        for name in sorted(row.key for row in unit.members)
    ]


def test_a_view_refreshes_a_changed_row_once_and_only_when_it_is_queried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refreshed: list[str] = []
    refresh = View._refresh

    def counted(self: View, unit: Any) -> None:
        refreshed.append(unit.key)
        refresh(self, unit)

    async def body() -> None:
        plane = open_plane(tmp_path)
        await plane.depth(HOME)
        monkeypatch.setattr(View, "_refresh", counted)
        keys = [f"p{i}_0_0" for i in range(20)]
        await plane.issue(HOME, keys, step=1)
        for column in ("tokens", "score", "more"):
            for key in keys:
                await plane.put(HOME, {key: {column: 1}})
        assert refreshed == []
        assert (await plane.depth(HOME)).ready == 20
        assert refreshed == keys
        assert (await plane.depth(HOME)).ready == 20 and len(refreshed) == 20
        await plane.close()

    asyncio.run(body())


def test_views_of_past_steps_are_removed(tmp_path: Path) -> None:
    """Each step claims by its own tag. Claims of past steps must not cost later steps anything."""

    async def body() -> None:
        plane = open_plane(tmp_path)
        for step in range(1, 7):
            keys = [f"s{step}p{i:03d}_0_0" for i in range(100)]
            await plane.issue(HOME, keys, step=step, tags={key: {"step": step} for key in keys})
            for key in keys:
                await plane.put(HOME, {key: {"tokens": 1}})
            lease = await plane.claim(HOME, 100, where={"step": step}, order=Order.KEY, timeout=5)
            assert list(lease.meta.keys) == keys
            await plane.ack(lease, step)
            assert len(partition_of(plane).views) <= 2
        await plane.close()

    asyncio.run(body())


def test_a_view_for_which_a_claim_waits_is_not_removed(tmp_path: Path) -> None:
    async def body() -> None:
        plane = open_plane(tmp_path)
        waiting = asyncio.create_task(
            plane.claim(HOME, 1, where={"wanted": True}, fields=("tokens",), timeout=20)
        )
        await asyncio.sleep(0)
        for i in range(300):  # far more changes than rows
            key = f"p{i}_0_0"
            await plane.issue(HOME, [key], step=1)
            await plane.put(HOME, {key: {"tokens": i}})
            await plane.evict(HOME, [key], "stale")
        await plane.issue(HOME, ["last_0_0"], step=1, tags={"last_0_0": {"wanted": True}})
        await plane.put(HOME, {"last_0_0": {"tokens": 1}})
        assert (await waiting).meta.keys == ("last_0_0",)
        await plane.close()

    asyncio.run(body())
