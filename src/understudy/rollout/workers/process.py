"""A rollout worker process: runs many agent loops at once and asks the run for every generation.

Started by `PipeWorker` (`connections.py`) as `python -m understudy.rollout.workers.process`; talks on stdin and stdout
(`workers/messages.py`) and ends when stdin closes, so it never outlives its run. Loops may print as they
like: their output goes to stderr. On another machine it is started with `--call HOST:PORT`, where the run
listens, and ends with that connection.

Another module may start it with a `RowHandler` of its own, which takes finished trajectories instead of the run
and does other work on rows.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from transformers import AutoTokenizer

from understudy.engines.base import Generation, Sampling
from understudy.errors import DataError, UnderstudyError
from understudy.media.pictures import usable_hashes
from understudy.media.processor import PictureProcessor, PictureReader
from understudy.media.store import MediaStore
from understudy.observability.faults import point
from understudy.observability.forks import close_in_forks
from understudy.rollout.agents.agent import LoopContext, checked_outputs
from understudy.rollout.agents.given import GivenAnswer
from understudy.rollout.agents.registry import LoopChoice
from understudy.rollout.render import Renderer
from understudy.rollout.user_code import awaited
from understudy.rollout.workers import messages as wire
from understudy.serving.process import Process, process_arguments, process_main
from understudy.types.prompt import Prompt
from understudy.types.trajectory import Trajectory

_LIMIT = 1 << 24
"""Bytes of a message that the reader buffers."""


class RowHandler(Protocol):
    """What a worker does besides running loops: rewards and storage of trajectories, and work requests. Segments and bodies are
    opaque to the worker."""

    @property
    def work(self) -> Mapping[str, Callable[[bytes, int | None], Awaitable[bytes]]]: ...

    async def store(
        self, prompt: Prompt, trajectories: Sequence[Trajectory], segment: int, sampling: Sampling
    ) -> bytes:
        """Store a session's trajectories; returns the body of `Stored`."""
        ...

    async def close(self) -> None: ...


MakeRowHandler = Callable[[wire.Setup, Renderer], RowHandler]


class Worker:
    """The sessions of one worker process. Runs on the process's event loop."""

    def __init__(
        self, setup: wire.Setup, send: Callable[[bytes], None], make_handler: MakeRowHandler | None = None
    ) -> None:
        tokenizer = AutoTokenizer.from_pretrained(setup.tokenizer, trust_remote_code=setup.own_code)
        self._renderer = Renderer(
            tokenizer,
            context=setup.context,
            reserve=setup.reserve,
            template_options=setup.template_options,
            max_prompt=setup.max_prompt,
            truncate=setup.truncate,
            pictures=_pictures(setup),
        )
        self._loops = LoopChoice(setup.agent, setup.options)
        self._handler = make_handler(setup, self._renderer) if make_handler is not None else None
        self._send = send
        self._sessions: dict[int, asyncio.Task[None]] = {}
        self._generations: dict[int, asyncio.Future[Generation]] = {}
        """By generation id."""
        self._asked = 0

    def say(self, message: wire.ToRun) -> None:
        self._send(wire.frame(message))

    async def serve(self, reader: asyncio.StreamReader) -> None:
        self.say(wire.Ready())
        while (message := await wire.read_from_run(reader)) is not None:
            if isinstance(message, wire.Begin):
                self._begin(message.session_id, self._session(message))
            elif isinstance(message, wire.WorkRequest):
                self._begin(message.session_id, self._work(message))
            elif isinstance(message, wire.Generated):
                answer = self._generations.get(message.generation_id)
                if answer is not None and not answer.done():
                    answer.set_result(message.generation)
            elif isinstance(message, wire.CancelSession):
                task = self._sessions.pop(message.session_id, None)
                if task is not None:
                    task.cancel()
        for task in self._sessions.values():
            task.cancel()
        await asyncio.gather(*self._sessions.values(), return_exceptions=True)
        await self._loops.close()
        if self._handler is not None:
            await self._handler.close()

    def _begin(self, session_id: int, work: Coroutine[Any, Any, wire.ToRun]) -> None:
        self._sessions[session_id] = asyncio.create_task(self._guarded(session_id, work))

    async def _guarded(self, session_id: int, work: Coroutine[Any, Any, wire.ToRun]) -> None:
        """Send the result of `work`, or `LoopFailed`."""
        try:
            self.say(await work)
        except UnderstudyError as error:
            self.say(wire.LoopFailed(session_id, isinstance(error, DataError), str(error)))
        except Exception:
            self.say(wire.LoopFailed(session_id, False, traceback.format_exc()))
        finally:
            self._sessions.pop(session_id, None)

    async def _work(self, request: wire.WorkRequest) -> wire.ToRun:
        run = self._handler.work.get(request.name) if self._handler is not None else None
        if run is None:
            raise DataError(f"this worker knows no work request {request.name!r}")
        return wire.WorkDone(request.session_id, await run(request.body, request.segment))

    async def _generate(
        self, session_id: int, tokens: np.ndarray, sampling: Sampling, turn: int, media: Sequence[str]
    ) -> Generation:
        self._asked += 1
        generation_id, context = self._asked, np.asarray(tokens).astype(np.int32, copy=False)
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._generations[generation_id] = answer
        self.say(wire.GenerateCall(session_id, generation_id, context, sampling, turn, list(media)))
        point("worker.asked")
        try:
            generation = await answer
        except asyncio.CancelledError:
            self.say(wire.CancelGeneration(session_id, generation_id))
            raise
        finally:
            del self._generations[generation_id]
        point("worker.answered")
        return generation

    async def _session(self, begin: wire.Begin) -> wire.ToRun:
        session_id, prompt, sampling = begin.session_id, begin.prompt, begin.sampling

        async def generate(
            tokens: np.ndarray, sampling: Sampling, turn: int, media: Sequence[str] | None = None
        ) -> Generation:
            shown = context.media if media is None else media
            return await self._generate(session_id, tokens, sampling, turn, shown)

        context = LoopContext(
            generate,
            self._renderer,
            sampling,
            prompt.key,
            begin.session,
            begin.context,
            begin.max_generated,
            usable_hashes(prompt.messages),
            given=begin.given,
        )
        loop = GivenAnswer() if context.given else self._loops.of(prompt)
        trajectories = checked_outputs(await awaited(loop.run(prompt, context)), context)
        if begin.segment is None or self._handler is None:
            return wire.Done(session_id, [wire.pack_output(one) for one in trajectories])
        self.say(wire.LoopReturned(session_id, len(trajectories)))
        return wire.Stored(
            session_id, await self._handler.store(prompt, trajectories, begin.segment, sampling)
        )


def _pictures(setup: wire.Setup) -> PictureReader | None:
    processor = PictureProcessor.load(setup.tokenizer) if setup.pictures else None
    return None if processor is None else PictureReader(processor, MediaStore(setup.pictures))


Channel = tuple[asyncio.StreamReader, Callable[[bytes], None]]


async def _pipes() -> Channel:
    # The channel is a copy of stdout; stdout itself is redirected to stderr, for prints of user code.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # The run detects our death by EOF on this pipe, so a fork must not hold it. In a fork it is redirected to
    # /dev/null: if it were closed, another file could get its number.
    close_in_forks(out, lambda file: os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno()))
    reader = asyncio.StreamReader(limit=_LIMIT)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )

    def send(frame: bytes) -> None:
        try:
            out.write(frame)
            out.flush()
        except (BrokenPipeError, ConnectionResetError):
            # The run is gone, and EOF on stdin ends this worker. Its sessions must not fill the run's terminal with stacks.
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())

    return reader, send


async def _call(address: str, number: int, token: str) -> Channel:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=_LIMIT)
    writer.write(wire.frame(wire.Hello(token, number)))
    return reader, writer.write


async def _run(process: Process, make_handler: MakeRowHandler | None) -> None:
    args = process.args
    reader, send = await (
        _pipes() if args.call is None else _call(args.call, args.number, process.token or "")
    )
    process.ready()
    setup = await wire.read_from_run(reader)
    if not isinstance(setup, wire.Setup):
        return
    sys.path += [path for path in setup.import_paths if path not in sys.path]
    await Worker(setup, send, make_handler).serve(reader)


def main(make_handler: MakeRowHandler | None = None) -> int:
    parser = process_arguments("understudy.rollout.workers.process", __doc__, serves=False)
    parser.add_argument(
        "--call", metavar="HOST:PORT", help="where the run listens; stdin and stdout when not given"
    )
    parser.add_argument("--number", type=int, default=0, help="which worker this is")
    # A local worker writes to the run's terminal: only warnings.
    return process_main(
        lambda process: _run(process, make_handler), parser.parse_args(), log_level=logging.WARNING
    )


if __name__ == "__main__":
    sys.exit(main())
