"""The child's side of a launch; `understudy.cluster.local` is the launcher's side."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAUNCHER_GONE = 3
"""The exit code of a process whose launcher has died."""


def end_with_launcher(
    fd: int, *, code: int = LAUNCHER_GONE, before: Callable[[], None] | None = None
) -> None:
    """Starts a thread that exits this process when the launcher's end of the pipe `fd` closes."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(fd, 4096):
                pass
        if before is not None:
            before()
        os._exit(code)

    threading.Thread(target=wait, name="launcher-watch", daemon=True).start()


def write_ready_file(path: Path, **facts: Any) -> None:
    """Tells the launcher that this process is ready.

    Written atomically, so the launcher never reads half a file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps({**facts, "pid": os.getpid()}))
    temporary.replace(path)
