"""`trainer.ranks`: training on several processes; resumes with another number of ranks, lost and suspended ranks."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.numpy import load_file
from small_runs import Command, run_cli, start_cli, until_no_progress, write_toml

from understudy.dataplane.kept_rows import read_columns
from understudy.dataplane.ledger import audit
from understudy.observability.metrics import read_metrics
from understudy.observability.rundir import read_json

Make = Callable[..., dict[str, Any]]
STEPS = 3


def losses(run: Path) -> list[float]:
    return [line["actor/loss"] for line in read_metrics(run / "metrics.jsonl") if "actor/loss" in line]


def weights(run: Path, step: int = STEPS) -> dict[str, Any]:
    return dict(load_file(run / "checkpoints" / f"step-{step:06d}" / "model.safetensors"))


def assert_near(one: Path, other: Path) -> None:
    assert losses(one) == pytest.approx(losses(other), abs=1e-5)
    theirs = weights(other)
    for name, tensor in weights(one).items():
        # Adam divides by a small root: rounding in a gradient near zero is worth up to a step of the learning rate.
        assert abs(tensor - theirs[name]).mean() < 1e-5, name


@pytest.fixture(scope="module")
def module_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


def one_rank_run(module_folder: Path, recipe: Make) -> Path:
    """The same recipe on one rank, run once."""
    if not (module_folder / "run" / "report.html").exists():
        table = recipe(trainer__steps=STEPS, trainer__batch_size=13, trainer__checkpoint_every=1)
        table["run"]["dir"] = str(module_folder / "run")
        code, output = run_cli("train", str(write_toml(module_folder / "r.toml", table)), "--quiet")
        assert code == 0, output
    return module_folder / "run"


def two_rank_run(module_folder: Path, recipe: Make) -> Path:
    """The same recipe on two ranks, run once."""
    run = module_folder / "two"
    if not (run / "report.html").exists():
        path, _ = write_recipe_with_ranks(recipe, module_folder, 2, run__dir=str(run))
        code, output = run_cli("train", str(path), "--quiet")
        assert code == 0, output
    return run


def write_recipe_with_ranks(recipe: Make, tmp_path: Path, ranks: int, **overrides: Any) -> tuple[Path, Path]:
    """A recipe of 13 prompts per step, a number that none of the tested numbers of ranks divides."""
    settings = {"trainer__steps": STEPS, "trainer__batch_size": 13, "trainer__checkpoint_every": 1}
    table = recipe("sharded", **{**settings, "trainer__ranks": ranks, **overrides})
    return write_toml(tmp_path / "r.toml", table), Path(table["run"]["dir"])


@pytest.mark.slow
def test_two_ranks_train_to_nearly_the_weights_of_one_rank(recipe: Make, module_folder: Path) -> None:
    run = two_rank_run(module_folder, recipe)
    assert_near(run, one_rank_run(module_folder, recipe))
    report = audit(run)
    assert report.balanced and report.trained == STEPS * 13
    assert not (run / "logs" / "rank-0.log").exists() and (run / "logs" / "rank-1.log").exists()


@pytest.mark.slow
def test_kept_rows_of_two_ranks_have_the_columns_of_a_run_on_one_rank(
    recipe: Make, module_folder: Path
) -> None:
    found = {}
    for run in (one_rank_run(module_folder, recipe), two_rank_run(module_folder, recipe)):
        lines = [json.loads(line) for line in (run / "kept_rows" / "000001.jsonl").open(encoding="utf-8")]
        found[run] = {line["key"]: read_columns(run / "kept_rows", 1, line) for line in lines}
    one, two = found.values()
    assert one.keys() == two.keys() and len(one) >= 4
    for key, columns in one.items():
        for name in ("losses", "student_entropy", "trainer_logprobs", "student_topk_logprobs"):
            assert two[key][name] == pytest.approx(columns[name], abs=1e-4), (key, name)


@pytest.mark.slow
def test_a_killed_run_of_two_ranks_can_resume_on_one(
    recipe: Make, tmp_path: Path, module_folder: Path
) -> None:
    path, run = write_recipe_with_ranks(recipe, tmp_path, 2)
    code, output = run_cli("train", str(path), "--quiet", fault="sync.after_ack:2")
    assert code == -signal.SIGKILL, output
    code, output = run_cli("resume", str(run), "trainer.ranks=1", "--quiet")
    assert code == 0, output
    assert_near(run, one_rank_run(module_folder, recipe))


@pytest.mark.slow
def test_a_killed_run_of_one_rank_can_resume_on_three(
    recipe: Make, tmp_path: Path, module_folder: Path
) -> None:
    path, run = write_recipe_with_ranks(recipe, tmp_path, 1)
    code, output = run_cli("train", str(path), "--quiet", fault="sync.after_ack:2")
    assert code == -signal.SIGKILL, output
    code, output = run_cli("resume", str(run), "trainer.ranks=3", "--quiet")
    assert code == 0, output
    assert_near(run, one_rank_run(module_folder, recipe))


Started = tuple[Command, Path, psutil.Process]


@pytest.fixture
def started(recipe: Make, tmp_path: Path) -> Iterator[Started]:
    """A long run of two ranks after its first step, its directory, and the process of rank 1. A lost rank ends
    the run."""
    path, run = write_recipe_with_ranks(
        recipe, tmp_path, 2, trainer__steps=5000, cluster__restarts={"student": 0}
    )
    process = start_cli("train", str(path), "--quiet")
    try:
        deadline = time.monotonic() + 150
        while len(losses(run)) < 1:
            assert process.poll() is None and time.monotonic() < deadline, "no step was taken"
            time.sleep(0.1)
        (rank_1,) = psutil.Process(process.pid).children(recursive=True)
        yield process, run, rank_1
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_run_whose_rank_is_killed_goes_back_to_its_last_checkpoint(
    recipe: Make, tmp_path: Path, module_folder: Path
) -> None:
    """Rank 1 dies at its ninth command, in step 3; so does its replacement, after another checkpoint."""
    path, run = write_recipe_with_ranks(recipe, tmp_path, 2, trainer__steps=4)
    code, output = run_cli("train", str(path), "--quiet", fault="rank.after_command:9")
    assert code == 0, output
    log_text = (run / "logs" / "trainer.log").read_text()
    assert "rank 1 of 2 was killed by SIGKILL" in log_text
    assert (
        "going back to step 2 (restart 1 of 1)" in log_text
        and "going back to step 3 (restart 1 of 1)" in log_text
    )
    assert losses(run)[:STEPS] == losses(two_rank_run(module_folder, recipe)), "to the bit"
    report = audit(run)
    assert report.balanced and report.trained == 4 * 13
    assert len(losses(run)) == 4


def test_a_killed_rank_without_restarts_ends_the_run_with_an_error_that_names_it(started: Started) -> None:
    process, _, rank_1 = started
    rank_1.kill()
    killed = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and "Traceback" not in output
    assert "rank 1 of 2 was killed by SIGKILL" in output, output
    assert "`understudy resume` continues" in output
    assert time.monotonic() - killed < 15


@pytest.mark.slow
def test_a_suspended_rank_ends_the_run_after_60_seconds(started: Started) -> None:
    process, run, rank_1 = started
    rank_1.suspend()
    suspended = time.monotonic()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2 and "rank 1 of 2 lives and has done nothing for 60 s" in output, output
    assert time.monotonic() - suspended < 100
    assert not rank_1.is_running() or rank_1.status() == psutil.STATUS_ZOMBIE
    assert audit(run).balanced


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_rank_process_is_left_when_the_trainer_is_killed_or_interrupted(
    started: Started, how: signal.Signals
) -> None:
    process, run, rank_1 = started
    os.kill(process.pid, how)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == (130 if how is signal.SIGINT else -how), output
    psutil.wait_procs([rank_1], timeout=20)
    assert not rank_1.is_running() or rank_1.status() == psutil.STATUS_ZOMBIE
    assert audit(run).balanced


@pytest.mark.slow
def test_a_suspended_rank_does_not_delay_a_stop(started: Started) -> None:
    """The suspended rank's shard of the student cannot be saved: the run stays at its last checkpoint, here its
    start."""
    process, run, rank_1 = started
    rank_1.suspend()
    until_no_progress(process, run)
    process.send_signal(signal.SIGTERM)
    signalled = time.monotonic()
    output, _ = process.communicate(timeout=100)
    took = time.monotonic() - signalled
    assert read_json(run / "state.json")["status"] == "stopped", output
    assert process.returncode == 130 and "Traceback" not in output, output
    assert took < 35, f"{took:.0f} s"
    psutil.wait_procs([rank_1], timeout=2)
    assert not rank_1.is_running() or rank_1.status() == psutil.STATUS_ZOMBIE
    log_text = (run / "logs" / "trainer.log").read_text()
    assert (
        "rank 1 of 2 lives and has done nothing for 8 s" in log_text
        and "the run stays at its start" in log_text
    )
    assert audit(run).balanced
