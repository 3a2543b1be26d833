"""One replica over several processes of this machine, started by hand: the others are children of process 0.

They end with it, however it ends (the pipe they watch closes), and it ends when one of them does: a replica that lost a
part of its model would wait for it for ever.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence

from understudy.errors import TeacherError
from understudy.teacher.replica import server

LOST_A_RANK = 4
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def with_ranks(arguments: Sequence[str], world: int) -> int:
    """`server.main(arguments)` as process 0 of `world`; returns its exit code."""
    if world < 1:
        raise TeacherError(f"--tensor-parallel {world}: expected at least 1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    with tempfile.TemporaryDirectory(prefix="understudy-teacher-") as folder:
        shared = [*arguments, "--world-size", str(world), "--rendezvous", f"file://{folder}/meet"]
        read_end, write_end = os.pipe()
        os.set_inheritable(read_end, True)
        others = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "understudy.teacher.replica.server",
                    *_at(shared, rank),
                    "--watch-fd",
                    str(read_end),
                ],
                pass_fds=[read_end],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches process 0, which ends the others in order
            )
            for rank in range(1, world)
        ]
        done = threading.Event()
        for rank, process in enumerate(others, start=1):
            threading.Thread(target=_watch, args=(rank, process, done), daemon=True).start()
        try:
            return server.main(_at(shared, 0))
        finally:
            done.set()
            os.close(write_end)
            os.close(read_end)
            for process in others:
                process.wait(30)


def _at(arguments: Sequence[str], rank: int) -> list[str]:
    """The same words for another process: it has its own rank, and its own GPU where there are GPUs."""
    words = [*arguments, "--rank", str(rank)]
    if "--device" in words:
        place = words.index("--device") + 1
        words[place] = f"cuda:{rank}" if words[place].startswith("cuda") else words[place]
    return words


def _watch(rank: int, process: subprocess.Popen[bytes], done: threading.Event) -> None:
    code = process.wait()
    if not done.wait(1.0):  # a replica that was asked to stop sends its ranks home first
        print(
            f"error: rank {rank} of this replica ended with code {code}; the replica ends too",
            file=sys.stderr,
        )
        os._exit(LOST_A_RANK)
