"""Folders that a killed run left in memory are removed by the next run; those of a living run are kept."""

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


def test_the_folder_of_a_killed_owner_is_removed_and_that_of_a_living_owner_is_kept(tmp_path: Path) -> None:
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
        assert (folder / "v7.safetensors").exists(), "removed although its owner lives"
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    unmarked = tmp_path / "understudy-engine-of-somebody"
    unmarked.mkdir()
    (unmarked / "file").touch()
    own = Snapshots(1, tmp_path)
    assert not folder.exists(), "not removed by the next run"
    assert unmarked.exists(), "removed although no owner has marked it"
    own.close()
    assert not own.folder.exists()


def test_an_owned_folder_with_tidy_false_leaves_abandoned_folders_beside_it(tmp_path: Path) -> None:
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


def test_a_folder_that_is_removed_while_it_is_created_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    created, mkdtemp = [], tempfile.mkdtemp

    def create_then_remove_the_first(**given: Any) -> str:
        created.append(mkdtemp(**given))
        if len(created) == 1:
            remove_abandoned(tmp_path, "x-")
        return created[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", create_then_remove_the_first)
    own = OwnedFolder("x-", tmp_path, tidy=False)
    assert [Path(one).exists() for one in created] == [False, True] and own.path == Path(created[1])
    own.close()


def test_closing_a_folder_removes_one_whose_owner_died_after_this_one_was_created(tmp_path: Path) -> None:
    """Processes of a killed run can end shortly after the next launch has started."""
    previous = OwnedFolder("x-", tmp_path)
    following = OwnedFolder("x-", tmp_path)
    assert previous.path.exists()
    os.close(previous._file or 0)  # as if its owner were killed
    following.close()
    assert not list(tmp_path.iterdir())
