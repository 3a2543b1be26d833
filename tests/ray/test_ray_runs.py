"""Whole runs on a cluster of several nodes: the metrics of one machine, kills, lost nodes, and requests that do
not fit."""

import asyncio
import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_runs import ASSETS, start_cli, write_toml

import understudy
from understudy.dataplane.ledger import audit
from understudy.errors import ClusterError, ConfigError

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
STORE = 80 * 2**20


def recipe(folder: Path, steps: int = 2, replicas: int = 1, **changes: dict[str, Any]) -> dict[str, Any]:
    teacher = {"model": str(ASSETS / "models" / "teacher-add"), "replicas": replicas}
    table: dict[str, dict[str, Any]] = {
        "student": {"model": str(ASSETS / "models" / "student"), "device": "cpu"},
        "teachers": {"add": teacher},
        "loss": {"topk": 4},
        "rollout": {"max_new_tokens": 4},
        "data": {"train": str(ASSETS / "data" / "train.jsonl")},
        "trainer": {"steps": steps, "batch_size": 8, "learning_rate": 1e-3, "checkpoint_every": 1000},
        "dataplane": {},
        "cluster": {},
        "run": {"dir": str(folder), "threads": 1, "determinism": "full"},
    }
    for section, entries in changes.items():
        table[section] = {**table[section], **entries}
    return table


def metrics_without_clock(path: Path) -> list[dict[str, float]]:
    """The metrics of every step that do not depend on the clock."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not name.startswith(("time/", "perf/"))}
        for line in lines
    ]


def test_runs_on_ray_have_the_metrics_of_the_local_run_with_and_without_a_queue(
    cluster: Any, tmp_path: Path
) -> None:
    for _ in range(2):
        cluster.add_node(num_cpus=2, object_store_memory=STORE)
    on_ray = {"backend": "ray", "address": cluster.address}
    queue = {"backend": "transfer_queue", "storage_units": 1}
    here = understudy.train(recipe(tmp_path / "here"), progress=False)
    there = understudy.train(recipe(tmp_path / "there", cluster=on_ray), progress=False)
    queued = understudy.train(recipe(tmp_path / "queued", cluster=on_ray, dataplane=queue), progress=False)
    losses = [line["actor/loss"] for line in metrics_without_clock(here.dir)]
    assert len(losses) == 2 and losses[0] != losses[1]
    assert metrics_without_clock(there.dir) == metrics_without_clock(here.dir), (
        "models, batches and threads are the same"
    )
    assert metrics_without_clock(queued.dir) == metrics_without_clock(here.dir)
    for run in (here, there, queued):
        report = audit(run.dir / "dataplane")
        assert report.balanced and report.trained == 16


def test_a_fully_async_run_trains_on_ray_with_a_queue(cluster: Any, tmp_path: Path) -> None:
    cluster.add_node(num_cpus=3, object_store_memory=STORE)
    table = recipe(
        tmp_path / "run",
        steps=3,
        cluster={"backend": "ray", "address": cluster.address},
        dataplane={"backend": "transfer_queue", "storage_units": 1},
        trainer={"mode": "fully_async"},
        run={"determinism": "fast"},
    )
    run = understudy.train(table, progress=False)
    report = audit(run.dir / "dataplane")
    assert run.steps == 3 and report.balanced and report.trained == 24


def start_and_wait(folder: Path, table: dict[str, Any]) -> tuple[subprocess.Popen[str], dict[str, int]]:
    """A run that has taken a few steps, and the pids of its teachers."""
    process = start_cli("train", str(write_toml(folder / "recipe.toml", table)), "--quiet")
    metrics, log = folder / "run" / "metrics.jsonl", folder / "run" / "logs" / "trainer.log"
    deadline = time.monotonic() + 400
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert process.poll() is None and time.monotonic() < deadline, "the run did not take three steps"
        time.sleep(0.2)
    found = re.findall(r"process (teacher-add-\d) runs on \S+ \(pid (\d+)\)", log.read_text())
    return process, {name: int(pid) for name, pid in found}


def test_a_killed_trainer_leaves_no_process_on_any_machine_and_the_run_can_be_resumed(
    cluster: Any, tmp_path: Path
) -> None:
    cluster.add_node(num_cpus=2, object_store_memory=STORE)
    on_ray = {"backend": "ray", "address": cluster.address}
    table = recipe(tmp_path / "run", steps=500, cluster=on_ray)
    table["trainer"]["checkpoint_every"] = 2
    process, pids = start_and_wait(tmp_path, table)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(pid) for pid in pids.values()):
        assert time.monotonic() < deadline, "a teacher outlived its run"
        time.sleep(0.2)
    done = len(metrics_without_clock(tmp_path / "run"))
    resumed = start_cli("resume", str(tmp_path / "run"), f"trainer.steps={done + 2}", "--quiet")
    output, _ = resumed.communicate(timeout=500)
    assert resumed.returncode == 0, output[-3000:]
    report = audit(tmp_path / "run" / "dataplane")
    assert report.balanced and report.trained == 8 * (done + 2)


def test_a_run_continues_when_the_node_of_a_teacher_replica_is_lost(cluster: Any, tmp_path: Path) -> None:
    for _ in range(3):
        cluster.add_node(num_cpus=1, object_store_memory=STORE)
    table = recipe(
        tmp_path / "run", steps=60, replicas=2, cluster={"backend": "ray", "address": cluster.address}
    )
    process, pids = start_and_wait(tmp_path, table)
    metrics, log = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "logs" / "trainer.log"
    steps_before = len(metrics.read_text().splitlines())
    cluster.remove_node(node_of(cluster, pids["teacher-add-0"]), allow_graceful=False)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-3000:]
    assert steps_before < 60 and len(metrics_without_clock(tmp_path / "run")) == 60
    report = audit(tmp_path / "run" / "dataplane")
    assert report.balanced and (report.trained, report.dead) == (480, 0)
    assert "replica 0: ejected" in log.read_text(), "the lost replica should be ejected"
    assert not any(psutil.pid_exists(pid) for pid in pids.values())


@pytest.mark.parametrize("cluster", [1], indirect=True, ids=["head-has-a-cpu"])
def test_ranks_on_two_machines_give_nearly_the_losses_of_one_machine(cluster: Any, tmp_path: Path) -> None:
    cluster.add_node(num_cpus=2, object_store_memory=STORE)
    pool = {"pools": {"train": {"nodes": 2, "cpus_per_node": 1}}, "roles": {"student": "train"}}
    on_ray = {"backend": "ray", "address": cluster.address, **pool}
    two: dict[str, Any] = {"trainer": {"ranks": 2}}
    here = understudy.train(recipe(tmp_path / "here", **two), progress=False)
    there = understudy.train(recipe(tmp_path / "there", cluster=on_ray, **two), progress=False)
    assert [line["actor/loss"] for line in metrics_without_clock(there.dir)] == pytest.approx(
        [line["actor/loss"] for line in metrics_without_clock(here.dir)], abs=1e-6
    )
    assert "process rank-1 runs on" in (there.dir / "logs" / "trainer.log").read_text()
    assert not list(there.dir.glob("understudy-ranks-*")), "the coordination folder should be removed"


def node_of(cluster: Any, pid: int) -> Any:
    ancestors = {parent.pid for parent in psutil.Process(pid).parents()}
    return next(
        node for node in cluster.worker_nodes if node.all_processes["raylet"][0].process.pid in ancestors
    )


def test_replicas_that_do_not_fit_on_the_cluster_are_refused(cluster: Any, tmp_path: Path) -> None:
    cluster.add_node(num_cpus=1, object_store_memory=STORE)
    table = recipe(tmp_path / "run", replicas=3, cluster={"backend": "ray", "address": cluster.address})
    with pytest.raises(
        ClusterError, match=r"teacher-add wants 3 × \(1 CPU\); room was found for 1"
    ) as caught:
        understudy.train(table, progress=False)
    assert "has 1 CPU" in str(caught.value)
    with pytest.raises(ConfigError, match=r"cluster\.backend = 'ray'"):
        understudy.train(recipe(tmp_path / "b", dataplane={"backend": "transfer_queue"}), progress=False)
    assert asyncio.run(_no_teacher_process_left())


async def _no_teacher_process_left() -> bool:
    return not [
        child
        for child in psutil.Process().children(recursive=True)
        if "teacher.replica.server" in " ".join(child.cmdline())
    ]
