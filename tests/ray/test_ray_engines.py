"""Rollout engines on other nodes: the same metrics, weights by broadcast, and lost nodes."""

import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_runs import start_cli, write_toml
from test_ray_runs import STORE, metrics_without_clock, node_of, recipe

import understudy
from understudy.dataplane.ledger import audit

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


def engines_on_ray(cluster: Any, nodes: int, processes: int) -> dict[str, dict[str, Any]]:
    pool = {"nodes": nodes, "cpus_per_node": processes // nodes}
    on_ray = {"backend": "ray", "address": cluster.address, "pools": {"write": pool}}
    return {"cluster": {**on_ray, "roles": {"rollout": "write"}}, "rollout": {"processes": processes}}


def pids_of(log: str) -> dict[str, int]:
    """Pids of the newest process of each engine."""
    return {
        name: int(pid) for name, pid in re.findall(r"process (rollout-\d) runs on \S+ \(pid (\d+)\)", log)
    }


def test_engines_on_two_other_nodes_give_the_metrics_of_an_engine_in_the_trainer(
    cluster: Any, tmp_path: Path
) -> None:
    for _ in range(2):
        cluster.add_node(num_cpus=2, object_store_memory=STORE)
    here = understudy.train(recipe(tmp_path / "here"), progress=False)
    there = understudy.train(recipe(tmp_path / "there", **engines_on_ray(cluster, 2, 2)), progress=False)
    losses = [line["actor/loss"] for line in metrics_without_clock(here.dir)]
    assert len(losses) == 2 and losses[0] != losses[1]
    assert metrics_without_clock(there.dir) == metrics_without_clock(here.dir), "every bit should be the same"
    report = audit(there.dir / "dataplane")
    assert report.balanced and report.trained == 16
    log = (there.dir / "logs" / "trainer.log").read_text()
    for version in range(3):
        assert f"weights of version {version}: 2 of 2 remote engine processes have them" in log
    assert set(pids_of(log)) == {"rollout-0", "rollout-1"}
    assert "the engine writes at" in (there.dir / "logs" / "rollout-1.log").read_text()
    assert not any(psutil.pid_exists(pid) for pid in pids_of(log).values())


def start_and_wait(folder: Path, table: dict[str, Any], steps: int = 3) -> tuple[Any, Path, Path]:
    process = start_cli("train", str(write_toml(folder / "recipe.toml", table)), "--quiet")
    metrics, log = folder / "run" / "metrics.jsonl", folder / "run" / "logs" / "trainer.log"
    deadline = time.monotonic() + 400
    while not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
        assert process.poll() is None and time.monotonic() < deadline, "the run did not take enough steps"
        time.sleep(0.2)
    return process, metrics, log


def test_an_engine_whose_node_is_lost_restarts_on_another_and_changes_no_metric(
    cluster: Any, tmp_path: Path
) -> None:
    """Two engines are on nodes of their own, and another node is free: there the lost engine restarts."""
    for _ in range(4):
        cluster.add_node(num_cpus=1, object_store_memory=STORE)
    table = recipe(tmp_path / "run", steps=5000, **engines_on_ray(cluster, 2, 2))
    process, metrics, log = start_and_wait(tmp_path, table)
    lost = pids_of(log.read_text())["rollout-0"]
    cluster.remove_node(node_of(cluster, lost), allow_graceful=False)
    deadline = time.monotonic() + 300
    while "engine replica-0 is back" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.2)
    before = len(metrics.read_text().splitlines())
    while len(metrics.read_text().splitlines()) < before + 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)  # the run stops after the step
    output, _ = process.communicate(timeout=300)
    steps = len(metrics_without_clock(tmp_path / "run"))
    report = audit(tmp_path / "run" / "dataplane")
    assert (report.trained, report.dead) == (8 * steps, 0) and report.balanced, output[-3000:]
    log_text = log.read_text()
    assert "engine process lost: replica-0" in log_text and pids_of(log_text)["rollout-0"] != lost
    assert "weights of version 3: 2 of 2" in log_text and f"weights of version {steps}: 2 of 2" in log_text
    undisturbed = understudy.train(recipe(tmp_path / "whole", steps=steps), progress=False)
    assert metrics_without_clock(tmp_path / "run") == metrics_without_clock(undisturbed.dir), (
        "the lost node should not change the metrics"
    )
    assert not any(psutil.pid_exists(pid) for pid in pids_of(log_text).values())


def test_a_run_ends_when_no_machine_can_hold_its_last_engine(cluster: Any, tmp_path: Path) -> None:
    """The error gives the reason, and no process of the run is left."""
    cluster.add_node(num_cpus=1, object_store_memory=STORE)
    cluster.add_node(num_cpus=2, object_store_memory=STORE)
    changes = engines_on_ray(cluster, 1, 2)
    table = recipe(tmp_path / "run", steps=500, **changes)
    process, _, log = start_and_wait(tmp_path, table)
    pids = pids_of(log.read_text())
    cluster.remove_node(node_of(cluster, pids["rollout-0"]), allow_graceful=False)
    began = time.monotonic()
    output, _ = process.communicate(timeout=300)
    assert process.returncode not in (0, None) and time.monotonic() - began < 240
    assert "no engine process is left" in output and "no machine is that large" in output, output[-3000:]
    assert "so the run waits until one is back" in log.read_text() + output
    assert not any(psutil.pid_exists(pid) for pid in pids.values())


def test_a_fully_async_run_trains_with_a_remote_teacher_engine_and_worker(
    cluster: Any, tmp_path: Path
) -> None:
    cluster.add_node(num_cpus=2, object_store_memory=STORE)
    cluster.add_node(num_cpus=2, object_store_memory=STORE)
    changes = engines_on_ray(cluster, 2, 2)
    changes["cluster"]["roles"]["workers"] = "write"
    changes["cluster"]["pools"] = {"write": {"nodes": 1, "cpus_per_node": 2}}
    changes["rollout"] = {"processes": 1, "workers": 1}
    table = recipe(
        tmp_path / "run",
        steps=4,
        trainer={"mode": "fully_async", "max_staleness": 1},
        run={"determinism": "fast"},
        **changes,
    )
    run = understudy.train(table, progress=False)
    report = audit(run.dir / "dataplane")
    assert run.steps == 4 and report.balanced and (report.trained, report.dead) == (32, 0)
    log = (run.dir / "logs" / "trainer.log").read_text()
    for process in ("teacher-add-0", "rollout-0", "rollout-worker-0"):
        assert f"process {process} runs on" in log
    assert "weights of version 4: 1 of 1 remote engine processes have them" in log
