"""A rollout worker process: runs many agent loops at once and asks the run for every generation.

Started by `workers.py` as `python -m understudy.rollout.workers.process`; talks on stdin and stdout
(`workers/messages.py`) and ends when stdin closes, so it never outlives its run. Loops may print as they
like: their output goes to stderr. On another machine it is started with `--call HOST:PORT`, where the run
listens, and ends with that connection.

Another module may start it with a `Keeper` of its own, which takes finished trajectories instead of the run,
brings tokens to engines, and runs errands.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from transformers import AutoTokenizer

from understudy.engines.base import Generation, Sampling
from understudy.engines.remote_tokens import Grant
from understudy.engines.servers.worker_client import Leg
from understudy.errors import DataError, UnderstudyError
from understudy.observability.forks import only_here
from understudy.rollout.agents.agent import LoopContext, check_ids, checked_outputs
from understudy.rollout.agents.registry import LoopChoice
from understudy.rollout.render import Renderer
from understudy.rollout.workers import messages as wire
from understudy.rollout.workers.generations import Questions
from understudy.serving.child import end_with_launcher
from understudy.types.prompt import Prompt
from understudy.types.trajectory import Trajectory

_LIMIT = 1 << 24


class Keeper(Protocol):
    """What a worker can do besides running loops: store trajectories, send tokens to engines, run errands.
    Tickets and bodies are opaque to the worker."""

    @property
    def errands(self) -> Mapping[str, Callable[[bytes, int | None], Awaitable[bytes]]]: ...

    async def keep(self, prompt: Prompt, trajectories: Sequence[Trajectory], ticket: int) -> bytes:
        """Store a session's trajectories; returns the body of `Kept`."""
        ...

    async def bring(self, grant: Grant, tokens: np.ndarray, sampling: Sampling, leg: Leg) -> Generation:
        """Send tokens to the granted engine process or server; returns what was written, after what earlier
        calls wrote."""
        ...

    async def close(self) -> None: ...


MakeKeeper = Callable[[wire.Setup, Renderer], Keeper]


class Worker:
    """The sessions of one worker process. Runs on the process's event loop."""

    def __init__(
        self, setup: wire.Setup, send: Callable[[bytes], None], make_keeper: MakeKeeper | None = None
    ) -> None:
        tokenizer = AutoTokenizer.from_pretrained(setup.tokenizer)
        self._renderer = Renderer(
            tokenizer,
            context=setup.context,
            reserve=setup.reserve,
            template_options=setup.template_options,
            max_prompt=setup.max_prompt,
            truncate=setup.truncate,
        )
        self._loops = LoopChoice(setup.agent, setup.options)
        self._keeper = make_keeper(setup, self._renderer) if make_keeper is not None else None
        self._send = send
        self._sessions: dict[int, asyncio.Task[None]] = {}
        self._questions = Questions(self.say, self._keeper.bring if self._keeper is not None else None)

    def say(self, message: wire.ToRun) -> None:
        self._send(wire.frame(message))

    async def serve(self, reader: asyncio.StreamReader) -> None:
        self.say(wire.Ready())
        while (message := await wire.read_from_run(reader)) is not None:
            if isinstance(message, wire.Begin):
                self._begin(message.session_id, self._session(message))
            elif isinstance(message, wire.Errand):
                self._begin(message.session_id, self._errand(message))
            elif isinstance(message, wire.Generated | wire.Grant | wire.Cut | wire.Take):
                self._questions.told(message)
            elif isinstance(message, wire.Drop):
                task = self._sessions.pop(message.session_id, None)
                if task is not None:
                    task.cancel()
        for task in self._sessions.values():
            task.cancel()
        await asyncio.gather(*self._sessions.values(), return_exceptions=True)
        await self._loops.close()
        if self._keeper is not None:
            await self._keeper.close()

    def _begin(self, session_id: int, work: Coroutine[Any, Any, wire.ToRun]) -> None:
        self._sessions[session_id] = asyncio.create_task(self._guarded(session_id, work))

    async def _guarded(self, session_id: int, work: Coroutine[Any, Any, wire.ToRun]) -> None:
        """Send the result of `work`, or `Failed`."""
        try:
            self.say(await work)
        except UnderstudyError as error:
            self.say(wire.Failed(session_id, isinstance(error, DataError), str(error)))
        except Exception:
            self.say(wire.Failed(session_id, False, traceback.format_exc()))
        finally:
            self._sessions.pop(session_id, None)

    async def _errand(self, errand: wire.Errand) -> wire.ToRun:
        run = self._keeper.errands.get(errand.name) if self._keeper is not None else None
        if run is None:
            raise DataError(f"this worker knows no errand {errand.name!r}")
        return wire.ErrandDone(errand.session_id, await run(errand.body, errand.ticket))

    async def _session(self, begin: wire.Begin) -> wire.ToRun:
        session_id = begin.session_id
        prompt = wire.unpack_prompt(begin.prompt)
        sampling = wire.unpack_sampling(begin.sampling)

        async def generate(tokens: np.ndarray, sampling: Sampling, turn: int) -> Generation:
            return await self._questions.ask(session_id, tokens, sampling, turn, far=begin.far)

        context = LoopContext(
            generate, self._renderer, sampling, prompt.key, begin.session, begin.context, begin.max_generated
        )
        trajectories = checked_outputs(await self._loops.of(prompt).run(prompt, context), context)
        if begin.ticket is None or self._keeper is None:
            return wire.Done(session_id, [wire.pack_trajectory(one) for one in trajectories])
        for one in trajectories:
            check_ids(one, sampling)
        self.say(wire.Judging(session_id, len(trajectories)))
        return wire.Kept(session_id, await self._keeper.keep(prompt, trajectories, begin.ticket))


Channel = tuple[asyncio.StreamReader, Callable[[bytes], None]]


async def _pipes() -> Channel:
    # The channel is a copy of stdout; stdout itself is redirected to stderr, for prints of user code.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # The run detects our death by EOF on this pipe, so a fork must not hold it. In a fork it is redirected to
    # /dev/null: if it were closed, another file could get its number.
    only_here(out, lambda file: os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno()))
    reader = asyncio.StreamReader(limit=_LIMIT)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )

    def send(frame: bytes) -> None:
        out.write(frame)
        out.flush()

    return reader, send


async def _call(address: str, number: int) -> Channel:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=_LIMIT)
    writer.write(wire.frame(wire.Hello(os.environ.get("UNDERSTUDY_TOKEN", ""), number)))
    return reader, writer.write


async def _main(args: argparse.Namespace, make_keeper: MakeKeeper | None) -> None:
    reader, send = await (_pipes() if args.call is None else _call(args.call, args.number))
    if args.ready_file is not None:
        temporary = args.ready_file.with_name(f".{args.ready_file.name}.{os.getpid()}")
        temporary.write_text(json.dumps({"pid": os.getpid()}))
        temporary.replace(args.ready_file)
    setup = await wire.read_from_run(reader)
    if not isinstance(setup, wire.Setup):
        return
    sys.path += [path for path in setup.import_paths if path not in sys.path]
    await Worker(setup, send, make_keeper).serve(reader)


def main(make_keeper: MakeKeeper | None = None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--call", metavar="HOST:PORT", help="where the run listens; stdin and stdout when not given"
    )
    parser.add_argument("--number", type=int, default=0, help="which worker this is")
    parser.add_argument("--ready-file", type=Path, help="written once the run was reached")
    parser.add_argument("--watch-fd", type=int, help="exit when this inherited pipe closes")
    args = parser.parse_args()
    if args.watch_fd is not None:
        end_with_launcher(args.watch_fd)
    asyncio.run(_main(args, make_keeper))


if __name__ == "__main__":
    main()
