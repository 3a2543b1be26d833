"""Remote processes whose logs cannot be written, and folders that killed supervisors leave on their machines."""

import asyncio
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_ray_processes import layout, open_on, wait_until, wait_until_gone

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
STORE = 80 * 2**20


def test_the_end_of_a_remote_process_is_noticed_although_its_log_cannot_be_written(
    cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add_node(num_cpus=2, object_store_memory=STORE)
    failing_for_a_while, always_failing = tmp_path / "crew-0.log", tmp_path / "crew-1.log"
    for log in (failing_for_a_while, always_failing):
        log.symlink_to("/dev/full")  # every write: no space left on device

    async def body() -> None:
        processes = await open_on(cluster, tmp_path, layout("crew-0", "crew-1"))
        try:
            tolerant = await processes.start("crew-0", "node_child", ["--leave-after", "12"])
            await wait_until(lambda: "process crew-0 says cannot be copied" in caplog.text, within=10)
            assert tolerant.alive and "No space left on device" in caplog.text
            failing_for_a_while.unlink()
            await wait_until(failing_for_a_while.exists, within=10)
            short = await processes.start("crew-1", "node_child", ["--leave-after", "0.5"])
            await wait_until(lambda: not short.alive, within=20)
            assert short.process.returncode == 7
            await wait_until(lambda: not tolerant.alive, within=30)
            assert tolerant.process.returncode == 7
            log_text = failing_for_a_while.read_text()
            assert (
                log_text.startswith("hello from ")
                and log_text.endswith("goodbye\n")
                and log_text.count("\n") == 2
            )
        finally:
            await processes.close()

    asyncio.run(body())
    assert caplog.text.count("cannot be copied") == 2, "there should be one message for each log"


def folder_of(pid: int) -> Path:
    """The folder of the process's supervisor, which holds the ready file."""
    command_line = psutil.Process(pid).cmdline()
    return Path(command_line[command_line.index("--ready-file") + 1]).parent


def test_the_next_supervisor_removes_the_folder_that_a_killed_one_left(cluster: Any, tmp_path: Path) -> None:
    cluster.add_node(num_cpus=2, object_store_memory=STORE)

    async def body() -> None:
        processes = await open_on(cluster, tmp_path, layout("crew-0", "crew-1"))
        try:
            first = await processes.start("crew-0", "node_child", [])
            other = await processes.start("crew-1", "node_child", [])
            left_behind, kept = folder_of(first.process.pid), folder_of(other.process.pid)
            supervisor = psutil.Process(first.process.pid).parent()
            os.kill(supervisor.pid, 9)
            await wait_until(lambda: not first.alive)
            assert wait_until_gone(first.process.pid) and left_behind.is_dir()
            await processes.stop("crew-0")
            again = await processes.start("crew-0", "node_child", [])
            new = folder_of(again.process.pid)
            assert not left_behind.exists() and new.is_dir() and kept.is_dir() and other.alive
        finally:
            await processes.close()
        assert not new.exists() and not kept.exists()

    asyncio.run(body())


def test_the_folder_that_a_killed_supervisor_left_is_removed_at_the_end_of_the_run(
    cluster: Any, tmp_path: Path
) -> None:
    cluster.add_node(num_cpus=1, object_store_memory=STORE)

    async def body() -> None:
        processes = await open_on(cluster, tmp_path, layout("crew-0"))
        try:
            child = await processes.start("crew-0", "node_child", [])
            left_behind = folder_of(child.process.pid)
            os.kill(psutil.Process(child.process.pid).parent().pid, 9)
            await wait_until(lambda: not child.alive)
            assert left_behind.is_dir()
        finally:
            await processes.close()
        assert not left_behind.exists()

    asyncio.run(body())
