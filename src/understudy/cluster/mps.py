"""NVIDIA's multi-process service (MPS), started for this process and ended with it.

    this process ──`nvidia-cuda-mps-control -d`──> daemon, with pipes and logs in a folder of its own
         └──pipe──> keeper: at the end of the pipe it sends `quit` and removes the folder

A process connects to the service when it first uses CUDA, and keeps that connection. So the service must run before
torch looks for GPUs, and it lasts until this process ends, not until a run does: a notebook still holds its
connection then. The keeper ends it after kill -9 too. If the keeper was killed as well, the next start finds
the folder without an owner and ends the daemon. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from understudy.observability.forks import close_in_forks
from understudy.observability.owned_folder import OwnedFolder, remove_abandoned

CONTROL = "nvidia-cuda-mps-control"
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_DEFAULT_PIPES = "/tmp/nvidia-mps"
_PREFIX = "understudy-mps-"
_QUIT = "quit -t 5"
"""The daemon waits as many seconds for processes that still use it."""
_SECONDS = 20.0
_KEEPER = f'cat > /dev/null; echo {_QUIT} | "$0" > /dev/null 2>&1; rm -rf "$1"'
_PROBE = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()
for call in (lambda: cuda.cuInit(0), lambda: cuda.cuDeviceGet(ctypes.byref(device), 0),
             lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)):
    if code := call():
        raise SystemExit(f"CUDA error {code}")
"""


class _Service:
    """The daemon of this process: its folder and the pipe to its keeper. Both are dropped in forks."""

    def __init__(self, folder: OwnedFolder, keeper: subprocess.Popen[bytes]) -> None:
        self.folder, self.keeper = folder, keeper
        close_in_forks(self, _Service.let_go)

    def let_go(self) -> None:
        assert self.keeper.stdin is not None
        self.keeper.stdin.close()


_ours: _Service | None = None


def is_running() -> bool:
    """Whether a service listens where this process would look for one."""
    return (Path(os.environ.get(_PIPES) or _DEFAULT_PIPES) / "control").exists()


def uses_cuda() -> bool:
    """Whether this process has used CUDA already, and so can no longer connect to a service. CUDA opens
    /dev/nvidia-uvm; programs that only read a GPU's temperature and load do not."""
    with contextlib.suppress(OSError):
        opened = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
        return any(os.readlink(one).startswith("/dev/nvidia-uvm") for one in opened if os.path.islink(one))
    return False


def opens_cuda() -> str | None:
    """Opens a GPU in another process; returns what went wrong."""
    try:
        done = subprocess.run(
            [sys.executable, "-S", "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no GPU could be opened in {_SECONDS:g} s"
    return (done.stderr.strip().splitlines() or ["no reason given"])[-1] if done.returncode else None


def start(probe: Callable[[], str | None] = opens_cuda) -> str | None:
    """Starts the service for this process and its children; returns why it does not run. Daemons that killed
    processes left behind are ended first."""
    global _ours
    control = shutil.which(CONTROL)
    if control is None:
        return f"{CONTROL} is not on PATH"
    remove_abandoned(Path(tempfile.gettempdir()), _PREFIX, lambda folder: _end(control, folder))
    folder = OwnedFolder(_PREFIX, None, tidy=False)
    env = _environment(folder.path)
    (folder.path / "log").mkdir()
    if problem := _begin(control, env):
        folder.close()
        return problem
    keeper = subprocess.Popen(
        ["/bin/sh", "-c", _KEEPER, control, str(folder.path)],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.environ[_PIPES] = str(folder.path)
    if problem := probe():
        del os.environ[_PIPES]
        assert keeper.stdin is not None
        keeper.stdin.close()
        keeper.wait()
        folder.close()
        return problem
    _ours = _Service(folder, keeper)
    return None


def _environment(folder: Path) -> dict[str, str]:
    """The daemon's environment. It sees all GPUs: a daemon with CUDA_VISIBLE_DEVICES would number them anew for
    the processes that use it."""
    env = {**os.environ, _PIPES: str(folder), _LOGS: str(folder / "log")}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    return env


def _begin(control: str, env: dict[str, str]) -> str | None:
    # The daemon would hold a pipe of ours open, so it writes to a file.
    with tempfile.TemporaryFile("w+") as output:
        try:
            code = subprocess.run(
                [control, "-d"], env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=_SECONDS, check=False
            ).returncode  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{CONTROL} -d: {error}"
        output.seek(0)
        text = " ".join(output.read().split())
    return f"{CONTROL} -d ended with code {code}: {text or 'it printed nothing'}" if code else None


def _end(control: str, folder: Path) -> None:
    """Ends the daemon of a folder whose owner is gone."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [control],
            env=_environment(folder),
            input=f"{_QUIT}\n".encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS,
            check=False,
        )
    for pid in _daemons(folder):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _daemons(folder: Path) -> Iterator[int]:
    """Processes of the service that run with this folder and did not end when asked to."""
    mark = f"{_PIPES}={folder}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            named = b"nvidia-cuda-mps" in (process / "cmdline").read_bytes()
            if named and mark in (process / "environ").read_bytes().split(b"\0"):
                yield int(process.name)
