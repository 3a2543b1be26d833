"""A teacher over its restart limit: the run ends, and the error shows the last line of the teacher's log."""

import time
from pathlib import Path

import psutil
import pytest
from small_runs import ASSETS, start_cli, write_toml

from understudy.dataplane.ledger import audit


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_teacher_over_its_restart_limit_ends_the_run_and_a_resume_loses_no_row(tmp_path: Path) -> None:
    steps = 60
    table = {
        "student": {"model": str(ASSETS / "models" / "student"), "device": "cpu"},
        "teachers": {"add": {"model": str(ASSETS / "models" / "teacher-add"), "device": "cpu"}},
        "loss": {"topk": 4},
        "rollout": {"max_new_tokens": 4},
        "data": {"train": str(ASSETS / "data" / "train.jsonl")},
        "trainer": {"steps": steps, "batch_size": 8, "checkpoint_every": 5},
        "cluster": {"restarts": {"teacher": 0}},
        "run": {"dir": str(tmp_path / "run"), "threads": 1},
    }
    process = start_cli("train", str(write_toml(tmp_path / "recipe.toml", table)), "--quiet")
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 6:
        assert process.poll() is None and time.monotonic() < deadline, "the run did not take six steps"
        time.sleep(0.01)
    family = psutil.Process(process.pid).children(recursive=True)
    (teacher,) = [one for one in family if "understudy.teacher.replica.server" in one.cmdline()]
    teacher.kill()
    lost = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and time.monotonic() - lost < 30, output[-3000:]
    message = output[output.index("error") :]
    assert "no replica of teacher add is left" in message and "cluster.restarts.teacher" in message
    last_line = (tmp_path / "run" / "logs" / "teacher-add-0.log").read_text().splitlines()[-1]
    assert message.index(last_line) < message.index("given up after 0 restarts"), message
    assert audit(tmp_path / "run" / "dataplane").dead == 0, "the lost teacher made no dead letters"
    again = start_cli("resume", str(tmp_path / "run"), "--quiet")
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 0, output[-3000:]
    report = audit(tmp_path / "run" / "dataplane")
    assert report.balanced and (report.trained, report.dead) == (8 * steps, 0)
