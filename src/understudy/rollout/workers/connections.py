"""Connections between the run and its worker processes: pipes on one machine, TCP from another.

    this machine       the run starts the worker and holds its stdin and stdout
    another machine    `Launch` starts it there, and it connects back: run <──TCP, Hello (token, number) first── worker

Both carry the messages of `messages.py`. A closed connection means that the worker is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import sys
from collections.abc import Awaitable, Callable
from typing import Protocol

from understudy.errors import DataError
from understudy.rollout.workers import messages as wire
from understudy.serving.frames import FrameError

WORKER_MODULE = "understudy.rollout.workers.process"
_LIMIT = 1 << 24
"""Bytes of a message that a reader buffers."""
_CALL_SECONDS = 60.0
"""How long a worker on another machine may take to connect."""
_HELLO_SECONDS = 10.0
"""How long a connection may take to send its `Hello`."""
_MOST_UNKNOWN = 64
"""Connections without a `Hello` yet. A worker sends its own at once; beyond this many the oldest is closed."""
_GRACE_SECONDS = 5.0
"""How long a worker may take to end after its stdin was closed; then it is killed."""
_LOOK_SECONDS = 1.0
"""How often it is checked that a worker on another machine lives."""


class WorkerConnection(Protocol):
    """The run's connection to one worker."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    pid: int

    async def ended(self) -> str:
        """Waits until the worker has ended; says how, for messages."""
        ...

    async def close(self, *, at_once: bool = False) -> None:
        """Ends the worker and waits until it is gone."""
        ...


OpenLine = Callable[[int], Awaitable[WorkerConnection]]
"""Starts the worker with this number and returns the connection to it."""


class PipeWorker:
    """A worker on this machine, by its stdin and stdout."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.reader, self.writer = process.stdout, process.stdin
        self.pid = process.pid
        self._process = process

    @staticmethod
    async def open(index: int) -> PipeWorker:
        pipe = asyncio.subprocess.PIPE
        # In a session of its own: Ctrl-C in the terminal reaches the run alone, which finishes its step.
        return PipeWorker(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", WORKER_MODULE),
                stdin=pipe,
                stdout=pipe,
                limit=_LIMIT,
                start_new_session=True,
            )
        )

    async def ended(self) -> str:
        return f"died with exit code {await self._process.wait()}"

    async def close(self, *, at_once: bool = False) -> None:
        self.writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), 0.0 if at_once else _GRACE_SECONDS)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


Launch = Callable[[int, str], Awaitable[int]]
"""Starts worker `number` on another machine with the address HOST:PORT to connect to; returns its pid there."""
Dismiss = Callable[[int], Awaitable[None]]
"""Ends worker `number` on its machine."""
Lives = Callable[[int], bool]
"""Whether worker `number` is alive: a machine that loses power does not close its connections."""


class WorkerListener:
    """Accepts connections of workers on other machines; closes those without the token. Runs on the run's
    event loop."""

    def __init__(self, launch: Launch, dismiss: Dismiss, lives: Lives, token: str) -> None:
        self._launch, self._dismiss, self._lives, self._token = launch, dismiss, lives, token
        self._server: asyncio.Server | None = None
        self._expected: dict[int, asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = {}
        self._unknown: dict[asyncio.StreamWriter, None] = {}
        """Connections that have not said who they are, the oldest first."""
        self._address = ""

    async def listen(self, host: str) -> None:
        self._server = await asyncio.start_server(self._called, host, 0, limit=_LIMIT)
        self._address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def open(self, index: int) -> TcpWorker:
        call: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
        self._expected[index] = call = asyncio.get_running_loop().create_future()
        try:
            pid = await self._launch(index, self._address)
            async with asyncio.timeout(_CALL_SECONDS):
                reader, writer = await call
        except TimeoutError:
            await self._dismiss(index)
            raise DataError(
                f"rollout worker {index} runs and did not reach {self._address} within {_CALL_SECONDS:g} s; may its "
                "machine connect to the trainer's?"
            ) from None
        finally:
            del self._expected[index]
        return TcpWorker(reader, writer, pid, lambda: self._dismiss(index), lambda: self._lives(index))

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._unknown[writer] = None
        if len(self._unknown) > _MOST_UNKNOWN:
            next(iter(self._unknown)).transport.abort()
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                hello = await wire.read_hello(reader)
        except (TimeoutError, FrameError):
            hello = None
        finally:
            self._unknown.pop(writer)
        call = self._expected.get(hello.number) if hello is not None else None
        known = hello is not None and hmac.compare_digest(hello.token.encode(), self._token.encode())
        if call is None or call.done() or not known:
            writer.close()
            return
        call.set_result((reader, writer))

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()


class TcpWorker:
    """A worker on another machine, by TCP."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pid: int,
        dismiss: Callable[[], Awaitable[None]],
        lives: Callable[[], bool],
    ) -> None:
        self.reader, self.writer, self.pid = reader, writer, pid
        self._dismiss = dismiss
        self._watch = asyncio.create_task(self._until_gone(lives))

    async def _until_gone(self, lives: Callable[[], bool]) -> None:
        """Abort the connection once the worker is no longer alive."""
        while lives():
            await asyncio.sleep(_LOOK_SECONDS)
        self.writer.transport.abort()

    async def ended(self) -> str:
        # If only the connection broke, the worker may still be running: end it before its sessions are
        # repeated.
        await self.close()
        return "went away with its machine, or died there; its log is in the run directory"

    async def close(self, *, at_once: bool = False) -> None:
        self._watch.cancel()
        self.writer.close()
        await self._dismiss()
