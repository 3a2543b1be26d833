"""Named fault-injection points, at which a test can kill the process between any two writes.

`point("checkpoint.before_rename")` does nothing unless the environment names that point:

    UNDERSTUDY_FAULT="checkpoint.before_rename:3"      kill -9 this process at the third call

A test sets the variable for one child process and then checks that nothing was lost.
"""

from __future__ import annotations

import os
import signal

_VARIABLE = "UNDERSTUDY_FAULT"
_passages: dict[str, int] = {}


def point(name: str) -> None:
    """Kills this process if a test asks for it here; otherwise it costs nothing."""
    wanted = os.environ.get(_VARIABLE)
    if not wanted:
        return
    target, _, count = wanted.partition(":")
    if target != name:
        return
    _passages[name] = _passages.get(name, 0) + 1
    if _passages[name] >= int(count or 1):
        os.kill(os.getpid(), signal.SIGKILL)
