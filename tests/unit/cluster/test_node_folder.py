"""A supervisor's folder outlives a kill -9; the next supervisor on the machine removes it, and only such."""

import subprocess
import sys
from pathlib import Path

import pytest

from understudy.observability.owned_folder import OwnedFolder, remove_abandoned

PREFIX = "understudy-node-"

OWNER = """
import sys
from understudy.observability.owned_folder import OwnedFolder
folder = OwnedFolder("understudy-node-", None)
(folder.path / "teacher-0.log").write_text("hello")
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _a_machine_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def owner() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_supervisor_left_is_removed_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    lives, its_folder = owner()
    killed, left = owner()
    try:
        assert {its_folder.parent, left.parent} == {tmp_path}
        killed.kill()
        killed.wait()
        assert (left / "teacher-0.log").exists(), "kill -9 leaves it"
        mine = OwnedFolder(PREFIX, None)
        assert not left.exists()
        assert (its_folder / "teacher-0.log").exists() and mine.path.is_dir()
        mine.close()
        assert not mine.path.exists()
    finally:
        for process in (lives, killed):
            process.kill()
            process.communicate()
    remove_abandoned(tmp_path, PREFIX)
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def test_what_has_no_mark_and_what_only_points_somewhere_is_left_alone(tmp_path: Path) -> None:
    unmarked = tmp_path / f"{PREFIX}unmarked"
    unmarked.mkdir()
    (unmarked / "file").touch()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / ".owner").touch()
    (precious / "file").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(precious)
    marked = tmp_path / f"{PREFIX}marked"
    marked.mkdir()
    (marked / ".owner").symlink_to(precious / ".owner")
    remove_abandoned(tmp_path, PREFIX)
    assert unmarked.exists() and marked.exists()
    assert (precious / ".owner").exists() and (precious / "file").exists()
