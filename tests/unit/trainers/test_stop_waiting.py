"""After a stop request, the trainer bounds every wait."""

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
from understudy.trainers.pacing.idle_meter import ProducerMeters
from understudy.trainers.stopping import Abandoned, Interrupts


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "STOP_WAIT_S", 0.2)


async def soon(value: int) -> int:
    await asyncio.sleep(0)
    return value


def test_waiting_returns_the_result_of_work_before_and_after_a_stop_signal() -> None:
    notes: list[str] = []

    async def body() -> None:
        with Interrupts(notes.append) as stop:
            stop.training = True
            assert await stop.waiting(soon(1)) == 1
            asked = asyncio.Event()
            stop.on_stop(asked.set)

            async def until_asked() -> int:
                os.kill(os.getpid(), signal.SIGTERM)
                await asked.wait()
                return 2

            assert await stop.waiting(until_asked()) == 2 and stop.requested
            with pytest.raises(ZeroDivisionError):
                await stop.waiting(broken())

    async def broken() -> None:
        raise ZeroDivisionError

    asyncio.run(body())
    assert len(notes) == 1 and notes[0].startswith("SIGTERM: finishing this step")


class Stuck:
    """Work that never completes. `begun` is set when it waits. Once cancelled it takes `turns` turns of the event loop
    and then sets `ended`."""

    def __init__(self, turns: int = 0) -> None:
        self.begun, self.ended, self._turns = asyncio.Event(), False, turns

    async def __call__(self) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(self._turns):
                await asyncio.sleep(0)
            self.ended = True


async def send_signal(begun: asyncio.Event, number: signal.Signals) -> None:
    """Sends the signal once the work waits."""
    await begun.wait()
    os.kill(os.getpid(), number)


def test_work_that_does_not_end_after_a_stop_signal_is_cancelled() -> None:
    async def body() -> None:
        work = Stuck()
        with Interrupts(lambda text: None) as stop:
            stop.training = True
            sender = asyncio.create_task(send_signal(work.begun, signal.SIGINT))
            with pytest.raises(Abandoned):
                await stop.waiting(work())
            assert work.ended and sender.done()
            assert await asyncio.to_thread(lambda: 5) == 5, (
                "threads must still be usable, since the save needs them"
            )

    asyncio.run(asyncio.wait_for(body(), 60))


@pytest.mark.parametrize("turns", [0, 50])
def test_waiting_ends_only_after_its_cancelled_work_has_ended(turns: int) -> None:
    """The caller goes on to close what the work uses."""

    async def body() -> None:
        work = Stuck(turns)
        with Interrupts(lambda text: None) as stop:
            outer = asyncio.create_task(stop.waiting(work()))
            await work.begun.wait()
            outer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await outer
            assert work.ended

    asyncio.run(asyncio.wait_for(body(), 60))


BLOCKED_LOOP = """
import asyncio, os, signal, sys, threading, time
from understudy.trainers import stopping as interrupts
interrupts.BLOCKED_S = float(sys.argv[1])

async def main():
    with interrupts.Interrupts(print, lambda: print("children ended", flush=True)) as stop:
        stop.training = True
        threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGTERM)).start()
        while stop._blocked_timer is None or sys.argv[2] == "for ever":  # blocked: the signal is received, and the loop cannot handle it
            time.sleep(0.01)
        while not stop.requested:
            await asyncio.sleep(0.01)
        print("the loop handled it", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("deaf", "blocked", "code", "message"),
    [("0.5", "for ever", 130, "children ended"), ("60", "until the signal", 0, "the loop handled it")],
)
def test_a_stop_signal_ends_the_process_although_the_event_loop_is_blocked(
    deaf: str, blocked: str, code: int, message: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED_LOOP, deaf, blocked],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code and message in done.stdout, done


def test_a_stop_abandons_a_step_that_waits_in_its_claim_and_stops_waiting_for_its_publish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stop during the claim gives up the step. A stop during the publish keeps it, and nothing more is waited for."""
    claim, sending = Stuck(), Stuck()

    async def produced(producer: Any, learner: Any, step: int) -> dict[str, float]:
        return {}

    def unclaimed(learner: Any, step: int) -> Coroutine[Any, Any, None]:
        return claim()

    monkeypatch.setattr(sync, "fill_step", produced)
    monkeypatch.setattr(sync, "claim_batch", unclaimed)
    state, learner = SimpleNamespace(spans=Spans(None)), SimpleNamespace(publish=lambda step: sending())
    system: Any = SimpleNamespace(state=state, learner=learner, producer=None)

    async def body() -> None:
        with Interrupts(lambda text: None) as stop:
            stop.training = True
            sender = asyncio.create_task(send_signal(claim.begun, signal.SIGTERM))
            with pytest.raises(Abandoned):
                await sync.take_step(system, 1, stop, ProducerMeters())
            await sender
        with Interrupts(lambda text: None) as stop:
            stop.training = True
            sender = asyncio.create_task(send_signal(sending.begun, signal.SIGTERM))
            await sync.publish(system.learner, 1, stop)
            with pytest.raises(Abandoned):
                await stop.waiting(soon(1))
            await sender

    asyncio.run(asyncio.wait_for(body(), 60))
    assert claim.ended and sending.ended
