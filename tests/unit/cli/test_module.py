"""`python -m understudy` is the command."""

import subprocess
import sys


def test_the_package_can_be_run_as_a_module() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "understudy", "--version"], capture_output=True, text=True, check=True
    )
    assert found.stdout.startswith("understudy ")
