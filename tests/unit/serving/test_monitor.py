"""The monitor notices a rank that is alive and stalled; a trainer that was itself suspended declares no rank dead."""

import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from understudy.errors import GivenUp, RankLost
from understudy.serving.supervisor import Monitor, newest_mark

RANK = """
import sys, time
from pathlib import Path
from understudy.serving import supervisor
supervisor.BEAT_S = 0.1
supervisor.beat(Path(sys.argv[1]) / "mark")
time.sleep(60)
"""


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[psutil.Process]:
    process = subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path)])
    try:
        while not list(tmp_path.iterdir()):
            assert process.poll() is None
            time.sleep(0.02)
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def monitor_of(folder: Path, silence_s: float) -> Monitor:
    made = Monitor(RankLost, beat_s=0.1, silence_s=silence_s)
    child: Any = SimpleNamespace(alive=True, log=folder / "log")
    made.add(1, "rank 1 of 2", child, partial(newest_mark, folder / "mark"))
    return made


def looked_at(watching: Monitor, seconds: float) -> bool:
    """Whether the rank was found silent within this time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if watching.lost() is not None:
            return True
        time.sleep(0.05)
    return False


def test_a_stopped_process_is_silent_and_a_living_one_is_not(tmp_path: Path, rank: psutil.Process) -> None:
    watching = monitor_of(tmp_path, silence_s=3.0)
    assert not looked_at(watching, 4.0)
    rank.suspend()
    assert looked_at(watching, 30.0)
    assert "rank 1 of 2 lives and has done nothing for 3 s" in str(watching.lost())


def test_time_in_which_the_trainer_did_not_look_does_not_count(tmp_path: Path, rank: psutil.Process) -> None:
    watching = monitor_of(tmp_path, silence_s=2.0)
    assert watching.lost() is None
    rank.suspend()
    time.sleep(3.0)
    assert watching.lost() is None, "the trainer may have been stopped together with it"
    rank.resume()
    assert not looked_at(watching, 1.0)


def test_one_that_has_not_begun_is_not_silent(tmp_path: Path) -> None:
    assert not looked_at(monitor_of(tmp_path, silence_s=0.1), 0.5)


def test_a_request_to_stop_counts_its_timeout_from_then_on(tmp_path: Path, rank: psutil.Process) -> None:
    watching = monitor_of(tmp_path, silence_s=60.0)
    given_up: list[str] = []
    rank.suspend()
    assert not looked_at(watching, 1.0)
    watching.stop_soon(1.0, lambda: given_up.append("now"))
    assert not looked_at(watching, 0.5) and looked_at(watching, 30.0)
    assert isinstance(watching.lost(), GivenUp) and given_up == ["now"]
