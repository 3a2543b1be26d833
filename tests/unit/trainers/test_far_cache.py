"""Scores remembered by workers: recalled by name for rows with the same tokens, never from an answer that was not believed."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from far_rig import Site

from understudy.teacher.manifest import Batching, Limits, Manifest
from understudy.trainers.remote_rows import messages as wire
from understudy.trainers.remote_rows.scoring import FarScoreCache, FarScores
from understudy.types.scores import ScoreItem, Signal, TeacherScores


def manifest(batching: Batching) -> Manifest:
    return Manifest("add", "native", "m", "aa", "v", 50, 8, "float32", list(Signal), Limits(), batching)


class Asker:
    """A pool's way through its cache."""

    def __init__(self, site: Site, batching: Batching = Batching.BY_ARRIVAL, most_bytes: int = 10**6) -> None:
        self.site, self.manifest = site, manifest(batching)
        self.cache = FarScoreCache(site.scoring, "add", most_bytes)
        self.client = site.client("add", remember_bytes=most_bytes)

    async def __call__(self, items: Sequence[ScoreItem], believed: bool = True) -> list[TeacherScores]:
        found: list[Any] = [None] * len(items)
        for key, members in self.cache.parts(self.manifest, items):
            wanted = [items[i] for i in members]
            scores = await self.cache.find(key, wanted)
            if scores is None:
                scores = await self.client.score(wanted)
                if believed:
                    self.cache.put(key, scores)
            for i, one in zip(members, scores, strict=True):
                found[i] = one
        return found


def test_a_row_with_the_same_tokens_is_recalled_and_written_as_its_own(tmp_path: Path) -> None:
    async def body() -> None:
        site = Site(tmp_path)
        ask = Asker(site)
        (first,) = await ask([site.row("a_0_0", Signal.TOPK, 4)])
        (again,) = await ask([site.row("b_0_0", Signal.TOPK, 4)])
        assert isinstance(again, FarScores) and again.key == "b_0_0"
        one, two = await site.read(first), await site.read(again)
        assert one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)
        assert again.written.cells["teacher_ids"] != first.written.cells["teacher_ids"], "a copy of its own"  # type: ignore[attr-defined]
        assert site.writer.queued == ["a_0_0", "b_0_0"] and len(site.teachers["add"].asked) == 1
        for other in (
            site.row("c_0_0", Signal.TOPK, 5),
            site.row("d_0_0", Signal.SAMPLED),
            site.row("e_0_0", Signal.TOPK, 4, seed=2),
            replace(site.row("f_0_0", Signal.TOPK, 4), digest=b""),
        ):
            await ask([other])
        assert len(site.teachers["add"].asked) == 5 and ask.cache.hits == 1

    asyncio.run(body())


def test_an_answer_that_was_not_believed_is_never_recalled(tmp_path: Path) -> None:
    async def body() -> None:
        site = Site(tmp_path)
        ask = Asker(site)
        await ask([site.row("a_0_0", Signal.TOPK, 4)], believed=False)
        await ask([site.row("a_0_0", Signal.TOPK, 4)])
        assert len(site.teachers["add"].asked) == 2 and site.errands == [wire.SCORE] * 2

    asyncio.run(body())


def test_requests_scored_alone_are_recalled_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    async def body() -> None:
        site = Site(tmp_path)
        ask = Asker(site, Batching.BY_REQUEST)
        rows = [site.row(f"a{i}_0_0", Signal.TOPK, 4, seed=i) for i in range(3)]
        await ask(rows)
        await ask(rows[:2])
        await ask([rows[0], replace(rows[1], digest=b"")])
        assert site.errands == [wire.SCORE] * 3
        again = await ask([site.row(f"b{i}_0_0", Signal.TOPK, 4, seed=i) for i in range(3)])
        assert site.errands[3:] == [wire.RECALL] and [one.key for one in again] == [
            f"b{i}_0_0" for i in range(3)
        ]

    asyncio.run(body())


def test_what_a_worker_forgot_is_asked_again(tmp_path: Path) -> None:
    async def body() -> None:
        site = Site(tmp_path)
        ask = Asker(site)
        await ask([site.row("a_0_0", Signal.TOPK, 4)])
        site.verdicts._memories.clear()  # another life of the worker
        await ask([site.row("b_0_0", Signal.TOPK, 4)])
        assert site.errands == [wire.SCORE, wire.RECALL, wire.SCORE]
        site.refused = {wire.RECALL}
        await ask([site.row("c_0_0", Signal.TOPK, 4)])
        assert ask.cache.hits == 0 and len(site.teachers["add"].asked) == 3
        site.refused = set()
        await ask([site.row("d_0_0", Signal.TOPK, 4)])
        assert ask.cache.hits == 1

    asyncio.run(body())


def test_memory_is_bounded_on_both_sides(tmp_path: Path) -> None:
    async def body() -> None:
        site = Site(tmp_path)
        ask = Asker(site, most_bytes=2000)
        for seed in range(20):
            await ask([site.row(f"a{seed}_0_0", Signal.TOPK, 4, seed=seed)])
            assert ask.cache._held_bytes <= 2000 and site.verdicts._memories["add"].held_bytes <= 2000
        await ask([site.row("b_0_0", Signal.TOPK, 4, seed=19)])
        await ask([site.row("c_0_0", Signal.TOPK, 4, seed=0)])
        assert ask.cache.hits == 1 and len(site.teachers["add"].asked) == 21

    asyncio.run(body())


def test_scores_that_came_here_after_all_are_kept_here(tmp_path: Path) -> None:
    async def body() -> None:
        site = Site(tmp_path)
        ask = Asker(site)
        site.refused = {wire.SCORE}
        await ask([site.row("a_0_0", Signal.TOPK, 4)])
        (again,) = await ask([site.row("b_0_0", Signal.TOPK, 4)])
        assert again.key == "b_0_0" and not isinstance(again, FarScores) and again.ids is not None
        assert len(site.teachers["add"].asked) == 1 and ask.cache.hits == 1

    asyncio.run(body())
