"""Processes on other nodes: started, logged, restarted, and ended with their node, their supervisor or the run."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from understudy.cluster.ray import RayProcesses
from understudy.cluster.ray_cluster import RaySettings
from understudy.cluster.ray_layout import Bundle, GroupRequest, RayLayout, Spread, UnitBundle
from understudy.errors import ChildDied, ClusterError

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
STORE = 80 * 2**20
ONE = Bundle(1)


def layout(*units: str, spread: Spread = Spread.LOOSE) -> RayLayout:
    request = GroupRequest("crew", tuple(ONE for _ in units), spread)
    return RayLayout(
        {"crew": request}, {unit: UnitBundle("crew", place, ONE) for place, unit in enumerate(units)}
    )


async def open_on(cluster: Any, logs: Path, where: RayLayout) -> RayProcesses:
    processes = RayProcesses(logs, 60.0, RaySettings(address=cluster.address), lambda nodes: where)
    await processes.ready()
    return processes


def wait_until_gone(pid: int, within: float = 60.0) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


def node_of(cluster: Any, pid: int) -> Any:
    """The simulated node whose raylet is an ancestor of this process."""
    ancestors = {parent.pid for parent in psutil.Process(pid).parents()}
    for node in cluster.worker_nodes:
        for kind, processes in node.all_processes.items():
            if kind == "raylet" and processes[0].process.pid in ancestors:
                return node
    raise AssertionError(f"no node owns process {pid}")


async def wait_until(condition: Any, within: float = 90.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


SCRIPT_STOPPED_BY_SIGTERM = """
import asyncio, os, signal, sys
from pathlib import Path
from understudy.cluster.ray import RayProcesses
from understudy.cluster.ray_cluster import RaySettings
from understudy.cluster.ray_layout import RayLayout

async def main():
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
    processes = RayProcesses(Path(sys.argv[1]), 60.0, RaySettings(cpus=1), lambda nodes: RayLayout())
    await processes.ready()
    os.kill(os.getpid(), signal.SIGTERM)
    await asked.wait()
    await asyncio.sleep(5)  # saves
    await processes.close()
    print("saved")

asyncio.run(main())
"""


def test_ray_does_not_abort_a_process_that_saves_after_sigterm(tmp_path: Path) -> None:
    """Ray's own handler would abort the process after 3 s."""
    command = [sys.executable, "-c", SCRIPT_STOPPED_BY_SIGTERM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "saved\n"), done
    assert "SIGTERM received" not in done.stderr


def test_children_run_on_nodes_log_into_the_run_directory_and_end_with_node_or_supervisor(
    cluster: Any, tmp_path: Path
) -> None:
    for _ in range(3):
        cluster.add_node(num_cpus=1, object_store_memory=STORE)

    async def body() -> list[int]:
        processes = await open_on(cluster, tmp_path, layout("crew-0", "crew-1", "crew-2"))
        env = {"UNDERSTUDY_TOKEN": "x" * 24}
        children = [
            await processes.start(f"crew-{i}", "node_child", ["--bind", "127.0.0.1:0"], env) for i in range(3)
        ]
        pids = [child.process.pid for child in children]
        nodes = {id(node_of(cluster, pid)) for pid in pids}
        assert len(nodes) == 3, "one group's bundles are spread over the nodes"
        address = ray.util.get_node_ip_address()
        assert all(child.ready["url"] == f"http://{address}:0" for child in children)
        log = tmp_path / "crew-0.log"
        await wait_until(lambda: log.exists() and "token 24 letters" in log.read_text())

        # A child's node is removed: the child ends, that is noticed, and the others continue.
        lost = node_of(cluster, pids[0])
        await asyncio.to_thread(cluster.remove_node, lost, False)
        await wait_until(lambda: not children[0].alive)
        assert wait_until_gone(pids[0]) and children[1].alive and children[2].alive
        await processes.stop("crew-0")

        # A child's supervisor is killed: the pipe closes and the child ends itself.
        os.kill(psutil.Process(pids[1]).parent().pid, 9)
        await wait_until(lambda: not children[1].alive)
        assert wait_until_gone(pids[1])
        await processes.stop("crew-1")

        # Both are started again where there is room: on the same node, and on a node added after the first was lost.
        again = await processes.start("crew-1", "node_child", [], env)
        assert again.alive and again.process.pid != pids[1]
        fresh = cluster.add_node(num_cpus=1, object_store_memory=STORE)
        moved = await processes.start("crew-0", "node_child", [], env)
        assert node_of(cluster, moved.process.pid) is fresh
        pids += [again.process.pid, moved.process.pid]
        await processes.close()
        return pids

    pids = asyncio.run(body())
    assert all(wait_until_gone(pid) for pid in pids), "a child outlived `close`"


def test_errors_show_the_childs_own_message_first_and_the_end_of_a_child_is_noticed(
    cluster: Any, tmp_path: Path
) -> None:
    cluster.add_node(num_cpus=2, object_store_memory=STORE)

    async def body() -> None:
        processes = await open_on(cluster, tmp_path, layout("crew-0", "crew-1"))
        try:
            with pytest.raises(ChildDied) as caught:
                await processes.start("crew-0", "node_child", ["--fail", "the model folder is empty"])
            message = str(caught.value)
            assert "ValueError: the model folder is empty" in message and "RayTaskError" not in message
            assert message.index("ValueError") < message.index("ended with code")
            assert "the model folder is empty" in (tmp_path / "crew-0.log").read_text()

            short = await processes.start("crew-1", "node_child", ["--leave-after", "0.5"])
            await wait_until(lambda: not short.alive)
            assert short.process.returncode == 7 and (tmp_path / "crew-1.log").read_text().endswith(
                "goodbye\n"
            )
            with pytest.raises(ChildDied, match="No module named"):
                await processes.start("crew-0", "no_such_module", [])

            # A child without a bundle runs beside the trainer; starting the same name twice is refused.
            local = await processes.start("neighbour", "node_child", [])
            assert psutil.Process(local.process.pid).ppid() == os.getpid()
            with pytest.raises(ClusterError, match="runs already"):
                await processes.start("neighbour", "node_child", [])
            ends = await processes.start("crew-0", "node_child", [])
            processes.kill_now()
            assert wait_until_gone(ends.process.pid) and wait_until_gone(local.process.pid)
        finally:
            await processes.close()

    asyncio.run(body())


def test_a_request_that_does_not_fit_is_refused_within_seconds_with_a_list_of_resources(
    cluster: Any, tmp_path: Path
) -> None:
    cluster.add_node(num_cpus=2, object_store_memory=STORE)
    began = time.monotonic()
    with pytest.raises(ClusterError) as caught:
        asyncio.run(open_on(cluster, tmp_path, layout("a-0", "a-1", spread=Spread.STRICT)))
    # Five seconds of waiting for resources to be freed, and Ray's connecting and disconnecting on a busy machine.
    assert time.monotonic() - began < 30
    assert "room was found for 1" in str(caught.value) and "free 2 CPU" in str(caught.value)
    assert not ray.is_initialized(), "the connection to Ray should be closed"
