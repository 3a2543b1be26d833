"""A proxy that delays, resets, partitions or damages connections to an external teacher or between processes of
a run."""

from __future__ import annotations

import asyncio
import atexit
import functools
import random
import socket
import tempfile
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from small_runs import ASSETS

TOKEN = "of the nemesis"
_DELAY_SECONDS = 0.6
_OF_A_PORT = 8
"""Strangers' connections to each port."""
_GREETINGS = (
    b"",
    b"GET / HTTP/1.1\r\n",
    b"POST /v1/score HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n",
    b"\x00" * 4096,
    b"\xff" * 64,
)


@functools.cache
def server_url() -> str:
    """One server for all runs of this process; it ends with it."""
    from teacher_rig import await_ready, spawn_replica  # imports torch, which other modes need not

    folder = Path(tempfile.mkdtemp(prefix="understudy-nemesis-teacher-"))
    model = ASSETS / "models" / "teacher-add"
    replica = spawn_replica(model, folder, "add", "--batching", "by_request", token=TOKEN)
    atexit.register(replica.end)
    return await_ready(replica, folder)


class Proxy:
    """Passes TCP connections on, on a thread of its own. `trouble` is partition, delay, reset, damage or empty.

    Without a target, the first line of a connection is the port that it is passed on to (`shim/`)."""

    def __init__(self, target: str | None = None) -> None:
        self._target = None if target is None else urlsplit(target)
        self.trouble = ""
        self.port = 0
        self._chance = random.Random(0)
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _run(self, ready: threading.Event) -> None:
        async def serve() -> None:
            server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            ready.set()
            with suppress(asyncio.CancelledError):
                await server.serve_forever()

        self._loop.run_until_complete(serve())
        for task in asyncio.all_tasks(self._loop):
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(task)
        self._loop.close()

    def make(self, trouble: str) -> None:
        self.trouble = trouble
        if trouble == "reset":
            self._loop.call_soon_threadsafe(self._reset)

    def _reset(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()

    def close(self) -> None:
        def stop() -> None:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()

        self._loop.call_soon_threadsafe(stop)
        self._thread.join(5)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.trouble == "reset":
            writer.transport.abort()
            return
        try:
            if self._target is None:
                host, port = "127.0.0.1", int(await reader.readline())
            else:
                host, port = str(self._target.hostname), int(self._target.port or 0)
            far_reader, far_writer = await asyncio.open_connection(host, port)
        except (OSError, ValueError):
            writer.transport.abort()
            return
        self._open |= {writer, far_writer}
        try:
            await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))
        finally:
            for one in (writer, far_writer):
                self._open.discard(one)
                one.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(1 << 16):
                while self.trouble == "partition":
                    await asyncio.sleep(0.05)
                if self.trouble == "delay":
                    await asyncio.sleep(_DELAY_SECONDS)
                if self.trouble == "damage":
                    piece = _damaged(piece, self._chance)
                writer.write(piece)
                await writer.drain()
            writer.write_eof()


def _damaged(piece: bytes, chance: random.Random) -> bytes:
    """Changes a byte of the body in this piece, if there is one; HTTP itself notices a damaged head."""
    start = piece.find(b"\r\n\r\n") + 4 if b"HTTP/1." in piece[:256] else 0
    if start == len(piece):
        return piece
    place = chance.randrange(start, len(piece))
    return piece[:place] + bytes([piece[place] ^ 0x41]) + piece[place + 1 :]


def strangers(processes: Iterable[psutil.Process], chance: random.Random) -> list[socket.socket]:
    """Opens connections to every TCP port that the processes listen on; each sends some bytes and stays open."""
    found = []
    for process in processes:
        with suppress(psutil.Error):
            listening = [
                one.laddr for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN
            ]
            for host, port in listening * _OF_A_PORT:
                with suppress(OSError):
                    one = socket.create_connection(
                        ("127.0.0.1" if host in ("::", "0.0.0.0") else host, port), 1
                    )
                    found.append(one)
                    one.sendall(chance.choice((*_GREETINGS, chance.randbytes(500))))
    return found
