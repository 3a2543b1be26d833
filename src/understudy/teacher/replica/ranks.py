"""Starts a replica over several ranks of one machine by hand: ranks 1 … are children of rank 0.

The children watch a pipe and exit when rank 0 ends in any way. Rank 0 exits when a child does: a replica that
lost a shard of its model would wait for it for ever.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence

from understudy.errors import LOST_PEER, TeacherError
from understudy.teacher.replica import server

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def with_ranks(arguments: Sequence[str], world: int) -> int:
    """Runs `server.main(arguments)` as rank 0 of `world`; returns its exit code."""
    if world < 1:
        raise TeacherError(f"--tensor-parallel {world}: expected at least 1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    with tempfile.TemporaryDirectory(prefix="understudy-replica-ranks-") as folder:
        shared = [*arguments, "--world-size", str(world), "--rendezvous", f"file://{folder}/rendezvous"]
        read_end, write_end = os.pipe()
        os.set_inheritable(read_end, True)
        followers = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "understudy.teacher.replica.server",
                    *_at(shared, rank),
                    "--watch-fd",
                    str(read_end),
                ],
                pass_fds=[read_end],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches rank 0 alone, which ends its children in order
            )
            for rank in range(1, world)
        ]
        done = threading.Event()
        for rank, process in enumerate(followers, start=1):
            threading.Thread(target=_watch, args=(rank, process, done), daemon=True).start()
        try:
            return server.main(_at(shared, 0))
        finally:
            done.set()
            os.close(write_end)
            os.close(read_end)
            for process in followers:
                process.wait(30)


def _at(arguments: Sequence[str], rank: int) -> list[str]:
    """The arguments for another rank: with its own `--rank`, and its own GPU on CUDA."""
    own = [*arguments, "--rank", str(rank)]
    if "--device" in own:
        place = own.index("--device") + 1
        own[place] = f"cuda:{rank}" if own[place].startswith("cuda") else own[place]
    return own


def _watch(rank: int, process: subprocess.Popen[bytes], done: threading.Event) -> None:
    code = process.wait()
    if not done.wait(1.0):  # a replica that was asked to stop ends its ranks first
        print(
            f"error: rank {rank} of this replica ended with code {code}; the replica ends too",
            file=sys.stderr,
        )
        os._exit(LOST_PEER)
