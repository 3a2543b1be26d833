"""The base of a LoRA student as teacher, in engine processes on other nodes: bits, kills of engines and of the
trainer."""

import asyncio
import os
import signal
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from ray_runs import QUEUE, STORE, LostNode, bits, killed_and_resumed, lines, ranks_recipe
from small_runs import until_back

import understudy
from understudy.assembly.teachers.launchers import EngineTeachers
from understudy.dataplane.ledger import audit
from understudy.serving.endpoint import Endpoint
from understudy.teacher.clients.native import ReplicaClient

pytest.importorskip("peft")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


def recipe(
    folder: Path, placement: str = "engine", steps: int = 3, **changes: dict[str, Any]
) -> dict[str, Any]:
    """A recipe of a student with adapters, and its base as the teacher."""
    table = ranks_recipe(folder, steps)
    table["student"]["lora"] = {"rank": 4, "alpha": 8.0, "publish": "adapter"}
    table["teachers"] = {"base": {"model": "student", "version": "start", "placement": placement}}
    table["teachers"]["base"]["prompt"] = "{{ answer }}{{ prompt }}"
    table["rollout"]["processes"] = 2
    table["trainer"] |= {"ranks": 1, "learning_rate": 1e-2, "checkpoint_every": 1}
    for section, entries in changes.items():
        table[section] |= entries
    return table


def on_two_nodes(cluster: Any) -> dict[str, Any]:
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=STORE)
    pool = {"nodes": 2, "cpus_per_node": 1}
    placed = {"pools": {"write": pool}, "roles": {"rollout": "write"}}
    return {"cluster": {"backend": "ray", "address": cluster.address, **placed}}


@pytest.fixture(scope="module")
def local_bits(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, float]], dict[str, bytes]]:
    """Metrics and weights of a run whose engine processes are beside the trainer."""
    return bits(understudy.train(recipe(tmp_path_factory.mktemp("local")), progress=False).dir, 3)


class RecordedReplicas:
    """Records the endpoints of base-teacher replicas and counts requests, with a hook at the second request for
    rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, second: Callable[[int], None] | None = None) -> None:
        """`second` is called with the pid of the replica's process, which is suspended: it has the request and does not
        answer."""
        self.endpoints: list[Endpoint] = []
        self.requests = 0
        launchers: list[EngineTeachers] = []
        start, score = EngineTeachers.start, ReplicaClient.score

        async def started(launcher: EngineTeachers, replica: str) -> Endpoint:
            launchers.append(launcher)
            self.endpoints.append(await start(launcher, replica))
            return self.endpoints[-1]

        async def scored(client: ReplicaClient, items: Any, timeout: float | None = None) -> Any:
            self.requests += items[0].key != "probe"
            if self.requests == 2 and second is not None and items[0].key != "probe":
                process = launchers[0]._processes.children[f"rollout-{client._channel.replica}"]
                os.kill(process.process.pid, signal.SIGSTOP)
                asyncio.get_running_loop().call_later(0.5, second, process.process.pid)
            return await score(client, items, timeout)

        monkeypatch.setattr(EngineTeachers, "start", started)
        monkeypatch.setattr(ReplicaClient, "score", scored)


def test_the_base_teacher_in_engines_on_other_nodes_gives_the_bits_of_a_local_one(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_bits: Any
) -> None:
    inside = understudy.train(recipe(tmp_path / "inside", "trainer"), progress=False)
    asked, statuses = RecordedReplicas(monkeypatch), []

    def without_a_token(step: understudy.Step) -> None:
        for endpoint in asked.endpoints:
            url = urlsplit(endpoint.url)
            stranger = HTTPConnection(url.netloc)
            stranger.request("GET", f"{url.path}/manifest")
            statuses.append(stranger.getresponse().status)

    table = recipe(tmp_path / "there", **on_two_nodes(cluster))
    there = understudy.train(table, progress=False, on_step=without_a_token)
    assert statuses == [401] * 6
    assert bits(there.dir, 3) == local_bits == bits(inside.dir, 3)
    assert len(local_bits[0]) == 3 and asked.requests >= 3
    for endpoint in asked.endpoints:
        assert endpoint.url.endswith("/teachers/0") and endpoint.token and not endpoint.shares_memory
        assert "//127." not in endpoint.url, "the address should be reachable from other machines"
    assert not list((there.dir / "logs").glob("teacher-*")), "no process should be started for the teacher"


def test_workers_on_another_node_ask_the_base_teacher_themselves(
    cluster: Any, tmp_path: Path, local_bits: Any
) -> None:
    placed = on_two_nodes(cluster)
    cluster.add_node(num_cpus=4, object_store_memory=STORE)
    placed["cluster"]["pools"]["loops"] = {"nodes": 1, "cpus_per_node": 1}
    placed["cluster"]["roles"]["workers"] = "loops"
    run = understudy.train(
        recipe(tmp_path / "run", rollout={"workers": 1}, dataplane=QUEUE, **placed), progress=False
    )
    assert bits(run.dir, 3) == local_bits
    assert lines(run.dir)[-1]["perf/workers/rows_judged_here"] == 0
    assert audit(run.dir / "dataplane").balanced


def test_an_engine_killed_while_its_base_teacher_scores_changes_no_bit(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_bits: Any
) -> None:
    asked = RecordedReplicas(monkeypatch, lambda pid: os.kill(pid, signal.SIGKILL))
    run = understudy.train(
        recipe(tmp_path / "run", **on_two_nodes(cluster)), progress=False, on_step=until_back(2)
    )
    log = (run.dir / "logs" / "trainer.log").read_text()
    assert "ejected" in log and "engine process lost" in log and len(asked.endpoints) == 3
    assert bits(run.dir, 3) == local_bits
    report = audit(run.dir / "dataplane")
    assert report.balanced and (report.trained, report.dead) == (24, 0)


def test_a_base_teacher_whose_node_is_lost_restarts_on_another_in_a_fully_async_run(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node of the replica's engine is lost while the replica scores."""
    placed = on_two_nodes(cluster)
    cluster.add_node(num_cpus=1, object_store_memory=STORE)
    node = LostNode(cluster)
    asked = RecordedReplicas(monkeypatch, node.lose)
    trainer = {"mode": "fully_async", "max_staleness": 1.0}
    table = recipe(tmp_path / "run", steps=12, trainer=trainer, run={"determinism": "fast"}, **placed)
    run = understudy.train(table, progress=False, on_step=until_back(8))
    report = audit(run.dir / "dataplane")
    assert report.balanced and (report.trained, report.dead) == (96, 0)
    assert node.is_lost
    assert len(asked.endpoints) == 3


def test_a_killed_trainer_resumes_with_remote_base_teachers_to_the_same_bits(
    cluster: Any, tmp_path: Path, local_bits: Any
) -> None:
    run = killed_and_resumed(recipe(tmp_path / "run", **on_two_nodes(cluster)))
    assert bits(run, 3) == local_bits
