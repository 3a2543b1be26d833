"""A rollout worker that is forked by the trainer's fork server, with a socket as its standard input and output."""

import asyncio
import os
import runpy
import socket
import sys

from setproctitle import setproctitle

from understudy.cluster import fork_server
from understudy.rollout.workers import connections

_LOOK_SECONDS = 0.02


class _Process:
    """The part of `asyncio.subprocess.Process` that `PipeWorker` uses."""

    def __init__(self, child, reader, writer):
        self.pid, self.stdout, self.stdin = child.pid, reader, writer
        self._child = child

    async def wait(self):
        while (code := self._child.poll()) is None:
            await asyncio.sleep(_LOOK_SECONDS)
        return code

    def kill(self):
        os.kill(self.pid, 9)


def install() -> None:
    """Workers are forked if the trainer has a fork server that is ready."""
    fresh = connections.PipeWorker.open

    async def open_forked(index):
        server = fork_server.current()
        if server is None or not server.ready():
            return await fresh(index)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                child = server.start("forked_worker", [], os.environ, 2, theirs.fileno())
            except OSError:  # it was killed
                ours.close()
                return await fresh(index)
        streams = await asyncio.open_connection(sock=ours, limit=connections._LIMIT)
        return connections.PipeWorker(_Process(child, *streams))

    connections.PipeWorker.open = staticmethod(open_forked)


if __name__ == "__main__":
    number = int(sys.argv[-1])
    for standard in (0, 1):
        os.dup2(number, standard)
    os.close(number)
    sys.argv = [connections.WORKER_MODULE]
    setproctitle(f"{sys.executable} -m {connections.WORKER_MODULE}")
    runpy.run_module(connections.WORKER_MODULE, run_name="__main__", alter_sys=True)
