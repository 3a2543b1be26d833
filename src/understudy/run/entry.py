"""The end of a run does not wait for threads that hang.

    run_to_its_end(launch(…)) ──> result, or the error, at once ──> said to the user ──> leave_soon(code)
         └── threads in which somebody's agent loop still sits, or a download: left behind ──3 s──┘ the process ends

`asyncio.run` joins the event loop's threads before it gives back a result or raises an error: a run that failed would say so only when
the last of them is over, and one that hangs would keep it quiet for ever. So would the end of the interpreter.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from understudy.cluster import nursery
from understudy.config import Recipe
from understudy.run.own_thread import OwnThread, inside_a_running_loop


def begun_early(recipe: Recipe) -> AbstractContextManager[None]:
    """A nursery for the teachers this run will start on this machine, if there are any."""
    own = [teacher for teacher in recipe.teachers.values() if not teacher.urls]
    if recipe.cluster.backend != "local" or not own:
        return nullcontext()
    threads = Counter(teacher.threads for teacher in own).most_common(1)[0][0]
    return nursery.prepared({"OMP_NUM_THREADS": str(threads)})


_NAME = "understudy-run"
_LAST_SECONDS = 3.0
Result = TypeVar("Result")


def run_to_its_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Like `asyncio.run`, without waiting for what still runs in threads when `work` is over: nobody wants it any more. Inside a
    running event loop it works too, on a thread of its own."""
    if inside_a_running_loop():
        thread: OwnThread[Result] = OwnThread(run_to_its_end)
        return thread.result(work)
    with asyncio.Runner() as runner:
        loop, threads = runner.get_loop(), ThreadPoolExecutor(thread_name_prefix=_NAME)
        loop.set_default_executor(threads)
        try:
            return runner.run(work)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            # What is still to be closed with the loop has threads of its own, and those are waited for.
            loop.set_default_executor(ThreadPoolExecutor())


def leave_soon(code: int, *, whatever_runs: bool = False) -> None:
    """All is saved and said: in a moment the process ends, where a thread of `run_to_its_end` would hold it up; with `whatever_runs`
    also where any other would. For the end of a program: whoever has more to do in this process must not call it."""
    left_behind = [thread for thread in threading.enumerate() if thread.name.startswith(_NAME)]

    def end() -> None:
        if whatever_runs or any(thread.is_alive() for thread in left_behind):
            os._exit(code)

    if whatever_runs or left_behind:
        last = threading.Timer(_LAST_SECONDS, end)
        last.daemon = True
        last.start()
