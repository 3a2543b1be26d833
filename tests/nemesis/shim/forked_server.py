"""A trainer's fork server, forked from the trainer before it has threads, instead of a fresh Python that imports torch."""

import json
import math
import os
import signal
import socket
import subprocess
import time

from understudy.cluster import fork_server, fork_server_process


class _Process:
    """The part of `subprocess.Popen` that `ForkServer` uses."""

    def __init__(self, pid):
        self.pid, self.returncode = pid, None

    def poll(self, options=os.WNOHANG):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout=None):
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork server", timeout)
            time.sleep(0.01)
        return self.returncode

    def kill(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def install() -> None:
    """The trainer's first fork server is a fork of it; later ones are fresh Pythons."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        _serve(theirs)
        raise SystemExit
    theirs.close()
    fresh = fork_server.begin

    def begin(descriptor, modules, environment):
        fork_server.begin = fresh
        try:
            socket.send_fds(ours, [json.dumps([list(modules), dict(environment)]).encode()], [descriptor])
        except OSError:  # it was killed
            return fresh(descriptor, modules, environment)
        finally:
            ours.close()
        return _Process(pid)

    fork_server.begin = begin


def _serve(line: socket.socket) -> None:
    """Waits for the socket that it serves; ends with the trainer if there is none."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    message, descriptors, _, _ = socket.recv_fds(line, fork_server_process.LARGEST, 1)
    line.close()
    if message:
        modules, environment = json.loads(message)
        os.environ.clear()
        os.environ.update(environment)
        fork_server_process.main(descriptors[0], modules)
