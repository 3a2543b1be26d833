"""The run's side of a worker that sends invalid messages: the row fails or the worker is given up; no session hangs."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from understudy.engines.base import Sampling
from understudy.errors import ClusterError, DataError
from understudy.rollout.agents.agent import LoopContext, LostOutput
from understudy.rollout.workers import messages as wire
from understudy.rollout.workers import sessions as sessions_module
from understudy.rollout.workers.sessions import WorkerChannel, WorkerDied, WorkerSession, WorkerTraffic
from understudy.types.prompt import Prompt
from understudy.types.trajectory import StopReason, Trajectory

PROMPT = Prompt("p", 0, 0, "", messages=({"role": "user", "content": "x"},))


class Writer:
    def is_closing(self) -> bool:
        return False

    def write(self, frame: bytes) -> None: ...


class Line:
    """A connection without a process behind it: the test feeds what the worker would send."""

    pid = 1

    def __init__(self) -> None:
        self.reader, self.writer, self.closed = asyncio.StreamReader(), Writer(), False

    async def ended(self) -> str:
        return "ended"

    async def close(self, *, at_once: bool = False) -> None:
        self.closed = True


def trajectory(session: int, stop_reason: Any) -> Trajectory:
    zeros = np.zeros(3, np.int32)
    mask = np.array([0, 1, 1], bool)
    return Trajectory(f"p_{session}_0", zeros, mask, zeros.astype(np.float32), zeros, stop_reason)


def session(number: int) -> WorkerSession:
    return WorkerSession(PROMPT, LoopContext(None, None, Sampling(max_new_tokens=4), "p", number, 100))  # type: ignore[arg-type]


def with_channel(use: Callable[[WorkerChannel, Line, list[int]], Coroutine[Any, Any, None]]) -> None:
    async def body() -> None:
        line, ended = Line(), []
        channel = WorkerChannel(line, "rollout worker 0", 1, WorkerTraffic(), ended.append)  # type: ignore[arg-type]
        line.reader.feed_data(wire.frame(wire.Ready()))
        await channel.begin(wire.Setup("t", "a", {}, 100, 1, {}, []))
        async with asyncio.timeout(10):
            await use(channel, line, ended)

    asyncio.run(body())


def test_an_unknown_stop_reason_is_reported_by_the_worker_as_a_lost_output() -> None:
    key, body, lost = wire.pack_output(trajectory(0, "stop"))
    assert (key, body) == ("p_0_0", b"")
    assert lost == (
        "row p_0_0 came with stop_reason = 'stop'; expected one of 'eos', 'length', 'stop_string', 'aborted'"
    )
    assert wire.unpack_output(key, body, lost) == LostOutput(key, lost)


def test_outputs_that_cannot_be_decoded_fail_only_their_session() -> None:
    async def use(channel: WorkerChannel, line: Line, ended: list[int]) -> None:
        bad, good = (asyncio.create_task(channel.run(session(number))) for number in range(2))
        await asyncio.sleep(0)
        line.reader.feed_data(wire.frame(wire.Done(1, [("p_0_0", b"no frame", "")])))
        line.reader.feed_data(wire.frame(wire.Done(2, [wire.pack_output(trajectory(1, StopReason.EOS))])))
        with pytest.raises(DataError, match="outputs cannot be read"):
            await bad
        assert [one.key for one in await good] == ["p_1_0"]
        assert channel.alive and not ended

    with_channel(use)


def test_a_worker_that_sends_an_unreadable_frame_is_closed_and_its_sessions_raise_worker_died() -> None:
    async def use(channel: WorkerChannel, line: Line, ended: list[int]) -> None:
        waiting = [asyncio.create_task(channel.run(session(number))) for number in range(2)]
        await asyncio.sleep(0)
        line.reader.feed_data(b"no frame" * 4)
        for one in waiting:
            with pytest.raises(WorkerDied, match=r"rollout worker 0 \(pid 1\) sent what cannot be read"):
                await one
        assert line.closed and not channel.alive and ended == [1]

    with_channel(use)


def test_a_worker_that_is_not_ready_within_the_start_timeout_is_closed_with_a_cluster_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions_module, "_START_S", 0.01)

    async def body() -> None:
        line = Line()
        channel = WorkerChannel(line, "rollout worker 0", 1, WorkerTraffic(), lambda life: None)  # type: ignore[arg-type]
        with pytest.raises(ClusterError, match="rollout worker 0 was not ready within"):
            await channel.begin(wire.Setup("t", "a", {}, 100, 1, {}, []))
        assert line.closed

    asyncio.run(body())
