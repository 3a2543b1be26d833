"""Helpers of the end-to-end tests: the quickstart's assets, recipes as files, the command as a process."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from importlib import resources
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
from forked_command import ForkedCommand, forked_command

import understudy
from understudy.cli.main import main
from understudy.observability.watchdog import read_waits

ASSETS = Path(str(resources.files("understudy.assets") / "quickstart"))
TOKEN_VARIABLE = "UNDERSTUDY_TEST_TOKEN"
Command = subprocess.Popen[str] | ForkedCommand


def write_toml(path: Path, table: dict[str, Any]) -> Path:
    """Writes plain tables as a recipe file; JSON values are TOML values."""
    lines: list[str] = []

    def emit(prefix: str, entries: dict[str, Any]) -> None:
        lines.append(f"[{prefix}]")
        nested = {}
        for key, value in entries.items():
            if isinstance(value, dict):
                nested[key] = value
            else:
                lines.append(f"{_named(key)} = {json.dumps(value)}")
        for key, value in nested.items():
            emit(f"{prefix}.{_named(key)}", value)

    for section, entries in table.items():
        emit(section, entries)
    path.write_text("\n".join(lines) + "\n")
    return path


def _named(key: str) -> str:
    return key if key.replace("_", "").isalnum() else json.dumps(key)


def until_no_progress(process: Command, run: Path, seconds: float = 2) -> None:
    """Waits until the run's watchdog reports no progress for this long."""
    deadline = time.monotonic() + 120
    waits = run / "waits.json"
    while not waits.exists() or read_waits(waits)[0]["seconds_without_progress"] < seconds:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.2)


def until_back(step: int) -> Callable[[understudy.Step], None]:
    """An `on_step` callback that waits after this step until a lost teacher replica is back."""

    def wait(done: understudy.Step) -> None:
        log, deadline = done.dir / "logs" / "trainer.log", time.monotonic() + 120
        while done.step == step and "back after a restart" not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    return wait


def start_cli(*arguments: str, fault: str | None = None, fork: bool = True) -> Command:
    """Starts the command as a process: forked if there is a fork server (`forked_command.py`), else as a new Python."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env.pop("UNDERSTUDY_FAULT", None)
    if fault:
        env["UNDERSTUDY_FAULT"] = fault
    if fork and (forked := forked_command(arguments, env)):
        return forked
    command = [sys.executable, "-m", "understudy.cli.main", *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def call_cli(*arguments: str) -> tuple[int, str]:
    """Runs the command in this process, which has imported torch already; for tests that do not look at the process."""
    with redirect_stdout(StringIO()) as output, redirect_stderr(output):
        code = main(arguments)
    return code, output.getvalue()


def run_cli(*arguments: str, fault: str | None = None) -> tuple[int, str]:
    process = start_cli(*arguments, fault=fault)
    try:
        output, _ = process.communicate(timeout=150)
    finally:
        process.kill()  # so that an aborted test leaves no run behind
    return process.returncode, output


def living_children() -> list[psutil.Process]:
    """Descendants of this process, without zombies, which have no command line."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
