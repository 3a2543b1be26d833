"""Workers that bring their tokens to engines themselves: what they and the run say to each other, and who dies when."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bringing_worker import written
from chat_tokenizers import chat_tokenizer
from recording_engine import CONTEXT

from understudy.engines.base import Generation, Sampling
from understudy.engines.remote_tokens import Bearer, BearerGone, Grant, NotBrought, told_of
from understudy.errors import DataError, EngineError
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.render import Renderer
from understudy.rollout.workers.connections import PipeLine
from understudy.rollout.workers.pool import LoopWorkers
from understudy.types.prompt import Prompt

TOKENIZER = chat_tokenizer("chatml")
SAMPLING = Sampling(6, (TOKENIZER.eos_token_id,))


class Tickets:
    def take(self, writer: int) -> Any:
        return SimpleNamespace(number=1)

    def end(self, writer: int) -> None:
        return


async def open_line(index: int) -> PipeLine:
    pipe = asyncio.subprocess.PIPE
    words = [sys.executable, str(Path(__file__).with_name("bringing_worker.py"))]
    return PipeLine(await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe))


Ask = Callable[[int, int, int, Bearer], Awaitable[Generation]]


def with_worker(
    folder: Path, use: Callable[[LoopWorkers, Callable[[Ask], LoopContext]], Awaitable[Any]]
) -> Any:
    async def near(tokens: np.ndarray, sampling: Sampling, turn: int) -> Generation:
        raise AssertionError("no tokens pass the run")

    async def body() -> Any:
        TOKENIZER.save_pretrained(folder)
        renderer = Renderer(TOKENIZER, context=CONTEXT)
        workers = LoopWorkers(
            1, tokenizer=folder, agent="chatty_loop:Chatty", context=CONTEXT,
            open_line=open_line, tickets=Tickets(),
        )  # fmt: skip

        def context(ask: Ask) -> LoopContext:
            return LoopContext(near, renderer, SAMPLING, PROMPT.key, 0, CONTEXT, generate_far=ask)

        try:
            await workers.start()
            return await use(workers, context)
        finally:
            await workers.close()

    return asyncio.run(asyncio.wait_for(body(), 90))


PROMPT = Prompt("00000-0000000", 0, 0, "add", text="1 + 1 =")


def expected() -> list[int]:
    """Both turns of the loop, with seeds 100 and 101."""
    tokens, own = Renderer(TOKENIZER, context=CONTEXT).render(PROMPT), []
    for turn in range(2):
        new = written(tokens, SAMPLING, 100 + turn).tokens
        tokens = np.concatenate([tokens, new, np.array([5, 6], np.int32)])
        own += new.tolist()
    return own


def grant(turn: int, call: int, url: str = "right") -> Grant:
    return Grant(call, url, "secret", f"{PROMPT.key}_0_0/{turn}", "s", 100 + turn)


def kept(body: bytes) -> list[int]:
    return np.frombuffer(body.rpartition(b"|")[0], np.int32).tolist()


def test_a_worker_keeps_its_tokens_and_tells_lengths_whatever_happens_on_the_way(tmp_path: Path) -> None:
    async def use(workers: LoopWorkers, context: Callable[[Ask], LoopContext]) -> None:
        async def trouble_free(length: int, most: int, turn: int, bearer: Bearer) -> Generation:
            assert most == 6
            brought = await bearer.bring(grant(turn, turn + 1))
            assert brought.tokens and (brought.oldest, brought.newest) == (0, brought.tokens - 1)
            return told_of(brought)

        answer = await workers.run_kept(PROMPT, context(trouble_free))
        assert kept(answer.body) == expected()
        assert 0 < workers.traffic.generation < 1000
        told: list[str] = []

        async def troubled(length: int, most: int, turn: int, bearer: Bearer) -> Generation:
            calls = iter(range(10 * turn + 1, 99))
            with pytest.raises(NotBrought, match="no way"):
                await bearer.bring(grant(turn, next(calls), "unreachable"))
            for silent in ("given up", "hang"):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(bearer.bring(grant(turn, next(calls), silent)), 0.3)
            first = await bearer.bring(grant(turn, next(calls)))
            await asyncio.sleep(0.1)
            again = await bearer.bring(grant(turn, next(calls)))  # its neighbour's host died meanwhile
            assert first == again
            told.append(again.stop_reason)
            return told_of(again)

        answer = await workers.run_kept(PROMPT, context(troubled))
        assert kept(answer.body) == expected() and told == ["length"] * 2

        async def aborted(length: int, most: int, turn: int, bearer: Bearer) -> Generation:
            ids = np.empty(0, np.int32)
            return Generation(ids, ids.astype(np.float32), ids, "aborted")  # type: ignore[arg-type]

        assert kept((await workers.run_kept(PROMPT, context(aborted))).body) == []

        async def broken(length: int, most: int, turn: int, bearer: Bearer) -> Generation:
            await bearer.bring(grant(turn, 1))
            raise EngineError("no engine process is left")

        with pytest.raises(EngineError, match="no engine process is left"):
            await workers.run_kept(PROMPT, context(broken))

        async def late(length: int, most: int, turn: int, bearer: Bearer) -> Generation:
            bringing = asyncio.ensure_future(bearer.bring(grant(turn, 1, "hang")))
            await asyncio.sleep(0.1)
            bearer.give_up()
            await bringing
            raise AssertionError

        with pytest.raises(DataError, match="did not bring its tokens to the engine"):
            await workers.run_kept(PROMPT, context(late))

    with_worker(tmp_path, use)


def test_a_loop_that_waits_no_longer_withdraws_its_question(tmp_path: Path) -> None:
    async def use(workers: LoopWorkers, context: Callable[[Ask], LoopContext]) -> None:
        said: list[str] = []

        async def ask(length: int, most: int, turn: int, bearer: Bearer) -> Generation:
            if turn < 9:
                return told_of(await bearer.bring(grant(turn, turn + 1)))
            bringing = asyncio.ensure_future(bearer.bring(grant(turn, 1, "hang")))
            bringing.add_done_callback(lambda done: said.append(type(done.exception()).__name__))
            try:
                return await asyncio.Event().wait()  # type: ignore[return-value]
            finally:
                said.append("withdrawn")

        impatient = replace(PROMPT, columns={"impatient": True})
        answer = await workers.run_kept(impatient, context(ask))
        assert kept(answer.body) == expected() and said == ["withdrawn", "BearerGone"]

    with_worker(tmp_path, use)


@pytest.mark.slow
def test_a_worker_that_dies_as_it_brings_is_told_to_the_engine_after_the_question_is_withdrawn(
    tmp_path: Path,
) -> None:
    async def use(workers: LoopWorkers, context: Callable[[Ask], LoopContext]) -> None:
        lives: list[int] = []
        gone: list[tuple[str, bool]] = []

        async def ask(length: int, most: int, turn: int, bearer: Bearer) -> Generation:
            lives.append(turn)
            url = {1: "die", 3: "hang"}.get(len(lives), "right")
            bringing = asyncio.ensure_future(bearer.bring(grant(turn, len(lives), url)))
            call: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()

            def told(done: asyncio.Future[Any]) -> None:
                if not done.cancelled() and isinstance(done.exception(), BearerGone):
                    gone.append((str(done.exception()), call.cancelled()))
                elif not call.done():
                    call.set_result(told_of(done.result()))

            bringing.add_done_callback(told)
            if url == "hang":
                asyncio.get_running_loop().call_later(0.2, os.kill, workers.pids[0], signal.SIGKILL)
            return await call

        answer = await workers.run_kept(PROMPT, context(ask))
        assert kept(answer.body) == expected()
        assert lives == [0, 0, 1, 0, 1], "begun again from the start, twice"
        assert [withdrawn for _, withdrawn in gone] == [True, True]
        assert answer.life == 3

    with_worker(tmp_path, use)
