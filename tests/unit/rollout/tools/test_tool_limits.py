"""Memory limits over all processes of a tool call, and the system calls that isolated code is denied."""

from __future__ import annotations

import asyncio
import time

import pytest

from understudy.rollout.tools.base import ToolOutcome, ToolResult
from understudy.rollout.tools.sandbox import Isolation, Sandbox, namespace_problem

needs_namespaces = pytest.mark.skipif(bool(namespace_problem()), reason=namespace_problem())
BOTH = [pytest.param(Isolation.NAMESPACES, marks=needs_namespaces), Isolation.NONE]

CHILDREN = """
import os, time
for _ in range({count}):
    if os.fork() == 0:
        held = bytearray({mb} << 20)
        for place in range(0, len(held), 4096):
            held[place] = 1
        time.sleep({seconds})
        os._exit(0)
for _ in range({count}):
    os.wait()
print("all held it")
"""


def run(sandbox: Sandbox, code: str, seconds: float = 30) -> ToolResult:
    return asyncio.run(sandbox.run_code(code, deadline_s=seconds))


@pytest.mark.parametrize("isolation", BOTH)
def test_all_processes_of_a_tool_call_share_one_memory_limit(isolation: Isolation) -> None:
    started = time.monotonic()
    result = run(Sandbox(isolation, memory_mb=200), CHILDREN.format(count=6, mb=100, seconds=20))
    assert result.outcome is ToolOutcome.ERROR
    assert "together used more than 200 MB of memory" in result.text and "all held it" not in result.text
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("isolation", BOTH)
def test_memory_pages_shared_between_processes_count_once(isolation: Isolation) -> None:
    shared = "held = bytearray(b'1') * (60 << 20)\n"
    result = run(Sandbox(isolation, memory_mb=200), shared + CHILDREN.format(count=6, mb=1, seconds=0.5))
    assert result.text == "all held it"


DENIED = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)

def refused(name, *arguments):
    return getattr(libc, name)(*arguments) == -1 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS)

USER, MOUNT = 0x10000000, 0x20000
print([
    refused("unshare", USER),
    refused("unshare", MOUNT),
    refused("syscall", {clone}, USER | 17, None, None, None, None),
    refused("syscall", {clone3}, None, 0),
    refused("memfd_create", b"hidden", 0),
    refused("syscall", {keyctl}, 0, -3, 0),
    refused("shmget", 0, 1 << 20, 0o600),
    refused("mount", b"none", b"/tmp", b"tmpfs", 0, None),
])
child = os.fork()
if child == 0:
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
import subprocess, threading
print(subprocess.run(["/bin/echo", "runs"], capture_output=True, text=True).stdout.strip())
thread = threading.Thread(target=lambda: print("thread"))
thread.start()
thread.join()
"""


@needs_namespaces
def test_isolated_code_cannot_open_namespaces_keyrings_or_hidden_memory() -> None:
    import platform

    from understudy.rollout.tools.jail import CLONE, CLONE3, KEYCTL

    machine = platform.machine()
    code = DENIED.format(clone=CLONE[machine], clone3=CLONE3, keyctl=KEYCTL[machine])
    assert run(Sandbox(Isolation.NAMESPACES), code).text.splitlines() == [
        str([True] * 8),
        "7",
        "runs",
        "thread",
    ]
