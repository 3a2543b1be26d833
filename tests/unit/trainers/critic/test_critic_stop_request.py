"""A stop request during a call to the critic's process: a stalled critic is abandoned, a computing one is waited for."""

import asyncio
import os
import signal
from functools import partial
from typing import Any

import pytest
from test_remote_critic import ask_and_disturb, child  # noqa: F401  (a fixture)

from understudy.errors import CriticLost, GivenUp
from understudy.run.restarts import with_restarts
from understudy.trainers.critic.remote import CriticWatch
from understudy.trainers.stopping import Interrupts


def test_a_stop_gives_up_a_stalled_critic_before_it_counts_as_lost(child: Any) -> None:  # noqa: F811
    given_up: list[str] = []

    def disturb(watch: CriticWatch, _: Any) -> None:
        os.kill(child.process.pid, signal.SIGSTOP)
        watch.stop_soon(1.0, partial(given_up.append, "leave"))

    # The stop comes in the middle of the long interval between two health checks.
    error, _, took = asyncio.run(ask_and_disturb(child, disturb, beat_s=30.0, silence_s=60.0))
    assert isinstance(error, GivenUp) and 1.0 < took < 5, took
    assert "the critic lives and has done nothing for 1 s (" in str(error)
    assert given_up == ["leave"], "the callback must be called once"


def test_a_stop_waits_for_a_critic_that_answers_its_health_checks(child: Any) -> None:  # noqa: F811
    def disturb(watch: CriticWatch, channel: Any) -> None:
        watch.stop_soon(0.5, lambda: pytest.fail("a computing critic was given up"))
        # Its late answer is an error of its own, which must not be reported as giving up.
        asyncio.get_running_loop().call_later(3.0, os.kill, child.process.pid, signal.SIGKILL)

    error, _, took = asyncio.run(ask_and_disturb(child, disturb))
    assert took > 2.9 and isinstance(error, CriticLost) and not isinstance(error, GivenUp)


def test_a_run_whose_critic_was_given_up_ends_at_its_last_checkpoint() -> None:
    async def attempt() -> int:
        raise GivenUp("the critic's process does not answer")

    for saved, place in ((4, "step 4"), (0, "its start")):
        notes: list[str] = []
        stop = Interrupts(notes.append)
        stop.requested = True
        assert asyncio.run(with_restarts(attempt, 5, lambda saved=saved: saved, stop, notes.append)) == saved  # type: ignore[misc]
        (news,) = notes
        assert news.startswith("the critic's process does not answer; ") and news.endswith(
            f"the run stays at {place}"
        )


def test_a_stop_calls_only_the_callbacks_of_the_current_attempt_once() -> None:
    notes: list[str] = []

    async def body() -> None:
        with Interrupts(notes.append) as stop:
            stop.on_stop(partial(notes.append, "the first attempt"))
            stop.starting(lambda: None)
            stop.on_stop(partial(notes.append, "the second attempt"))
            stop.training = True
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.1)
            stop.on_stop(partial(notes.append, "one registered after the stop"))

    asyncio.run(body())
    assert [text for text in notes if not text.startswith("SIGTERM: ")] == [
        "the second attempt",
        "one registered after the stop",
    ]
