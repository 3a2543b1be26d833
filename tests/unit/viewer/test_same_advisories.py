"""`train`, `doctor RUN`, report.html and the page show the same advisories for a run."""

import json
import re
import time
from pathlib import Path

import pytest
from recorded_run import recorded_run

from understudy.cli.main import main
from understudy.cli.outcome import finish
from understudy.observability.metrics import read_metrics
from understudy.run.outcome import RunOutcome
from understudy.viewer.frozen import write_report
from understudy.viewer.run_view import RunView


def test_the_page_the_report_doctor_and_train_give_the_same_advisories(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded_run(tmp_path / "run")
    cut = {"response_length/clip_ratio": 0.5, "perf/teacher/add/0/restarts": 1.0, "critic/score/mean": 0.0}
    lines = [line | cut for line in read_metrics(run.metrics)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ended = {"status": "ended", "written": time.time(), "seconds_without_progress": 0.0, "waiting": [], "facts": {}}  # fmt: skip
    run.waits.write_text(json.dumps(ended))
    view = RunView(run)
    while view.look():
        pass
    page = view.advisories()
    assert [one["name"] for one in page] == ["truncation", "reward_is_constant", "restarting_replica"]
    text = write_report(run).read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="frozen">(.*?)</script>', text, re.S)
    assert found is not None and json.loads(found[1])["advisories"] == json.loads(json.dumps(page))
    sentences = [f"{one['sentence']} ({one['evidence']}). {one['turn']}" for one in page]
    assert main(["doctor", str(run.path)]) == 0
    doctor = capsys.readouterr().out
    finish(RunOutcome(run.path, 12, lines))
    trained = capsys.readouterr().out
    for sentence in sentences:
        assert sentence in doctor and sentence in trained, sentence
