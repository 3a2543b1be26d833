"""Takes a protection out of a copy of the package and runs a test, which must then fail.

A mutation names the text it replaces; when the code moves on, the mutation fails loudly and is rewritten with it.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import understudy

TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutation:
    file: str
    """In the package."""
    old: str
    new: str
    test: str
    """A file or a test of it, in the folder of tests."""
    also: tuple[str, str, str] | None = None
    """A second (file, old, new), if two protections cover the same fault."""


def assert_test_fails(name: str, mutation: Mutation, folder: Path) -> None:
    package = folder / "src" / "understudy"
    shutil.copytree(Path(understudy.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    edits = [(mutation.file, mutation.old, mutation.new), *([mutation.also] if mutation.also else [])]
    for file, old, new in edits:
        source = package / file
        text = source.read_text()
        assert text.count(old) == 1, f"{file} no longer holds what '{name}' replaces"
        source.write_text(text.replace(old, new))
    env = {**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    # Without the project's own options, which leave fault tests out.
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-m", "not slow", "-x", "-q"]
    command += ["-p", "no:cacheprovider", "--timeout", "150"]
    done = subprocess.run(
        [*command, str(TESTS / mutation.test)],
        env=env,
        capture_output=True,
        text=True,
        cwd=TESTS.parent,
        timeout=500,
    )
    assert done.returncode == 1, f"'{name}' was not noticed:\n{done.stdout[-3000:]}{done.stderr[-1000:]}"
    assert "ImportError" not in done.stdout and "SyntaxError" not in done.stdout
