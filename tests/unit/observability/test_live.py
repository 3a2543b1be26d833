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


def test_plain_lines_where_there_is_no_terminal() -> None:
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


def test_rewards_beyond_1_are_no_share() -> None:
    out = io.StringIO()
    with LiveView(3, console=Console(file=out, width=120)) as view:
        view.step({"step": 3, "val/accuracy": 8.0})
    assert "held-out reward 8" in out.getvalue() and "%" not in out.getvalue()


def test_a_message_stays_on_one_line_where_there_is_no_terminal() -> None:
    """Lines of a log file are searched by line."""
    out = io.StringIO()
    with LiveView(3, console=Console(file=out, width=40)) as view:
        view.phase("loading the student " + "long/" * 12)
        view.step(LINE)
        view.note("teachers.math ends its turns with another token than the student")
    assert len(out.getvalue().splitlines()) == 3


def test_the_terminal_shows_every_figure_and_each_replicas_share() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True)
    view = LiveView(3, console=console)
    view.step({**LINE, "perf/teacher/add/0/share": 0.25, "perf/teacher/add/1/share": 0.75})
    console.print(view._render())
    text = out.getvalue()
    for expected in ("1,234", "queue", "add/0", "25%", "add/1", "75%", "90.0%"):
        assert expected in text


def test_work_that_takes_a_while_has_a_bar() -> None:
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


def test_work_is_a_line_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.observability.live._PLAIN_SECONDS", 0.0)
    out = io.StringIO()
    with LiveView(3, console=Console(file=out)) as view, view.work("evaluating", total=4) as advance:
        advance(1)
    assert out.getvalue().splitlines() == ["evaluating", "evaluating: 1/4"]


def test_silence() -> None:
    out = io.StringIO()
    with LiveView(3, enabled=False, console=Console(file=out)) as view:
        view.phase("starting")
        view.step(LINE)
        view.note("hello")
        with view.work("loading"):
            pass
    assert out.getvalue() == ""
