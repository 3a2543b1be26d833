"""The fork server, launcher's side: forks children that have torch and transformers imported.

    prepared(…) ──> fork server imports while the trainer starts ──> start(…) ──> fork runs `python -m module`

Importing takes seconds of CPU time in each process, and a run has several. The four teachers of the
quickstart spent more time importing than on anything else before the first step. A forked child has its own
session, a log and a pipe to its launcher, as any child does (`local.py`). It does not need the fork server
once it runs.

Used only on Linux without a visible GPU: whether a fork may use a GPU depends on what libraries did at import. With
a GPU, spare processes take its place (`spare_processes.py`). A child is started as a plain subprocess if its
environment differs in variables that libraries read when they load (`_READ_AT_LOAD`).
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from understudy.cluster.fork_server_process import LARGEST, MODULES
from understudy.observability.forks import close_in_forks

_READ_AT_LOAD = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "ACL_", "TORCH_", "PYTORCH_", "PYTHON", "LD_", "MALLOC_",
    "CUDA", "NVIDIA_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "TRITON", "TMPDIR", "HOME", "XDG_", "PATH", "VIRTUAL_ENV",
)  # fmt: skip
"""Prefixes of variables that libraries read when they load."""
_PROGRAM = "from understudy.cluster.fork_server_process import main; main({}, {}, forks={})"
_ANSWER_SECONDS = 10.0
"""How long `start` waits for a fork. It takes some hundredths of a second and blocks the launcher's event
loop."""
_GPU_DRIVER = Path("/dev/nvidiactl")
_POLL_SECONDS = 0.01
_END_SECONDS = 1.0
_REPORT_SECONDS_IF_STOPPED = 3.0
"""How long after a child's death a stopped fork server may take to report its exit code."""
_REPORT_SECONDS = 60.0
"""The same for one that runs. On a busy machine it may get no CPU for seconds."""


class ChildProcess(Protocol):
    """The part of `subprocess.Popen` that a `Child` uses."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class ProcessSource(Protocol):
    """Starts children that have imported their modules already: a fork server, or spare processes."""

    @property
    def over(self) -> bool:
        """Whether it starts no more children."""
        ...

    def ready(self) -> bool: ...

    def takes(self, environment: Mapping[str, str]) -> bool: ...

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: int,
        pipe: int | None,
    ) -> ChildProcess: ...

    def close(self) -> None: ...


class ForkServer:
    """The launcher's handle on the fork server: its process, the socket to it and exit codes not yet read.

    `LocalProcesses` starts children with it; several threads may poll one. A lock guards the socket.
    """

    def __init__(self, env: Mapping[str, str], modules: Sequence[str] = MODULES) -> None:
        environment = {**os.environ, **env}
        self._environment = read_at_load(environment)
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.setblocking(False)
        with theirs:
            self._process = begin(theirs.fileno(), modules, environment)
        self._lock = threading.Lock()
        self._ready = False
        self._ended = False
        self._codes: dict[int, int] = {}
        close_in_forks(self, ForkServer._let_go)

    @property
    def over(self) -> bool:
        return self._ended

    def ready(self) -> bool:
        """Whether it accepts jobs: False while it imports, and after it has ended."""
        with self._lock:
            self._receive()
            return self._ready and not self._ended

    def takes(self, environment: Mapping[str, str]) -> bool:
        return read_at_load(environment) == self._environment

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: int,
        pipe: int | None,
    ) -> ChildProcess:
        """Fork a child; `OSError` if the fork server has ended or does not answer. Only a child with a pipe is
        given `--watch-fd`."""
        message = job_message(module, arguments, environment)
        with self._lock:
            socket.send_fds(self._line, [message], [log] if pipe is None else [log, pipe])
            deadline = time.monotonic() + _ANSWER_SECONDS
            while (pid := self._receive()) is None:
                if self._ended or time.monotonic() > deadline:
                    self._let_go()
                    self._process.kill()  # a late fork would be a child that we do not know of
                    self._process.wait()
                    raise OSError("the fork server does not answer")
                time.sleep(_POLL_SECONDS)
        return _Forked(pid, self)

    def code_of(self, child: _Forked) -> int | None:
        """A child's exit code; None while it lives."""
        with self._lock:
            self._receive()
            code = self._codes.pop(child.pid, None)
            if code is not None:
                self._say({"bury": child.pid})
            elif not _lives(child.pid):
                child.dead_since = child.dead_since or time.monotonic()
                waited = time.monotonic() - child.dead_since
                most = _REPORT_SECONDS_IF_STOPPED if _state(self._process.pid) in "TtZX" else _REPORT_SECONDS
                if self._ended or waited > most:
                    return -signal.SIGKILL  # the fork server cannot report it any more
            return code

    def close(self) -> None:
        with self._lock:
            self._let_go()
        self._process.kill()
        self._process.wait()

    def _let_go(self) -> None:
        self._ended = True
        self._line.close()

    def _say(self, message: Mapping[str, Any]) -> None:
        with suppress(OSError):
            self._line.send(json.dumps(message).encode())

    def _receive(self) -> int | None:
        """Reads pending messages up to the pid of a new child, which it returns; None if there is no such
        message."""
        while not self._ended:
            try:
                message = self._line.recv(LARGEST)
            except BlockingIOError:
                return None
            except OSError:
                message = b""
            if not message:
                self._ended = True
                with suppress(subprocess.TimeoutExpired):
                    # The socket is closed a moment before the process can be waited for.
                    self._process.wait(_END_SECONDS)
                return None
            report = json.loads(message)
            if "pid" in report:
                return int(report["pid"])
            if "gone" in report:
                self._codes[report["gone"]] = report["code"]
            else:
                self._ready, self._ended = report["ready"], not report["ready"]
        return None


def begin(
    descriptor: int, modules: Sequence[str], environment: Mapping[str, str], *, forks: bool = True
) -> subprocess.Popen[bytes]:
    """Starts the process of a fork server, or a spare one."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM.format(descriptor, list(modules), forks)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        pass_fds=[descriptor],
        start_new_session=True,
    )


def job_message(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> bytes:
    """`OSError` if it is too long."""
    job = {
        "module": module,
        "arguments": [*arguments],
        "env": dict(environment),
        "folder": str(Path.cwd()),
    }
    message = json.dumps(job).encode()
    if len(message) > LARGEST:
        raise OSError("an environment this large does not fit into a message")
    return message


class _Forked:
    """A forked child with the interface of `Popen`."""

    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.dead_since: float | None = None
        """When its death was seen, while its exit code has not been reported. Not kept by pid: pids are used again."""
        self._server = server

    def poll(self) -> int | None:
        if self.returncode is None and (code := self._server.code_of(self)) is not None:
            self.returncode = code
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code


_SERVER: ProcessSource | None = None


@contextmanager
def prepared(env: Mapping[str, str], modules: Sequence[str] = MODULES) -> Iterator[None]:
    """A fork server with these modules for the duration of the block, for children with `env`.

    Does nothing if this process has one already, or must not fork (`can_fork`).
    """
    if current() is not None or not can_fork():
        yield
        return
    with used(ForkServer(env, modules)):
        yield


@contextmanager
def used(made: ProcessSource) -> Iterator[None]:
    """Children are taken from `made` for the duration of the block, which closes it."""
    global _SERVER
    _SERVER = made
    try:
        yield
    finally:
        made.close()  # not `_SERVER`: if this one died meanwhile, an inner block may have replaced it
        _SERVER = None


def can_fork() -> bool:
    """On Linux without a GPU, or with every GPU hidden by an empty `CUDA_VISIBLE_DEVICES`."""
    without_gpu = not _GPU_DRIVER.exists() or os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    return hasattr(os, "pidfd_open") and without_gpu


def current() -> ProcessSource | None:
    """The fork server of this process, or its spare processes, if it has any."""
    return None if _SERVER is None or _SERVER.over else _SERVER


def read_at_load(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_LOAD)}


def _lives(pid: int) -> bool:
    return _state(pid) not in "ZX"


def _state(pid: int) -> str:
    """A letter, as in /proc: T stopped, Z ended and not waited for, X gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
