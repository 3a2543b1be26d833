"""Views look at changed rows when they are asked, and tell what a view built at that moment would."""

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


def opened(folder: Path) -> EmbeddedDataPlane:
    return EmbeddedDataPlane.open(folder, max_rows=1000, max_bytes=2**20, spill_bytes=2**16)


def home_of(plane: EmbeddedDataPlane) -> Partition:
    return plane._store.partitions[HOME]


def built_now(home: Partition, spec: ViewSpec) -> View:
    singles = [row for row in home.rows.values() if row.group is None]
    return View(spec, [*singles, *home.groups.values()])


@pytest.mark.parametrize("group", [None, GroupPolicy.TRAIN_REST])
@pytest.mark.parametrize("seed", range(6))
def test_a_view_asked_late_says_what_a_new_one_would(
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
        plane = opened(tmp_path)
        home = home_of(plane)
        for turn in range(60):
            prompt, step = rng.randrange(12), rng.randrange(2)
            keys = [f"p{prompt}_{session}_0" for session in range(3)]
            await plane.issue(HOME, keys, step=step, group=group, tags={key: {"step": step} for key in keys})
            known = sorted(home.rows)
            for key in rng.sample(known, min(len(known), 4)):
                await plane.put(HOME, {key: {rng.choice(("tokens", "score")): turn}})
            if known and rng.random() < 0.3:
                await plane.dead_letter(HOME, rng.choice(sorted(home.rows)), "poison")
            if rng.random() < 0.3 and (await plane.depth(HOME)).ready >= 3:
                lease = await plane.claim(HOME, 3, at_least=1, timeout=5)
                if rng.random() < 0.5:
                    await plane.ack(lease, step=1)
                else:
                    await plane.release(lease)
            for spec in rng.sample(specs, 2):  # most views hear of a change long after it was made
                asked, new = home.view(spec), built_now(home, spec)
                for count in Count:
                    assert asked.ready(count) == new.ready(count), (turn, spec)
                assert _in_order(asked) == _in_order(new), (turn, spec)
        await plane.close()

    asyncio.run(body())


def _in_order(view: View) -> list[str]:
    """Its ready units in their order, without taking them."""
    return [
        name
        for _, _, unit in sorted(view._members[unit] for unit in view._ready)
        for name in sorted(row.key for row in unit.members)
    ]


def test_a_row_is_looked_at_when_somebody_asks_and_then_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    refresh = View._refresh

    def counted(self: View, unit: Any) -> None:
        looks.append(unit.key)
        refresh(self, unit)

    async def body() -> None:
        plane = opened(tmp_path)
        await plane.depth(HOME)
        monkeypatch.setattr(View, "_refresh", counted)
        keys = [f"p{i}_0_0" for i in range(20)]
        await plane.issue(HOME, keys, step=1)
        for column in ("tokens", "score", "more"):
            for key in keys:
                await plane.put(HOME, {key: {column: 1}})
        assert looks == []
        assert (await plane.depth(HOME)).ready == 20
        assert looks == keys
        assert (await plane.depth(HOME)).ready == 20 and len(looks) == 20
        await plane.close()

    asyncio.run(body())


def test_views_of_past_steps_are_let_go(tmp_path: Path) -> None:
    """Each step claims by its own tag. What the steps before asked for must not cost later ones anything."""

    async def body() -> None:
        plane = opened(tmp_path)
        for step in range(1, 7):
            keys = [f"s{step}p{i:03d}_0_0" for i in range(100)]
            await plane.issue(HOME, keys, step=step, tags={key: {"step": step} for key in keys})
            for key in keys:
                await plane.put(HOME, {key: {"tokens": 1}})
            lease = await plane.claim(HOME, 100, where={"step": step}, order=Order.KEY, timeout=5)
            assert list(lease.meta.keys) == keys
            await plane.ack(lease, step)
            assert len(home_of(plane).views) <= 2
        await plane.close()

    asyncio.run(body())


def test_a_view_somebody_waits_at_is_never_let_go(tmp_path: Path) -> None:
    async def body() -> None:
        plane = opened(tmp_path)
        waiting = asyncio.create_task(
            plane.claim(HOME, 1, where={"wanted": True}, fields=("tokens",), timeout=20)
        )
        await asyncio.sleep(0)
        for i in range(300):  # changes by far outnumber the rows there are
            key = f"p{i}_0_0"
            await plane.issue(HOME, [key], step=1)
            await plane.put(HOME, {key: {"tokens": i}})
            await plane.evict(HOME, [key], "stale")
        await plane.issue(HOME, ["last_0_0"], step=1, tags={"last_0_0": {"wanted": True}})
        await plane.put(HOME, {"last_0_0": {"tokens": 1}})
        assert (await waiting).meta.keys == ("last_0_0",)
        await plane.close()

    asyncio.run(body())
