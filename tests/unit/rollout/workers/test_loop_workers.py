"""Agent loops in worker processes: the same rows as without workers, and what happens when a worker is killed."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from chat_tokenizers import chat_tokenizer
from recording_engine import CONTEXT, RecordingEngine

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.errors import ClusterError, ConfigError, DataError, EngineError
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.given import GivenAnswer
from understudy.rollout.agents.registry import LoopChoice
from understudy.rollout.render import Renderer
from understudy.rollout.seeds import derive_seed
from understudy.rollout.timing import BatchTimings
from understudy.rollout.workers import pool as workers_module
from understudy.rollout.workers.connections import PipeWorker
from understudy.rollout.workers.pool import LoopWorkers
from understudy.types.prompt import Prompt
from understudy.types.trajectory import Origin, Trajectory

TOKENIZER = chat_tokenizer("chatml")


def prompts(count: int, **columns: Any) -> list[Prompt]:
    return [Prompt(f"00000-{i:07d}", i, 0, "add", text=f"{i} + {i} =", columns=columns) for i in range(count)]


Use = Callable[[LoopWorkers, Callable[[Prompt], LoopContext]], Awaitable[Any]]


async def use_with_engine(workers: LoopWorkers, use: Use, generate: Any = None) -> Any:
    engine = RecordingEngine(TOKENIZER)
    renderer = Renderer(TOKENIZER, context=CONTEXT)

    def context(prompt: Prompt) -> LoopContext:
        async def ask(tokens: np.ndarray, sampling: Sampling, turn: int) -> Generation:
            if generate is not None:
                return await generate(tokens, sampling, turn)
            seed = derive_seed(3, prompt.epoch, prompt.key, 0, turn)
            return await engine.generate(
                GenerateRequest(f"{prompt.key}/{turn}", tokens, sampling, seed), prompt.key
            )

        return LoopContext(ask, renderer, Sampling(6, (TOKENIZER.eos_token_id,)), prompt.key, 0, CONTEXT)

    try:
        return await use(workers, context)
    finally:
        await engine.close()


@asynccontextmanager
async def started_workers(folder: Path, count: int, **settings: Any) -> AsyncIterator[LoopWorkers]:
    TOKENIZER.save_pretrained(folder)
    workers = LoopWorkers(count, tokenizer=folder, agent="chatty_loop:Chatty", context=CONTEXT, **settings)
    try:
        await workers.start()
        yield workers
    finally:
        await workers.close()
        assert not [pid for pid in workers.pids if psutil.pid_exists(pid)]


def with_workers(folder: Path, use: Use, *, generate: Any = None, **settings: Any) -> Any:
    """Starts one worker for this test alone and runs `use` with it."""

    async def body() -> Any:
        async with started_workers(folder, 1, **settings) as workers:
            return await use_with_engine(workers, use, generate)

    return asyncio.run(asyncio.wait_for(body(), 120))


Shared = Callable[..., Any]
"""Runs `use` with workers shared by this module's tests, since each takes seconds to start."""


def shared_workers(folder: Path, count: int) -> Iterator[Shared]:
    with asyncio.Runner() as runner:
        manager = started_workers(folder, count)
        workers = runner.run(manager.__aenter__())
        yield lambda use, generate=None: runner.run(
            asyncio.wait_for(use_with_engine(workers, use, generate), 120)
        )
        runner.run(manager.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def with_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    yield from shared_workers(tmp_path_factory.mktemp("one"), 1)


@pytest.fixture(scope="module")
def with_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    yield from shared_workers(tmp_path_factory.mktemp("two"), 2)


def same(a: Trajectory, b: Trajectory) -> bool:
    streams = ("tokens", "loss_mask", "weight_versions")
    return a.key == b.key and all(getattr(a, name).tolist() == getattr(b, name).tolist() for name in streams)


def test_rows_are_the_same_with_and_without_workers(with_two: Shared) -> None:
    async def use(workers: LoopWorkers, context: Callable[[Prompt], LoopContext]) -> None:
        rows = prompts(10, answer="x", nested={"a": [1, None, "é"]})
        here = LoopChoice("chatty_loop:Chatty")
        there = await asyncio.gather(*(workers.of(p).run(p, context(p)) for p in rows))
        for prompt, (remote,) in zip(rows, there, strict=True):
            (local,) = await here.of(prompt).run(prompt, context(prompt))
            assert same(remote, local)
            assert remote.extra["row"] == dict(prompt.columns) and remote.metrics == {"a": 1.0}
            assert remote.extra["seconds"].keys() == {"generate", "loop"}
            np.testing.assert_array_equal(np.isnan(remote.behaviour_logprobs), ~remote.loss_mask)
        assert len({remote.extra["pid"] for (remote,) in there}) == 2, "both workers must get rows"
        timings = BatchTimings()
        for (remote,) in there:
            timings.add(remote.key, remote.extra["seconds"])
        timings.add("slow", {"loop": 0.5, "score": 1e6})
        timings.add("slow", {"loop": 0.25})
        summary = timings.take()
        assert summary["time/rollout/loop/max"] >= summary["time/rollout/loop/mean"]
        assert summary["time/rollout/slowest/key"] == "slow"
        assert summary["time/rollout/slowest/loop"] == 0.75
        assert summary["time/rollout/score/min"] == 1e6, (
            "rows without a `score` activity must not count in its minimum"
        )
        assert timings.take() == {}

    with_two(use)


def test_a_worker_returns_given_answers_marked_with_origin_data(with_one: Shared) -> None:
    async def use(workers: LoopWorkers, context: Callable[[Prompt], LoopContext]) -> None:
        (prompt,) = prompts(1, answer="5 6")
        given = replace(context(prompt), given="answer")
        (remote,) = await workers.of(prompt).run(prompt, given)
        (local,) = await GivenAnswer().run(prompt, given)
        assert same(remote, local) and remote.origin is local.origin is Origin.DATA
        (own,) = await workers.of(prompt).run(prompt, context(prompt))
        assert own.origin is Origin.STUDENT

    with_one(use)


class Gated:
    """A generate function that blocks at the second turn until `opened` is set. `held(n)` waits for n blocked calls."""

    def __init__(self) -> None:
        self._held = 0
        self.asked: list[tuple[int, bytes]] = []
        self._changed = asyncio.Condition()
        self.opened = asyncio.Event()

    async def __call__(self, tokens: np.ndarray, sampling: Sampling, turn: int) -> Generation:
        self.asked.append((turn, tokens.tobytes()))
        if turn == 1 and not self.opened.is_set():
            async with self._changed:
                self._held += 1
                self._changed.notify_all()
            await self.opened.wait()
        n = int(tokens.sum()) % 5 + 1
        return Generation(np.arange(n, dtype=np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32), "eos")  # type: ignore[arg-type]

    async def held(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._held >= count)


async def wait_until_dead(pid: int) -> None:
    """Returns when the process is gone or a zombie."""
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("forks", [False, True])
def test_sessions_of_a_killed_worker_are_run_again_with_the_generations_they_already_had(
    with_two: Shared, forks: bool
) -> None:
    """The restart does not wait for processes that the loop forked, although they hold the worker's pipes open."""
    gate = Gated()

    async def use(workers: LoopWorkers, context: Callable[[Prompt], LoopContext]) -> None:
        rows = [*prompts(2, forks=forks), *prompts(6)[2:]]
        tasks = [asyncio.create_task(workers.run(p, context(p))) for p in rows]
        await gate.held(len(rows))
        before = workers.pids
        forked: list[psutil.Process] = []
        while len(forked) < 2 * forks:
            await asyncio.sleep(0.05)
            forked = [child for pid in before for child in psutil.Process(pid).children()]
        os.kill(before[0], signal.SIGKILL)
        await wait_until_dead(before[0])
        gate.opened.set()
        try:
            results = await asyncio.wait_for(asyncio.gather(*tasks), 40)
        finally:
            for pid in workers.pids:
                forked += psutil.Process(pid).children()
            for child in forked:
                child.kill()
        assert [one.key for (one,) in results] == [f"{p.key}_0_0" for p in rows]
        assert workers.pids[1] == before[1]
        assert len(gate.asked) == len(set(gate.asked)) == 2 * len(rows), "a generation was asked for twice"

    with_two(use, gate)


@pytest.mark.slow
def test_a_row_that_kills_its_worker_fails_with_a_data_error_and_other_rows_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "_TRIES", 1)  # each try starts a process

    async def use(workers: LoopWorkers, context: Callable[[Prompt], LoopContext]) -> None:
        (deadly,) = prompts(1, dies=True)
        with pytest.raises(DataError, match="00000-0000000_0_0: its worker process died 1 times"):
            await workers.run(deadly, context(deadly))
        (fine,) = prompts(1)
        assert len(await workers.run(fine, context(fine))) == 1

    with_workers(tmp_path, use)


@pytest.mark.slow
def test_the_run_ends_when_a_worker_exceeds_its_restarts_without_finishing_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cluster.restarts.workers` bounds consecutive restarts without a finished session; beyond it the run fails."""
    monkeypatch.setattr(workers_module, "_TRIES", 1)
    notes: list[str] = []

    async def use(workers: LoopWorkers, context: Callable[[Prompt], LoopContext]) -> None:
        async def dies() -> None:
            (deadly,) = prompts(1, dies=True)
            with pytest.raises(DataError, match="its worker process died"):
                await workers.run(deadly, context(deadly))

        await dies()
        (fine,) = prompts(1)
        assert len(await workers.run(fine, context(fine))) == 1
        assert len(notes) == 1 and "started again (1 of 1)" in notes[0]
        await dies()  # the count starts again, since the restarted worker finished a session
        await dies()
        assert len(notes) == 2
        with pytest.raises(ClusterError, match="No rollout worker is left") as caught:
            await workers.run(fine, context(fine))
        assert "cluster.restarts.workers" in str(caught.value) and "rollout worker 0" in str(caught.value)

    with_workers(tmp_path, use, restarts=1, notify=notes.append)


@pytest.mark.slow
def test_sessions_wait_for_a_workers_last_restart(tmp_path: Path) -> None:
    """The worker is not given up while its last restart is under way, however many sessions ask for it."""

    gate = Gated()

    async def use(workers: LoopWorkers, context: Callable[[Prompt], LoopContext]) -> None:
        rows = prompts(6)
        tasks = [asyncio.create_task(workers.run(p, context(p))) for p in rows]
        await gate.held(6)
        os.kill(workers.pids[0], signal.SIGKILL)
        await wait_until_dead(workers.pids[0])
        gate.opened.set()
        assert len(await asyncio.gather(*tasks)) == 6

    with_workers(tmp_path, use, generate=gate, restarts=1)


def test_a_worker_that_cannot_be_restarted_is_given_up_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "_FIRST_PAUSE_SECONDS", 0.01)
    starts = 0

    async def open_line(number: int) -> Any:
        nonlocal starts
        starts += 1
        if starts > 1:
            raise ClusterError("no machine has its bundle")
        return await PipeWorker.open(number)

    async def use(workers: LoopWorkers, context: Callable[[Prompt], LoopContext]) -> None:
        os.kill(workers.pids[0], signal.SIGKILL)
        await wait_until_dead(workers.pids[0])
        (fine,) = prompts(1)
        with pytest.raises(ClusterError, match="could not be started: no machine has its bundle"):
            await workers.run(fine, context(fine))
        assert starts == 3

    with_workers(tmp_path, use, restarts=2, open_line=open_line)


def test_a_worker_killed_before_it_is_ready_is_reported_with_its_exit_code(tmp_path: Path) -> None:
    async def open_line(number: int) -> Any:
        worker = await PipeWorker.open(number)
        os.kill(worker.pid, signal.SIGKILL)
        return worker

    async def use(workers: LoopWorkers, context: Callable[[Prompt], LoopContext]) -> None:
        pytest.fail("the killed worker became ready")

    with pytest.raises(ConfigError, match="it died with exit code -9"):
        with_workers(tmp_path, use, open_line=open_line)


def test_errors_raised_in_a_worker_session_keep_their_type(with_one: Shared) -> None:
    async def broken(tokens: np.ndarray, sampling: Sampling, turn: int) -> Generation:
        raise EngineError("engine gone")

    async def use(workers: LoopWorkers, context: Callable[[Prompt], LoopContext]) -> None:
        (raising,) = prompts(1, raises=True)
        with pytest.raises(DataError, match="KeyError: 'loop bug'"):
            await workers.run(raising, context(raising))
        (long,) = [Prompt("00000-0000001", 1, 0, "", text="7" * 500)]
        with pytest.raises(DataError, match="500 tokens; the context is 96"):
            await workers.run(long, context(long))
        (fine,) = prompts(1)
        with pytest.raises(EngineError, match="engine gone"):
            await workers.run(fine, context(fine))

    with_one(use, broken)


@pytest.mark.parametrize(("column", "name"), [("exits", "SystemExit"), ("leaks", "CancelledError")])
def test_exit_and_cancellation_in_a_loop_fail_the_row_and_not_the_worker(
    with_one: Shared, column: str, name: str
) -> None:
    async def use(workers: LoopWorkers, context: Callable[[Prompt], LoopContext]) -> None:
        before = workers.pids
        (row,) = prompts(1, **{column: True})
        with pytest.raises(DataError, match=f"RuntimeError: {name}"):
            await asyncio.wait_for(workers.run(row, context(row)), 20)
        assert workers.pids == before

    with_one(use)


def test_a_cancelled_session_leaves_the_worker_usable(with_one: Shared) -> None:
    gate = Gated()

    async def use(workers: LoopWorkers, context: Callable[[Prompt], LoopContext]) -> None:
        (row,) = prompts(1)
        session = asyncio.create_task(workers.run(row, context(row)))
        await gate.held(1)
        session.cancel()
        with pytest.raises(asyncio.CancelledError):
            await session
        (raising,) = prompts(1, raises=True)
        with pytest.raises(DataError, match="loop bug"):
            await workers.run(raising, context(raising))

    with_one(use, gate)


def test_a_generation_abandoned_by_its_loop_is_cancelled(with_one: Shared) -> None:
    events: list[str] = []

    async def generate(tokens: np.ndarray, sampling: Sampling, turn: int) -> Generation:
        if turn == 9:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                events.append("cancelled")
                raise
        events.append(f"turn {turn}")
        return Generation(np.arange(3, dtype=np.int32), np.zeros(3, np.float32), np.zeros(3, np.int32), "eos")  # type: ignore[arg-type]

    async def use(workers: LoopWorkers, context: Callable[[Prompt], LoopContext]) -> None:
        (impatient,) = prompts(1, impatient=True)
        assert len(await workers.run(impatient, context(impatient))) == 1
        assert events == ["cancelled", "turn 0", "turn 1"]

    with_one(use, generate)
