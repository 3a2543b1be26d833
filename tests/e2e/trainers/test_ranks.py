"""`trainer.ranks`: the same training on several processes, and none of them left behind."""

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
def uploads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


def alone(uploads: Path, recipe: Make) -> Path:
    """The same recipe on one rank, run once."""
    if not (uploads / "run" / "report.html").exists():
        table = recipe(trainer__steps=STEPS, trainer__batch_size=13, trainer__checkpoint_every=1)
        table["run"]["dir"] = str(uploads / "run")
        code, output = run_cli("train", str(write_toml(uploads / "r.toml", table)), "--quiet")
        assert code == 0, output
    return uploads / "run"


def undisturbed(uploads: Path, recipe: Make) -> Path:
    """The same recipe on two ranks, run once."""
    run = uploads / "two"
    if not (run / "report.html").exists():
        path, _ = on_ranks(recipe, uploads, 2, run__dir=str(run))
        code, output = run_cli("train", str(path), "--quiet")
        assert code == 0, output
    return run


def on_ranks(recipe: Make, tmp_path: Path, ranks: int, **overrides: Any) -> tuple[Path, Path]:
    """A recipe of 13 prompts a step, which no number of ranks divides."""
    settings = {"trainer__steps": STEPS, "trainer__batch_size": 13, "trainer__checkpoint_every": 1}
    table = recipe("sharded", **{**settings, "trainer__ranks": ranks, **overrides})
    return write_toml(tmp_path / "r.toml", table), Path(table["run"]["dir"])


@pytest.mark.slow
def test_two_ranks_train_what_one_does(recipe: Make, uploads: Path) -> None:
    run = undisturbed(uploads, recipe)
    assert_near(run, alone(uploads, recipe))
    report = audit(run)
    assert report.balanced and report.trained == STEPS * 13
    assert not (run / "logs" / "rank-0.log").exists() and (run / "logs" / "rank-1.log").exists()


@pytest.mark.slow
def test_kept_rows_of_every_rank_have_the_trainers_columns(recipe: Make, uploads: Path) -> None:
    found = {}
    for run in (alone(uploads, recipe), undisturbed(uploads, recipe)):
        lines = [json.loads(line) for line in (run / "kept_rows" / "000001.jsonl").open(encoding="utf-8")]
        found[run] = {line["key"]: read_columns(run / "kept_rows", 1, line) for line in lines}
    one, two = found.values()
    assert one.keys() == two.keys() and len(one) >= 4
    for key, columns in one.items():
        for name in ("losses", "student_entropy", "trainer_logprobs", "student_topk_logprobs"):
            assert two[key][name] == pytest.approx(columns[name], abs=1e-4), (key, name)


@pytest.mark.slow
def test_a_run_of_two_ranks_goes_on_with_one(recipe: Make, tmp_path: Path, uploads: Path) -> None:
    path, run = on_ranks(recipe, tmp_path, 2)
    code, output = run_cli("train", str(path), "--quiet", fault="sync.after_ack:2")
    assert code == -signal.SIGKILL, output
    code, output = run_cli("resume", str(run), "trainer.ranks=1", "--quiet")
    assert code == 0, output
    assert_near(run, alone(uploads, recipe))


@pytest.mark.slow
def test_a_run_of_one_rank_goes_on_with_three(recipe: Make, tmp_path: Path, uploads: Path) -> None:
    path, run = on_ranks(recipe, tmp_path, 1)
    code, output = run_cli("train", str(path), "--quiet", fault="sync.after_ack:2")
    assert code == -signal.SIGKILL, output
    code, output = run_cli("resume", str(run), "trainer.ranks=3", "--quiet")
    assert code == 0, output
    assert_near(run, alone(uploads, recipe))


Started = tuple[Command, Path, psutil.Process]


@pytest.fixture
def started(recipe: Make, tmp_path: Path) -> Iterator[Started]:
    """A long run of two ranks that takes steps, its directory, and its follower."""
    path, run = on_ranks(recipe, tmp_path, 2, trainer__steps=5000, cluster__restarts={"student": 0})
    process = start_cli("train", str(path), "--quiet")
    try:
        deadline = time.monotonic() + 150
        while len(losses(run)) < 1:
            assert process.poll() is None and time.monotonic() < deadline, "no step was taken"
            time.sleep(0.1)
        (follower,) = psutil.Process(process.pid).children(recursive=True)
        yield process, run, follower
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_lost_rank_takes_the_run_back_to_its_last_checkpoint(
    recipe: Make, tmp_path: Path, uploads: Path
) -> None:
    """The rank dies at its ninth command, in step 3; so does the one that takes its place, after another checkpoint."""
    path, run = on_ranks(recipe, tmp_path, 2, trainer__steps=4)
    code, output = run_cli("train", str(path), "--quiet", fault="rank.after_command:9")
    assert code == 0, output
    log_text = (run / "logs" / "trainer.log").read_text()
    assert "rank 1 of 2 was killed by SIGKILL" in log_text
    assert (
        "going back to step 2 (restart 1 of 1)" in log_text
        and "going back to step 3 (restart 1 of 1)" in log_text
    )
    assert losses(run)[:STEPS] == losses(undisturbed(uploads, recipe)), "to the bit"
    report = audit(run)
    assert report.balanced and report.trained == 4 * 13
    assert len(losses(run)) == 4


def test_a_killed_follower_ends_the_run_with_its_name(started: Started) -> None:
    process, _, follower = started
    follower.kill()
    killed = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and "Traceback" not in output
    assert "rank 1 of 2 was killed by SIGKILL" in output, output
    assert "`understudy resume` continues" in output
    assert time.monotonic() - killed < 15


@pytest.mark.slow
def test_a_stopped_follower_ends_the_run_after_a_minute(started: Started) -> None:
    process, run, follower = started
    follower.suspend()
    stopped = time.monotonic()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2 and "rank 1 of 2 lives and has done nothing for 60 s" in output, output
    assert time.monotonic() - stopped < 100
    assert not follower.is_running() or follower.status() == psutil.STATUS_ZOMBIE
    assert audit(run).balanced


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_rank_is_left_behind(started: Started, how: signal.Signals) -> None:
    process, run, follower = started
    os.kill(process.pid, how)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == (130 if how is signal.SIGINT else -how), output
    psutil.wait_procs([follower], timeout=20)
    assert not follower.is_running() or follower.status() == psutil.STATUS_ZOMBIE
    assert audit(run).balanced


@pytest.mark.slow
def test_a_rank_that_stands_still_does_not_hold_up_a_stop(started: Started) -> None:
    """Its part of the student cannot be saved without it: the run stays at its last checkpoint, here at its start."""
    process, run, follower = started
    follower.suspend()
    until_no_progress(process, run)
    process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    output, _ = process.communicate(timeout=100)
    took = time.monotonic() - asked
    assert read_json(run / "state.json")["status"] == "stopped", output
    assert process.returncode == 130 and "Traceback" not in output, output
    assert took < 35, f"{took:.0f} s"
    psutil.wait_procs([follower], timeout=2)
    assert not follower.is_running() or follower.status() == psutil.STATUS_ZOMBIE
    log_text = (run / "logs" / "trainer.log").read_text()
    assert (
        "rank 1 of 2 lives and has done nothing for 8 s" in log_text
        and "the run stays at its start" in log_text
    )
    assert audit(run).balanced
