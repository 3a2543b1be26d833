"""A Ray of the run's own has one machine. If it is lost, the launch ends with an error, and a resume continues."""

import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_runs import metrics_without_clock, ranks_recipe
from small_runs import start_cli, write_toml

import understudy
from understudy.dataplane.ledger import audit

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
STEPS = 12


def raylet_of(pid: int) -> psutil.Process:
    (raylet,) = [one for one in psutil.Process(pid).children(recursive=True) if one.name() == "raylet"]
    return raylet


def test_a_launch_whose_own_ray_loses_its_only_machine_ends_and_can_be_resumed(
    tmp_path: Path, monkeypatch: Any
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    alone = {"trainer": {"steps": STEPS, "batch_size": 8, "learning_rate": 1e-3, "checkpoint_every": 3}}
    here = understudy.train({**ranks_recipe(tmp_path / "here"), **alone}, progress=False)
    table = {**ranks_recipe(tmp_path / "run", cluster={"backend": "ray"}), **alone}
    process = start_cli("train", str(write_toml(tmp_path / "recipe.toml", table)), "--quiet")
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 400
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 5:
        assert process.poll() is None and time.monotonic() < deadline, "the run did not take five steps"
        time.sleep(0.05)
    raylet = raylet_of(process.pid)
    for one in [raylet, *raylet.children(recursive=True)]:
        one.kill()
    lost = time.monotonic()
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 2, output[-3000:]
    assert time.monotonic() - lost < 60
    assert "the only one of the run's own Ray, is lost: its raylet ended with code -9" in output, output[
        -3000:
    ]
    assert "`understudy resume` continues from the last checkpoint" in output and "Traceback" not in output
    process = start_cli("resume", str(tmp_path / "run"), "--quiet")
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output[-3000:]
    assert metrics_without_clock(tmp_path / "run") == metrics_without_clock(here.dir), (
        "the metrics should be those of the undisturbed run"
    )
    report = audit(tmp_path / "run" / "dataplane")
    assert report.balanced and (report.trained, report.dead) == (8 * STEPS, 0), "every row exactly once"
