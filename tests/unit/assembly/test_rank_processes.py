"""A follower that cannot start says why in its own words."""

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

from understudy.assembly.ranks import Followers, refusal_file, start_ranks
from understudy.cluster.local import LocalProcesses
from understudy.errors import ChildDied, RankLost
from understudy.observability.live import LiveView
from understudy.observability.rundir import RunDir


async def fail_to_start(folder: Path) -> tuple[str, Followers]:
    processes = LocalProcesses(folder / "logs", start_timeout=60)
    followers = Followers(processes, RunDir(folder), size=2)
    try:
        with pytest.raises(ChildDied) as caught:
            await followers.start(1)
        return str(caught.value), followers
    finally:
        followers.end_at_once()
        await followers.close()
        await processes.close()


@pytest.mark.parametrize("spoiled", ["", pytest.param("{}", marks=pytest.mark.slow)])
def test_its_own_error_comes_first(tmp_path: Path, spoiled: str) -> None:
    if spoiled:
        (tmp_path / "recipe.json").write_text(spoiled)
    said, followers = asyncio.run(fail_to_start(tmp_path))
    expected = "ConfigError: `student.model` is missing" if spoiled else "RunDirectoryError:"
    assert expected in said.splitlines()[0], said
    assert not followers.meeting.exists()


def test_a_rank_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    """Rank 0 joins when the others are about to. Before, its thread stood where they meet until the process ended, and the next group
    of this process never met its ranks: torch counts groups."""
    run = RunDir.create(str(tmp_path / "run"), "run")
    student: Any = SimpleNamespace(device=torch.device("cpu"), model=None)
    recipe: Any = SimpleNamespace(trainer=SimpleNamespace(ranks=2))

    async def start() -> float:
        processes = LocalProcesses(run.logs, start_timeout=60)
        try:
            async with AsyncExitStack() as stack:
                try:
                    view = LiveView(0, enabled=False)
                    settings: Any = None
                    await start_ranks(recipe, run, processes, student, settings, print, stack, view)
                finally:
                    failed = time.monotonic()
        except ExceptionGroup as error:
            assert error.subgroup(ChildDied) and "recipe.json" in str(error.exceptions[0])
            return time.monotonic() - failed
        finally:
            await processes.close()
        raise AssertionError("a rank without a recipe started")

    assert asyncio.run(start()) < 5
    stuck = [thread for thread in threading.enumerate() if thread.name == "rank"]
    for thread in stuck:
        thread.join(5)
    assert not any(thread.is_alive() for thread in stuck)


def test_a_refusal_is_found_by_command_and_rank(tmp_path: Path) -> None:
    processes = LocalProcesses(tmp_path)
    followers = Followers(processes, RunDir(tmp_path), size=3)
    followers._children = {1: None, 2: None}  # type: ignore[dict-item]
    refusal_file(followers.meeting, 7, 2).write_text("too long")
    assert followers.refused(7) == {2: "too long"} and followers.refused(6) == {}


READY = """
import pathlib, sys, time
pathlib.Path(sys.argv[sys.argv.index("--ready-file") + 1]).write_text("{}")
time.sleep(60)
"""


async def lose_one(folder: Path) -> tuple[RankLost, Followers]:
    """A rank that is there and is killed, seen by whoever watches the ranks."""
    processes = LocalProcesses(folder / "logs", start_timeout=60)
    followers = Followers(processes, RunDir(folder), size=2)
    child = await processes.start("rank-1", "rank_for_test", [])
    followers._children, followers._said_before = {1: child}, {1: 0}
    try:
        child.process.kill()
        with pytest.raises(RankLost) as caught:
            await asyncio.wait_for(followers.watch(), 20)
        return caught.value, followers
    finally:
        await processes.close()


def test_a_loss_is_known_after_the_others_went_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that has part in a lost rank asks for it again and again, on a thread of its own: it must hear of it even when
    the loss has ended the run already, or a minute goes by until it gives up."""
    (tmp_path / "rank_for_test.py").write_text(READY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    seen, followers = asyncio.run(lose_one(tmp_path))
    followers.send_home()
    assert followers.lost() is seen and "rank 1 of 2 was killed by SIGKILL" in str(seen)


def test_nobody_waits_for_ranks_that_were_ended(tmp_path: Path) -> None:
    followers = Followers(LocalProcesses(tmp_path), RunDir(tmp_path), size=2)
    followers.send_home()
    assert followers.lost() is None
    followers.end_at_once()
    assert "ended with the run" in str(followers.lost())
