"""Bridged functions in another process: columns are fetched and written there, and names are all that passes here."""

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
from understudy.dataplane.transfer_queue.bridge import Answer, Errand, call_elsewhere
from understudy.dataplane.transfer_queue.segments import Written
from understudy.errors import DataPlaneError, LeaseLost
from understudy.types.batch import BatchMeta

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("queue")]
KEYS = [f"p{number}_0_0" for number in range(3)]


class Elsewhere:
    """A process, asked by lines."""

    def __init__(self, process: Any) -> None:
        self.process = process
        self.seen = 0
        """Bytes that came and went."""

    @staticmethod
    async def start(folder: Path, plane: Any) -> "Elsewhere":
        link = plane.uploads.link
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(Path(__file__).with_name("bridge_child.py")),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=2**24,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        told = {"folder": str(folder), "address": link.address.dump(), "prefix": link.partition_id("")}
        process.stdin.write(json.dumps(told).encode() + b"\n")
        return Elsewhere(process)

    async def ask(self, name: str, errand: Errand, **arguments: Any) -> Answer:
        sent = base64.b64encode(msgspec.msgpack.encode(errand)).decode()
        line = json.dumps([name, sent, arguments]).encode() + b"\n"
        self.process.stdin.write(line)
        while not (said := await self.process.stdout.readline()).startswith(b"answer "):
            if not said:
                raise ConnectionError("it is gone")
        self.seen += len(line) + len(said)
        text = said.decode().split(" ", 1)[1].strip()
        if text.startswith("!"):
            raise DataPlaneError(text[1:])
        result, written = msgspec.msgpack.decode(base64.b64decode(text))
        meta = msgspec.convert(result, BatchMeta) if isinstance(result, dict) else result
        return Answer(meta, tuple(msgspec.convert(one, dict[str, Written]) for one in written))


def run(folder: Path, body: Any) -> None:
    async def whole() -> None:
        plane: Any = plane_rig.IMPLEMENTATIONS["transfer_queue"](folder, **ROOMY)
        for number, key in enumerate(KEYS):
            await plane.put("train", {key: {"tokens": np.arange(20_000 + number, dtype=np.int32)}})
        elsewhere = await Elsewhere.start(folder, plane)
        try:
            await asyncio.wait_for(body(plane, elsewhere), 90)
        finally:
            if elsewhere.process.returncode is None:
                elsewhere.process.kill()
            await elsewhere.process.wait()
            await plane.close()

    asyncio.run(whole())


def test_columns_are_fetched_and_written_there_and_only_names_travel(tmp_path: Path) -> None:
    async def body(plane: Any, elsewhere: Elsewhere) -> None:
        lease = await plane.claim("train", 3, fields=("tokens",), order=Order.KEY)
        done = await call_elsewhere(
            plane, lease, ("tokens",), lambda errand: elsewhere.ask("measure", errand, factor=2)
        )
        assert done.keys == tuple(KEYS) and {"length", "squares"} <= set(done.fields)
        assert plane.uploads.bytes_got == 0, "the plane's own process fetched nothing"
        assert elsewhere.seen < 20_000, "three rows of 80 kB each, and as much again written"
        columns = await plane.get(done, ("length", "squares"))
        assert columns["length"] == [40_000, 40_002, 40_004]
        for number, squares in enumerate(columns["squares"]):
            assert np.array_equal(squares.numpy(), np.arange(20_000 + number, dtype=np.float32) ** 2)
        # What one function wrote, the next one reads, from where it lies; and an answer that is no columns comes as it is.
        whole = await call_elsewhere(plane, done, ("squares",), lambda errand: elsewhere.ask("total", errand))
        assert whole == pytest.approx(sum((np.arange(20_000 + n) ** 2.0).sum() for n in range(3)), rel=1e-5)
        await plane.ack(lease, 1)

    run(tmp_path, body)


def test_new_columns_outlive_the_plane(tmp_path: Path) -> None:
    async def body(plane: Any, elsewhere: Elsewhere) -> None:
        meta = BatchMeta("train", tuple(KEYS), ("tokens",))
        await call_elsewhere(plane, meta, ("tokens",), lambda errand: elsewhere.ask("measure", errand))

    run(tmp_path, body)

    async def again() -> None:
        plane: Any = plane_rig.IMPLEMENTATIONS["transfer_queue"](tmp_path, **ROOMY)
        columns = await plane.get(BatchMeta("train", tuple(KEYS)), ("length", "squares"))
        assert columns["length"] == [20_000, 20_001, 20_002] and len(columns["squares"]) == 3
        await plane.close()

    asyncio.run(again())


def test_a_lease_that_was_given_back_fences_what_comes_late(tmp_path: Path) -> None:
    async def body(plane: Any, elsewhere: Elsewhere) -> None:
        lease: Lease = await plane.claim("train", 3, fields=("tokens",), order=Order.KEY)

        async def slowly(errand: Errand) -> Answer:
            answer = await elsewhere.ask("measure", errand)
            await plane.release(lease)
            return answer

        with pytest.raises(LeaseLost):
            await call_elsewhere(plane, lease, ("tokens",), slowly)
        with pytest.raises(DataPlaneError):
            await plane.get(lease.meta, ("length",))

    run(tmp_path, body)


def test_a_process_that_dies_leaves_nothing_and_the_call_may_be_made_again(tmp_path: Path) -> None:
    async def body(plane: Any, elsewhere: Elsewhere) -> None:
        meta = BatchMeta("train", tuple(KEYS), ("tokens",))
        elsewhere.process.kill()
        with pytest.raises((ConnectionError, BrokenPipeError)):
            await call_elsewhere(plane, meta, ("tokens",), lambda errand: elsewhere.ask("measure", errand))
        other = await Elsewhere.start(tmp_path, plane)
        try:
            done = await call_elsewhere(
                plane, meta, ("tokens",), lambda errand: other.ask("measure", errand), site=1
            )
        finally:
            other.process.kill()
            await other.process.wait()
        assert (await plane.get(done, ("length",)))["length"] == [20_000, 20_001, 20_002]

    run(tmp_path, body)


def test_a_column_that_was_not_sent_along_is_named(tmp_path: Path) -> None:
    async def body(plane: Any, elsewhere: Elsewhere) -> None:
        meta = BatchMeta("train", tuple(KEYS), ("tokens",))
        with pytest.raises(DataPlaneError, match="reads squares, and the errand was sent with tokens"):
            await call_elsewhere(plane, meta, ("tokens",), lambda errand: elsewhere.ask("total", errand))

    run(tmp_path, body)
