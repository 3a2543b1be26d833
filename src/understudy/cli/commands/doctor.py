"""Report what this machine offers a run; or, given a run directory, its waits and advisories."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from understudy.observability.advisories.gather import advisories_of
from understudy.observability.rundir import RunDir, read_whole
from understudy.observability.watchdog import read_waits, run_status
from understudy.planning.installed import too_old
from understudy.planning.preflight import PYTHON_VARIABLE
from understudy.rollout.tools.sandbox import namespace_problem

_PACKAGES = (
    "understudy",
    "torch",
    "transformers",
    "triton",
    "pydantic",
    "aiohttp",
    "uvicorn",
    "peft",
    "ray",
    "TransferQueue",
)

EXAMPLE = "understudy doctor runs/RUN"
_GONE = "its process is gone; continue with `understudy resume`"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", type=Path, help="a run directory: say what that run waits for, and give advice"
    )


def run(options: argparse.Namespace) -> None:
    if options.run is not None:
        return _waits(RunDir.open(options.run))
    return _machine()


def _waits(run_dir: RunDir) -> None:
    """The wait graph of a live run, as its watchdog last wrote it."""
    console = Console()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    # A launch that is killed early leaves no state.json.
    state = read_whole(run_dir.state) if run_dir.state.exists() else {}
    if not run_dir.waits.exists():
        # Of a process on another machine nothing is known until it writes waits.json.
        status = state["status"] if _elsewhere(state) else run_status(state, {})
        say(
            f"{run_dir.path}: {_GONE if status == 'killed' else status}; it has not begun to train{_because(state)}"
        )
        return
    entry, waits = read_waits(run_dir.waits)
    status = run_status(state, entry)
    alive = status == "running"
    if alive:
        say(
            f"{run_dir.path}: running as process {state['pid']}{_elsewhere(state)}; last progress "
            f"{entry['seconds_without_progress'] + time.time() - entry['written']:.0f} s ago"
        )
    else:
        say(f"{run_dir.path}: ended ({_GONE if status == 'killed' else status}){_because(state)}")
    if not alive and entry["status"] != "ended":  # the process had no time to write that it ends
        say(f"  its last report, of {time.strftime('%H:%M:%S', time.localtime(entry['written']))}:")
    if alive or entry["status"] != "ended":
        for chain in entry.get("chains", []):
            say(f"  {chain}")
        for wait in waits:
            say(f"  under way: {wait}")
        for name, value in entry["facts"].items():
            say(f"  {name:<28} {value}")
    for advisory in advisories_of(run_dir, live=alive):
        say(f"  {advisory.level}: {advisory}")


def _elsewhere(state: dict[str, Any]) -> str:
    host = state.get("host", socket.gethostname())
    return "" if host == socket.gethostname() else f" on {host}"


def _because(state: dict[str, Any]) -> str:
    return f": {state['detail']}" if state.get("detail") else ""


def _machine() -> None:
    import torch

    console = Console()

    def line(name: str, value: object) -> None:
        console.print(f"{name:<16} {value}", highlight=False, markup=False, soft_wrap=True)

    line("python", f"{sys.version.split()[0]} on {platform.system()} {platform.machine()}")
    for package in _PACKAGES:
        try:
            line(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            line(package, "not installed")
    for problem in too_old():
        line("too old", problem)
    line("vllm", _vllm())
    memory = psutil.virtual_memory()
    line("cores", f"{os.cpu_count()} ({torch.get_num_threads()} torch threads)")
    line("memory", f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free")
    line("disk here", f"{shutil.disk_usage(Path.cwd()).free / 2**30:.1f} GiB free")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            line(f"cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    else:
        line("cuda", "none; runs use the CPU")
    problem = namespace_problem()
    line(
        "tool isolation",
        f'none ({problem}): tools are refused unless isolation = "none"'
        if problem
        else "namespaces: tools run without network, files of yours or other processes",
    )


def _vllm() -> str:
    """The vLLM that runs start for engines and teachers: it has an environment of its own."""
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        return f"none: {PYTHON_VARIABLE} names no interpreter of an environment that has it"
    code = "import importlib.metadata as m; print(next(d.version for d in m.distributions() if (d.name or '').startswith('vllm')))"
    try:
        found = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"none: {PYTHON_VARIABLE} = {python!r} has no vLLM ({type(error).__name__})"
    return f"{found.stdout.strip()} ({python})"
