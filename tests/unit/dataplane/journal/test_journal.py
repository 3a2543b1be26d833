"""The journal: group commits, disk errors that stop the plane, one process per folder, dead letters."""

import asyncio
import json
import os
import re
import resource
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.dataplane.base import GroupPolicy, Order, RowStatus
from understudy.dataplane.dead_letters import DeadLetters, detail
from understudy.dataplane.embedded import EmbeddedDataPlane
from understudy.dataplane.journal import journal as journal_module
from understudy.dataplane.ledger import audit
from understudy.errors import DataPlaneError

BOUNDS: dict[str, Any] = {"max_rows": 100_000, "max_bytes": 2**26, "spill_bytes": 2**20}
ROW = {"tokens": np.arange(50, dtype=np.int32)}


def commits(plane: EmbeddedDataPlane) -> list[int]:
    """Records the number of rows of each commit from here on."""
    writer, sizes = plane._store.journal.writer, []
    plain = writer.commit

    def counting(batch: Any) -> None:
        sizes.append(len(batch.dirty))
        plain(batch)

    writer.commit = counting  # type: ignore[method-assign]
    return sizes


def test_concurrent_puts_are_written_in_shared_commits(tmp_path: Path) -> None:
    async def body() -> None:
        plane = EmbeddedDataPlane.open(tmp_path, **BOUNDS)
        sizes = commits(plane)
        await asyncio.gather(*(plane.put("train", {f"{i}_0_0": ROW}) for i in range(200)))
        assert sum(sizes) == 200 and len(sizes) <= 4, sizes
        await plane.put("train", {"alone_0_0": ROW})
        assert sizes[-1] == 1
        await plane.close()

    asyncio.run(body())


@pytest.mark.parametrize("inline", [0, 2**30])
def test_a_row_is_in_the_file_as_soon_as_its_put_returned(
    tmp_path: Path, inline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another connection reads the row at that moment, whether the event loop or the writer thread wrote it."""
    monkeypatch.setattr(journal_module, "INLINE_BYTES", inline)

    async def body() -> None:
        plane = EmbeddedDataPlane.open(tmp_path, **BOUNDS)
        reader = sqlite3.connect(tmp_path / "journal.sqlite")

        async def write(i: int) -> None:
            await plane.put("train", {f"{i}_0_0": ROW})
            found = reader.execute("SELECT COUNT(*) FROM rows WHERE key = ?", (f"{i}_0_0",)).fetchone()
            assert found == (1,)

        for start in range(0, 40, 8):
            await asyncio.gather(*(write(start + i) for i in range(8)))
        reader.close()
        await plane.close()

    asyncio.run(body())


@pytest.mark.parametrize("inline", [0, 2**30])
def test_the_effect_of_every_call_is_in_the_file_as_soon_as_the_call_returned(
    tmp_path: Path, inline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "INLINE_BYTES", inline)

    async def body() -> None:
        plane = EmbeddedDataPlane.open(tmp_path, **BOUNDS)
        reader = sqlite3.connect(tmp_path / "journal.sqlite")

        def facts() -> list[tuple[str, str]]:
            return reader.execute("SELECT kind, key FROM facts ORDER BY seq, place").fetchall()

        def rows() -> dict[str, tuple[str, str, int, int | None]]:
            found = reader.execute("SELECT key, status, tags, attempts, trained FROM rows").fetchall()
            return {key: rest for key, *rest in found}

        expected = [("issued", name) for name in "abcd"]
        await plane.issue("train", ["a", "b", "c", "d"], step=1)
        assert facts() == expected
        await plane.claim("train", 1, status=RowStatus.PENDING, order=Order.KEY)
        assert rows()["a"] == ["pending", "{}", 1, None]
        await plane.put("train", {"b": ROW})
        assert rows()["b"][0] == "finished"
        await plane.put("train", {"c": {}}, status=RowStatus.FAILED)
        assert rows()["c"][0] == "failed"
        await plane.put_tags("train", {"d": {"x": 1}})
        assert rows()["d"][1] == '{"x":1}'
        await plane.ack(await plane.claim("train", 1), step=7)
        assert rows()["b"][3] == 7 and facts() == [*expected, ("trained", "b")]
        await plane.dead_letter("train", "c", "poison")
        await plane.evict("train", ["d"], "stale")
        assert facts() == [*expected, ("trained", "b"), ("dead", "c"), ("evicted", "d")] and set(rows()) == {
            "a",
            "b",
        }
        await plane.settle(7)
        assert set(rows()) == {"a"}
        reader.close()
        await plane.close()

    asyncio.run(body())


@pytest.mark.parametrize("inline", [0, 2**30])
def test_a_full_disk_fails_all_later_calls_and_loses_no_acknowledged_row(
    tmp_path: Path, inline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "INLINE_BYTES", inline)
    acknowledged: list[str] = []

    async def body() -> None:
        plane = EmbeddedDataPlane.open(tmp_path, **BOUNDS)
        plane._store.journal.writer.connection.execute("PRAGMA max_page_count=60")
        claim = asyncio.create_task(plane.claim("train", 90_000))

        async def write(i: int) -> None:
            await plane.put("train", {f"{i}_0_0": {"x": np.zeros(500, np.int32)}})
            acknowledged.append(f"{i}_0_0")

        results: list[Any] = []
        for start in range(0, 400, 8):
            results += await asyncio.gather(*(write(start + i) for i in range(8)), return_exceptions=True)
        assert 8 <= len(acknowledged) < 400
        failed = [result for result in results if result is not None]
        assert all(isinstance(error, DataPlaneError) and "full" in str(error) for error in failed)
        with pytest.raises(DataPlaneError, match="free space"):
            await claim
        for call in (
            plane.issue("train", ["new_0_0"], step=1),
            plane.depth("train"),
            plane.settle(1),
            plane.sync(),
        ):
            with pytest.raises(DataPlaneError, match="full"):
                await call
        await plane.close()

    async def after() -> None:
        plane = EmbeddedDataPlane.open(tmp_path, **BOUNDS)
        assert set(await plane.list("train")) == set(acknowledged)
        await plane.put("train", {"new_0_0": ROW})
        await plane.close()

    asyncio.run(body())
    assert audit(tmp_path).balanced
    asyncio.run(after())


def test_settle_and_rewind_on_a_full_disk_raise_an_error_with_the_cause(tmp_path: Path) -> None:
    """SQLite itself rolls a failed write back. Before, a second rollback hid the cause."""

    async def run(rewinds: bool) -> str:
        plane = EmbeddedDataPlane.open(
            tmp_path / str(rewinds), max_rows=999, max_bytes=10**8, spill_bytes=10**8
        )
        await plane.put("train", {f"{number}_0_0": {"text": "x" * 5000} for number in range(200)})
        await plane.ack(await plane.claim("train", 200), step=1)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        size = (tmp_path / str(rewinds) / "journal.sqlite-wal").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            await (plane.rewind(0, keep_rows=False) if rewinds else plane.settle(1))
        except DataPlaneError as error:
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            plane._store.journal.abandon()
        return "no error"

    for rewinds in (False, True):
        message = asyncio.run(run(rewinds))
        assert "journal.sqlite cannot be written: " in message and "free space or mend the disk" in message, (
            message
        )
        assert re.search("disk I/O error|disk is full", message), message


def test_a_put_whose_spill_file_cannot_be_written_raises_and_leaves_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        plane = EmbeddedDataPlane.open(tmp_path, max_rows=10, max_bytes=2**20, spill_bytes=100)

        def full(*_: Any) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(DataPlaneError, match="No space left"):
            await plane.put("train", {"a_0_0": ROW})
        monkeypatch.undo()
        await plane.close()
        again = EmbeddedDataPlane.open(tmp_path, max_rows=10, max_bytes=2**20, spill_bytes=100)
        assert await again.list("train") == {}
        await again.close()

    asyncio.run(body())


def test_the_write_ahead_log_is_checkpointed_as_it_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "LOG_BYTES", 200_000)

    async def body() -> None:
        plane = EmbeddedDataPlane.open(tmp_path, **BOUNDS)
        for i in range(200):
            await plane.put("train", {f"{i}_0_0": {"x": np.zeros(1000, np.int32)}})
        assert (tmp_path / "journal.sqlite-wal").stat().st_size < 2_000_000
        assert (tmp_path / "journal.sqlite").stat().st_size > 400_000
        await plane.close()
        assert not (tmp_path / "journal.sqlite-wal").exists()

    asyncio.run(body())


def test_cancelling_one_put_does_not_cancel_others_of_the_same_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "INLINE_BYTES", 0)

    async def body() -> None:
        plane = EmbeddedDataPlane.open(tmp_path, **BOUNDS)
        tasks = [asyncio.create_task(plane.put("train", {f"{i}_0_0": ROW})) for i in range(10)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(result, asyncio.CancelledError) for result in results].count(True) == 1
        assert (await plane.depth("train")).rows == 10
        await plane.close()

    asyncio.run(body())


def test_two_processes_cannot_share_a_folder(tmp_path: Path) -> None:
    async def body() -> None:
        plane = EmbeddedDataPlane.open(tmp_path, **BOUNDS)
        with pytest.raises(DataPlaneError, match=f"in use by process {os.getpid()}"):
            EmbeddedDataPlane.open(tmp_path, **BOUNDS)
        await plane.close()
        await EmbeddedDataPlane.open(tmp_path, **BOUNDS).close()

    asyncio.run(body())


@pytest.mark.parametrize("error", [DataPlaneError("the last commit failed"), asyncio.CancelledError()])
def test_a_plane_whose_last_commit_fails_releases_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """A trainer that lost a rank or its critic opens the folder again in the same process."""

    async def failing(work: object) -> None:
        raise error

    async def scenario() -> None:
        plane = EmbeddedDataPlane.open(tmp_path, max_rows=9, max_bytes=999, spill_bytes=999)
        monkeypatch.setattr(plane._store.journal, "run", failing)
        with pytest.raises(type(error)):
            await plane.close()
        await EmbeddedDataPlane.open(tmp_path, max_rows=9, max_bytes=999, spill_bytes=999).close()

    asyncio.run(scenario())


def test_sync_flushes_the_log_the_spill_file_and_their_folders_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: set[int] = set()
    plain = os.fsync

    def recording_fsync(handle: int) -> None:
        flushed.add(os.fstat(handle).st_ino)
        plain(handle)

    async def body() -> None:
        plane = EmbeddedDataPlane.open(tmp_path, max_rows=10, max_bytes=2**20, spill_bytes=100)
        await plane.put("train", {"a_0_0": ROW})
        monkeypatch.setattr(os, "fsync", recording_fsync)
        await plane.sync()
        needed = [
            tmp_path / "journal.sqlite-wal",
            tmp_path,
            tmp_path / "spill",
            tmp_path / "spill" / "00000001.seg",
        ]
        assert {path.stat().st_ino for path in needed} <= flushed
        await plane.close()

    asyncio.run(body())


def test_deadlines_of_acknowledged_leases_are_removed(tmp_path: Path) -> None:
    async def body() -> None:
        plane = EmbeddedDataPlane.open(tmp_path, **BOUNDS)
        await plane.put("train", {f"{i}_0_0": ROW for i in range(500)})
        for _ in range(500):
            await plane.ack(await plane.claim("train", 1), 1)
        assert len(plane._store.leases._ends) <= 65
        await plane.close()

    asyncio.run(body())


def test_a_dead_letter_file_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    async def body() -> None:
        plane = EmbeddedDataPlane.open(tmp_path, **BOUNDS)
        (tmp_path / "dead_letters.jsonl").mkdir()
        await plane.put("train", {"a_0_0": ROW, "b_0_0": ROW})
        await plane.dead_letter("train", "a_0_0", "poison")
        assert (await plane.depth("train")).rows == 1
        await plane.close()

    asyncio.run(body())
    assert audit(tmp_path).dead == 1


@pytest.mark.parametrize("another", [True, False])
def test_a_dead_letter_that_could_not_be_written_is_written_with_the_next_or_on_close(
    tmp_path: Path, another: bool
) -> None:
    file = tmp_path / "dead_letters.jsonl"

    async def body() -> None:
        plane = EmbeddedDataPlane.open(tmp_path, **BOUNDS)
        await plane.put("train", {"a_0_0": ROW, "b_0_0": ROW})
        file.mkdir()
        await plane.dead_letter("train", "a_0_0", "poison")
        file.rmdir()
        if another:
            await plane.dead_letter("train", "b_0_0", "poison")
            assert len(file.read_text().splitlines()) == 2
        await plane.close()

    asyncio.run(body())
    keys = [json.loads(line)["key"] for line in file.read_text().splitlines()]
    assert keys == ["a_0_0", "b_0_0"][: 1 + another]


def test_a_partly_written_dead_letter_is_truncated_and_written_whole_with_the_next(tmp_path: Path) -> None:
    letters, reason = DeadLetters(tmp_path), detail("poison")
    letters.append("train", "a_0_0", 1, reason)
    file = tmp_path / "dead_letters.jsonl"
    size = file.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
    try:
        letters.append("train", "b_0_0", 1, reason)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.stat().st_size == size
    letters.append("train", "c_0_0", 1, reason)
    keys = [json.loads(line)["key"] for line in file.read_text().splitlines()]
    assert keys == ["a_0_0", "b_0_0", "c_0_0"]


def test_sql_statements_of_a_commit_use_no_numbered_or_named_placeholders(tmp_path: Path) -> None:
    """Python 3.12.1 warns that a list of values for numbered or named placeholders will be refused."""

    class Recording:
        def __init__(self, cursor: sqlite3.Cursor) -> None:
            self.plain = cursor
            self.statements: list[str] = []

        def execute(self, statement: str, values: Any = ()) -> None:
            self.statements.append(statement)
            self.plain.execute(statement, values)

    async def body() -> list[str]:
        plane = EmbeddedDataPlane.open(tmp_path, **{**BOUNDS, "spill_bytes": 4000})
        writer = plane._store.journal.writer
        cursor = writer._cursor = Recording(writer._cursor)  # type: ignore[assignment]
        await plane.issue("train", ["g_0_0", "g_1_0"], step=1, group=GroupPolicy.DROP_GROUP)
        await plane.put("train", {f"{i}_0_0": ROW for i in range(40)}, tags={"3_0_0": {"source": "a"}})
        await plane.put("train", {"large_0_0": {"tokens": np.arange(2000, dtype=np.int32)}})
        await plane.dead_letter("train", "g_0_0", "poison")
        await plane.ack(await plane.claim("train", 5), 1)
        await plane.close()
        return cursor.statements

    statements = asyncio.run(body())
    for table in ("rows(", "packs ", "spills ", "events("):
        assert any(f"INTO {table}" in statement for statement in statements), table
    for statement in statements:
        assert not re.search(r"\?\d|[:@$]\w", statement), statement
