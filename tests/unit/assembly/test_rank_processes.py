"""Rank processes that fail to start, are lost, refuse a command or cannot leave their group."""

import asyncio
import os
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from understudy.assembly import ranks as assembled
from understudy.assembly.ranks import RankProcesses, forget_group, refusal_file, start_ranks
from understudy.cluster.local import LocalProcesses
from understudy.errors import ChildDied, RankLost
from understudy.observability.live import LiveView
from understudy.observability.rundir import RunDir
from understudy.policy.ranks.rank_thread import RankThread
from understudy.policy.ranks.shard import join, leave


async def fail_to_start(folder: Path) -> tuple[str, RankProcesses]:
    processes = LocalProcesses(folder / "logs", start_timeout=60)
    ranks = RankProcesses(processes, RunDir(folder), size=2)
    try:
        with pytest.raises(ChildDied) as caught:
            await ranks.start(1)
        return str(caught.value), ranks
    finally:
        ranks.end_at_once()
        await ranks.close()
        await processes.close()


@pytest.mark.parametrize("bad_recipe", ["", pytest.param("{}", marks=pytest.mark.slow)])
def test_the_error_of_a_rank_that_cannot_start_begins_with_the_ranks_own_message(
    tmp_path: Path, bad_recipe: str
) -> None:
    if bad_recipe:
        (tmp_path / "recipe.json").write_text(bad_recipe)
    message, ranks = asyncio.run(fail_to_start(tmp_path))
    expected = "`student.model` is missing" if bad_recipe else f"{tmp_path} is not a run directory"
    assert message.startswith(expected), message
    assert not ranks.coordination.exists()


def test_rank_0_does_not_wait_in_the_rendezvous_for_a_rank_that_failed_to_start(tmp_path: Path) -> None:
    """Rank 0 joins once the other ranks are about to. Before, its thread stayed in the rendezvous until the process
    ended, and the next group of this process never met its ranks, because torch counts groups."""
    run = RunDir.create(str(tmp_path / "run"), "run")
    student: Any = SimpleNamespace(device=torch.device("cpu"), model=None)

    async def start() -> float:
        processes = LocalProcesses(run.logs, start_timeout=60)
        try:
            async with AsyncExitStack() as stack:
                try:
                    view = LiveView(0, enabled=False)
                    settings: Any = None
                    await start_ranks(2, run, processes, student, settings, print, stack, view)
                finally:
                    failed = time.monotonic()
        except ExceptionGroup as error:
            assert error.subgroup(ChildDied) and "recipe.json" in str(error.exceptions[0])
            return time.monotonic() - failed
        finally:
            await processes.close()
        raise AssertionError("a rank without a recipe started")

    assert asyncio.run(start()) < 5
    rank_threads = [thread for thread in threading.enumerate() if thread.name == "rank"]
    for thread in rank_threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in rank_threads)


def test_refused_returns_the_messages_of_the_ranks_that_refused_this_command(tmp_path: Path) -> None:
    processes = LocalProcesses(tmp_path)
    ranks = RankProcesses(processes, RunDir(tmp_path), size=3)
    ranks._children = {1: None, 2: None}  # type: ignore[dict-item]
    refusal_file(ranks.coordination, 7, 2).write_text("too long")
    assert ranks.refused(7) == {2: "too long"} and ranks.refused(6) == {}


READY = """
import pathlib, sys, time
pathlib.Path(sys.argv[sys.argv.index("--ready-file") + 1]).write_text("{}")
time.sleep(60)
"""


async def kill_one_rank(folder: Path) -> tuple[RankLost, RankProcesses]:
    """Kills a ready rank and returns the error that the monitor raises."""
    processes = LocalProcesses(folder / "logs", start_timeout=60)
    ranks = RankProcesses(processes, RunDir(folder), size=2)
    child = await processes.start("rank-1", "rank_for_test", [])
    ranks.add(1, "rank 1 of 2", child, lambda: None)
    try:
        child.process.kill()
        with pytest.raises(RankLost) as caught:
            await asyncio.wait_for(ranks.watch(), 20)
        return caught.value, ranks
    finally:
        await processes.close()


def test_a_lost_rank_is_still_reported_after_the_other_ranks_were_expected_to_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that waits for a lost rank polls for the loss on its own thread. It must see the loss even when the run
    has already ended because of it; otherwise it gives up only after a minute."""
    (tmp_path / "rank_for_test.py").write_text(READY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    loss, ranks = asyncio.run(kill_one_rank(tmp_path))
    ranks.expect_exit()
    assert ranks.lost() is loss and "rank 1 of 2 was killed by SIGKILL" in str(loss)


def test_ranks_that_ended_with_the_run_count_as_lost(tmp_path: Path) -> None:
    ranks = RankProcesses(LocalProcesses(tmp_path), RunDir(tmp_path), size=2)
    ranks.expect_exit()
    assert ranks.lost() is None
    ranks.end_at_once()
    assert "ended with the run" in str(ranks.lost())


def test_a_process_group_that_raises_on_leave_is_abandoned_and_the_next_group_can_be_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NCCL raises the loss of a rank again when its group is left. Before, the trainer then ended instead of restarting
    the ranks."""

    def lost_again() -> None:
        raise torch.distributed.DistBackendError("NCCL error: remote process exited")

    monkeypatch.setattr(assembled, "leave", lost_again)
    join(0, 1, f"file://{tmp_path / 'first'}")
    assert asyncio.run(forget_group())
    assert "remote process exited" in caplog.text
    group = join(0, 1, f"file://{tmp_path / 'second'}")
    try:
        assert group.size == 1 and group.gathered(b"ranks") == [b"ranks"]
    finally:
        leave()


def test_ranks_that_cannot_leave_their_group_abandon_it_before_the_engine_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the trainer hung on a GPU: a collective that the lost rank had not joined blocked the stream. The engine
    waits for that stream when it closes, and the group was abandoned only afterwards."""

    def lost_again() -> None:
        raise torch.distributed.DistBackendError("NCCL error: remote process exited")

    monkeypatch.setattr(assembled, "leave", lost_again)
    thread = RankThread()
    thread.submit(lambda: join(0, 1, f"file://{tmp_path / 'rendezvous'}")).result(60)
    asyncio.run(assembled._leave(thread))
    thread.close()
    assert not torch.distributed.is_initialized()
