"""A disk that fills up during a save: a clear error, the checkpoint before it intact, and a resume that finishes."""

import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_runs import run_cli, start_cli, write_toml

from understudy.dataplane.ledger import audit
from understudy.observability.metrics import read_metrics
from understudy.observability.rundir import read_json
from understudy.policy.checkpoints.checkpoint import CheckpointStore, verify

Make = Callable[..., dict[str, Any]]


def run_with_file_size_limit(*arguments: str, room: int) -> tuple[int, str]:
    """Runs the command in a process whose files cannot grow beyond `room` bytes: writes fail as on a full disk."""

    def limit_file_size() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))

    command = [sys.executable, "-m", "understudy.cli.main", *arguments]
    finished = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=limit_file_size,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
    )
    return finished.returncode, finished.stdout


@pytest.mark.slow
@pytest.mark.parametrize("beside", [True, False])
def test_a_failed_save_leaves_earlier_checkpoints_intact_and_a_resume_finishes(
    recipe: Make, tmp_path: Path, beside: bool
) -> None:
    table = recipe("full", trainer__async_save=beside, trainer__checkpoint_every=1)
    path, run = write_toml(tmp_path / "r.toml", table), Path(table["run"]["dir"])
    code, output = run_cli("train", str(path), "--quiet", fault="sync.after_checkpoint:2")
    assert code != 0, output
    whole = CheckpointStore(run / "checkpoints").steps()
    weights = (run / "checkpoints" / "step-000002" / "model.safetensors").stat().st_size
    code, output = run_with_file_size_limit("resume", str(run), "--quiet", room=weights + weights // 2)
    assert code == 2 and "could not save the checkpoint of step 3" in output, output
    assert "the previous checkpoints are intact" in output and "Traceback" not in output
    assert read_json(run / "state.json")["status"] == "failed"
    store = CheckpointStore(run / "checkpoints")
    assert store.steps() == whole and store.load().step == 2
    for step in whole:
        verify(run / "checkpoints" / f"step-{step:06d}")
    code, output = run_cli("resume", str(run), "--quiet")
    assert code == 0, output
    report = audit(run)
    assert report.balanced and report.trained == 4 * 16 and report.in_flight == 0


@pytest.mark.slow
@pytest.mark.parametrize("room", [1 << 10, 12 << 10, 64 << 10])
def test_a_full_disk_ends_the_run_naming_the_file_and_a_later_resume_finishes(
    recipe: Make, tmp_path: Path, room: int
) -> None:
    table = recipe("full", trainer__checkpoint_every=1)
    path, run = write_toml(tmp_path / "r.toml", table), Path(table["run"]["dir"])
    code, output = run_cli("train", str(path), "--quiet", fault="sync.after_checkpoint:2")
    assert code != 0, output
    code, output = run_with_file_size_limit("resume", str(run), "--quiet", room=room)
    assert code == 2 and "Traceback" not in output and "unexpected" not in output, output
    named = re.search(
        rf"({re.escape(str(run))}\S*) cannot be (written|flushed|opened)|could not save", output
    )
    assert named and re.search("[Ff]ree some space|free space", output), output
    code, output = run_cli("resume", str(run), "--quiet")
    assert code == 0, output
    report = audit(run)
    assert report.balanced and report.trained == 4 * 16 and report.in_flight == 0


@pytest.mark.slow
def test_a_full_disk_with_rollout_workers_ends_the_run_with_a_one_line_error(
    recipe: Make, tmp_path: Path
) -> None:
    """Generations of the workers' sessions are in flight and have to be cancelled."""
    table = recipe(
        "crowded", rollout__workers=2, rollout__max_batch=4, trainer__batch_size=32, trainer__steps=5000
    )
    path, run = write_toml(tmp_path / "r.toml", table), Path(table["run"]["dir"])
    process = start_cli("train", str(path), "--quiet")
    try:
        deadline = time.monotonic() + 150
        while not read_metrics(run / "metrics.jsonl"):
            assert process.poll() is None and time.monotonic() < deadline, "no step was taken"
            time.sleep(0.1)
        psutil.Process(process.pid).rlimit(psutil.RLIMIT_FSIZE, (1 << 10, resource.RLIM_INFINITY))
        output, _ = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 2 and "cannot be written" in output, output
    assert len(output.splitlines()) == 1, output


@pytest.mark.slow
def test_a_full_disk_for_weights_is_reported_by_train_and_by_export(recipe: Make, tmp_path: Path) -> None:
    """safetensors raises an error type of its own. A teacher that lags behind the student has its weights
    written to disk at every publish."""
    behind = {"model": "student", "version": 1, "key": "add"}
    table = recipe("behind", teachers={"add": behind, "sort": {**behind, "key": "sort"}}, trainer__steps=2)
    path, run = write_toml(tmp_path / "r.toml", table), Path(table["run"]["dir"])
    code, output = run_with_file_size_limit("train", str(path), "--quiet", room=1 << 20)
    assert code == 2 and "cannot be written: File too large" in output and "unexpected" not in output, output
    again = ("resume", str(run)) if (run / "recipe.json").exists() else ("train", str(path))
    code, output = run_cli(*again, "--quiet")
    assert code == 0, output
    code, output = run_with_file_size_limit("export", str(run), str(tmp_path / "out"), room=1 << 20)
    assert code == 2 and "could not export" in output and "unexpected" not in output, output
    assert not (tmp_path / "out").exists()
    assert run_cli("export", str(run), str(tmp_path / "out"))[0] == 0
