"""The report says what the metrics say, and shows rollouts as text, whatever a model wrote."""

import base64
import json
import re
from pathlib import Path

from understudy.observability.metrics import MetricsWriter
from understudy.observability.report import accuracy_table, write_report
from understudy.observability.rundir import RunDir


def small_run(tmp_path: Path) -> RunDir:
    run = RunDir.create(str(tmp_path / "run"), "run")
    writer = MetricsWriter(run.metrics)
    writer.write(0, {"val/accuracy": 0.2, "val/accuracy/add": 0.2, "val/teacher_accuracy/add": 0.8})
    writer.write(1, {"actor/loss": 2.0, "teacher/add/kl": 2.0, "time/step": 0.5})
    writer.write(
        2,
        {
            "actor/loss": 1.0,
            "teacher/add/kl": 1.0,
            "time/step": 0.5,
            "val/accuracy": 0.6,
            "val/accuracy/add": 0.6,
        },
    )
    writer.close()
    lines = [
        {
            "step": step,
            "key": "eval-0",
            "source": "add",
            "prompt": "1+1=",
            "text": text,
            "answer": "2",
            "reward": reward,
        }
        for step, text, reward in ((0, "<script>alert(1)</script>", 0.0), (2, "2", 1.0))
    ]
    run.samples.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_the_table_compares_before_after_and_teacher(tmp_path: Path) -> None:
    from understudy.observability.metrics import read_metrics

    table = accuracy_table(read_metrics(small_run(tmp_path).metrics))
    assert table == [{"source": "add", "before": 0.2, "after": 0.6, "teacher": 0.8, "of_teacher": 0.6 / 0.8}]


def test_a_run_stopped_before_its_second_evaluation_has_no_figure_after_it(tmp_path: Path) -> None:
    start = {"step": 0, "val/accuracy/add": 0.2, "val/teacher_accuracy/add": 0.8}
    assert accuracy_table([start, {"step": 1, "loss": 1.0}]) == [
        {"source": "add", "before": 0.2, "after": None, "teacher": 0.8, "of_teacher": None}
    ]
    only_later = accuracy_table([{"step": 1, "loss": 1.0}, {**start, "step": 5}])
    assert only_later == [{"source": "add", "before": None, "after": 0.2, "teacher": 0.8, "of_teacher": 0.25}]


def test_the_page_escapes_and_the_picture_is_there(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    page = write_report(run, "understudy export RUN out").read_text()
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert "75.0%" in page and "understudy export RUN out" in page and "Content-Security-Policy" in page
    picture = (run.path / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000


def test_the_page_can_be_sent_alone(tmp_path: Path) -> None:
    """Its pictures are in it, and its policy lets it load nothing from anywhere."""
    run = small_run(tmp_path)
    page = write_report(run).read_text()
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert sources and all(source.startswith("data:image/png;base64,") for source in sources)
    inside = base64.b64decode(sources[0].partition(",")[2])
    assert inside == (run.path / "curves.png").read_bytes()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy and policy[1] == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def test_a_note_of_the_recipe_stands_above_the_rollouts(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    run.recipe.write_text(json.dumps({"run": {"note": "Sums are <written> in reverse."}}))
    page = write_report(run).read_text()
    assert "Sums are &lt;written&gt; in reverse." in page.partition("Rollouts before and after")[2]


def test_teachers_that_were_not_measured_have_no_columns(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    run.metrics.write_text(run.metrics.read_text().replace("val/teacher_accuracy/add", "val/other"))
    page = write_report(run).read_text()
    assert "after / teacher" not in page and "trainer.eval_teachers = true" in page
