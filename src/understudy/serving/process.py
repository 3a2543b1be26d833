"""The main function of our processes: arguments, log, token, ready file, the launcher's death, exit codes.

    process_main ─> parse ─> watch the launcher ─> body(process): bind ─> load ─> serve or work ─> ready file

| exit code | meaning |
|---|---|
| 0 | the work is done, or SIGTERM or SIGINT stopped it |
| 1 | an exception that is a fault of ours; the log has the traceback |
| 2 | an `UnderstudyError`, or no memory on the machine or GPU; the last line of the log says which |
| 3 `LAUNCHER_GONE` | the launcher has died |
| 4 `LOST_PEER` | another process of its group is gone |
| −11 and other signals | a crash in native code leaves the Python stacks in the log |

`understudy.cluster.local` is the launcher's side.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import json
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from understudy.errors import UnderstudyError, lacks_memory
from understudy.serving.bind import bind_socket

LAUNCHER_GONE = 3


class Process:
    """This process as its body sees it: its arguments and its token. Sockets close with it."""

    def __init__(self, args: argparse.Namespace, stack: ExitStack) -> None:
        self.args = args
        self.token = os.environ.get(getattr(args, "token_env", "UNDERSTUDY_TOKEN")) or None
        self._stack = stack

    def bind(self) -> socket.socket:
        """A socket bound to `--bind`, which listens when the process serves (`serving/server.py`).

        Called before minutes of loading: a port in use is an error at once.
        """
        return self._stack.enter_context(bind_socket(self.args.bind, self.token))

    def ready(self, **facts: Any) -> None:
        """Tells the launcher that this process is ready, if it wants to know.

        Written atomically, so the launcher never reads half a file.
        """
        path: Path | None = self.args.ready_file
        if path is not None:
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            temporary.write_text(json.dumps({**facts, "pid": os.getpid()}))
            temporary.replace(path)


def process_arguments(
    module: str, description: str | None, *, serves: bool = True
) -> argparse.ArgumentParser:
    """A parser with the options that a launcher gives."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    if serves:
        parser.add_argument(
            "--bind",
            default="127.0.0.1:0",
            help="HOST:PORT, beyond loopback only with a token; port 0 takes a free one",
        )
        parser.add_argument(
            "--token-env", default="UNDERSTUDY_TOKEN", help="environment variable with the bearer token"
        )
    parser.add_argument("--ready-file", type=Path, help='written when ready: {"url": …, "pid": …}')
    parser.add_argument("--watch-fd", type=int, help="exit when this inherited pipe closes")
    return parser


def process_main(
    body: Callable[[Process], Coroutine[Any, Any, None] | None],
    args: argparse.Namespace,
    *,
    before_orphaned_exit: Callable[[], None] | None = None,
    watches_launcher: bool = False,
    log_level: int = logging.INFO,
) -> int:
    """Runs `body` and returns the exit code. The process exits at once if its launcher dies, unless `body`
    watches `--watch-fd` itself."""
    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    faulthandler.enable(file=2)  # a crash in native code writes the Python stacks to the log
    logging.getLogger("httpx").setLevel(logging.WARNING)  # huggingface_hub's requests
    if args.watch_fd is not None and not watches_launcher:
        end_with_launcher(args.watch_fd, before_orphaned_exit)
    try:
        with ExitStack() as stack:
            work = body(Process(args, stack))
            if work is not None:
                asyncio.run(work)
    except UnderstudyError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except (RuntimeError, MemoryError, OSError) as error:
        if lacks_memory(error):  # no stack: a launcher shows the end of the log
            print(
                "error: out of memory on this machine; stop other programs, or start fewer processes",
                file=sys.stderr,
            )
            return UnderstudyError.exit_code
        if not is_full_memory(error):
            raise
        traceback.print_exc()
        print(
            "error: the GPU's memory is full; `nvidia-smi` lists the processes that hold it", file=sys.stderr
        )
        return UnderstudyError.exit_code
    return 0


def is_full_memory(error: BaseException) -> bool:
    """Whether torch's allocator or the CUDA driver ran out of memory. torch raises other types for the two."""
    return isinstance(error, RuntimeError) and "out of memory" in str(error)


def end_with_launcher(fd: int, before: Callable[[], None] | None = None) -> None:
    """Starts a thread that exits this process when the launcher's end of the pipe `fd` closes."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(fd, 4096):
                pass
        if before is not None:
            before()
        os._exit(LAUNCHER_GONE)

    threading.Thread(target=wait, name="launcher-watch", daemon=True).start()
