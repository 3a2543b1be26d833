"""A worker node with a network and a /dev/shm of its own: code that works on one machine only fails here.

this network, 10.231.77.1          another one, 10.231.77.2
head, trainer, ledger   ──veth──   teacher, rollout engine, agent-loop worker
"""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from small_runs import start_cli, write_toml
from test_ray_runs import STORE, metrics_without_clock, recipe

import understudy
from understudy.cluster.ray_cluster import use_token
from understudy.dataplane.ledger import audit

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
HERE, THERE = "10.231.77.1", "10.231.77.2"
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--object-store-memory={STORE}"]


def sudo(*arguments: str) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"{' '.join(arguments)}: {done.stderr.strip()}"


@pytest.fixture
def network() -> Iterator[str]:
    """A network namespace joined to ours by a pair of virtual interfaces; skips the test where that is not allowed."""
    name = f"us{secrets.token_hex(3)}"
    card = f"{name}a"
    steps = [
        ["ip", "netns", "add", name],
        ["ip", "link", "add", card, "type", "veth", "peer", "name", f"{name}b", "netns", name],
        ["ip", "addr", "add", f"{HERE}/24", "dev", card],
        ["ip", "link", "set", card, "up"],
        ["ip", "-n", name, "addr", "add", f"{THERE}/24", "dev", f"{name}b"],
        ["ip", "-n", name, "link", "set", f"{name}b", "up"],
        ["ip", "-n", name, "link", "set", "lo", "up"],
        ["ip", "netns", "exec", name, "unshare", "--mount", "mount", "-t", "tmpfs", "none", "/dev/shm"],
    ]
    try:
        for step in steps:
            try:
                problem = sudo(*step)
            except FileNotFoundError:
                problem = f"no command {step[0]!r}"
            if problem:
                pytest.skip(f"no network namespaces here: {problem}")
        yield name
    finally:
        left = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        for pid in left.stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        sudo("ip", "link", "del", card)
        sudo("ip", "netns", "del", name)


@contextmanager
def ray_node(command: list[str], log: Path) -> Iterator[None]:
    with log.open("w") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)
    deadline = time.monotonic() + 90
    try:
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_a_run_with_roles_in_another_network_namespace_has_the_same_metrics(
    network: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_urlsafe(24),
        "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }.items():
        monkeypatch.setenv(name, value)
    use_token(os.environ["RAY_AUTH_TOKEN"])
    address = f"{HERE}:26379"
    head = [
        *RAY,
        "--head",
        "--port=26379",
        f"--node-ip-address={HERE}",
        "--num-cpus=0",
        "--include-dashboard=false",
    ]
    command = " ".join([*RAY, f"--address={address}", f"--node-ip-address={THERE}", "--num-cpus=3"])
    with_its_own_shm = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs none /dev/shm && exec {command}"]
    table = recipe(
        tmp_path / "run",
        rollout={"processes": 1, "workers": 1},
        cluster={
            "backend": "ray",
            "address": address,
            "pools": {"elsewhere": {"nodes": 1, "cpus_per_node": 2}},
            "roles": {"rollout": "elsewhere", "workers": "elsewhere"},
        },
    )
    with (
        ray_node(head, tmp_path / "head.log"),
        ray_node(["ip", "netns", "exec", network, *with_its_own_shm], tmp_path / "node.log"),
    ):
        process = start_cli("train", str(write_toml(tmp_path / "recipe.toml", table)), "--quiet")
        output, _ = process.communicate(timeout=400)
        assert process.returncode == 0, output[-3000:]
    logs = tmp_path / "run" / "logs"
    assert f"the engine writes at http://{THERE}:" in (logs / "rollout-0.log").read_text()
    assert f"scores at http://{THERE}:" in (logs / "teacher-add-0.log").read_text()
    assert f"process rollout-worker-0 runs on {THERE}" in (logs / "trainer.log").read_text()
    report = audit(tmp_path / "run" / "dataplane")
    assert report.balanced and report.trained == 16
    here = understudy.train(recipe(tmp_path / "here"), progress=False)
    assert metrics_without_clock(tmp_path / "run") == metrics_without_clock(here.dir), (
        "every bit should be the same"
    )
