"""`RunView` reads finished, killed, resumed and damaged run directories for the page, and never writes to them."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from recorded_run import HOSTILE, journalled, recorded_run, write_waits

from understudy.cli.main import main
from understudy.observability.live import LiveView
from understudy.observability.rundir import RunDir
from understudy.observability.spans import Spans
from understudy.trainers.checkpoints import forget_after
from understudy.viewer.recipe_diff import differences
from understudy.viewer.run_view import NotFound, RunView


def opened(run: RunDir) -> RunView:
    view = RunView(run)
    while view.look():
        pass
    return view


def rows(view: RunView, **changes: Any) -> dict[str, Any]:
    asked = {
        "labels": {},
        "ranges": {},
        "text": "",
        "sort": "step",
        "descending": True,
        "offset": 0,
        "limit": 50,
    }
    return view.rows(**{**asked, **changes})


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    return opened(recorded_run(tmp_path_factory.mktemp("view") / "run"))


def test_the_view_has_curves_by_name_and_the_held_out_table(view: RunView) -> None:
    assert "odd/metric" in view.metric_names()
    assert view.curves(["actor/loss", "none"], 100) == {
        "actor/loss": [list(range(1, 13)), [2.0 / s for s in range(1, 13)]]
    }
    (line,) = view.held_out()["table"]
    assert (line["before"], line["after"], line["teacher"]) == (0.1, 0.8, 0.9)


def test_a_downsampled_curve_keeps_its_extremes(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run")
    values = [1.0] * 5000
    values[1234], values[4321] = 99.0, -99.0
    run.metrics.write_text("".join(json.dumps({"step": i, "x": v}) + "\n" for i, v in enumerate(values)))
    steps, found = opened(run).curves(["x"], 200)["x"]
    assert len(steps) <= 210 and max(found) == 99.0 and min(found) == -99.0 and 1234 in steps


def test_rows_can_be_sorted_filtered_and_searched(view: RunView) -> None:
    everything = rows(view)
    assert everything["total"] == 6 * 3 + 4 + 2
    assert everything["choices"]["kind"] == ["dump", "held-out", "kept"]
    by_kl = [row["kl"] for row in rows(view, labels={"kind": "kept"}, sort="kl")["rows"]]
    assert by_kl == [1.5, 1.5, 0.5, 0.5]
    assert {row["step"] for row in rows(view, ranges={"step": (3, 5)})["rows"]} == {4}
    (found,) = rows(view, text="NEEDLE8")["rows"]
    assert found["step"] == 8
    assert rows(view, text="prompt 2")["total"] == 6
    assert rows(view, text="مرحبا")["total"] == 6 + 2 + 1
    assert rows(view, text="stop_reason")["total"] == 0  # names of fields are not searched
    assert rows(view, limit=3, offset=23)["rows"][0]["id"]


def test_a_kept_row_has_the_teachers_candidates_and_the_gap_of_each_token(view: RunView) -> None:
    (group,) = [group for group in view.worst(12) if group["id"] == 9]
    worst = group["tokens"][0]
    row = view.row(worst["row"])
    assert row["measures"]["gap"][worst["place"]] == pytest.approx(7.5, abs=1e-3)
    assert "".join(row["pieces"]) == view.text().text(row["tokens"]) and row["has_tokenizer"]
    assert row["written"] == [-1] * 5 + list(range(7)) and row["prompt"] == HOSTILE
    (candidates,) = view.candidates(worst["row"], worst["place"], worst["place"] + 1)
    assert [one["id"] for one in candidates["teacher"]] == [9, 10, 11, 12]
    assert candidates["teacher"][0]["p"] == pytest.approx(0.6) and candidates["tail"] == pytest.approx(
        0.05, abs=1e-6
    )


def test_a_dumped_row_has_text_and_no_tokens(view: RunView) -> None:
    (row,) = rows(view, labels={"kind": "dump"}, text="needle2", limit=1)["rows"][:1]
    found = view.row(row["id"])
    assert "tokens" in found and "pieces" not in found and found["completion"].endswith(HOSTILE)
    assert view.candidates(row["id"], 0, 5) == []


def test_rows_with_the_same_prompt_are_found_in_all_kinds_of_rows(view: RunView) -> None:
    row = view.row(rows(view, labels={"kind": "kept"}, sort="kl")["rows"][0]["id"])
    assert {one["kind"] for one in view.same_prompt(row["prompt_sum"])} == {"kept", "dump"}


def test_the_timeline_has_the_spans_of_a_period_and_of_one_row(view: RunView) -> None:
    whole = view.timeline(0.0, 20.0)
    assert [span["name"] for span in whole["spans"]].count("update") == 12 and whole["end"] == pytest.approx(
        12.9
    )
    assert view.timeline(3.1, 3.2)["spans"][0]["about"] == {"step": 3}
    assert [(one["name"], one["about"]) for one in view.life("p1_0_0")] == [("rollout", {"key": "p1_0_0"})]


def test_the_timeline_of_a_resumed_run_has_two_launches(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run")
    with run.spans.open("a") as out:
        out.write('{"name":"update","start":0.1,"end":0.6,"step":13}\n')
    found = opened(run).timeline(0.0, 99.0)
    assert len(found["launches"]) == 2 and found["end"] == pytest.approx(12.9 + 0.6)


def test_a_killed_run_shows_the_rows_of_its_journal_and_is_not_changed(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run")
    journalled(run)
    before = snapshot(run.path)
    view = opened(run)
    assert (
        view.summary()["status"] == "killed" and "understudy resume" in view.summary()["commands"]["resume"]
    )
    found = rows(view, labels={"kind": "journal"})
    assert found["total"] == 5 and found["rows"][0]["source"] == "sums" and found["rows"][0]["newest"] == 3
    row = view.row(found["rows"][0]["id"])
    assert row["measures"]["gap"][1] == pytest.approx(7.5, abs=1e-3)
    assert len(view.candidates(row["id"], 0, 3)) == 3 and view.worst(13)
    assert snapshot(run.path) == before


def test_new_metrics_and_rows_of_a_growing_run_are_read(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run")
    view = opened(run)
    with run.metrics.open("a") as out:
        out.write('{"step": 13, "actor/loss": 0.5}\n{"step": 14, "actor/lo')
    (run.rollouts / "000013.jsonl").write_text(
        '{"key": "new_0_0", "prompt": "p", "completion": "c", "kl": 9.0}\n'
    )
    (run.rollouts / "000002.jsonl").unlink()
    view.look()
    assert view.summary()["steps"] == 13 and rows(view, sort="kl")["rows"][0]["key"] == "new_0_0"
    assert rows(view)["total"] == 24 + 1 - 3


def test_a_metrics_file_cut_by_a_resume_is_read_again(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run")
    view = opened(run)
    lines = run.metrics.read_text().splitlines()[:6]
    fresh = tmp_path / "fresh"
    fresh.write_text("\n".join(lines) + "\n")
    os.replace(fresh, run.metrics)
    view.look()
    assert view.summary()["steps"] == 5 and len(view.curves(["actor/loss"], 100)["actor/loss"][0]) == 5


def test_the_view_is_reset_when_a_run_begins_again_at_step_0(tmp_path: Path) -> None:
    """The run was killed before its first checkpoint. The resume empties the files and loads models before it writes again."""
    run = recorded_run(tmp_path / "run")
    view = opened(run)
    assert view.held_out()["answers"]
    forget_after(run, None)
    view.look()
    assert view.summary()["steps"] == 0 and not view.curves(["actor/loss"], 100)
    with run.metrics.open("a") as out:
        out.write('{"step": 1, "actor/loss": 9.0}\n')
    view.look()
    assert view.curves(["actor/loss"], 100) == {"actor/loss": [[1], [9.0]]}
    assert view.held_out() == {"table": [], "answers": []}


def test_the_view_offers_only_commands_that_would_work(tmp_path: Path) -> None:
    """A run without held-out problems has no best checkpoint and cannot be evaluated."""
    run = recorded_run(tmp_path / "run")
    assert opened(run).summary()["commands"] == {}
    (run.checkpoints / "step-000012").mkdir()
    offered = opened(run).summary()["commands"]
    assert offered == {"export": f"understudy export {run.path} my-student"}
    run.recipe.write_text(json.dumps({"data": {"eval": ["e.jsonl"], "reward": "m:f"}}))
    (run.checkpoints / "best").write_text("step-000012\n")
    offered = opened(run).summary()["commands"]
    assert offered["evaluate"] == f"understudy eval {run.path} --best"
    assert offered["export"] == f"understudy export {run.path} my-student --best"


def test_a_run_directory_with_only_a_recipe_can_be_viewed(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text("{}")
    view = opened(RunDir.open(tmp_path))
    assert rows(view)["total"] == 0 and view.advisories() == [] and view.timeline(None, None)["spans"] == []
    with pytest.raises(NotFound):
        view.row("kept:1:0")


def test_differences_lists_the_recipe_keys_with_unequal_values() -> None:
    recipes = [
        {"a": {"b": 1, "c": 2}, "run": {"dir": "x"}},
        {"a": {"b": 1, "c": 3, "d": None}, "run": {"dir": "y"}},
    ]
    assert differences(recipes) == [{"key": "a.c", "values": [2, 3]}]


def test_the_timeline_groups_scores_by_replica_and_has_notes_as_events(tmp_path: Path) -> None:
    """The spans are written by the trainer's own classes, in two launches."""
    run = recorded_run(tmp_path / "run")
    run.spans.unlink()
    for launch in (1, 2):
        spans, live = Spans(run.spans), LiveView(1, enabled=False)
        live.on_note = spans.event
        for replica in ("0", "1"):
            with spans.span("score", key=f"p{launch}_0_0", teacher="add") as about:
                about["replica"] = replica
        time.sleep(0.01)
        live.note(f"teacher add: replica 1 was restarted, launch {launch}")
        spans.close()
    found = opened(run).timeline(0.0, None)
    assert list(found["counts"]) == ["score add/0", "score add/1"] and len(found["launches"]) == 2
    events = [one["about"]["text"] for one in found["spans"] if one["name"] == "event"]
    assert [text[-8:] for text in events] == ["launch 1", "launch 2"]
    starts = [one["start"] for one in found["spans"]]
    assert starts == sorted(starts) and max(starts) >= found["launches"][1] > 0
    assert [one["name"] for one in opened(run).life("p2_0_0")] == ["score add/0", "score add/1"]


def test_a_lane_counts_spans_that_run_at_the_same_time(tmp_path: Path) -> None:
    """A part of the timeline may hold several steps; their rollouts do not add up."""
    run = recorded_run(tmp_path / "run")
    spans: list[dict[str, Any]] = [
        {"name": "rollout", "start": s / 10, "end": s / 10 + 0.09} for s in range(200) for _ in range(3)
    ]
    spans += [{"name": "reward", "start": 5.0, "end": 5.0}, {"name": "reward", "start": 1.0, "end": 19.0}]
    spans.sort(key=lambda span: span["end"])
    run.spans.write_text("".join(json.dumps(span) + "\n" for span in spans))
    view = opened(run)
    for first, last in ((0.0, 20.0), (4.0, 6.0)):
        counts = view.timeline(first, last)["counts"]
        assert max(counts["rollout"]) == 3 and max(counts["reward"]) == 2
    assert min(view.timeline(2.0, 4.0)["counts"]["reward"]) == 1


def test_rows_of_a_step_begin_with_those_that_have_token_scores(view: RunView) -> None:
    last = rows(view, ranges={"step": (12, 12)})["rows"]
    assert [row["kind"] for row in last] == ["kept", "kept", "dump", "dump", "dump", "held-out"]


def test_a_run_of_another_machine_counts_as_running_while_it_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a shared disk, its process id may be the id of a process of this machine."""
    run = recorded_run(tmp_path / "run")
    run.state.write_text(json.dumps({"status": "running", "pid": os.getpid(), "host": "another-machine"}))
    assert opened(run).status() == "killed"
    run.waits.write_text(json.dumps({"status": "running", "written": time.time(), "chains": []}))
    assert opened(run).status() == "running"
    write_waits(run)
    assert main(["doctor", str(run.path)]) == 0
    output = capsys.readouterr().out
    # The entry says 1 s; a slow machine may take seconds until it reads it.
    assert re.search(
        rf"running as process {os.getpid()} on another-machine; last progress [1-9]\d* s ago", output
    )
    write_waits(run, seconds_ago=60)
    assert main(["doctor", str(run.path)]) == 0
    assert "its process is gone" in capsys.readouterr().out


def test_a_run_that_was_killed_on_this_machine_is_reported_as_ended_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its last report may be only a second old, and is shown as a past one."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    run = recorded_run(tmp_path / "run")
    run.state.write_text(
        json.dumps({"status": "running", "pid": gone.pid, "host": socket.gethostname(), "detail": ""})
    )
    entry = {
        "status": "running",
        "written": time.time(),
        "seconds_without_progress": 1.0,
        "waiting": [],
        "chains": [],
        "facts": {"teacher add": "1 replica healthy"},
    }
    run.waits.write_text(json.dumps(entry))
    assert opened(run).status() == "killed"
    assert main(["doctor", str(run.path)]) == 0
    output = capsys.readouterr().out
    assert "ended (its process is gone" in output and "running as" not in output
    assert output.index("its last report, of ") < output.index("1 replica healthy")


def test_doctor_reports_the_state_of_a_run_that_has_not_begun_to_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    run = RunDir.create(str(tmp_path / "run"), "run")
    run.recipe.write_text("{}")
    for state, message in (
        (None, "unknown; it has not begun to train"),
        (
            {"status": "running", "pid": gone.pid},
            "its process is gone; continue with `understudy resume`; it has not",
        ),
        ({"status": "running", "pid": os.getpid()}, "running; it has not begun to train"),
        ({"status": "running", "pid": gone.pid, "host": "another"}, "running; it has not begun to train"),
        ({"status": "failed", "pid": gone.pid, "detail": "why"}, "failed; it has not begun to train: why"),
    ):
        if state is not None:
            run.state.write_text(json.dumps(state))
        assert main(["doctor", str(run.path)]) == 0
        assert message in capsys.readouterr().out
    run.state.write_text("{")
    assert main(["doctor", str(run.path)]) == 2
    assert "state.json is damaged" in capsys.readouterr().err


def test_a_single_look_with_large_limits_reads_everything(tmp_path: Path) -> None:
    """The report of a long run does this, because each look goes through all files of rows."""
    run = recorded_run(tmp_path / "run")
    for step in range(100, 120):
        (run.path / "kept_rows" / f"{step:06d}.jsonl").write_text(
            json.dumps({"key": f"k{step}", "prompt": "p", "response": "r"}) + "\n"
        )
    view = RunView(run)
    assert view.look()
    view = RunView(run)
    assert not view.look(1 << 62, 1 << 62)
    assert view.summary()["rows"] == opened(run).summary()["rows"] >= 20
