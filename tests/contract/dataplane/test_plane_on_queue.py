"""The data plane on TransferQueue: remote readers, TransferQueue's own calls, and a queue that is lost."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import plane_rig
import pytest
import torch
from plane_rig import ROOMY, keys

from understudy.dataplane.base import Order
from understudy.dataplane.transfer_queue.bridge import bridged, bridging
from understudy.errors import DataPlaneError
from understudy.types.batch import BatchMeta

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("queue")]
BITS = np.arange(1200, dtype=np.uint16).reshape(300, 4) ^ 0x7FC0
"""bfloat16 values as bits, including a NaN."""


def open_plane(folder: Path) -> Any:
    return plane_rig.IMPLEMENTATIONS["transfer_queue"](folder, **ROOMY)


def run(folder: Path, body: Any) -> Any:
    async def whole() -> Any:
        plane = open_plane(folder)
        try:
            return await asyncio.wait_for(body(plane), 60)
        finally:
            await plane.close()

    return asyncio.run(whole())


def row(number: int) -> dict[str, Any]:
    """A row whose lengths depend on its number."""
    return {
        "topk": BITS[: 100 + number],
        "tokens": np.arange(200 + number, dtype=np.int32),
        "reward": number / 3,
    }


def test_another_process_reads_rows_without_their_bytes_passing_through_the_plane(tmp_path: Path) -> None:
    names = keys(6)

    def ask(meta: BatchMeta, address: str) -> dict[str, Any]:
        settings = json.dumps({"address": address, "keys": meta.keys, "fields": meta.fields})
        child = Path(__file__).with_name("queue_reader_child.py")
        out = subprocess.run(
            [sys.executable, str(child)],
            input=settings,
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        answer: dict[str, Any] = json.loads(out.stdout.splitlines()[-1])
        return answer

    async def body(plane: Any) -> None:
        for number, name in enumerate(names):
            await plane.put("train", {name: row(number)})
        lease = await plane.claim("train", 6, fields=("topk",), order=Order.KEY)
        sent = plane.uploads.bytes_put
        meta = await plane.hand_over(lease.meta, ("topk", "reward"))
        assert plane.uploads.bytes_put == sent, "everything must already be in the queue"
        got = await asyncio.to_thread(ask, meta, plane.uploads.link.address.dump())
        assert got["rows"] == [BITS[: 100 + number].tolist() for number in range(6)]
        assert got["reward"] == [number / 3 for number in range(6)] and got["dtype"] == "torch.uint16"
        assert got["bytes"] == sum(BITS[: 100 + number].nbytes for number in range(6)) and not got["ray"]
        assert plane.uploads.bytes_got == 0, "the plane's own process must fetch nothing"
        await plane.ack(lease, 1)
        await plane.uploads.drain()
        assert await plane.uploads.link.get("train", names, ("topk",)) is None, (
            "acknowledged rows must leave the queue"
        )

    run(tmp_path, body)


def test_rows_of_an_earlier_launch_are_uploaded_from_the_run_directory_on_hand_over(tmp_path: Path) -> None:
    async def write(plane: Any) -> None:
        await plane.put("train", {name: row(number) for number, name in enumerate(keys(2))})

    async def read(plane: Any) -> None:
        meta = BatchMeta("train", tuple(keys(2)))
        assert await plane.uploads.link.get("train", keys(2), ("topk",)) is None
        await plane.hand_over(meta, ("topk",))
        found = await plane.uploads.link.get("train", keys(2), ("topk",))
        assert [r.numpy().tobytes() for r in found["topk"]] == [BITS[:100].tobytes(), BITS[:101].tobytes()]

    run(tmp_path, write)
    run(tmp_path, read)


def test_transfer_queues_own_calls_and_metas_work_on_the_planes_rows(tmp_path: Path) -> None:
    import transfer_queue

    @bridged("tokens")
    def count(columns: Any) -> Any:
        return {"length": [len(row) for row in columns["tokens"]]}

    @bridged("length")
    async def double(columns: Any) -> Any:
        return {"twice": [2 * length for length in columns["length"]]}

    class Worker:
        @bridged("length")
        async def scale(self, factor: int, data: Any, extra: Any) -> Any:
            return {"scaled": [factor * length + extra["plus"] for length in data["length"]]}

    async def body(plane: Any) -> None:
        for number, name in enumerate(keys(3)):
            await plane.put("train", {name: row(number)}, tags={name: {"n": number}})
        lease = await plane.claim("train", 3, order=Order.KEY)
        theirs = plane.keyed(lease.meta)
        assert isinstance(theirs, transfer_queue.KVBatchMeta) and theirs.tags == [{"n": n} for n in range(3)]
        table = await asyncio.to_thread(transfer_queue.kv_batch_get, theirs.keys, theirs.partition_id, "topk")
        assert [r.numpy().tobytes() for r in table["topk"].unbind()] == [
            BITS[: 100 + number].tobytes() for number in range(3)
        ]
        with bridging(plane):
            counted = await count(theirs)
            assert isinstance(counted, transfer_queue.KVBatchMeta) and counted.fields[-1] == "length"
            columnar = await plane.columnar(lease.meta)
            doubled = await double(columnar)
            assert isinstance(doubled, transfer_queue.BatchMeta) and "twice" in doubled.field_names
            columnar.update_extra_info({"plus": 1})
            scaled = await Worker().scale(3, data=columnar)
            assert isinstance(scaled, transfer_queue.BatchMeta) and "scaled" in scaled.field_names
            assert scaled.get_extra_info("plus") == 1
            assert isinstance(await count(transfer_queue.BatchMeta.empty()), transfer_queue.BatchMeta)
            blocking = await asyncio.to_thread(count, theirs.select_keys(keys(3)[:1]))
            assert blocking.keys == keys(3)[:1]
        columns = await plane.get(lease.meta, ("length", "twice", "scaled"))
        assert columns == {
            "length": [200, 201, 202], "twice": [400, 402, 404], "scaled": [601, 604, 607],
        }  # fmt: skip
        with pytest.raises(DataPlaneError, match="names no rows"), bridging(plane):
            await count(transfer_queue.KVBatchMeta(keys=["a"], tags=[{}]))

    run(tmp_path, body)


def test_a_lost_queue_loses_no_rows_and_failed_uploads_are_never_read(tmp_path: Path) -> None:
    from understudy.dataplane.transfer_queue.link import QueueAddress, QueueLink
    from understudy.dataplane.transfer_queue.uploads import QueueUploads

    async def body(plane: Any) -> None:
        await plane.put("train", {"a_0_0": row(1)})
        good = plane.uploads
        deaf = [{**unit, "ports": dict.fromkeys(unit["ports"], 9)} for unit in good.link.address.units]
        link = QueueLink.connect(QueueAddress(good.link.address.controller, tuple(deaf)))
        plane._store.uploads = QueueUploads(link, timeout_s=1.5)
        try:
            await plane.put("train", {"b_0_0": row(2)})
            assert plane.uploads.lost is not None
            columns = await plane.get(BatchMeta("train", ("a_0_0", "b_0_0")), ("topk", "tokens"))
            assert [len(r) for r in columns["topk"]] == [101, 102]
            assert columns["topk"].values.numpy().tobytes() == BITS[:101].tobytes() + BITS[:102].tobytes()
            with pytest.raises(DataPlaneError, match="is lost"):
                await plane.hand_over(BatchMeta("train", ("b_0_0",)), ("topk",))
            await plane.put("train", {"c_0_0": row(3)})
            await plane.ack(await plane.claim("train", 3), 1)
        finally:
            link.close()
            plane._store.uploads = good

    run(tmp_path, body)


def test_concurrent_writers_of_one_cell_leave_the_same_value_in_queue_and_disk(tmp_path: Path) -> None:
    """Some writers are refused after their upload arrived; what they left in the queue must not be read."""

    async def body(plane: Any) -> None:
        await plane.issue("train", keys(3), step=1)
        lost = await plane.claim("train", 3, status="pending", lease_seconds=600)

        async def write(number: int) -> bool:
            lease = lost if number % 3 == 0 else None
            try:
                await plane.put(
                    "train", {keys(3)[number % 2]: {"x": np.full(300, number, np.int32)}}, lease=lease
                )
            except DataPlaneError:
                return False
            return True

        first = asyncio.create_task(write(0))
        await asyncio.sleep(0)
        await plane.release(lost)
        written = await asyncio.gather(first, *(write(number) for number in range(1, 40)))
        assert any(written) and not all(written)
        meta = BatchMeta("train", tuple(keys(2)))
        from_queue = await plane.get(meta, ("x",))
        from_disk = await super(type(plane), plane).get(meta, ("x",))
        assert from_queue["x"].values.tolist() == from_disk["x"].values.tolist()
        depth = await plane.depth("train")
        assert 0 <= depth.resident_bytes <= 2 * 1300
        await plane.clear("train")
        assert (await plane.depth("train")).resident_bytes == 0

    run(tmp_path, body)


def test_the_queue_does_not_change_torchs_number_of_threads(tmp_path: Path) -> None:
    """A deterministic run relies on the number of threads it set, and TransferQueue's own client resets it."""
    before = torch.get_num_threads()
    seen = set()

    async def body(plane: Any) -> None:
        torch.set_num_threads(3)
        for number, name in enumerate(keys(5)):
            task = asyncio.create_task(plane.put("train", {name: row(number)}))
            while not task.done():
                seen.add(torch.get_num_threads())
                await asyncio.sleep(0.001)
        await plane.get(BatchMeta("train", tuple(keys(5))))
        seen.add(torch.get_num_threads())

    try:
        run(tmp_path, body)
    finally:
        torch.set_num_threads(before)
    assert seen == {3}
