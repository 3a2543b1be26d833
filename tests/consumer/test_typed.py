"""A project that uses the installed package is checked by mypy and pyright with the package's own types (`py.typed`).

`make test-typed` installs the wheel, mypy and pyright into an environment of their own and names it in UNDERSTUDY_TYPED_PYTHON.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.typed
HERE = Path(__file__).parent
CHECKERS = {
    "mypy": ["-m", "mypy", "--strict", "--cache-dir", "cache"],
    "pyright": ["-m", "pyright", "--pythonpath"],
}


def run_checker(checker: str, name: str, folder: Path) -> tuple[int, str]:
    """Exit code and output of the checker for one file, copied to a folder without the package's sources."""
    python = os.environ["UNDERSTUDY_TYPED_PYTHON"]
    shutil.copy(HERE / name, folder / name)
    arguments = [*CHECKERS[checker], *([python] if checker == "pyright" else []), name]
    done = subprocess.run(
        [python, *arguments], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_project_that_uses_the_package_correctly_passes_type_checks(checker: str, tmp_path: Path) -> None:
    code, output = run_checker(checker, "consumer.py", tmp_path)
    assert code == 0, output


@pytest.mark.parametrize("checker", CHECKERS)
def test_type_checkers_report_each_wrong_use_of_the_package(checker: str, tmp_path: Path) -> None:
    """Without `py.typed` every name would be Any, and no error would be reported."""
    code, output = run_checker(checker, "wrong.py", tmp_path)
    lines = {int(number) for number in re.findall(r"wrong\.py:(\d+)", output)}
    wanted = [
        i for i, line in enumerate((HERE / "wrong.py").read_text().splitlines(), 1) if "understudy." in line
    ]
    assert code == 1 and lines == set(wanted), output
