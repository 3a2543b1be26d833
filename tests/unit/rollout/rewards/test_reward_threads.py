"""The thread pool of rewards: bounded, errors are raised in the caller, and hanging threads are not waited for."""

import asyncio
import subprocess
import sys
import threading
import time
from contextvars import ContextVar

import pytest

from understudy.rollout.rewards.reward_threads import DaemonThreads


def test_jobs_run_concurrently_and_threads_are_reused() -> None:
    async def body() -> None:
        loop, pool = asyncio.get_running_loop(), DaemonThreads(most=4, name="tested")
        barrier = threading.Barrier(4)
        await asyncio.wait_for(
            asyncio.gather(*(loop.run_in_executor(pool, barrier.wait) for _ in range(4))), 10
        )
        names = await asyncio.gather(
            *(loop.run_in_executor(pool, lambda: threading.current_thread().name) for _ in range(50))
        )
        assert set(names) <= {f"tested-{place}" for place in range(1, 5)}
        pool.shutdown()

    asyncio.run(body())


def test_errors_and_context_variables_reach_the_caller_of_a_job() -> None:
    variable: ContextVar[str] = ContextVar("told", default="nothing")
    pool = DaemonThreads(most=1)
    variable.set("something")
    assert pool.submit(variable.get).result(10) == "something"
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 / 0).result(10)
    assert pool.submit(lambda: 3).result(10) == 3, "an error ends the job, not its thread"
    pool.shutdown()


@pytest.mark.parametrize(
    "error", [SystemExit(0), KeyboardInterrupt(), StopIteration(), asyncio.CancelledError()]
)
def test_exit_interrupt_and_cancellation_in_a_job_reach_the_caller_as_a_runtime_error(
    error: BaseException,
) -> None:
    """In the event loop's task these would end the process, look like a cancellation, or be refused by a future."""

    def job() -> None:
        raise error

    async def body() -> None:
        with pytest.raises(RuntimeError, match=type(error).__name__):
            await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(DaemonThreads(most=1), job), 10)

    asyncio.run(body())


def test_jobs_past_their_deadline_do_not_keep_threads_from_other_jobs() -> None:
    """In each of three rounds every thread hangs, and a waiting job still runs. Freed surplus threads end."""

    async def body() -> None:
        loop, pool, free = asyncio.get_running_loop(), DaemonThreads(most=2, name="late"), threading.Event()
        for _ in range(3):
            hanging = [asyncio.wait_for(loop.run_in_executor(pool, free.wait), 0.05) for _ in range(2)]
            waiting = loop.run_in_executor(pool, lambda: "scored")
            late = await asyncio.gather(*hanging, return_exceptions=True)
            assert [type(one) for one in late] == [TimeoutError, TimeoutError]
            assert await asyncio.wait_for(waiting, 10) == "scored"
        free.set()
        while len(alive := [one for one in threading.enumerate() if one.name.startswith("late-")]) > 2:
            alive[0].join(10)
        assert await loop.run_in_executor(pool, lambda: 3) == 3
        pool.shutdown()

    asyncio.run(asyncio.wait_for(body(), 60))


def test_a_hanging_job_blocks_neither_other_jobs_nor_process_exit() -> None:
    program = (
        "import time\n"
        "from understudy.rollout.rewards.reward_threads import DaemonThreads\n"
        "pool = DaemonThreads(most=2)\n"
        "pool.submit(time.sleep, 3600)\n"
        "assert [pool.submit(abs, -i).result(10) for i in range(5)] == [0, 1, 2, 3, 4]\n"
    )
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert time.monotonic() - started < 60
