"""A machine with a training rank is lost: the run goes back to its last checkpoint on the others, or ends with
an error."""

import re
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_runs import POOL, QUEUE, STORE, metrics_without_clock, node_of, ranks_recipe
from small_runs import start_cli, write_toml

import understudy
from understudy.dataplane.ledger import audit

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


def start_run_and_wait_for_checkpoint(
    cluster: Any, folder: Path, steps: int, dataplane: dict[str, Any] | None = None
) -> tuple[subprocess.Popen[str], int]:
    """A run on the cluster that has taken steps after its first checkpoint, and the pid of its rank 1."""
    on_ray = {"backend": "ray", "address": cluster.address, **POOL}
    table = ranks_recipe(folder / "run", steps, cluster=on_ray, dataplane=dataplane or {})
    table["trainer"]["checkpoint_every"] = 3
    process = start_cli("train", str(write_toml(folder / "recipe.toml", table)), "--quiet")
    metrics, log = folder / "run" / "metrics.jsonl", folder / "run" / "logs" / "trainer.log"
    deadline = time.monotonic() + 400
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 5:
        assert process.poll() is None and time.monotonic() < deadline, "the run did not take enough steps"
        time.sleep(0.05)
    return process, pid_of_rank_1(log)


def pid_of_rank_1(log: Path) -> int:
    return int(re.findall(r"process rank-1 runs on \S+ \(pid (\d+)\)", log.read_text())[-1])


@pytest.mark.parametrize(
    ("cluster", "dataplane", "cpus"),
    [(1, {}, 1), (2, QUEUE, 2)],
    indirect=["cluster"],
    ids=["embedded", "transfer_queue"],
)
def test_a_run_that_loses_a_rank_s_machine_goes_back_to_its_checkpoint_on_the_others(
    cluster: Any, dataplane: dict[str, Any], cpus: int, tmp_path: Path
) -> None:
    """Parts of the queue may be on the lost machine too: the run starts a new queue on the other machines."""
    for _ in range(3):  # for a rank, for a teacher, and a spare one
        cluster.add_node(num_cpus=cpus, object_store_memory=STORE)
    steps = 40
    here = understudy.train(ranks_recipe(tmp_path / "here", steps), progress=False)
    process, pid = start_run_and_wait_for_checkpoint(cluster, tmp_path, steps, dataplane)
    cluster.remove_node(node_of(cluster, pid), allow_graceful=False)
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output[-3000:]
    log = tmp_path / "run" / "logs" / "trainer.log"
    assert "rank 1 of 2 was lost with its machine" in log.read_text()
    assert re.search(r"going back to step \d+ \(restart 1 of 1\)", log.read_text())
    assert pid_of_rank_1(log) != pid, "another process on another machine"
    assert metrics_without_clock(tmp_path / "run") == metrics_without_clock(here.dir), (
        "the metrics should be those of the undisturbed run"
    )
    report = audit(tmp_path / "run" / "dataplane")
    assert report.balanced and (report.trained, report.dead) == (8 * steps, 0), "every row exactly once"
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("cluster", [1], indirect=True, ids=["head-has-a-cpu"])
def test_a_run_that_no_longer_fits_on_the_machines_left_ends_within_a_minute(
    cluster: Any, tmp_path: Path
) -> None:
    cluster.add_node(num_cpus=2, object_store_memory=STORE)
    process, pid = start_run_and_wait_for_checkpoint(cluster, tmp_path, 5000)
    cluster.remove_node(node_of(cluster, pid), allow_graceful=False)
    lost = time.monotonic()
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 2, output[-3000:]
    assert time.monotonic() - lost < 60
    assert "room was found for" in output and "the cluster: 1 machine" in output, output[-3000:]
    assert audit(tmp_path / "run" / "dataplane").balanced


def test_the_run_s_own_ray_is_kept_when_the_run_goes_back_to_a_checkpoint(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Without an address, the second attempt uses the Ray of the first: another one cannot be started in a
    process that has threads."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    steps = 40
    here = understudy.train(ranks_recipe(tmp_path / "here", steps), progress=False)
    table = ranks_recipe(tmp_path / "run", steps, cluster={"backend": "ray"})
    table["trainer"]["checkpoint_every"] = 3
    process = start_cli("train", str(write_toml(tmp_path / "recipe.toml", table)), "--quiet")
    metrics, log = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "logs" / "trainer.log"
    deadline = time.monotonic() + 400
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 5:
        assert process.poll() is None and time.monotonic() < deadline, "the run did not take enough steps"
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    (rank,) = [one for one in family if "understudy.assembly.processes.rank" in one.cmdline()]
    raylets = [one.pid for one in family if one.name() == "raylet"]
    rank.kill()
    while "going back to step" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.05)
    before = len(metrics.read_text().splitlines())
    while process.poll() is None and len(metrics.read_text().splitlines()) <= before:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if process.poll() is None:
        assert [
            one.pid for one in psutil.Process(process.pid).children(recursive=True) if one.name() == "raylet"
        ] == raylets
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-3000:]
    assert metrics_without_clock(tmp_path / "run") == metrics_without_clock(here.dir), (
        "the metrics should be those of the undisturbed run"
    )
    report = audit(tmp_path / "run" / "dataplane")
    assert report.balanced and (report.trained, report.dead) == (8 * steps, 0)
    assert not any(psutil.pid_exists(pid) for pid in raylets), "the run's own Ray outlived the run"
