"""The connection to a rollout worker: a machine lost without closing it, unauthorized peers, and Ctrl-C."""

import asyncio
import os

import numpy as np

from understudy.rollout.workers import messages as wire
from understudy.rollout.workers.connections import PipeWorker, WorkerListener


def test_the_connection_of_a_dead_worker_is_closed_although_its_socket_is_still_open() -> None:
    """The connection stays open, as with a machine that lost power; only the launcher knows that the worker is gone."""

    async def body() -> None:
        alive, dismissed = True, []
        open_writers: list[asyncio.StreamWriter] = []

        async def launch(number: int, address: str) -> int:
            host, _, port = address.rpartition(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(wire.frame(wire.Hello("secret", number)))
            open_writers.append(writer)
            return 4711

        async def dismiss(number: int) -> None:
            dismissed.append(number)

        worker_listener = WorkerListener(launch, dismiss, lambda number: alive, "secret")
        await worker_listener.listen("127.0.0.1")
        line = await worker_listener.open(3)
        reading = asyncio.ensure_future(wire.read_from_worker(line.reader))
        await asyncio.sleep(0.05)
        assert not reading.done()
        alive = False
        assert await asyncio.wait_for(reading, 5) is None
        assert "went away" in await line.ended()
        assert dismissed == [3], "the lost worker must be dismissed before its sessions are run elsewhere"
        open_writers[0].close()
        await worker_listener.close()

    asyncio.run(body())


def test_unauthorized_connections_are_closed_and_a_worker_still_connects_among_hundreds() -> None:
    async def body() -> None:
        async def launch(number: int, address: str) -> int:
            writers.append((await call(wire.frame(wire.Hello("secret", number))))[1])
            return 4711

        async def dismiss(number: int) -> None:
            raise AssertionError(f"worker {number} was dismissed instead of connected")

        async def call(greeting: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            host, _, port = worker_listener._address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(greeting)
            return reader, writer

        worker_listener = WorkerListener(launch, dismiss, lambda number: True, "secret")
        await worker_listener.listen("127.0.0.1")
        writers: list[asyncio.StreamWriter] = []
        valid = wire.frame(wire.Hello("secret", 3))
        rng = np.random.default_rng(0)
        for _ in range(200):
            frame = bytearray(valid)
            for place in rng.integers(0, len(frame), 3):
                frame[place] ^= int(rng.integers(1, 256))
            reader, writer = await call(bytes(frame))
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
        files = len(os.listdir("/proc/self/fd"))
        crowd = [await call(b"") for _ in range(300)]  # connections that send nothing
        await asyncio.sleep(0.1)
        assert len(os.listdir("/proc/self/fd")) < files + 300 + 80, (
            "the listener keeps too many silent connections open"
        )
        line = await asyncio.wait_for(worker_listener.open(3), 5)
        writers[0].write(wire.frame(wire.Ready()))
        assert await asyncio.wait_for(wire.read_from_worker(line.reader), 5) is not None
        for _, writer in crowd:
            writer.transport.abort()
        await worker_listener.close()

    asyncio.run(body())


def test_a_local_worker_is_in_another_process_group_so_that_ctrl_c_does_not_reach_it() -> None:
    """On Ctrl-C the run finishes its step first, for which it needs its workers."""

    async def body() -> None:
        line = await PipeWorker.open(0)
        try:
            assert os.getpgid(line.pid) != os.getpgrp()
        finally:
            await line.close(at_once=True)

    asyncio.run(body())
