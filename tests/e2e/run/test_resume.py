"""A run that was killed with SIGKILL and resumed has the same bits as one that was never interrupted."""

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_runs import call_cli, run_cli, start_cli, write_toml

from understudy.dataplane.ledger import audit
from understudy.observability.metrics import read_metrics, without_clock

Make = Callable[..., dict[str, Any]]
STEPS = 4
POINTS = ["sync.after_ack:3"]
MORE_POINTS = (
    [
        f"{name}:{count}"
        for name in ("sync.after_produce", "sync.after_update", "sync.after_ack", "sync.after_metrics")
        for count in (1, 2, 3, 4)
    ]
    + [f"sync.after_checkpoint:{count}" for count in (1, 2)]
    + [
        f"checkpoint.{name}:{count}"
        for name in (
            "before_model",
            "before_optimizer",
            "before_state",
            "before_manifest",
            "before_rename",
            "before_latest",
            "before_prune",
            "saved",
        )
        for count in (1, 2)
    ]
)


def state_of(run: Path) -> tuple[list[dict[str, Any]], dict[str, np.ndarray], dict[str, np.ndarray]]:
    folder = run / "checkpoints" / f"step-{STEPS:06d}"
    lines = [without_clock(line) for line in read_metrics(run / "metrics.jsonl")]
    return lines, load_file(folder / "model.safetensors"), load_file(folder / "optimizer.safetensors")


def assert_same(run: Path, reference: Path) -> None:
    lines, model, optimizer = state_of(run)
    expected_lines, expected_model, expected_optimizer = state_of(reference)
    assert lines == expected_lines
    for found, expected in ((model, expected_model), (optimizer, expected_optimizer)):
        assert found.keys() == expected.keys()
        assert all(found[name].tobytes() == expected[name].tobytes() for name in found)
    report = audit(run)
    assert report.balanced and report.trained == STEPS * 16 and report.in_flight == 0, str(report)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, teacher_urls: dict[str, str]) -> dict[str, Any]:
    return {"folder": tmp_path_factory.mktemp("reference"), "done": False}


def uninterrupted_run(reference: dict[str, Any], recipe: Make) -> Path:
    """The reference run, trained once, in this process. Killed and resumed runs have processes of their own."""
    path: Path = reference["folder"] / "run"
    if not reference["done"]:
        table = recipe(data__eval=recipe()["data"]["train"], trainer__eval_samples=8, trainer__eval_every=2)
        table["run"]["dir"] = str(path)
        code, output = call_cli("train", str(write_toml(reference["folder"] / "r.toml", table)), "--quiet")
        assert code == 0, output
        reference["done"] = True
    return path


def killed_and_resumed(recipe: Make, tmp_path: Path, fault: str) -> Path:
    table = recipe(
        "killed", data__eval=recipe()["data"]["train"], trainer__eval_samples=8, trainer__eval_every=2
    )
    path = write_toml(tmp_path / "r.toml", table)
    code, output = run_cli("train", str(path), "--quiet", fault=fault)
    assert code == -signal.SIGKILL, f"{fault} did not kill the run: {output}"
    code, output = run_cli("resume", table["run"]["dir"], "--quiet")
    assert code == 0, output
    return Path(table["run"]["dir"])


@pytest.mark.parametrize("fault", POINTS)
def test_a_killed_and_resumed_run_gives_the_same_bits(
    reference: dict[str, Any], recipe: Make, tmp_path: Path, fault: str
) -> None:
    expected = uninterrupted_run(reference, recipe)
    assert_same(killed_and_resumed(recipe, tmp_path, fault), expected)


@pytest.mark.slow
@pytest.mark.parametrize("fault", MORE_POINTS)
def test_a_run_killed_at_each_point_of_a_step_or_save_resumes_to_the_same_bits(
    reference: dict[str, Any], recipe: Make, tmp_path: Path, fault: str
) -> None:
    expected = uninterrupted_run(reference, recipe)
    assert_same(killed_and_resumed(recipe, tmp_path, fault), expected)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_run_killed_repeatedly_at_random_times_resumes_to_the_same_bits(
    reference: dict[str, Any], recipe: Make, tmp_path: Path, seed: int
) -> None:
    """Covers moments without a named kill point: kills at random times until the run finishes."""
    expected = uninterrupted_run(reference, recipe)
    chance = random.Random(seed)
    table = recipe(
        "killed", data__eval=recipe()["data"]["train"], trainer__eval_samples=8, trainer__eval_every=2
    )
    arguments = ["train", str(write_toml(tmp_path / "r.toml", table)), "--quiet"]
    for _ in range(6):
        process = start_cli(*arguments)
        deadline = time.monotonic() + chance.uniform(3.0, 12.0)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if process.poll() is not None:
            break
        process.kill()
        process.communicate()
        if (Path(table["run"]["dir"]) / "recipe.json").exists():
            arguments = ["resume", table["run"]["dir"], "--quiet"]
    else:
        process = start_cli(*arguments)
    process.communicate(timeout=150)
    assert process.returncode == 0
    assert_same(Path(table["run"]["dir"]), expected)


@pytest.mark.slow
def test_a_resume_in_fast_mode_trains_on_the_rollouts_in_the_journal(recipe: Make, tmp_path: Path) -> None:
    """Rollouts that were journalled before the kill are trained as they are; nothing is lost or trained twice."""
    table = recipe("killed", run__determinism="fast", trainer__checkpoint_every=100)
    code, _ = run_cli(
        "train", str(write_toml(tmp_path / "r.toml", table)), "--quiet", fault="sync.after_produce:3"
    )
    assert code == -signal.SIGKILL
    before = audit(Path(table["run"]["dir"]))
    assert before.trained == 32 and before.in_flight == 16
    spans = Path(table["run"]["dir"]) / "spans.jsonl"
    spans.unlink()
    code, output = run_cli("resume", table["run"]["dir"], "--quiet")
    assert code == 0, output
    report = audit(Path(table["run"]["dir"]))
    assert report.balanced and report.trained == STEPS * 16
    rolled_out = sum(json.loads(line)["name"] == "rollout" for line in spans.read_text().splitlines())
    assert rolled_out == 16, (
        "only the last step's rows are rolled out after the kill: the first three are in the journal"
    )


@pytest.mark.slow
def test_resuming_a_finished_run_reports_it_and_changes_nothing(
    reference: dict[str, Any], recipe: Make
) -> None:
    run = uninterrupted_run(reference, recipe)
    before = state_of(run)[0]
    code, output = run_cli("resume", str(run))
    assert code == 0 and "nothing to do" in output
    assert state_of(run)[0] == before


@pytest.mark.slow
def test_resuming_a_finished_run_with_a_damaged_last_checkpoint_repeats_its_last_steps(
    recipe: Make, tmp_path: Path
) -> None:
    """`resume` used to say that there was nothing to do."""
    table = recipe("damaged")
    run = Path(table["run"]["dir"])
    code, output = run_cli("train", str(write_toml(tmp_path / "r.toml", table)), "--quiet")
    assert code == 0, output
    lines, weights, _ = state_of(run)
    model = run / "checkpoints" / f"step-{STEPS:06d}" / "model.safetensors"
    content = bytearray(model.read_bytes())
    content[-1] ^= 0xFF
    model.chmod(0o600)
    model.write_bytes(content)
    code, output = run_cli("resume", str(run), "--quiet")
    assert code == 0, output
    again, same, _ = state_of(run)
    assert again == lines
    assert all(same[name].tobytes() == weights[name].tobytes() for name in weights)


@pytest.mark.slow
def test_resume_is_refused_when_the_training_data_changed(recipe: Make, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    lines = Path(recipe()["data"]["train"]).read_text().splitlines()
    data.write_text("\n".join(lines[:200]) + "\n")
    table = recipe("killed", data__train=str(data))
    run_cli("train", str(write_toml(tmp_path / "r.toml", table)), "--quiet", fault="sync.after_checkpoint:1")
    data.write_text("\n".join(lines[1:200]) + "\n")
    code, output = run_cli("resume", table["run"]["dir"], "--quiet")
    assert code == 2 and "cannot resume" in output and "Traceback" not in output
