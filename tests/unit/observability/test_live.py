import io

import pytest
from rich.console import Console

from understudy.observability.live import LiveView

LINE = {
    "step": 3,
    "actor/loss": 0.5,
    "actor/distillation/loss": 0.4,
    "val/accuracy": 0.9,
    "perf/tokens_per_second": 1234.0,
    "perf/queue_depth": 7.0,
}


def test_the_live_view_prints_plain_lines_without_a_terminal() -> None:
    out = io.StringIO()
    with LiveView(3, console=Console(file=out, width=120)) as view:
        view.phase("starting")
        view.step({"step": 0, "val/accuracy": 0.1})
        view.step(LINE)
        view.note("a replica came back")
    text = out.getvalue()
    assert (
        "starting" in text
        and "step 3/3" in text
        and "KL 0.4000" in text
        and "90.0%" in text
        and "a replica came back" in text
    )


def test_an_accuracy_above_1_is_shown_as_a_reward_instead_of_a_percentage() -> None:
    out = io.StringIO()
    with LiveView(3, console=Console(file=out, width=120)) as view:
        view.step({"step": 3, "val/accuracy": 8.0})
    assert "held-out reward 8" in out.getvalue() and "%" not in out.getvalue()


def test_each_message_is_one_line_without_a_terminal() -> None:
    """Log files are searched line by line, so a long message must not wrap."""
    out = io.StringIO()
    with LiveView(3, console=Console(file=out, width=40)) as view:
        view.phase("loading the student " + "long/" * 12)
        view.step(LINE)
        view.note("teachers.math ends its turns with another token than the student")
    assert len(out.getvalue().splitlines()) == 3


def test_the_terminal_view_shows_every_metric_and_the_share_of_each_replica() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True)
    view = LiveView(3, console=console)
    view.step({**LINE, "perf/teacher/add/0/share": 0.25, "perf/teacher/add/1/share": 0.75})
    console.print(view._render())
    text = out.getvalue()
    for expected in ("1,234", "queue", "add/0", "25%", "add/1", "75%", "90.0%"):
        assert expected in text


def test_work_has_a_progress_bar_in_a_terminal_until_it_ends() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True)
    view = LiveView(0, console=console)
    with view.work("evaluating", total=4) as advance:
        advance(3)
        console.print(view._render())
    assert "evaluating" in out.getvalue() and "━" in out.getvalue() and "step" not in out.getvalue()
    before = len(out.getvalue())
    console.print(view._render())
    assert "evaluating" not in out.getvalue()[before:]


def test_work_prints_progress_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.observability.live._PLAIN_SECONDS", 0.0)
    out = io.StringIO()
    with LiveView(3, console=Console(file=out)) as view, view.work("evaluating", total=4) as advance:
        advance(1)
    assert out.getvalue().splitlines() == ["evaluating", "evaluating: 1/4"]


def test_a_disabled_live_view_prints_nothing() -> None:
    out = io.StringIO()
    with LiveView(3, enabled=False, console=Console(file=out)) as view:
        view.phase("starting")
        view.step(LINE)
        view.note("hello")
        with view.work("loading"):
            pass
    assert out.getvalue() == ""
