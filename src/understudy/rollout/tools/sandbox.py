"""Starts jailed child processes with jobs and deadlines, and reads their output.

Code that a model wrote runs in a new process each time. A function of ours or the user's, to which the model
only gives arguments, is served by long-lived processes (`workers.py`): a call costs one line each way.
"""

from __future__ import annotations

import asyncio
import functools
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from understudy.errors import ConfigError
from understudy.rollout.tools.base import ToolOutcome, ToolResult
from understudy.rollout.tools.child import ToolChild

_COMMAND = (sys.executable, "-I", "-S", "-B", str(Path(__file__).with_name("jail.py")))
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONIOENCODING": "utf-8"}
"""Does not contain our environment, which often holds keys and tokens."""

_END_S = 4.0
"""How long a child may take to kill its descendants."""


class Isolation(StrEnum):
    NAMESPACES = "namespaces"
    """Linux user, mount, pid, network and ipc namespaces: no network, no files of ours, no other
    processes."""
    NONE = "none"
    """A child process with limits and a deadline only: it can read our files and reach the network. Processes
    that it starts end with the call (on Linux)."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Isolation and limits of a tool. Creating one raises `ConfigError` if this machine does not support
    them."""

    isolation: Isolation = Isolation.NAMESPACES
    memory_mb: int = 512
    """Address space of each process, and memory of all processes of a call together."""
    output_bytes: int = 16_384
    """Output beyond this is cut off, and the child is ended."""

    def __post_init__(self) -> None:
        if self.isolation is Isolation.NAMESPACES and (problem := namespace_problem()):
            raise ConfigError(
                f"tools cannot be isolated on this machine ({problem}). Allow unprivileged user namespaces, or, if the "
                'tools are harmless, set isolation = "none" for them'
            )

    def request(self, job: Mapping[str, Any], visible: Sequence[str], cpu_s: int | None) -> bytes:
        """The first line of a child's stdin."""
        limits = {
            "RLIMIT_AS": self.memory_mb << 20,
            "RLIMIT_FSIZE": 32 << 20,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
        }
        if cpu_s is not None:
            limits["RLIMIT_CPU"] = cpu_s
        if self.isolation is Isolation.NAMESPACES:
            limits["RLIMIT_NPROC"] = (
                32  # counted within the namespace; without one it would count all our processes
            )
        request = {
            "isolation": self.isolation, "visible": list(visible), "limits": limits, "job": dict(job),
            "memory": self.memory_mb << 20,
        }  # fmt: skip
        return json.dumps(request).encode() + b"\n"

    async def run_code(self, code: str, *, deadline_s: float, paths: Sequence[str] = ()) -> ToolResult:
        """Runs Python code in a new process. Every outcome is a `ToolResult`, and no process is left running.

        `paths` are folders it may import from.
        """
        start = time.perf_counter()
        job = {"kind": "python", "code": code, "paths": list(paths)}
        child = await start_child(self, job, paths, cpu_s=int(deadline_s) + 2)
        late, output = False, b""
        try:
            async with asyncio.timeout(deadline_s):
                output = await _read(child, self.output_bytes)
                if len(output) <= self.output_bytes:
                    await child.wait()
        except TimeoutError:
            late = True
        finally:
            exit_code = await end_child(self, child)
        if late:
            outcome, text = ToolOutcome.TIMEOUT, f"the code was stopped after {deadline_s:g} s"
        else:
            cut_off = len(output) > self.output_bytes
            text = output[: self.output_bytes].decode(errors="replace").rstrip()
            if cut_off:
                text += "\n… (cut off)"
            elif exit_code and not text:
                text = f"the code ended with exit code {exit_code} and printed nothing"
            outcome = ToolOutcome.ERROR if exit_code and not cut_off else ToolOutcome.OK
        return ToolResult(outcome, text, time.perf_counter() - start)


async def start_child(
    sandbox: Sandbox, job: Mapping[str, Any], visible: Sequence[str], cpu_s: int | None
) -> ToolChild:
    """Starts a jailed process and sends it its job."""
    child = await ToolChild.start(_COMMAND, _ENVIRONMENT)
    child.stdin.write(sandbox.request(job, visible, cpu_s))
    return child


async def end_child(sandbox: Sandbox, child: ToolChild) -> int:
    """Ends the child and all processes it started; returns its exit code. With namespaces, killing its process group
    (`start_new_session`) is enough; without, the child itself kills processes that left the group
    (`jail.supervise`)."""
    try:
        if sandbox.isolation is Isolation.NONE and not child.ended:
            child.terminate()
            with suppress(TimeoutError):
                await asyncio.wait_for(child.wait(), _END_S)
    finally:
        code = await child.end()
    return code


async def _read(child: ToolChild, most: int) -> bytes:
    """Reads until EOF, or until a little over `most` bytes."""
    output = b""
    while len(output) <= most and (block := await child.stdout.read(4096)):
        output += block
    return output


@functools.cache
def namespace_problem() -> str:
    """Why namespaces do not work on this machine; empty if they do. Determined by a probe, once."""
    request = (
        json.dumps({"isolation": "namespaces", "visible": [], "limits": {}, "job": {"kind": "nothing"}})
        + "\n"
    )
    try:
        probe = subprocess.run(
            _COMMAND, input=request, env=_ENVIRONMENT, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if probe.returncode == 0:
        return ""
    lines = (probe.stderr + probe.stdout).strip().splitlines()
    return lines[-1] if lines else f"exit code {probe.returncode}"
