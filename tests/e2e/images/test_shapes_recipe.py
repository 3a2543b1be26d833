"""The shapes recipe, shortened: the student learns to read pictures, a control trained on empty pictures does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_student_with_pictures_learns_and_one_with_empty_pictures_stays_at_chance(tmp_path: Path) -> None:
    make = "--scenes 1500 --tower-steps 120 --teacher-steps 300 --student-steps 60"
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "images" / "looking.py"),
        "--out",
        str(tmp_path / "out"),
    ]
    command += ["--folder", str(tmp_path / "study"), "--make", make]
    (tmp_path / "out").mkdir()
    done = subprocess.run(
        [
            *command,
            "trainer.steps=90",
            "trainer.eval_every=90",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (file,) = (tmp_path / "out").glob("shapes-*.json")
    found = {
        row["name"].removeprefix("seed 0: held-out accuracy "): row for row in json.loads(file.read_text())
    }
    before, after = found["of the student before"]["value"], found["of the student after"]["value"]
    assert before < 0.35 and after > before + 0.15 and found["of the student after"]["peer_value"] > 0.6
    for name in ("of the control, trained on empty pictures", "after, shown empty pictures"):
        assert found[name]["value"] < 0.35, name
    assert found["after, shown the picture of another row"]["value"] < 0.4
