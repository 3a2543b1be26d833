"""Runs a coroutine to its end without waiting for threads that hang, and starts the fork server early.

    run_to_its_end(launch(…)) ──> result or error, at once ──> shown to the user ──> exit_soon(code)
         └── threads that still run a user's agent loop, or a download ──3 s──> the process ends

`asyncio.run` joins the event loop's threads before it returns or raises. A failed run would report its error
only after the last thread ended, and never if one hangs. The end of the interpreter waits for threads in the
same way.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import os
import threading
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from understudy.cluster import fork_server
from understudy.cluster.spare_processes import prepared_spares
from understudy.config import ClusterConfig, TeacherConfig
from understudy.run.own_thread import OwnThread, inside_a_running_loop
from understudy.trainers.early_interrupt import give_back_sigint, remembering_interrupts


@contextmanager
def early_fork_server(cluster: ClusterConfig, teachers: Mapping[str, TeacherConfig]) -> Iterator[None]:
    """The fork server, or the spare processes, for the native replicas that this run will start on this machine, if
    there are any. They import while the block checks the recipe and imports its own modules. An interrupt that an
    import discards meanwhile ends the block when the run would start."""
    own = [teacher for teacher in teachers.values() if not teacher.urls and not teacher.starts_vllm]
    with remembering_interrupts():
        if cluster.backend != "local" or not own:
            yield
            return
        processes = Counter[int]()
        for teacher in own:
            alone = teacher.placement not in ("trainer", "engine")
            processes[teacher.threads] += alone * teacher.replicas * teacher.tensor_parallel
        threads, count = processes.most_common(1)[0]
        env = {"OMP_NUM_THREADS": str(threads)}
        with fork_server.prepared(env), prepared_spares(env, count):
            yield


@contextmanager
def importing() -> Iterator[None]:
    """A program's last imports, without garbage collection: they leave little garbage, and looking for it takes a sixth
    of their CPU time. Later collections leave out all objects that are there at the end (`gc.freeze`). A full one takes
    a third of a second otherwise, and each CUDA graph that an engine records begins with one."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        # Else the last collection leaves them out too, and triton's bindings report their types as leaked.
        atexit.register(gc.unfreeze)
        gc.enable()


_NAME = "understudy-run"
_LAST_SECONDS = 3.0
Result = TypeVar("Result")


def run_to_its_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Like `asyncio.run`, but does not wait for threads that still run when `work` is done. Their results are
    not needed. An exception that a signal handler raises in the event loop, outside of `work`, is raised as it is.

    Inside a running event loop, `work` runs on a new thread."""
    try:
        give_back_sigint()
    except KeyboardInterrupt:
        work.close()
        raise
    if inside_a_running_loop():
        thread: OwnThread[Result] = OwnThread(run_to_its_end)
        return thread.result(work)
    failed = False

    async def task() -> Result:
        try:
            return await work
        except BaseException:
            if failed:  # Another exception left the loop. The runner closes it and cancels this task.
                raise asyncio.CancelledError from None
            raise

    with asyncio.Runner() as runner:
        loop, threads = runner.get_loop(), ThreadPoolExecutor(thread_name_prefix=_NAME)
        loop.set_default_executor(threads)
        try:
            return runner.run(task())
        except BaseException:
            failed = True
            raise
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            # What closes with the loop uses this new executor, whose threads are waited for.
            loop.set_default_executor(ThreadPoolExecutor())


def exit_soon(code: int, *, always: bool = False) -> None:
    """Ends the process in `_LAST_SECONDS` if a thread of `run_to_its_end` still runs; with `always`,
    in any case.

    Call it only at the end of a program, after everything was saved and shown."""
    left_behind = [thread for thread in threading.enumerate() if thread.name.startswith(_NAME)]

    def end() -> None:
        if always or any(thread.is_alive() for thread in left_behind):
            os._exit(code)

    if always or left_behind:
        last = threading.Timer(_LAST_SECONDS, end)
        last.daemon = True
        last.start()
