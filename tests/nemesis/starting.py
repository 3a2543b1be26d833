"""Starts the trainer of a disturbed run: as a fresh Python, or forked from a process that has torch imported.

Imports take seven seconds of CPU time in a trainer and five in its fork server; all else of a small launch takes two to three.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
from injection import flush_library
from network import TOKEN
from small_runs import TOKEN_VARIABLE

from understudy.cluster.fork_server import ChildProcess, ForkServer, can_fork
from understudy.cluster.fork_server_process import MODULES

MARK = "UNDERSTUDY_NEMESIS"
"""Names the folder of the run in the environment of its processes."""
_TESTS = Path(__file__).parents[1]


class ForkedTrainer(psutil.Process):
    """A forked trainer with the part of `psutil.Popen` that the driver uses."""

    def __init__(self, child: ChildProcess) -> None:
        super().__init__(child.pid)
        self._child = child

    @property
    def returncode(self) -> int | None:
        return self._child.returncode

    def poll(self) -> int | None:
        return self._child.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self._child.wait(timeout)


Trainer = psutil.Popen | ForkedTrainer


@functools.cache
def trainer_server() -> ForkServer | None:
    """The fork server for trainers of this process; None where a process must not be forked."""
    if not can_fork():
        return None
    for modules in ((*MODULES, "preloaded"), MODULES):
        server = ForkServer(_environment(), modules)
        atexit.register(server.close)
        if _ready(server):
            return server
        print(f"no trainer can be forked from a process that has imported {modules}", file=sys.stderr)
    return None


def start_trainer(
    arguments: list[str],
    folder: Path,
    shim: Path,
    log: Path,
    more: Mapping[str, str],
    server: ForkServer | None = None,
) -> Trainer:
    """Starts `understudy ARGUMENTS` in a session of its own, with temporary files in the folder and output in
    the log."""
    own = {MARK: str(folder), "TMPDIR": str(folder / "tmp"), "UNDERSTUDY_NEMESIS_SHIM": str(shim)}
    env = {**os.environ, **_environment(), **own, **more}
    with log.open("wb") as sink:
        if server is not None and _ready(server):
            try:
                child = server.start("disturbed", [*arguments, "--quiet"], env, sink.fileno(), None)
                return ForkedTrainer(child)
            except OSError:
                trainer_server.cache_clear()  # it did not answer, and has been ended
        return psutil.Popen(
            [sys.executable, "-m", "understudy.cli.main", *arguments, "--quiet"],
            env=env, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def _ready(server: ForkServer) -> bool:
    while not (ready := server.ready()) and not server.over:
        time.sleep(0.05)
    return ready


def _environment() -> dict[str, str]:
    path = [str(Path(__file__).with_name("shim")), str(_TESTS / "e2e"), os.environ.get("PYTHONPATH", "")]
    preloaded = {"LD_PRELOAD": library} if (library := flush_library()) else {}
    return {
        "OMP_NUM_THREADS": "1",
        TOKEN_VARIABLE: TOKEN,
        "PYTHONPATH": os.pathsep.join(path),
        # On x86-64 pyarrow's allocator starts a thread as it is imported, and a process with threads is not forked.
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
        **preloaded,
    }
