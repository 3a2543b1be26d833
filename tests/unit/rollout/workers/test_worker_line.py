"""The line to a worker on another machine, where that machine goes without hanging up."""

import asyncio
import os

import numpy as np

from understudy.rollout.workers import messages as wire
from understudy.rollout.workers.connections import PipeWorker, WorkerListener


def test_a_worker_that_is_known_to_be_gone_is_hung_up_on() -> None:
    """Its connection stays open, as that of a machine without power does; only its launcher knows."""

    async def body() -> None:
        alive, dismissed = True, []
        strangers: list[asyncio.StreamWriter] = []

        async def launch(number: int, address: str) -> int:
            host, _, port = address.rpartition(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(wire.frame(wire.Hello("secret", number)))
            strangers.append(writer)
            return 4711

        async def dismiss(number: int) -> None:
            dismissed.append(number)

        board = WorkerListener(launch, dismiss, lambda number: alive, "secret")
        await board.listen("127.0.0.1")
        line = await board.open(3)
        coming = asyncio.ensure_future(wire.read_from_worker(line.reader))
        await asyncio.sleep(0.05)
        assert not coming.done()
        alive = False
        assert await asyncio.wait_for(coming, 5) is None
        assert "went away" in await line.ended()
        assert dismissed == [3], "what may be left of it is ended before others do its work"
        strangers[0].close()
        await board.close()

    asyncio.run(body())


def test_strangers_are_hung_up_on_and_a_worker_gets_through_a_crowd_of_them() -> None:
    async def body() -> None:
        async def launch(number: int, address: str) -> int:
            writers.append((await call(wire.frame(wire.Hello("secret", number))))[1])
            return 4711

        async def dismiss(number: int) -> None:
            raise AssertionError(f"worker {number} was expected to come through")

        async def call(greeting: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            host, _, port = board._address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(greeting)
            return reader, writer

        board = WorkerListener(launch, dismiss, lambda number: True, "secret")
        await board.listen("127.0.0.1")
        writers: list[asyncio.StreamWriter] = []
        honest = wire.frame(wire.Hello("secret", 3))
        chance = np.random.default_rng(0)
        for _ in range(200):
            frame = bytearray(honest)
            for place in chance.integers(0, len(frame), 3):
                frame[place] ^= int(chance.integers(1, 256))
            reader, writer = await call(bytes(frame))
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
        files = len(os.listdir("/proc/self/fd"))
        crowd = [await call(b"") for _ in range(300)]  # they say nothing
        await asyncio.sleep(0.1)
        assert len(os.listdir("/proc/self/fd")) < files + 300 + 80, "the listener keeps few of them"
        line = await asyncio.wait_for(board.open(3), 5)
        writers[0].write(wire.frame(wire.Ready()))
        assert await asyncio.wait_for(wire.read_from_worker(line.reader), 5) is not None
        for _, writer in crowd:
            writer.transport.abort()
        await board.close()

    asyncio.run(body())


def test_ctrl_c_in_the_terminal_does_not_reach_a_worker_on_this_machine() -> None:
    """The run finishes its step first."""

    async def body() -> None:
        line = await PipeWorker.open(0)
        try:
            assert os.getpgid(line.pid) != os.getpgrp()
        finally:
            await line.close(at_once=True)

    asyncio.run(body())
