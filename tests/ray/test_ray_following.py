"""What is known here of a remote process when its log cannot be written, and what a killed supervisor leaves on its machine."""

import asyncio
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_ray_processes import gone, layout, open_on, until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
STORE = 80 * 2**20


def test_an_end_is_seen_although_the_log_cannot_be_written(
    cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add_node(num_cpus=2, object_store_memory=STORE)
    for_a_while, for_ever = tmp_path / "crew-0.log", tmp_path / "crew-1.log"
    for log in (for_a_while, for_ever):
        log.symlink_to("/dev/full")  # every write: no space left on device

    async def body() -> None:
        processes = await open_on(cluster, tmp_path, layout("crew-0", "crew-1"))
        try:
            tolerant = await processes.start("crew-0", "node_child", ["--leave-after", "12"])
            await until(lambda: "process crew-0 says cannot be copied" in caplog.text, within=10)
            assert tolerant.alive and "No space left on device" in caplog.text
            for_a_while.unlink()
            await until(for_a_while.exists, within=10)
            short = await processes.start("crew-1", "node_child", ["--leave-after", "0.5"])
            await until(lambda: not short.alive, within=20)
            assert short.process.returncode == 7
            await until(lambda: not tolerant.alive, within=30)
            assert tolerant.process.returncode == 7
            log_text = for_a_while.read_text()
            assert (
                log_text.startswith("hello from ")
                and log_text.endswith("goodbye\n")
                and log_text.count("\n") == 2
            )
        finally:
            await processes.close()

    asyncio.run(body())
    assert caplog.text.count("cannot be copied") == 2, "once for each log"


def folder_of(pid: int) -> Path:
    """Of its supervisor: there lies its ready file."""
    command_line = psutil.Process(pid).cmdline()
    return Path(command_line[command_line.index("--ready-file") + 1]).parent


def test_what_a_killed_supervisor_left_is_swept_by_the_next(cluster: Any, tmp_path: Path) -> None:
    cluster.add_node(num_cpus=2, object_store_memory=STORE)

    async def body() -> None:
        processes = await open_on(cluster, tmp_path, layout("crew-0", "crew-1"))
        try:
            first = await processes.start("crew-0", "node_child", [])
            other = await processes.start("crew-1", "node_child", [])
            left, kept = folder_of(first.process.pid), folder_of(other.process.pid)
            supervisor = psutil.Process(first.process.pid).parent()
            os.kill(supervisor.pid, 9)
            await until(lambda: not first.alive)
            assert gone(first.process.pid) and left.is_dir()
            await processes.stop("crew-0")
            again = await processes.start("crew-0", "node_child", [])
            new = folder_of(again.process.pid)
            assert not left.exists() and new.is_dir() and kept.is_dir() and other.alive
        finally:
            await processes.close()
        assert not new.exists() and not kept.exists()

    asyncio.run(body())


def test_what_a_killed_supervisor_left_is_swept_at_the_end_of_the_run(cluster: Any, tmp_path: Path) -> None:
    cluster.add_node(num_cpus=1, object_store_memory=STORE)

    async def body() -> None:
        processes = await open_on(cluster, tmp_path, layout("crew-0"))
        try:
            child = await processes.start("crew-0", "node_child", [])
            left = folder_of(child.process.pid)
            os.kill(psutil.Process(child.process.pid).parent().pid, 9)
            await until(lambda: not child.alive)
            assert left.is_dir()
        finally:
            await processes.close()
        assert not left.exists()

    asyncio.run(body())
