"""The tests of all Triton kernels, run in Triton's interpreter on the CPU.

Triton decides when a kernel is defined whether it is interpreted, so TRITON_INTERPRET=1 must be set before Triton is
imported. The tests are in the folders of their subjects and are skipped there. They run here in one separate process,
since importing torch and transformers takes longer than most of them.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[1] / "unit"
CASES = [
    "losses/test_losses_triton.py",
    "losses/test_losses_usable.py",
    "losses/test_losses_no_candidates.py",
    "engines/test_decode_windows.py::test_the_decode_loop_past_the_window_equals_transformers_in_triton_s_interpreter",
    "engines/test_divided_rows.py::test_attention_over_divided_rows_equals_plain_attention_in_triton_s_interpreter",
    "engines/test_fused_decode.py::test_the_fused_decode_kernels_equal_transformers_in_triton_s_interpreter",
    "engines/test_slots.py::test_the_attention_and_norm_kernels_equal_plain_torch_in_triton_s_interpreter",
    "teacher/test_teacher_scorer.py::test_the_triton_head_kernels_agree_with_their_plain_versions",
]


@pytest.mark.kernels
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the triton package is not installed")
@pytest.mark.timeout(600)
def test_triton_kernels_pass_their_tests_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    finished = subprocess.run(
        [*command, *(str(UNIT / case) for case in CASES)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-2000:]
    assert re.search(r"^\d+ passed", finished.stdout, re.MULTILINE) and "skipped" not in finished.stdout, (
        finished.stdout[-4000:]
    )
