"""Interrupts: one Ctrl-C finishes the step and saves, a second one ends the run at once; no process is left behind."""

import json
import os
import pty
import re
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_runs import ASSETS, Command, call_cli, run_cli, start_cli, write_toml

from understudy.dataplane.ledger import audit
from understudy.observability.metrics import read_metrics, without_clock
from understudy.observability.rundir import read_json
from understudy.observability.watchdog import read_waits

Make = Callable[..., dict[str, Any]]


@pytest.fixture
def long_run(recipe: Make, tmp_path: Path) -> tuple[Path, Path]:
    """Recipe file and run directory of a long run that starts its own teachers, whose processes could be left
    behind."""
    teachers = {
        name: {"model": str(ASSETS / "models" / f"teacher-{name}"), "key": name} for name in ("add", "sort")
    }
    table = recipe("long", teachers=teachers, trainer__steps=5000, trainer__checkpoint_every=5000)
    return write_toml(tmp_path / "recipe.toml", table), Path(table["run"]["dir"])


def wait_for_first_step(process: Command, run: Path) -> list[psutil.Process]:
    """Waits for the first step; returns every process of the run."""
    deadline = time.monotonic() + 120
    while not ((run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.1)
    family = psutil.Process(process.pid)
    children = family.children(recursive=True)
    servers = [child for child in children if "understudy.teacher.replica.server" in child.cmdline()]
    assert len(servers) == 2, "one process per teacher"
    return [family, *children]


def all_gone(processes: list[psutil.Process], seconds: float = 30.0) -> bool:
    def lives(process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:  # it ended after `wait_procs` had looked
            return False

    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not any(map(lives, alive))


def test_one_sigint_finishes_the_step_and_saves(long_run: tuple[Path, Path]) -> None:
    path, run = long_run
    process = start_cli("train", str(path))
    family = wait_for_first_step(process, run)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and f"understudy resume {run}" in output, output
    assert all_gone(family)
    state = read_json(run / "state.json")
    steps = [int(folder.name.removeprefix("step-")) for folder in (run / "checkpoints").glob("step-*")]
    assert state["status"] == "stopped" and len(steps) == 1
    report = audit(run)
    assert report.balanced and report.in_flight == 0 and report.trained == steps[0] * 16


def test_a_run_whose_terminal_is_closed_saves_and_stops(recipe: Make, tmp_path: Path) -> None:
    """With a real terminal: the kernel sends SIGHUP, and every later write to the terminal fails."""
    table = recipe("long", trainer__steps=5000, trainer__checkpoint_every=5000)
    path, run = write_toml(tmp_path / "recipe.toml", table), Path(table["run"]["dir"])
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["OMP_NUM_THREADS"] = "1"
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the child would inherit an ignored SIGHUP
        os.execv(sys.executable, [sys.executable, "-m", "understudy.cli.main", "train", str(path)])
    process, deadline = psutil.Process(pid), time.monotonic() + 120
    try:
        while not ((run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size):
            assert time.monotonic() < deadline
            if select.select([terminal], [], [], 0.1)[0]:
                os.read(terminal, 1 << 16)
        family = [process, *process.children(recursive=True)]
        os.close(terminal)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    finally:
        with suppress(psutil.NoSuchProcess):
            process.kill()  # so that an aborted test leaves no run behind
    assert all_gone(family[1:])
    assert read_json(run / "state.json")["status"] == "stopped"
    steps = [int(folder.name.removeprefix("step-")) for folder in (run / "checkpoints").glob("step-*")]
    assert len(steps) == 1 and audit(run).trained == steps[0] * 16


@pytest.mark.parametrize(
    "how", ["kill -9", *(pytest.param(how, marks=pytest.mark.slow) for how in ("twice", "SIGTERM"))]
)
def test_no_process_is_left_after_sigkill_sigterm_or_a_second_sigint(
    long_run: tuple[Path, Path], how: str
) -> None:
    path, run = long_run
    process = start_cli("train", str(path), "--quiet")
    family = wait_for_first_step(process, run)
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


def test_an_interrupt_while_teachers_start_leaves_no_process_and_no_traceback(
    long_run: tuple[Path, Path],
) -> None:
    path, run = long_run
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
@pytest.mark.parametrize(
    ("mode", "how"), [("sync", "SIGTERM"), ("fully_async", "SIGINT"), ("drained", "SIGTERM")]
)
def test_a_stop_abandons_a_step_whose_rewards_hang_and_a_resume_trains_it(
    recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, how: str
) -> None:
    """More rewards hang than the event loop has threads. The last finished step is saved, and the resume trains every
    prompt once."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("HANGS_AFTER", "40")
    changes: dict[str, Any] = {"data__reward": "small_rewards:hangs_later", "trainer__steps": 5}
    if mode != "sync":
        changes["trainer__mode"] = "fully_async"
        changes["trainer__partial_rollouts"] = mode != "drained"
    table = recipe(mode, trainer__checkpoint_every=5000, **changes)
    run = Path(table["run"]["dir"])
    process = start_cli("train", str(write_toml(tmp_path / "recipe.toml", table)), "--quiet")
    wait_until_stalled_in(process, run, "reward")
    stop_and_assert_saved(process, run, how)
    monkeypatch.delenv("HANGS_AFTER")
    code, output = run_cli("resume", str(run), "--quiet")
    assert code == 0, output
    report = audit(run)
    assert report.balanced and report.in_flight == 0 and report.per_step == dict.fromkeys(range(1, 6), 16)
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("mode", "step"),
    [
        ("sync", 4),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("sync", 2), ("fully_async", 4))),
    ],
)
def test_an_interrupted_evaluation_is_run_again_by_the_resume(
    recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, step: int
) -> None:
    """When the evaluation after the last step was interrupted, the run used to count as finished, without the
    accuracy of its final student."""
    problems = tmp_path / "held-out.jsonl"
    lines = Path(recipe()["data"]["train"]).read_text().splitlines()[:8]
    problems.write_text("\n".join(lines) + "\n")
    changes: dict[str, Any] = {"data__eval": str(problems), "data__reward": "small_rewards:hangs_later"}
    changes |= {"trainer__mode": mode, "trainer__eval_every": 2 if step == 2 else 0}
    changes["run__python_path"] = [str(Path(__file__).parents[1])]
    table = recipe(mode, trainer__checkpoint_every=5000, **changes)
    run = Path(table["run"]["dir"])
    monkeypatch.setenv(
        "HANGS_AFTER", str(8 + 16 * step + 3)
    )  # three of the eight answers after this step have a reward
    process = start_cli("train", str(write_toml(tmp_path / "recipe.toml", table)))
    wait_until_stalled_in(process, run, "evaluate")
    output = stop_and_assert_saved(process, run, "SIGINT")
    assert f"the evaluation after step {step} was cut short" in output
    assert "val/accuracy" not in read_metrics(run / "metrics.jsonl")[-1]
    monkeypatch.delenv("HANGS_AFTER")
    code, output = run_cli("resume", str(run))
    assert code == 0 and f"continuing after step {step}" in output, output
    assert read_json(run / "state.json")["status"] == "finished"
    found = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in found] == [0, 1, 2, 3, 4]
    assert found[-1]["val/accuracy"] >= 0
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    answers = Counter(sample["step"] for sample in samples if sample["model"] == "student")
    assert answers == dict.fromkeys((0, step, 4), 8)
    best = max(found[1:], key=lambda line: (line.get("val/accuracy", -1), -line["step"]))["step"]
    assert (run / "checkpoints" / "best").read_text() == f"step-{best:06d}\n"
    if (mode, step) == ("sync", 2):
        table["run"]["dir"] = str(tmp_path / "undisturbed")
        code, output = call_cli("train", str(write_toml(tmp_path / "recipe.toml", table)), "--quiet")
        assert code == 0, output
        expected = read_metrics(tmp_path / "undisturbed" / "metrics.jsonl")
        assert list(map(without_clock, found)) == list(map(without_clock, expected))
    code, output = call_cli("resume", str(run))
    assert code == 0 and "nothing to do" in output, output
    assert read_metrics(run / "metrics.jsonl") == found


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "how"), [("fully_async", "SIGTERM"), ("sync", "SIGINT")])
def test_a_stop_abandons_a_step_whose_teachers_are_suspended(
    long_run: tuple[Path, Path], tmp_path: Path, mode: str, how: str
) -> None:
    path, run = long_run
    process = start_cli("train", str(path), f"trainer.mode={mode}", "--quiet")
    _, *teachers = family = wait_for_first_step(process, run)
    for teacher in teachers:
        teacher.suspend()
    wait_until_stalled_in(process, run, "score")
    code, output = run_cli("doctor", str(run))
    assert code == 0 and f"running as process {process.pid}" in output, output
    place = "window" if mode == "fully_async" else "step"
    chain = rf"train waits for rows of {place} (\d+) .* <- produce {place} \1 waits for \d+ × scores of teacher (add|sort) .*"
    assert re.search(chain + r" <- teacher \2: .*replica 0 healthy, \d+ requests?", output), output
    stop_and_assert_saved(process, run, how)
    assert all_gone(family, seconds=0)


def wait_until_stalled_in(process: Command, run: Path, name: str) -> None:
    """Waits until the watchdog reports two seconds without progress and a wait of this name."""
    deadline = time.monotonic() + 120
    while True:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.2)
        if (run / "waits.json").exists():
            entry, waits = read_waits(run / "waits.json")
            if entry["seconds_without_progress"] > 2 and name in {wait.name for wait in waits}:
                return


def stop_and_assert_saved(process: Command, run: Path, how: str) -> str:
    """Sends one signal; the process must end within 30 s with the last finished step saved. Returns its output."""
    os.kill(process.pid, getattr(signal, how))
    output, _ = process.communicate(timeout=30)
    lines = read_metrics(run / "metrics.jsonl")
    assert process.returncode == 130 and f"understudy resume {run}" in output, output
    assert "Traceback" not in output and "never retrieved" not in output, output
    steps = [int(folder.name.removeprefix("step-")) for folder in (run / "checkpoints").glob("step-*")]
    assert read_json(run / "state.json")["status"] == "stopped" and steps == [lines[-1]["step"]]
    assert audit(run).balanced
    return output


@pytest.mark.slow
def test_resume_is_refused_while_another_trainer_uses_the_run(long_run: tuple[Path, Path]) -> None:
    path, run = long_run
    process = start_cli("train", str(path), "--quiet")
    family = wait_for_first_step(process, run)
    code, output = run_cli("resume", str(run))
    assert code == 2 and "is in use by process" in output
    process.kill()
    process.communicate()
    assert all_gone(family)
