"""What waits is waited for only so long after somebody asked to stop."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from understudy.observability.spans import Spans
from understudy.trainers import stopping as interrupts
from understudy.trainers import sync
from understudy.trainers.stopping import Abandoned, Interrupts


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "PATIENCE_S", 0.2)


async def soon(value: int, seconds: float = 0.01) -> int:
    await asyncio.sleep(seconds)
    return value


def test_work_that_ends_gives_its_result_before_and_after_a_signal() -> None:
    told: list[str] = []

    async def body() -> None:
        with Interrupts(told.append) as stop:
            stop.training = True
            assert await stop.waiting(soon(1)) == 1
            work = asyncio.create_task(stop.waiting(soon(2, 0.1)))
            await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGTERM)
            assert await work == 2 and stop.requested
            with pytest.raises(ZeroDivisionError):
                await stop.waiting(broken())

    async def broken() -> None:
        raise ZeroDivisionError

    asyncio.run(body())
    assert len(told) == 1 and told[0].startswith("SIGTERM: finishing this step")


async def stuck(ended: list[str]) -> None:
    """Waits for what never comes, and says when it is cancelled."""
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("cleaned up")


def test_work_that_does_not_end_is_cancelled_and_given_up() -> None:
    ended: list[str] = []

    async def body() -> None:
        with Interrupts(lambda text: None) as stop:
            stop.training = True
            asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGINT)
            with pytest.raises(Abandoned):
                await stop.waiting(stuck(ended))
            assert ended == ["cleaned up"]
            assert await asyncio.to_thread(lambda: 5) == 5, "saving has threads of its own"

    asyncio.run(asyncio.wait_for(body(), 10))


def test_whoever_is_cancelled_cancels_the_work() -> None:
    ended: list[str] = []

    async def body() -> None:
        with Interrupts(lambda text: None) as stop:
            outer = asyncio.create_task(stop.waiting(stuck(ended)))
            await asyncio.sleep(0.01)
            outer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await outer
            assert ended == ["cleaned up"]

    asyncio.run(asyncio.wait_for(body(), 10))


def test_work_of_whoever_is_cancelled_is_over_when_they_are() -> None:
    """They go on to close what it uses."""
    ended: list[str] = []

    async def slow_to_leave() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.2)
            ended.append("cleaned up")

    async def body() -> None:
        with Interrupts(lambda text: None) as stop:
            outer = asyncio.create_task(stop.waiting(slow_to_leave()))
            await asyncio.sleep(0.01)
            outer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await outer
            assert ended == ["cleaned up"]

    asyncio.run(asyncio.wait_for(body(), 10))


DEAF = """
import asyncio, os, signal, sys, threading, time
from understudy.trainers import stopping as interrupts
interrupts.DEAF_S = 0.5

async def main():
    with interrupts.Interrupts(print, lambda: print("children ended", flush=True)) as stop:
        stop.training = True
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        time.sleep(float(sys.argv[1]))
        await asyncio.sleep(1.0)
        print("the loop heard", stop.requested, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize(("blocked", "code", "said"), [(3600, 130, "children ended"), (0.2, 0, "heard True")])
def test_an_event_loop_that_is_blocked_does_not_hold_the_process(
    blocked: float, code: int, said: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DEAF, str(blocked)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code and said in done.stdout, done


def test_a_step_that_waits_in_its_claim_or_its_publish_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its claim: the step is given up. Its publish: the step is kept, and nothing more is waited for."""
    ended: list[str] = []

    async def produced(system: Any, step: int) -> dict[str, float]:
        return {}

    def unclaimed(system: Any, step: int) -> Coroutine[Any, Any, None]:
        return stuck(ended)

    monkeypatch.setattr(sync, "fill_step", produced)
    monkeypatch.setattr(sync, "claim_batch", unclaimed)
    publisher = SimpleNamespace(publish=lambda step: stuck(ended))
    system: Any = SimpleNamespace(spans=Spans(None), publisher=publisher)

    async def body() -> None:
        with Interrupts(lambda text: None) as stop:
            stop.training = True
            asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)
            with pytest.raises(Abandoned):
                await sync.take_step(system, 1, stop)
        with Interrupts(lambda text: None) as stop:
            stop.training = True
            asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)
            await sync.publish(system, 1, stop)
            with pytest.raises(Abandoned):
                await stop.waiting(soon(1))

    asyncio.run(asyncio.wait_for(body(), 5))
    assert ended == ["cleaned up"] * 2
