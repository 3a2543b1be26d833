"""A stop request during a call to the critic's process: a stalled critic is abandoned, a computing one is waited for."""

import asyncio
import os
import signal
from functools import partial
from typing import Any

import pytest
from test_remote_critic import asked_and_disturbed, child  # noqa: F401  (a fixture)

from understudy.errors import CriticLost, GivenUp
from understudy.run.restarts import with_restarts
from understudy.trainers.critic.remote import CriticWatch
from understudy.trainers.stopping import Interrupts


def test_one_that_stands_still_is_given_up_long_before_it_counts_as_lost(child: Any) -> None:  # noqa: F811
    given_up: list[str] = []

    def disturb(watch: CriticWatch, _: Any) -> None:
        os.kill(child.process.pid, signal.SIGSTOP)
        watch.stop_soon(1.0, partial(given_up.append, "leave"))

    # The pulse is in the midst of its long beat when the stop comes.
    error, _, took = asyncio.run(asked_and_disturbed(child, disturb, beat_s=30.0, silence_s=60.0))
    assert isinstance(error, GivenUp) and 1.0 < took < 5, took
    assert "the critic lives and has done nothing for 1 s (" in str(error)
    assert given_up == ["leave"], "once"


def test_one_that_answers_its_pulse_is_waited_for(child: Any) -> None:  # noqa: F811
    def disturb(watch: CriticWatch, channel: Any) -> None:
        watch.stop_soon(0.5, lambda: pytest.fail("it computes"))
        # Its answer comes at last: here an error, told without a word of giving up.
        asyncio.get_running_loop().call_later(3.0, os.kill, child.process.pid, signal.SIGKILL)

    error, _, took = asyncio.run(asked_and_disturbed(child, disturb))
    assert took > 2.9 and isinstance(error, CriticLost) and not isinstance(error, GivenUp)


def test_a_run_whose_critic_was_given_up_is_where_its_last_checkpoint_is() -> None:
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


def test_whoever_wants_to_be_told_of_a_stop_is_told_once_and_not_of_an_attempt_before() -> None:
    notes: list[str] = []

    async def body() -> None:
        with Interrupts(notes.append) as stop:
            stop.on_stop(partial(notes.append, "the first attempt"))
            stop.starting(lambda: None)
            stop.on_stop(partial(notes.append, "the second attempt"))
            stop.training = True
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.1)
            stop.on_stop(partial(notes.append, "one that comes late"))

    asyncio.run(body())
    assert [text for text in notes if not text.startswith("SIGTERM: ")] == [
        "the second attempt",
        "one that comes late",
    ]
