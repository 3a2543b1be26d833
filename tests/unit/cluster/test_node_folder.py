"""A supervisor's folder outlives a SIGKILL; the next supervisor on the machine removes it and no other folder."""

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
def _own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def owner() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_new_supervisor_removes_the_folder_of_a_killed_one_and_keeps_that_of_a_living_one(
    tmp_path: Path,
) -> None:
    living, living_folder = owner()
    killed, abandoned = owner()
    try:
        assert {living_folder.parent, abandoned.parent} == {tmp_path}
        killed.kill()
        killed.wait()
        assert (abandoned / "teacher-0.log").exists(), "SIGKILL leaves the folder"
        own_folder = OwnedFolder(PREFIX, None)
        assert not abandoned.exists()
        assert (living_folder / "teacher-0.log").exists() and own_folder.path.is_dir()
        own_folder.close()
        assert not own_folder.path.exists()
    finally:
        for process in (living, killed):
            process.kill()
            process.communicate()
    remove_abandoned(tmp_path, PREFIX)
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def test_folders_without_an_owner_file_and_symbolic_links_are_not_removed(tmp_path: Path) -> None:
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
