"""The critic on a machine of its own: the same bits; if the machine is lost, the run goes back to its last
checkpoint."""

import re
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_runs import STORE, lines, metrics_without_clock, node_of
from small_runs import ASSETS, start_cli, write_toml

import understudy
from understudy.dataplane.ledger import audit

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def _rewards_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(Path(__file__).parents[1] / "e2e")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", folder)


def ppo(folder: Path, steps: int, **changes: dict[str, Any]) -> dict[str, Any]:
    """A PPO recipe with rewards only and two updates per step."""
    table: dict[str, dict[str, Any]] = {
        "student": {"model": str(ASSETS / "models" / "student"), "device": "cpu"},
        "loss": {"task_coef": 1.0, "distill_coef": 0.0, "advantage": "gae", "lam": 0.95},
        "critic": {"learning_rate": 1e-3},
        "rollout": {"n": 2, "max_new_tokens": 4},
        "data": {"train": str(ASSETS / "data" / "train.jsonl"), "reward": "small_rewards:varied"},
        "trainer": {
            "steps": steps, "batch_size": 4, "mini_batch_size": 2, "learning_rate": 1e-3, "checkpoint_every": 3
        },
        "cluster": {},
        "run": {"dir": str(folder), "threads": 1, "determinism": "full"},
    }  # fmt: skip
    for section, entries in changes.items():
        table[section] = {**table[section], **entries}
    return table


def critic_pool(cluster: Any) -> dict[str, Any]:
    pool = {"pools": {"values": {"nodes": 1, "cpus_per_node": 1}}, "roles": {"critic": "values"}}
    return {"backend": "ray", "address": cluster.address, **pool}


def critic_pids(log: Path) -> list[int]:
    """Pids of the run's critic processes, the newest last."""
    return [int(pid) for pid in re.findall(r"process critic runs on \S+ \(pid (\d+)\)", log.read_text())]


def test_a_critic_in_a_pool_of_its_own_gives_the_same_bits_as_in_the_trainer(
    cluster: Any, tmp_path: Path
) -> None:
    cluster.add_node(num_cpus=1, object_store_memory=STORE)
    here = understudy.train(ppo(tmp_path / "here", 3), progress=False)
    there = understudy.train(ppo(tmp_path / "there", 3, cluster=critic_pool(cluster)), progress=False)
    assert (
        metrics_without_clock(there.dir) == metrics_without_clock(here.dir)
        and len(metrics_without_clock(here.dir)) == 3
    )
    assert lines(there.dir)[-1]["perf/critic/bytes_sent"] > 0
    for name in ("model", "optimizer"):
        one, other = (
            (run.dir / "checkpoints" / "step-000003" / f"{name}.safetensors").read_bytes()
            for run in (here, there)
        )
        assert one == other, "the checkpoints should have the same bits"
    (pid,) = critic_pids(there.dir / "logs" / "trainer.log")
    log_text = (there.dir / "logs" / "critic.log").read_text()
    assert "the critic answers at http://" in log_text, "the critic's log should be in the run directory"
    assert not psutil.pid_exists(pid)


def start_run_and_wait_for_checkpoint(
    cluster: Any, folder: Path, steps: int
) -> tuple[subprocess.Popen[str], int]:
    """A run on the cluster that has taken steps after its first checkpoint, and the pid of its critic."""
    table = ppo(folder / "run", steps, cluster=critic_pool(cluster))
    process = start_cli("train", str(write_toml(folder / "recipe.toml", table)), "--quiet")
    metrics, log = folder / "run" / "metrics.jsonl", folder / "run" / "logs" / "trainer.log"
    deadline = time.monotonic() + 400
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 5:
        assert process.poll() is None and time.monotonic() < deadline, "the run did not take five steps"
        time.sleep(0.05)
    return process, critic_pids(log)[-1]


def test_a_run_that_loses_the_critic_s_machine_restarts_the_critic_on_another(
    cluster: Any, tmp_path: Path
) -> None:
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=STORE)
    steps = 60
    here = understudy.train(ppo(tmp_path / "here", steps), progress=False)
    process, pid = start_run_and_wait_for_checkpoint(cluster, tmp_path, steps)
    cluster.remove_node(node_of(cluster, pid), allow_graceful=False)
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output[-3000:]
    log = tmp_path / "run" / "logs" / "trainer.log"
    assert "the critic was lost with its machine" in log.read_text(), log.read_text()[-3000:]
    assert re.search(r"going back to step \d+ \(restart 1 of 1\)", log.read_text())
    assert critic_pids(log)[-1] != pid and not any(psutil.pid_exists(one) for one in critic_pids(log))
    assert metrics_without_clock(tmp_path / "run") == metrics_without_clock(here.dir), (
        "the metrics should be those of the undisturbed run"
    )
    report = audit(tmp_path / "run" / "dataplane")
    assert report.balanced and (report.trained, report.dead) == (8 * steps, 0), "every row exactly once"


def test_a_run_without_another_machine_for_its_critic_ends_within_a_minute(
    cluster: Any, tmp_path: Path
) -> None:
    cluster.add_node(num_cpus=1, object_store_memory=STORE)
    process, pid = start_run_and_wait_for_checkpoint(cluster, tmp_path, 5000)
    cluster.remove_node(node_of(cluster, pid), allow_graceful=False)
    lost = time.monotonic()
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 2, output[-3000:]
    assert time.monotonic() - lost < 60
    assert "pool values wants 1 × (1 CPU); room was found for 0" in output, output[-3000:]
    assert audit(tmp_path / "run" / "dataplane").balanced
