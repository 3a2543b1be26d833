"""A process that the trainer forked (a multiprocessing pool) does not keep its locks and pipes alive after its death."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from understudy.dataplane.journal.folder_lock import FolderLock
from understudy.errors import DataPlaneError, RunDirectoryError
from understudy.observability.rundir import RunDir

TRAINER = """
import asyncio, multiprocessing, os, sys, time
from pathlib import Path
from understudy.cluster.local import LocalProcesses
from understudy.dataplane.journal.folder_lock import FolderLock
from understudy.observability.rundir import RunDir

async def main():
    lock = RunDir(Path(sys.argv[1])).lock()
    rows = FolderLock(Path(sys.argv[1]) / "dataplane")
    processes = LocalProcesses(Path(sys.argv[1]) / "logs")
    child = await processes.start("child", "child_for_test", [])
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    forked.start()
    print(child.process.pid, forked.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""

CHILD = """
import time
from understudy.serving.process import process_arguments, process_main
process_main(
    lambda process: process.ready() or time.sleep(60),
    process_arguments("child_for_test", None, serves=False).parse_args(),
)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_trainers_children_end_and_its_locks_are_free_while_a_forked_process_lives(
    tmp_path: Path, how: signal.Signals
) -> None:
    run = RunDir.create(str(tmp_path / "run"), "run")
    (tmp_path / "child_for_test.py").write_text(CHILD)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(run.path)], stdout=subprocess.PIPE, text=True, env=env
    )
    assert trainer.stdout is not None
    child, forked = (psutil.Process(int(pid)) for pid in trainer.stdout.readline().split())
    try:
        with pytest.raises(RunDirectoryError, match=f"in use by process {trainer.pid}"):
            run.lock()
        with pytest.raises(DataPlaneError, match=f"in use by process {trainer.pid}"):
            FolderLock(run.dataplane)
        trainer.send_signal(how)
        trainer.wait()
        assert not psutil.wait_procs([child], timeout=10)[1]
        assert forked.is_running()
        run.lock().close()
        FolderLock(run.dataplane).release()
    finally:
        trainer.stdout.close()
        forked.kill()
