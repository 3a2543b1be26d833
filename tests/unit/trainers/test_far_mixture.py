"""Mixtures of teachers mixed by a worker: the local verdict to the bit, and never a score through the run unless it must be."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from far_rig import Site

from understudy.errors import TeacherError
from understudy.teacher.mixture import mix, opinions_of
from understudy.trainers.remote_rows import messages as wire
from understudy.trainers.remote_rows.mixture import score_far_mixture
from understudy.trainers.remote_rows.scoring import FarScores
from understudy.trainers.row_columns import score_columns
from understudy.types.scores import ScoreItem, Signal, TeacherScores

SHARES = {
    "one": {"add": 1.0},
    "two": {"add": 0.3, "sort": 0.7},
    "three": {"add": 0.25, "sort": 0.5, "swap": 0.25},
}
SIGNALS = [(Signal.TOPK, 4), (Signal.AT_IDS, 0), (Signal.SAMPLED, 0)]


async def judged(site: Site, item: Any, shares: dict[str, float], **clients: Any) -> TeacherScores:
    async def ask(teacher: str, wanted: ScoreItem) -> TeacherScores:
        client = clients.get(teacher) or site.client(teacher)
        return (await client.score([wanted]))[0]

    return await score_far_mixture(site.scoring, item, shares, ask)


async def local(site: Site, item: Any, shares: dict[str, float]) -> dict[str, Any]:
    async def ask(teacher: str, wanted: ScoreItem) -> TeacherScores:
        return (await site.teachers[teacher].score([wanted]))[0]

    row = site.rows[item.key]
    return score_columns(mix(await opinions_of(row, shares, ask), row))


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert np.array_equal(found[name], value), name
        assert getattr(found[name], "dtype", None) == getattr(value, "dtype", None)


@pytest.mark.parametrize("names", SHARES)
@pytest.mark.parametrize(("signal", "k"), SIGNALS)
def test_a_worker_mixes_what_a_local_run_would(tmp_path: Path, signal: Signal, k: int, names: str) -> None:
    async def body() -> None:
        site, shares = Site(tmp_path), SHARES[names]
        item = site.row("row_0_0", signal, k)
        verdict = await judged(site, item, shares)
        assert isinstance(verdict, FarScores) and site.scoring.rows_judged_here == 0
        same(await site.read(verdict), await local(site, item, shares))
        assert site.writer.queued == ["row_0_0"], "the verdict alone is for ranks"
        assert site.errands.count(wire.MIX) == (len(shares) > 1)

    asyncio.run(body())


def test_what_passes_the_run_does_not_grow_with_candidates(tmp_path: Path) -> None:
    async def carried(k: int) -> int:
        site = Site(tmp_path)
        await judged(site, site.row("row_0_0", Signal.TOPK, k), SHARES["two"])
        return site.carried

    few, many = asyncio.run(carried(2)), asyncio.run(carried(20))
    assert many - few < 80 < 5 * 18 * 8, "a few more digits; the candidates themselves weigh more"
    assert many < 2300


@pytest.mark.parametrize(("signal", "k"), SIGNALS)
@pytest.mark.parametrize("trouble", ["mix", "score", "one teacher here"])
def test_where_workers_cannot_it_is_mixed_here_and_is_the_same(
    tmp_path: Path, signal: Signal, k: int, trouble: str
) -> None:
    async def body() -> None:
        site, shares = Site(tmp_path), SHARES["three"]
        item, clients = site.row("row_0_0", signal, k), {}
        if trouble == "one teacher here":
            clients["swap"] = site.client("swap", external=wire.External(50, "", "m", "auto"))
        else:
            site.refused = {trouble}
        verdict = await judged(site, item, shares, **clients)
        assert not isinstance(verdict, FarScores) and site.scoring.rows_judged_here > 0
        same(score_columns(verdict), await local(site, item, shares))

    asyncio.run(body())


def test_an_opinion_that_was_damaged_on_the_disk_is_refused(tmp_path: Path) -> None:
    async def body() -> None:
        site = Site(tmp_path)
        item = site.row("row_0_0", Signal.TOPK, 4)
        (opinion,) = await site.client("add").score([replace(item, use=wire.Use.OPINION)])
        (segment,) = tmp_path.glob("*.seg")
        segment.write_bytes(b"\0" * segment.stat().st_size)
        assert await site.scoring.mix(item, [wire.OpinionAt("add", 1.0, opinion.written, None)]) is None

    asyncio.run(body())


def test_hidden_states_are_not_mixed(tmp_path: Path) -> None:
    site = Site(tmp_path)
    item = replace(site.row("row_0_0", Signal.SAMPLED), signal=Signal.HIDDEN)
    with pytest.raises(TeacherError, match="mixture"):
        asyncio.run(judged(site, item, SHARES["two"]))
