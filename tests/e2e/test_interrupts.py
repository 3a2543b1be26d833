"""Ctrl-C once: finish the step, save, leave. Twice: leave now. No orphan either way."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_runs import ASSETS, run_cli, start_cli, write_toml

from understudy.dataplane.ledger import audit
from understudy.observability.rundir import read_json

Make = Callable[..., dict[str, Any]]


@pytest.fixture
def local(recipe: Make, tmp_path: Path) -> tuple[Path, Path]:
    """A long run with teachers of its own, so that orphans would show."""
    teachers = {
        name: {"model": str(ASSETS / "models" / f"teacher-{name}"), "key": name} for name in ("add", "sort")
    }
    table = recipe("long", teachers=teachers, trainer__steps=5000, trainer__checkpoint_every=5000)
    return write_toml(tmp_path / "recipe.toml", table), Path(table["run"]["dir"])


def until_training(process: subprocess.Popen[str], run: Path) -> list[psutil.Process]:
    """Waits for the first steps; returns every process of the run."""
    deadline = time.monotonic() + 120
    while not ((run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.1)
    family = psutil.Process(process.pid)
    children = family.children(recursive=True)
    assert len(children) == 2, "one process per teacher"
    return [family, *children]


def all_gone(processes: list[psutil.Process], seconds: float = 30.0) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_once_finishes_the_step_and_saves(local: tuple[Path, Path]) -> None:
    path, run = local
    process = start_cli("train", str(path))
    family = until_training(process, run)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and f"understudy resume {run}" in output, output
    assert all_gone(family)
    state = read_json(run / "state.json")
    steps = [int(folder.name.removeprefix("step-")) for folder in (run / "checkpoints").glob("step-*")]
    assert state["status"] == "stopped" and len(steps) == 1
    report = audit(run)
    assert report.balanced and report.in_flight == 0 and report.trained == steps[0] * 16


@pytest.mark.parametrize(
    "how", ["kill -9", *(pytest.param(how, marks=pytest.mark.slow) for how in ("twice", "SIGTERM"))]
)
def test_no_orphan_however_it_ends(local: tuple[Path, Path], how: str) -> None:
    path, run = local
    process = start_cli("train", str(path), "--quiet")
    family = until_training(process, run)
    if how == "twice":
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
    else:
        os.kill(process.pid, signal.SIGTERM if how == "SIGTERM" else signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == {"twice": 130, "SIGTERM": 130, "kill -9": -signal.SIGKILL}[how]
    assert all_gone(family)
    assert audit(run).balanced


def test_while_starting_there_is_nothing_to_save(local: tuple[Path, Path]) -> None:
    path, run = local
    process = start_cli("train", str(path), "--quiet")
    deadline = time.monotonic() + 60
    while not (run / "logs" / "teacher-add-0.log").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in output, output
    assert all_gone(family)


@pytest.mark.slow
def test_two_trainers_never_share_a_run(local: tuple[Path, Path]) -> None:
    path, run = local
    process = start_cli("train", str(path), "--quiet")
    family = until_training(process, run)
    code, output = run_cli("resume", str(run))
    assert code == 2 and "is in use by process" in output
    process.kill()
    process.communicate()
    assert all_gone(family)
