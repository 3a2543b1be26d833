"""What a killed run left in memory is removed by the next one; what a living one has is not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

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
