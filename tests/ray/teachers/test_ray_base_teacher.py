"""The base of a LoRA student scores in engine processes on other nodes: bits, both modes, a killed engine, a killed trainer."""

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
    """A student with adapters, and its base as the teacher."""
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
def local(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, float]], dict[str, bytes]]:
    """The bits of a run whose engine processes are beside the trainer."""
    return bits(understudy.train(recipe(tmp_path_factory.mktemp("local")), progress=False).dir, 3)


class Asked:
    """The base's replicas as they start, and a hook into the second request for rows that one of them gets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, second: Callable[[int], None] | None = None) -> None:
        """`second`: called with the pid of the process, which is stopped: it has the request and does not answer."""
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


def test_it_scores_on_two_other_nodes_as_in_local_engines_and_in_the_trainer(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: Any
) -> None:
    inside = understudy.train(recipe(tmp_path / "inside", "trainer"), progress=False)
    asked, statuses = Asked(monkeypatch), []

    def without_a_token(step: understudy.Step) -> None:
        for endpoint in asked.endpoints:
            url = urlsplit(endpoint.url)
            stranger = HTTPConnection(url.netloc)
            stranger.request("GET", f"{url.path}/manifest")
            statuses.append(stranger.getresponse().status)

    table = recipe(tmp_path / "there", **on_two_nodes(cluster))
    there = understudy.train(table, progress=False, on_step=without_a_token)
    assert statuses == [401] * 6
    assert bits(there.dir, 3) == local == bits(inside.dir, 3)
    assert len(local[0]) == 3 and asked.requests >= 3
    for endpoint in asked.endpoints:
        assert endpoint.url.endswith("/teachers/0") and endpoint.token and not endpoint.shares_memory
        assert "//127." not in endpoint.url, "an address that other machines reach"
    assert not list((there.dir / "logs").glob("teacher-*")), "no process was started for it"


def test_workers_on_another_node_ask_it_themselves(cluster: Any, tmp_path: Path, local: Any) -> None:
    placed = on_two_nodes(cluster)
    cluster.add_node(num_cpus=4, object_store_memory=STORE)
    placed["cluster"]["pools"]["loops"] = {"nodes": 1, "cpus_per_node": 1}
    placed["cluster"]["roles"]["workers"] = "loops"
    run = understudy.train(
        recipe(tmp_path / "run", rollout={"workers": 1}, dataplane=QUEUE, **placed), progress=False
    )
    assert bits(run.dir, 3) == local
    assert lines(run.dir)[-1]["perf/workers/rows_judged_here"] == 0
    assert audit(run.dir / "dataplane").balanced


def test_an_engine_killed_while_it_scores_costs_no_row_and_no_bit(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: Any
) -> None:
    asked = Asked(monkeypatch, lambda pid: os.kill(pid, signal.SIGKILL))
    run = understudy.train(
        recipe(tmp_path / "run", **on_two_nodes(cluster)), progress=False, on_step=until_back(2)
    )
    log = (run.dir / "logs" / "trainer.log").read_text()
    assert "ejected" in log and "engine process lost" in log and len(asked.endpoints) == 3
    assert bits(run.dir, 3) == local
    report = audit(run.dir / "dataplane")
    assert report.balanced and (report.trained, report.dead) == (24, 0)


def test_in_a_fully_async_run_a_replica_is_back_on_another_node(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine's node is lost while it scores."""
    placed = on_two_nodes(cluster)
    cluster.add_node(num_cpus=1, object_store_memory=STORE)
    node = LostNode(cluster)
    asked = Asked(monkeypatch, node.lose)
    trainer = {"mode": "fully_async", "max_staleness": 1.0}
    table = recipe(tmp_path / "run", steps=12, trainer=trainer, run={"determinism": "fast"}, **placed)
    run = understudy.train(table, progress=False, on_step=until_back(8))
    report = audit(run.dir / "dataplane")
    assert report.balanced and (report.trained, report.dead) == (96, 0)
    assert node.is_lost
    assert len(asked.endpoints) == 3


def test_a_killed_trainer_resumes_on_the_cluster(cluster: Any, tmp_path: Path, local: Any) -> None:
    run = killed_and_resumed(recipe(tmp_path / "run", **on_two_nodes(cluster)))
    assert bits(run, 3) == local
