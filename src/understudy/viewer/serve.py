"""Runs the page's server until it is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import resources
from pathlib import Path

import uvicorn

from understudy.errors import UnderstudyError
from understudy.observability.rundir import RunDir
from understudy.viewer.run_view import RunView
from understudy.viewer.server import ViewServer, address, listen


def demo_run() -> RunDir:
    """The recorded run that ships with the package."""
    return RunDir.open(Path(str(resources.files("understudy.viewer") / "demo")))


@contextmanager
def served_beside(run: Path) -> Iterator[None]:
    """A page on `run` in a process of its own while the body runs; it ends with this process too."""
    command = [sys.executable, "-P", "-m", "understudy.cli.main", "view", "--beside", str(run)]
    page = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno())
    try:
        yield
    finally:
        page.terminate()
        page.wait()


def _end_with_parent() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def serve(
    runs: Sequence[RunDir], port: int | None, tell: Callable[[str], None], *, beside: bool = False
) -> None:
    """Serves until Ctrl-C or SIGTERM; `tell` gets the address once the socket listens. `beside`: ends with
    the process that started it, and leaves Ctrl-C to it."""
    if beside:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    try:
        sock = listen(port or 0)
    except (OSError, OverflowError) as error:
        raise UnderstudyError(
            f"--port {port}: {error}; choose another port, or none for a free one"
        ) from None
    server = ViewServer([RunView(run) for run in runs])
    server.start()
    tell(address(server, sock))
    config = uvicorn.Config(
        server.app, log_level="error", access_log=False, lifespan="off", server_header=False
    )
    web = uvicorn.Server(config)
    if beside:
        # Uvicorn would take Ctrl-C, which is meant for the run.
        web.capture_signals = nullcontext
    try:
        web.run(sockets=[sock])
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
