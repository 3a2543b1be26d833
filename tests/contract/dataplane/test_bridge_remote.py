"""Bridged functions in another process, which fetches and writes columns itself; the plane passes only row names."""

import asyncio
import base64
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import plane_rig
import pytest
from plane_rig import ROOMY

from understudy.dataplane.base import Lease, Order
from understudy.dataplane.transfer_queue.bridge import RemoteCall, RemoteResult, call_remote
from understudy.dataplane.transfer_queue.segments import WrittenRow
from understudy.errors import DataPlaneError, LeaseLost
from understudy.types.batch import BatchMeta

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("queue")]
KEYS = [f"p{number}_0_0" for number in range(3)]


class RemoteProcess:
    """A process that answers requests, one line each."""

    def __init__(self, process: Any) -> None:
        self.process = process
        self.seen = 0
        """Bytes sent and received."""

    @staticmethod
    async def start(folder: Path, plane: Any) -> "RemoteProcess":
        link = plane.uploads.link
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(Path(__file__).with_name("bridge_child.py")),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=2**24,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        settings = {"folder": str(folder), "address": link.address.dump(), "prefix": link.partition_id("")}
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        return RemoteProcess(process)

    async def ask(self, name: str, call: RemoteCall, **arguments: Any) -> RemoteResult:
        sent = base64.b64encode(msgspec.msgpack.encode(call)).decode()
        line = json.dumps([name, sent, arguments]).encode() + b"\n"
        self.process.stdin.write(line)
        while not (reply := await self.process.stdout.readline()).startswith(b"answer "):
            if not reply:
                raise ConnectionError("the process is gone")
        self.seen += len(line) + len(reply)
        text = reply.decode().split(" ", 1)[1].strip()
        if text.startswith("!"):
            raise DataPlaneError(text[1:])
        result, written = msgspec.msgpack.decode(base64.b64decode(text))
        meta = msgspec.convert(result, BatchMeta) if isinstance(result, dict) else result
        return RemoteResult(meta, tuple(msgspec.convert(one, dict[str, WrittenRow]) for one in written))


def run(folder: Path, body: Any) -> None:
    async def whole() -> None:
        plane: Any = plane_rig.IMPLEMENTATIONS["transfer_queue"](folder, **ROOMY)
        for number, key in enumerate(KEYS):
            await plane.put("train", {key: {"tokens": np.arange(20_000 + number, dtype=np.int32)}})
        remote = await RemoteProcess.start(folder, plane)
        try:
            await asyncio.wait_for(body(plane, remote), 90)
        finally:
            if remote.process.returncode is None:
                remote.process.kill()
            await remote.process.wait()
            await plane.close()

    asyncio.run(whole())


def test_a_bridged_call_moves_only_row_names_through_the_planes_process(tmp_path: Path) -> None:
    async def body(plane: Any, remote: RemoteProcess) -> None:
        lease = await plane.claim("train", 3, fields=("tokens",), order=Order.KEY)
        done = await call_remote(
            plane, lease, ("tokens",), lambda call: remote.ask("measure", call, factor=2)
        )
        assert done.keys == tuple(KEYS) and {"length", "squares"} <= set(done.fields)
        assert plane.uploads.bytes_got == 0, "the plane's own process must fetch nothing"
        assert remote.seen < 20_000, "the columns, 80 kB a row, must not pass through the plane's process"
        columns = await plane.get(done, ("length", "squares"))
        assert columns["length"] == [40_000, 40_002, 40_004]
        for number, squares in enumerate(columns["squares"]):
            assert np.array_equal(squares.numpy(), np.arange(20_000 + number, dtype=np.float32) ** 2)
        # The next function reads by location what the first one wrote. An answer without columns is returned as it is.
        whole = await call_remote(plane, done, ("squares",), lambda call: remote.ask("total", call))
        assert whole == pytest.approx(sum((np.arange(20_000 + n) ** 2.0).sum() for n in range(3)), rel=1e-5)
        await plane.ack(lease, 1)

    run(tmp_path, body)


def test_columns_written_by_a_bridged_call_are_read_after_the_plane_is_reopened(tmp_path: Path) -> None:
    async def body(plane: Any, remote: RemoteProcess) -> None:
        meta = BatchMeta("train", tuple(KEYS), ("tokens",))
        await call_remote(plane, meta, ("tokens",), lambda call: remote.ask("measure", call))

    run(tmp_path, body)

    async def again() -> None:
        plane: Any = plane_rig.IMPLEMENTATIONS["transfer_queue"](tmp_path, **ROOMY)
        columns = await plane.get(BatchMeta("train", tuple(KEYS)), ("length", "squares"))
        assert columns["length"] == [20_000, 20_001, 20_002] and len(columns["squares"]) == 3
        await plane.close()

    asyncio.run(again())


def test_columns_that_a_remote_call_returns_after_its_lease_was_released_are_refused(tmp_path: Path) -> None:
    async def body(plane: Any, remote: RemoteProcess) -> None:
        lease: Lease = await plane.claim("train", 3, fields=("tokens",), order=Order.KEY)

        async def release_before_returning(call: RemoteCall) -> RemoteResult:
            answer = await remote.ask("measure", call)
            await plane.release(lease)
            return answer

        with pytest.raises(LeaseLost):
            await call_remote(plane, lease, ("tokens",), release_before_returning)
        with pytest.raises(DataPlaneError):
            await plane.get(lease.meta, ("length",))

    run(tmp_path, body)


def test_a_bridged_call_can_be_repeated_in_another_process_after_the_first_died(tmp_path: Path) -> None:
    async def body(plane: Any, remote: RemoteProcess) -> None:
        meta = BatchMeta("train", tuple(KEYS), ("tokens",))
        remote.process.kill()
        with pytest.raises((ConnectionError, BrokenPipeError)):
            await call_remote(plane, meta, ("tokens",), lambda call: remote.ask("measure", call))
        other = await RemoteProcess.start(tmp_path, plane)
        try:
            done = await call_remote(
                plane, meta, ("tokens",), lambda call: other.ask("measure", call), site=1
            )
        finally:
            other.process.kill()
            await other.process.wait()
        assert (await plane.get(done, ("length",)))["length"] == [20_000, 20_001, 20_002]

    run(tmp_path, body)


def test_a_bridged_call_that_reads_a_column_not_sent_with_it_is_refused(tmp_path: Path) -> None:
    async def body(plane: Any, remote: RemoteProcess) -> None:
        meta = BatchMeta("train", tuple(KEYS), ("tokens",))
        with pytest.raises(DataPlaneError, match="reads squares, and the call was sent with tokens"):
            await call_remote(plane, meta, ("tokens",), lambda call: remote.ask("total", call))

    run(tmp_path, body)
