"""Signals to the process group of a child that leads it, with the group's number still its own.

The kernel may give a pid to a new process as soon as it is waited for and no process is left in its group. So the group is
signalled while its leader is alive or a zombie, and only then is the leader waited for.
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress


def has_ended(leader: subprocess.Popen[bytes]) -> bool:
    """Unlike `poll`, this leaves a zombie in place."""
    if leader.returncode is not None or not hasattr(os, "waitid"):  # macOS before Python 3.13
        return leader.poll() is not None
    return os.waitid(os.P_PID, leader.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def signal_group(leader: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Does nothing once the leader has been waited for."""
    if leader.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(leader.pid, number)


def end_group(leader: subprocess.Popen[bytes]) -> int:
    """SIGKILL to the group, then waits for its leader; returns the leader's exit code, which is its own if it had ended."""
    signal_group(leader, signal.SIGKILL)
    return leader.wait()
