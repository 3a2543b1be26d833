"""Rows that become ready in the same event-loop turn are written together, after pending requests were sent."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.dataplane.base import GroupPolicy, Retain
from understudy.dataplane.embedded import EmbeddedDataPlane
from understudy.errors import DataPlaneError
from understudy.trainers.produce.row_journal import RowJournal, RowsToWrite
from understudy.trainers.row_columns import PARTITION


def run_with_plane(folder: Path, work: Callable[[EmbeddedDataPlane], Awaitable[None]]) -> None:
    async def main() -> None:
        plane = EmbeddedDataPlane.open(
            folder, max_rows=100, max_bytes=1 << 20, spill_bytes=1 << 20, retain=Retain.UNTIL_ACK
        )
        try:
            await work(plane)
        finally:
            await plane.close()

    asyncio.run(main())


def row_to_write(key: str, number: int) -> Callable[[], RowsToWrite]:
    return lambda: RowsToWrite({key: {"tokens": np.full(number + 1, number, np.int32)}}, {key: {"n": number}})


def record_puts(plane: EmbeddedDataPlane, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Records the keys of every put."""
    puts: list[list[str]] = []
    put = plane.put

    async def counting(partition: str, rows: Any, *more: Any, **others: Any) -> Any:
        puts.append(list(rows))
        return await put(partition, rows, *more, **others)

    monkeypatch.setattr(plane, "put", counting)
    return puts


def test_rows_ready_in_the_same_turn_are_written_with_one_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"p{i}_0_0" for i in range(5)]

    async def work(plane: EmbeddedDataPlane) -> None:
        await plane.issue(PARTITION, keys, step=1)
        puts = record_puts(plane, monkeypatch)
        journal = RowJournal(plane)
        await asyncio.gather(*(journal.put(row_to_write(key, i)) for i, key in enumerate(keys)))
        assert puts == [keys]
        await journal.put(lambda: RowsToWrite({keys[0]: {"teacher": "t"}}))
        assert puts[1:] == [keys[:1]]
        held = await plane.list(PARTITION)
        assert {key: held[key].tags["n"] for key in keys} == {key: i for i, key in enumerate(keys)}
        assert "teacher" in held[keys[0]].columns and "tokens" in held[keys[0]].columns

    run_with_plane(tmp_path, work)


def test_put_returns_only_after_the_row_would_survive_a_kill(tmp_path: Path) -> None:
    """A second plane over a copy of the folder, taken when `put` returns, has the row."""

    async def work(plane: EmbeddedDataPlane) -> None:
        await plane.issue(PARTITION, ["p_0_0"], step=1)
        await RowJournal(plane).put(row_to_write("p_0_0", 3))
        shutil.copytree(tmp_path / "a", tmp_path / "b")

    run_with_plane(tmp_path / "a", work)

    async def look(plane: EmbeddedDataPlane) -> None:
        held = await plane.list(PARTITION)
        assert "tokens" in held["p_0_0"].columns

    (tmp_path / "b" / "lock").unlink(missing_ok=True)
    run_with_plane(tmp_path / "b", look)


def test_a_row_whose_group_was_dropped_is_not_written_and_others_are(tmp_path: Path) -> None:
    keys = ["p_0_0", "p_1_0", "q_0_0"]

    async def work(plane: EmbeddedDataPlane) -> None:
        await plane.issue(PARTITION, keys, step=1, group=GroupPolicy.DROP_GROUP)
        await plane.dead_letter(PARTITION, "p_0_0", "broken", {})  # drops its whole group
        journal = RowJournal(plane)
        await asyncio.gather(journal.put(row_to_write("p_1_0", 1)), journal.put(row_to_write("q_0_0", 2)))
        held = await plane.list(PARTITION)
        assert list(held) == ["q_0_0"] and "tokens" in held["q_0_0"].columns

    run_with_plane(tmp_path, work)


def test_a_row_whose_columns_cannot_be_built_fails_alone(tmp_path: Path) -> None:
    def broken() -> RowsToWrite:
        raise TypeError("no columns")

    async def work(plane: EmbeddedDataPlane) -> None:
        await plane.issue(PARTITION, ["p_0_0", "q_0_0"], step=1)
        journal = RowJournal(plane)
        results = await asyncio.gather(
            journal.put(broken), journal.put(row_to_write("q_0_0", 2)), return_exceptions=True
        )
        assert isinstance(results[0], TypeError) and results[1] is None
        assert "tokens" in (await plane.list(PARTITION))["q_0_0"].columns

    run_with_plane(tmp_path, work)


def test_a_failed_put_fails_every_row_written_with_it(tmp_path: Path) -> None:
    async def work(plane: EmbeddedDataPlane) -> None:
        journal = RowJournal(plane)
        await plane.issue(PARTITION, ["p_0_0", "q_0_0"], step=1)
        nonsense = RowsToWrite({"p_0_0": {"tokens": object()}})  # type: ignore[dict-item]
        results = await asyncio.gather(
            journal.put(lambda: nonsense), journal.put(row_to_write("q_0_0", 2)), return_exceptions=True
        )
        assert all(isinstance(result, DataPlaneError) for result in results)

    run_with_plane(tmp_path, work)


def test_a_row_whose_sample_was_cancelled_is_still_written(tmp_path: Path) -> None:
    async def work(plane: EmbeddedDataPlane) -> None:
        await plane.issue(PARTITION, ["p_0_0", "q_0_0"], step=1)
        journal = RowJournal(plane)

        async def sample(key: str, number: int) -> None:
            await journal.put(row_to_write(key, number))

        given_up, other = asyncio.create_task(sample("p_0_0", 1)), asyncio.create_task(sample("q_0_0", 2))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up, other])
        assert given_up.cancelled() and other.exception() is None
        held = await plane.list(PARTITION)
        assert all("tokens" in held[key].columns for key in ("p_0_0", "q_0_0"))

    run_with_plane(tmp_path, work)
