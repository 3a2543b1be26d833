"""What a killed run left in memory is removed by the next one; what a living one has is not."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from understudy.observability.owned_folder import OwnedFolder, remove_abandoned, remove_if_abandoned
from understudy.weights.snapshots import Snapshots

OWNER = """
import sys, time, torch
from pathlib import Path
from understudy.weights.snapshots import Snapshots
snapshots = Snapshots(1, Path(sys.argv[1]))
snapshots.write(7, [("w", torch.zeros(3))])
print(snapshots.folder, flush=True)
time.sleep(600)
"""


def test_a_killed_owners_folder_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert child.stdout is not None
        folder = Path(child.stdout.readline().strip())
        assert (folder / "v7.safetensors").exists()
        remove_if_abandoned(folder)
        remove_abandoned(tmp_path, "understudy-engine-")
        assert (folder / "v7.safetensors").exists(), "its owner lives"
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    strangers = tmp_path / "understudy-engine-of-somebody"
    strangers.mkdir()
    (strangers / "file").touch()
    mine = Snapshots(1, tmp_path)
    assert not folder.exists(), "the next run tidies up"
    assert strangers.exists(), "a folder without a mark is not removed"
    mine.close()
    assert not mine.folder.exists()


def test_nothing_beside_a_folder_of_the_users_own_is_looked_at(tmp_path: Path) -> None:
    left = OwnedFolder("x-", tmp_path)
    os.close(left._file or 0)
    kept = OwnedFolder("x-", tmp_path, tidy=False)
    assert left.path.exists()
    kept.close()
    OwnedFolder("x-", tmp_path).close()
    assert not left.path.exists()


CREATING = """
import os, sys
from pathlib import Path
from understudy.observability import owned_folder
before = sys.argv[2]
def die(*_, **__): os.kill(os.getpid(), 9)
if before == "open":
    os.open = die
elif before == "lock":
    owned_folder.fcntl.flock = die
elif before == "name":
    Path.rename = die
folder = owned_folder.OwnedFolder("x-", Path(sys.argv[1]), tidy=False)
(folder.path / "a").mkdir()
(folder.path / "a" / "file").touch()
owned_folder.shutil.rmtree = die
folder.close()
"""


@pytest.mark.parametrize("before", ["open", "lock", "name", "removal"])
def test_an_owner_killed_while_it_creates_or_removes_its_folder_leaves_one_that_is_removed(
    tmp_path: Path, before: str
) -> None:
    done = subprocess.run([sys.executable, "-c", CREATING, str(tmp_path), before])
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    remove_abandoned(tmp_path, "x-")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_taken_away_while_it_is_created_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, make = [], tempfile.mkdtemp

    def taken(**given: Any) -> str:
        made.append(make(**given))
        if len(made) == 1:
            remove_abandoned(tmp_path, "x-")
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", taken)
    mine = OwnedFolder("x-", tmp_path, tidy=False)
    assert [Path(one).exists() for one in made] == [False, True] and mine.path == Path(made[1])
    mine.close()


def test_an_owner_that_ends_after_the_next_one_began_is_tidied_up_after_by_that_one(tmp_path: Path) -> None:
    """As processes of a killed run do that end a moment after the next launch has started."""
    late = OwnedFolder("x-", tmp_path)
    following = OwnedFolder("x-", tmp_path)
    assert late.path.exists()
    os.close(late._file or 0)  # it is killed
    following.close()
    assert not list(tmp_path.iterdir())
