"""Teachers that follow the student, with replicas on other nodes: bits, replicas lost at a publish, a killed
trainer."""

import asyncio
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray_runs import STORE, LostNode, bits, killed_and_resumed, lines, ranks_recipe
from small_runs import until_back

import understudy
from understudy.assembly.teachers.following import FollowingReplicas
from understudy.assembly.teachers.launchers import LocalTeachers
from understudy.dataplane.ledger import audit
from understudy.serving.endpoint import Endpoint
from understudy.weights.broadcast import Rendezvous

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
HEAD = pytest.mark.parametrize("cluster", [1], indirect=True, ids=["head-has-a-cpu"])


VERSIONS: dict[str, tuple[str | int, str | int]] = {
    "live-and-ema": ("live", "ema"),
    "lagging": (1, 2),
    "lora": ("live", 1),
}
"""Versions of the teachers for sums and for sorting. Each kind of run is compared with a local one."""


def recipe(
    folder: Path, kind: str = "live-and-ema", steps: int = 4, **changes: dict[str, Any]
) -> dict[str, Any]:
    table = ranks_recipe(folder, steps)
    own = {"model": "student", "prompt": "{{ answer }}{{ prompt }}"}
    add, sort = VERSIONS[kind]
    table["teachers"] = {
        "add": {**own, "key": "add", "version": add, "replicas": 2},
        "sort": {**own, "key": "sort", "version": sort},
    }
    table["loss"]["topk"] = 40
    table["trainer"] |= {"ranks": 1, "checkpoint_every": 1}
    if sort == "ema":
        table["trainer"]["ema_decay"] = 0.5
    if kind == "lora":  # the engine gets adapters, and the teachers merged weights
        table["student"]["lora"] = {"rank": 4, "alpha": 8.0, "publish": "adapter"}
        table["rollout"]["processes"] = 1
        table["trainer"]["learning_rate"] = 1e-2
    for section, entries in changes.items():
        table[section] |= entries
    return table


def on_nodes(cluster: Any, kind: str = "live-and-ema") -> dict[str, Any]:
    """Adds nodes so that, with the head's one CPU, there is just enough room for three replicas and an engine
    process."""
    for _ in range(3 if kind == "lora" else 2):
        cluster.add_node(num_cpus=1, object_store_memory=STORE)
    return {"cluster": {"backend": "ray", "address": cluster.address}}


@pytest.fixture(scope="module", params=VERSIONS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def local_bits(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return bits(understudy.train(recipe(tmp_path_factory.mktemp("local"), kind), progress=False).dir, 4)


@pytest.fixture
def disturb_publish(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], Any]], list[str]]:
    """Suspends a replica on another node before the second publish, calls `then` with its pid, and records
    addresses."""

    def plant(then: Callable[[int], Any]) -> list[str]:
        addresses: list[str] = []
        done: list[Any] = []
        pids: dict[str, int] = {}
        send, listen, start = FollowingReplicas.send, Rendezvous.__init__, LocalTeachers.start

        async def started(launcher: LocalTeachers, replica: str) -> Endpoint:
            endpoint = await start(launcher, replica)
            name = f"teacher-{launcher._name}-{replica}"
            pids[f"{launcher._name}-{replica}"] = launcher._processes.children[name].process.pid
            addresses.append(endpoint.url)
            return endpoint

        async def sent(self: FollowingReplicas, version: int, tensors: Any, replicas: Any) -> Any:
            remote = [name for name, one in self._channels.items() if not one.endpoint.shares_memory]
            if version == 2 and not done and remote:
                pid = pids[f"{self._teacher}-{remote[0]}"]
                os.kill(pid, signal.SIGSTOP)
                done.append(asyncio.get_running_loop().call_later(0.5, then, pid))
            return await send(self, version, tensors, replicas)

        def listening(self: Rendezvous, host: str) -> None:
            addresses.append(host)
            listen(self, host)

        monkeypatch.setattr(LocalTeachers, "start", started)
        monkeypatch.setattr(FollowingReplicas, "send", sent)
        monkeypatch.setattr(Rendezvous, "__init__", listening)
        return addresses

    return plant


@HEAD
def test_a_remote_replica_killed_while_it_receives_weights_changes_no_bit(
    cluster: Any, tmp_path: Path, disturb_publish: Any, kind: str, local_bits: Any
) -> None:
    addresses = disturb_publish(lambda pid: os.kill(pid, signal.SIGKILL))
    table = recipe(tmp_path / "run", kind, **on_nodes(cluster, kind))
    run = understudy.train(table, progress=False, on_step=until_back(3))
    log = (run.dir / "logs" / "trainer.log").read_text()

    assert bits(run.dir, 4) == local_bits
    newest = [line["rollout/teacher_version/max"] for line in lines(run.dir)]
    assert newest == ([0, 0, 1, 2] if kind == "lagging" else [0, 1, 2, 3])
    assert "ejected" in log and not any("127.0.0" in one for one in addresses)
    # Ray chooses which of the replicas is beside the trainer.
    assert re.search(r"version 1: (\d) of \1 remote replicas of teacher add have them", log)
    report = audit(run.dir / "dataplane")
    assert report.balanced and (report.trained, report.dead) == (32, 0)


@HEAD
def test_a_killed_trainer_resumes_with_remote_self_teachers_to_the_same_bits(
    cluster: Any, tmp_path: Path, kind: str, local_bits: Any
) -> None:
    """It resumes from the checkpoint of step 3: lagging teachers need weights that only `teacher_weights` has."""
    run = killed_and_resumed(recipe(tmp_path / "run", kind, **on_nodes(cluster, kind)), step=4)
    assert bits(run, 4) == local_bits


@HEAD
@pytest.mark.parametrize("end", ["its-node-is-lost", "it-hangs"])
def test_a_replica_that_is_lost_or_hangs_at_a_publish_restarts_in_a_fully_async_run(
    cluster: Any, tmp_path: Path, disturb_publish: Any, end: str
) -> None:
    """The replica is suspended while it receives weights; then its node is removed, or it stays suspended."""
    placed = on_nodes(cluster)
    cluster.add_node(num_cpus=1, object_store_memory=STORE)
    node = LostNode(cluster)
    disturb_publish(node.lose if end == "its-node-is-lost" else lambda pid: None)
    trainer = {"mode": "fully_async", "max_staleness": 1.0}
    table = recipe(tmp_path / "run", steps=12, trainer=trainer, run={"determinism": "fast"}, **placed)
    run = understudy.train(table, progress=False, on_step=until_back(8))
    assert node.is_lost or "does not answer /health" in (run.dir / "logs" / "trainer.log").read_text()
    report = audit(run.dir / "dataplane")
    assert report.balanced and (report.trained, report.dead) == (96, 0)
