"""Workers and vLLM servers on other nodes: kills and publishes lose no row. The servers are stand-ins with
vLLM's routes over a small model; one test uses vLLM itself where it is installed."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_runs import QUEUE, STORE, lines, metrics_without_clock, ranks_recipe
from small_runs import ASSETS, start_cli, write_toml
from test_ray_remote_generation import assert_every_row_trained
from vllm_student import write_student

import understudy

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
HERE = Path(__file__).parents[1]
ROWS, STEPS = 8, 2
REAL = os.environ.get("UNDERSTUDY_VLLM_PYTHON", "")
PATHS = os.environ.get("PYTHONPATH", "")
FAKE = HERE.parent / "contract" / "engines"


@pytest.fixture(autouse=True)
def stand_in_vllm_on_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the stand-in for vLLM on the import path of processes on every node."""
    paths = [str(FAKE / "fake_vllm"), str(FAKE), str(HERE), PATHS]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def add_nodes(cluster: Any, count: int = 2) -> None:
    for _ in range(count):
        cluster.add_node(num_cpus=4, object_store_memory=STORE)


def servers_recipe(folder: Path, steps: int, address: str | None, **changes: Any) -> dict[str, Any]:
    """A recipe with two servers and two workers on nodes of their own; without an address all are on this machine."""
    rollout = {"engine": "vllm", "vllm_python": sys.executable, "replicas": 2, "workers": 2}
    rollout |= changes.pop("rollout", {})
    table: dict[str, Any] = {
        "rollout": rollout,
        "trainer": {"ranks": 1} | changes.pop("trainer", {}),
        "run": {"determinism": "fast"},
        **changes,
    }
    if address is not None:
        pools = {name: {"nodes": 1, "cpus_per_node": 2} for name in ("write", "loops")}
        roles = {"rollout": "write", "workers": "loops"}
        table["cluster"] = {
            "backend": "ray", "address": address, "pools": pools, "roles": roles,
            "start_timeout_seconds": 400.0 if REAL and rollout["vllm_python"] == REAL else 90.0,
        }  # fmt: skip
        table["dataplane"] = QUEUE
    return ranks_recipe(folder, steps, **table)


def batch_independent_metrics(run: Path) -> list[list[float]]:
    """Metrics that do not depend on batches, except in the last digits: servers batch requests as they arrive."""
    names = ("actor/loss", "response_length/mean", "rollout/weight_version/min")
    return [[line[name] for name in names] for line in metrics_without_clock(run)]


def test_vllm_servers_and_workers_on_other_nodes_give_the_rows_of_a_run_on_one_machine(
    cluster: Any, tmp_path: Path
) -> None:
    add_nodes(cluster)
    hot = {"max_new_tokens": 64, "temperature": 8.0}
    there = understudy.train(
        servers_recipe(tmp_path / "there", STEPS, cluster.address, rollout=hot), progress=False
    ).dir
    assert_every_row_trained(there, ROWS * STEPS)
    alone = servers_recipe(tmp_path / "here", STEPS, None, rollout={**hot, "workers": 0})
    here = understudy.train(alone, progress=False).dir
    assert batch_independent_metrics(there) == [
        pytest.approx(step, rel=1e-5) for step in batch_independent_metrics(here)
    ]


def test_vllm_generations_continue_after_a_publish_in_a_fully_async_run(cluster: Any, tmp_path: Path) -> None:
    """The servers are beside the trainer."""
    add_nodes(cluster)
    steps = 8
    table = servers_recipe(
        tmp_path / "run", steps, cluster.address,
        rollout={"max_new_tokens": 100, "temperature": 8.0, "agent": "two_turns:TwoTurns"},
        trainer={"mode": "fully_async", "max_staleness": 1},
    )  # fmt: skip
    del table["cluster"]["roles"]["rollout"], table["cluster"]["pools"]["write"]
    run = understudy.train(table, progress=False).dir
    assert_every_row_trained(run, ROWS * steps)
    taken = lines(run)
    assert max(line["async/staleness/max"] for line in taken) <= 1
    assert sum(line["async/partial_rollouts"] for line in taken) > 0, (
        "no rollout was in progress at a publish"
    )


def test_servers_and_workers_killed_while_generating_lose_no_row(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_nodes(cluster, 1)
    for point, passage in (("worker.asked", 25), ("worker.answered", 31)):
        monkeypatch.setenv("UNDERSTUDY_FAULT", f"{point}:{passage}")
        add_nodes(cluster, 1)
    monkeypatch.delenv("UNDERSTUDY_FAULT")
    table = servers_recipe(
        tmp_path / "run", 5000, cluster.address,
        rollout={"max_new_tokens": 100, "temperature": 8.0},
        trainer={"mode": "fully_async", "max_staleness": 1},
    )  # fmt: skip
    table["cluster"]["pools"]["loops"] = {"nodes": 2, "cpus_per_node": 1}
    process = start_cli("train", str(write_toml(tmp_path / "recipe.toml", table)), "--quiet")
    metrics, log = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "logs" / "trainer.log"
    deadline, killed, stopped = time.monotonic() + 500, 0, False
    servers_of_the_dead: list[psutil.Process] = []
    while process.poll() is None:
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        if killed < 2 and done >= 2 + 3 * killed:
            found = re.findall(rf"process vllm-replica-{killed} runs on \S+ \(pid (\d+)\)", log.read_text())
            victim = psutil.Process(int(found[0]))
            # Of the first server the proxy is killed; of the second only the vLLM behind the proxy.
            behind = victim.children()[0]
            (victim if killed == 0 else behind).send_signal(signal.SIGKILL)
            servers_of_the_dead.append(behind)
            killed += 1
        # The other server continues, so the run could end before a killed one is back: it is stopped only then.
        # The proxy of the second may live for a moment longer, and be asked once more before it is restarted.
        backs = (
            set(re.findall(r"vLLM (\S+) is back, with weights", log.read_text())) if killed == 2 else set()
        )
        if len(backs) == 2 and not stopped:
            process.send_signal(signal.SIGTERM)
            stopped = True
        time.sleep(0.05)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and stopped, output[-3000:]
    log_text = log.read_text()
    assert not any(one.is_running() for one in servers_of_the_dead), "a vLLM outlived its proxy"
    assert len(re.findall(r"_0_0 is begun again", log_text)) > 1
    assert_every_row_trained(tmp_path / "run", ROWS * len(lines(tmp_path / "run")))
    assert sum(line["async/partial_rollouts"] for line in lines(tmp_path / "run")) > 0


@contextmanager
def running(dialect: str, model: str, host: str) -> Iterator[str]:
    """The address of an external server, so slow that new weights come while it generates."""
    arguments = [sys.executable, str(HERE / "wire_server_child.py"), dialect, model, "--host", host]
    arguments += ["--token-seconds", "0.02"]
    pipe = subprocess.PIPE
    child = subprocess.Popen(arguments, stdin=pipe, stdout=pipe, text=True)
    assert child.stdin is not None and child.stdout is not None
    try:
        yield f"http://{host}:{int(child.stdout.readline())}"
    finally:
        child.stdin.close()
        child.wait(20)


def test_remote_workers_use_running_sglang_servers_named_by_urls(cluster: Any, tmp_path: Path) -> None:
    """The servers are named by `rollout.urls` instead of a pool."""
    add_nodes(cluster)
    steps, model, host = 6, str(ASSETS / "models" / "student"), cluster.address.rpartition(":")[0]
    with running("sglang", model, host) as first, running("sglang", model, host) as second:
        table = servers_recipe(
            tmp_path / "run", steps, cluster.address,
            trainer={"mode": "fully_async", "max_staleness": 1},
            rollout={"engine": "sglang", "urls": [first, second], "snapshots": str(tmp_path / "weights"),
                     "served_model": "student", "max_new_tokens": 100, "temperature": 8.0},
        )  # fmt: skip
        for unused in ("vllm_python", "replicas"):
            del table["rollout"][unused]
        del table["cluster"]["roles"]["rollout"], table["cluster"]["pools"]["write"]
        run = understudy.train(table, progress=False).dir
    assert_every_row_trained(run, ROWS * steps)
    continued = sum(line["async/partial_rollouts"] for line in lines(run))
    assert continued > 0 and lines(run)[-1]["rollout/weight_version/min"] > 0


@pytest.mark.vllm
@pytest.mark.skipif(not REAL, reason="set UNDERSTUDY_VLLM_PYTHON to an interpreter that has vLLM")
def test_a_real_vllm_on_another_node_generates_with_published_weights(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(HERE), PATHS])))
    add_nodes(cluster)
    steps = 4
    table = servers_recipe(
        tmp_path / "run", steps, cluster.address,
        student={"model": write_student(tmp_path / "student")},
        rollout={"vllm_python": REAL, "replicas": 1, "max_new_tokens": 64, "temperature": 1.0,
                 "context_length": 128},
        trainer={"mode": "fully_async", "max_staleness": 1, "learning_rate": 1e-3},
    )  # fmt: skip
    run = understudy.train(table, progress=False).dir
    assert_every_row_trained(run, ROWS * steps)
    assert lines(run)[-1]["rollout/weight_version/min"] > 0, (
        "the last rows should come from published weights"
    )
