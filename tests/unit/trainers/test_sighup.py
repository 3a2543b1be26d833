"""SIGHUP requests a stop; under nohup it stays ignored."""

import asyncio
import os
import signal

from understudy.trainers.stopping import Interrupts


def test_sighup_requests_a_stop_and_a_second_one_changes_nothing() -> None:
    async def run() -> list[str]:
        notes: list[str] = []
        with Interrupts(notes.append) as stop:
            stop.training = True
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGHUP)
                await asyncio.sleep(0.05)
                assert stop.requested
        return notes

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if the tests themselves run under nohup
    try:
        notes = asyncio.run(run())
    finally:
        signal.signal(signal.SIGHUP, before)
    assert len(notes) == 1 and notes[0].startswith("SIGHUP: finishing this step")


def test_sighup_stays_ignored_under_nohup() -> None:
    async def run() -> None:
        with Interrupts(lambda text: None) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.05)
            assert not stop.requested

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asyncio.run(run())
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
