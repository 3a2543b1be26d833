"""Rows written by remote processes: the plane adopts them by location, and rows that are not announced do not count."""

import asyncio
import json
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import plane_rig
import psutil
import pytest
from plane_rig import ROOMY

from understudy.dataplane.base import Order
from understudy.dataplane.ledger import audit
from understudy.dataplane.transfer_queue.meta import named_by
from understudy.dataplane.transfer_queue.write_ids import row_of
from understudy.errors import DataPlaneError, LeaseLost, RowsUnreachable
from understudy.types.batch import BatchMeta

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("queue")]


def row(number: int) -> dict[str, Any]:
    return {
        "tokens": np.arange(200 + number, dtype=np.int32),
        "topk": np.full((50 + number, 8), number, np.float32),
        "reward": number / 3,
    }


class Site:
    """A plane, and the writer of a worker."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        from understudy.dataplane.transfer_queue.writer import RowWriter

        self.plane: Any = plane_rig.IMPLEMENTATIONS["transfer_queue"](folder, **{**ROOMY, **settings})
        link = self.plane.uploads.link
        self.writer = RowWriter(folder, link.address, prefix=link.partition_id(""))

    async def write(self, key: str, columns: dict[str, Any], worker: int = 1) -> Any:
        segment = self.plane.writer_segments.take(worker)
        return (await self.writer.write("train", {key: columns}, segment.number))[key]


def run(folder: Path, body: Any, **settings: Any) -> None:
    async def whole() -> None:
        site = Site(folder, **settings)
        try:
            await asyncio.wait_for(body(site), 60)
        finally:
            site.writer.close()
            await site.plane.close()

    asyncio.run(whole())


def segments(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "spill").glob("*.seg"))


def test_adopted_rows_are_claimed_and_trained_without_bytes_passing_through_the_plane(tmp_path: Path) -> None:
    keys = [f"p{number}_0_0" for number in range(4)]

    async def body(site: Site) -> None:
        plane = site.plane
        await plane.issue("train", keys, step=1)
        for number, key in enumerate(keys):
            columns = row(number)
            scores = {"topk": columns.pop("topk")}
            await plane.adopt("train", {key: await site.write(key, columns)}, {key: {"n": number}})
            await plane.adopt("train", {key: await site.write(key, scores, worker=2)})
        lease = await plane.claim("train", 4, fields=("topk",), order=Order.KEY)
        assert [tags["n"] for tags in lease.meta.tags] == [0, 1, 2, 3]
        await plane.hand_over(lease.meta, ("tokens", "topk"))
        assert plane.uploads.bytes_put == 0, "everything must already be in the queue"
        from_disk = await super(type(plane), plane).get(lease.meta, ("tokens", "topk", "reward"))
        assert plane.uploads.bytes_got == 0
        found = await plane.get(lease.meta)
        for name in ("tokens", "topk"):
            wanted = np.concatenate([row(number)[name] for number in range(4)])
            assert np.array_equal(found[name].values.numpy(), wanted)
            assert np.array_equal(from_disk[name].values.numpy(), wanted)
        assert found["reward"] == [number / 3 for number in range(4)] == from_disk["reward"]
        assert plane.uploads.bytes_got > 0
        await plane.ack(lease, 1)
        await plane.settle(1)
        await plane.uploads.drain()
        assert await plane.uploads.keys("train") == [], "trained rows must leave the queue"
        assert (await plane.depth("train")).resident_bytes == 0
        await plane.settle(1)
        assert segments(tmp_path) == 0, "trained rows must leave the run directory"
        with pytest.raises(LeaseLost):
            await plane.adopt("train", {keys[0]: await site.write(keys[0], row(0))})
        await plane.uploads.drain()
        assert await plane.uploads.keys("train") == [], "a refused copy must leave the queue at once"

    run(tmp_path, body)
    report = audit(tmp_path)
    assert report.balanced and report.trained == 4


def test_rows_of_remote_writers_are_read_from_the_run_directory_after_reopening(tmp_path: Path) -> None:
    async def write(site: Site) -> None:
        await site.plane.adopt("train", {"a_0_0": await site.write("a_0_0", row(5))})
        await site.write("b_0_0", row(6))  # its writer died before it announced the row

    async def read(site: Site) -> None:
        found = await site.plane.get(BatchMeta("train", ("a_0_0",)), ("tokens", "topk", "reward"))
        assert found["tokens"].values.tolist() == list(range(205)) and found["reward"] == [5 / 3]
        assert list(await site.plane.list("train")) == ["a_0_0"]
        await site.plane.hand_over(BatchMeta("train", ("a_0_0",)), ("tokens",))
        again = await site.writer.read("train", ("a_0_0",), ("tokens",))
        assert again["tokens"].values.tolist() == list(range(205))  # type: ignore[union-attr]

    run(tmp_path, write)
    run(tmp_path, read)


def test_rows_that_a_dead_writer_did_not_announce_are_ignored_and_cleared(tmp_path: Path) -> None:
    async def body(site: Site) -> None:
        plane = site.plane
        await plane.issue("train", ["a_0_0", "b_0_0"], step=1)
        await site.write("a_0_0", row(1))
        await site.write("b_0_0", row(1))
        await site.write("b_0_1", row(1))  # another output of the same session
        plane.writer_segments.end(1)
        depth = await plane.depth("train", fields=("tokens",))
        assert depth.pending == 2 and depth.ready == 0, "rows that were not announced must not count"
        await plane.adopt("train", {"a_0_0": await site.write("a_0_0", row(2), worker=2)})
        found = await plane.get(BatchMeta("train", ("a_0_0",)), ("topk",))
        assert found["topk"].values.unique().tolist() == [2.0]
        assert await plane.clear_orphans() == 0, "b is still being produced, so nothing may be cleared"
        await plane.dead_letter("train", "b_0_0", "its worker died too often")
        await plane.uploads.drain()
        assert await plane.clear_orphans() == 2
        await plane.uploads.drain()
        left = await plane.uploads.keys("train")
        assert [row_of(name) for name in left] == ["a_0_0"] * 2 and len(set(left)) == 2, (
            "both copies of a must be left, its own and the dead writer's"
        )
        await plane.ack(await plane.claim("train", 1), 1)
        await plane.settle(1)
        await plane.settle(1)
        assert segments(tmp_path) == 0
        await plane.uploads.drain()
        assert await plane.uploads.keys("train") == []
        with pytest.raises(RowsUnreachable):
            await site.writer.read("train", ("a_0_0",), ("tokens",))

    run(tmp_path, body)


def test_a_late_write_of_a_writer_presumed_dead_does_not_change_its_row(tmp_path: Path) -> None:
    """It is frozen after writing to the run directory and resumed after another writer has announced the row."""

    async def body(site: Site) -> None:
        plane, link = site.plane, site.plane.uploads.link
        await plane.issue("train", ["a_0_0"], step=1)
        late = await asyncio.create_subprocess_exec(
            sys.executable, str(Path(__file__).parent / "late_writer_child.py"),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert late.stdin is not None and late.stdout is not None
        settings = {
            "folder": str(tmp_path), "address": link.address.dump(), "prefix": link.partition_id(""),
            "key": "a_0_0", "token": 1, "segment": plane.writer_segments.take(1).number,
        }  # fmt: skip
        late.stdin.write(json.dumps(settings).encode() + b"\n")
        while psutil.Process(late.pid).status() != psutil.STATUS_STOPPED:
            await asyncio.sleep(0.05)
        plane.writer_segments.end(1)
        again = {"tokens": np.full(300, 2, np.int32), "reward": 2.0}
        await plane.adopt("train", {"a_0_0": await site.write("a_0_0", again, worker=2)})
        os.kill(late.pid, signal.SIGCONT)
        assert json.loads(await late.stdout.readline())["queued"] == ["tokens", "reward"], (
            "the late writer must have written to the queue"
        )
        await late.wait()
        lease = await plane.claim("train", 1)
        meta = await plane.hand_over(lease.meta, ("tokens", "reward"))
        assert plane.uploads.bytes_put == 0
        reader = import_module("understudy.dataplane.transfer_queue.plane").QueueReader(
            link.address, prefix=link.partition_id("")
        )
        copies = [
            await plane.get(lease.meta, ("tokens",)),
            await super(type(plane), plane).get(lease.meta, ("tokens",)),
            await reader.get(meta),
            await site.writer.read("train", meta.keys, ("tokens",), meta.marks),
        ]
        reader.close()
        assert [copy["tokens"].values.unique().tolist() for copy in copies] == [[2]] * 4
        assert copies[2]["reward"] == [2.0]
        assert len(await plane.uploads.keys("train")) == 2, (
            "the late copy must be stored beside the valid one"
        )
        await plane.ack(lease, 1)
        await plane.settle(1)
        await plane.uploads.drain()
        assert await plane.uploads.keys("train") == [], "the late copy must leave the queue with its row"

    run(tmp_path, body)
    report = audit(tmp_path)
    assert report.balanced and report.trained == 1


def test_columns_of_one_row_by_several_writers_are_named_separately_for_transfer_queue(
    tmp_path: Path,
) -> None:
    async def body(site: Site) -> None:
        plane = site.plane
        await plane.issue("train", ["a_0_0"], step=1)
        columns = row(1)
        scores = {"topk": columns.pop("topk")}
        await plane.adopt("train", {"a_0_0": await site.write("a_0_0", columns)})
        await plane.adopt("train", {"a_0_0": await site.write("a_0_0", scores)})
        for names in (("tokens", "reward"), ("topk",)):
            meta = BatchMeta("train", ("a_0_0",), names)
            theirs = plane.keyed(meta)
            assert row_of(theirs.keys[0]) == "a_0_0" != theirs.keys[0]
            assert set((await plane.columnar(meta)).field_names) >= set(names)
            assert (await named_by(plane, theirs)).keys == ("a_0_0",)
        with pytest.raises(DataPlaneError, match="several processes"):
            plane.keyed(BatchMeta("train", ("a_0_0",), ("tokens", "topk")))

    run(tmp_path, body)


def test_a_cancelled_write_leaves_nothing_in_the_queue(tmp_path: Path) -> None:
    async def body(site: Site) -> None:
        for pause in (0.0, 0.001, 0.003, 0.01):
            work = asyncio.create_task(site.write("a_0_0", row(1)))
            await asyncio.sleep(pause)
            work.cancel()
            await asyncio.wait([work])
            await site.writer._uploads.drain()
            left = await site.plane.uploads.keys("train")
            assert work.cancelled() == (not left)
            site.plane.uploads.clear("train", left)
            await site.plane.uploads.drain()

    run(tmp_path, body)


def test_rows_beyond_the_queues_memory_are_read_from_the_run_directory(tmp_path: Path) -> None:
    async def body(site: Site) -> None:
        plane = site.plane
        keys = tuple(f"p{number}_0_0" for number in range(6))
        await plane.issue("train", keys, step=1)
        for number, key in enumerate(keys):
            await plane.adopt("train", {key: await site.write(key, row(number))})
        await plane.uploads.drain()
        held = await plane.uploads.keys("train")
        assert 0 < len(held) < 6, "some rows must have left the queue"
        assert (await plane.depth("train")).resident_bytes <= 8000
        found = await plane.get(BatchMeta("train", keys), ("topk",))
        assert [rows.numpy()[0, 0] for rows in found["topk"]] == list(range(6))

    run(tmp_path, body, max_bytes=8000)


def test_a_writer_that_lost_its_queue_still_writes_to_the_run_directory(tmp_path: Path) -> None:
    async def body(site: Site) -> None:
        site.writer._uploads.give_up("gone")
        written = await site.write("a_0_0", row(3))
        assert written.queued == ()
        await site.plane.adopt("train", {"a_0_0": written})
        found = await site.plane.get(BatchMeta("train", ("a_0_0",)), ("tokens",))
        assert len(found["tokens"].values) == 203
        with pytest.raises(RowsUnreachable, match="gone"):
            await site.writer.read("train", ("a_0_0",), ("tokens",))

    run(tmp_path, body)
