"""Plants bugs in a copy of the package, to test that a search for bugs finds them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import understudy

PACKAGE = Path(understudy.__file__).parent


@dataclass(frozen=True)
class Bug:
    finder: str
    """A mode of the nemesis, or a part of the simulation."""
    edits: Sequence[tuple[str, str, str]]
    """File of the package, the text to replace, its replacement. If the code no longer has the text,
    `test_every_bug_can_be_planted` fails, and the bug has to be rewritten."""
    only: str = ""
    """Kinds of faults that are drawn (`campaign.py --only`); empty: all."""


def single_edit(finder: str, file: str, old: str, new: str, only: str = "") -> Bug:
    return Bug(finder, ((file, old, new),), only)


def planted_files(bug: Bug) -> dict[str, str]:
    """The content of the package's files that the bug changes."""
    files: dict[str, str] = {}
    for file, old, new in bug.edits:
        text = files.get(file) or (PACKAGE / file).read_text()
        assert text.count(old) == 1, f"{file} no longer holds, once, what the bug replaces: {old}"
        files[file] = text.replace(old, new)
    return files


def copy_with(bug: Bug, folder: Path) -> dict[str, str]:
    """The environment in which the package has the bug."""
    package = folder / "src" / "understudy"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for file, text in planted_files(bug).items():
        (package / file).write_text(text)
    return {**os.environ, "PYTHONPATH": str(folder / "src")}


def seeds_until_found(command: Sequence[str], bug: Bug, folder: Path) -> int:
    """Runs the search; returns how many seeds it took. Fails if it finds nothing."""
    done = subprocess.run(
        [sys.executable, *command], env=copy_with(bug, folder), capture_output=True, text=True
    )
    print(done.stdout[-3000:])
    assert done.returncode == 1 and "violation:" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]
    assert "ImportError" not in done.stdout and "SyntaxError" not in done.stdout
    found = re.findall(r"(\d+) (?:seeds|schedules),", done.stdout)
    return int(found[-1])
