"""A run reports its result and its process exits, even if a thread hangs."""

import asyncio
import importlib.util
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import FrameType

import pytest

from understudy.errors import ClusterError
from understudy.run.entry import run_to_its_end


def test_an_error_of_a_run_is_raised_without_waiting_for_a_hanging_thread() -> None:
    release = threading.Event()

    async def work() -> None:
        hanging = asyncio.create_task(asyncio.to_thread(release.wait))
        await asyncio.sleep(0.1)
        hanging.cancel()
        raise ClusterError("no teacher is left")

    began = time.monotonic()
    threading.Timer(20, release.set).start()
    with pytest.raises(ClusterError, match="no teacher"):
        run_to_its_end(work())
    took = time.monotonic() - began
    release.set()
    assert took < 10


def test_an_exception_raised_by_a_signal_handler_is_not_replaced_by_the_cancelled_task() -> None:
    """A test runner raises its timeout in this way: in the event loop, outside of every task."""

    class TooLate(BaseException):
        pass

    def too_late(number: int, frame: FrameType | None) -> None:
        raise TooLate("the test took longer than 60 s")

    async def work() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None  # a run that is interrupted during its start does this

    previous = signal.signal(signal.SIGALRM, too_late)
    # pytest-timeout uses the same timer.
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        with pytest.raises(TooLate, match="longer than 60 s"):
            run_to_its_end(work())
    finally:
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, remaining, interval)


def test_background_tasks_can_use_threads_while_they_are_cancelled_and_are_waited_for() -> None:
    closed: list[str] = []

    async def works_until_the_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.to_thread(closed.append, "written")

    async def work() -> int:
        background.append(asyncio.create_task(works_until_the_end()))
        return await asyncio.to_thread(lambda: 7)

    background: list[asyncio.Task[None]] = []
    assert run_to_its_end(work()) == 7 and closed == ["written"]


COMMAND = """
import asyncio, sys, time
from understudy.cli.commands.recipes import check
from understudy.cli.main import program
from understudy.errors import ClusterError
from understudy.run.entry import run_to_its_end

async def work():
    asyncio.create_task(asyncio.to_thread(time.sleep, 600))
    await asyncio.sleep(0.1)
    if how == "fails":
        raise ClusterError("no teacher is left")

how = sys.argv[1]
check.run = lambda options: run_to_its_end(work())
sys.argv[1:] = ["check", "recipe.toml"]
sys.exit(program())
"""


@pytest.mark.parametrize(
    ("how", "code", "message"), [("fails", 2, "no teacher is left"), ("ends well", 0, "")]
)
def test_a_command_exits_while_a_thread_hangs(how: str, code: int, message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, how], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code and message in done.stderr, done


AGAIN = """
import asyncio, sys, time
from understudy.cli.commands.recipes import check
from understudy.cli.main import main
from understudy.run.entry import run_to_its_end

async def work():
    asyncio.create_task(asyncio.to_thread(time.sleep, 1))
    await asyncio.sleep(0.1)

check.run = lambda options: run_to_its_end(work())
assert main(["check", "recipe.toml"]) == 0
run_to_its_end(asyncio.to_thread(time.sleep, 4))
sys.exit(7)
"""


def test_a_process_that_continues_after_a_run_is_not_ended() -> None:
    """Nor is it ended while a later run uses threads."""
    done = subprocess.run(
        [sys.executable, "-c", AGAIN], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 7, done


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the triton package is not installed")
def test_a_program_that_imports_without_garbage_collection_ends_without_a_report_of_leaks() -> None:
    """Objects left out of the garbage collection until the very end made triton's bindings print dozens of lines."""
    program = """
        from understudy.run.entry import importing
        with importing():
            import torch._dynamo, triton
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "leaked" not in done.stderr
