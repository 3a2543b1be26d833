import io

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


def test_the_terminal_shows_every_figure_and_each_replicas_share() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True)
    view = LiveView(3, console=console)
    view.step({**LINE, "perf/teacher/add/0/share": 0.25, "perf/teacher/add/1/share": 0.75})
    console.print(view._render())
    text = out.getvalue()
    for expected in ("1,234", "queue", "add/0", "25%", "add/1", "75%", "90.0%"):
        assert expected in text


def test_silence() -> None:
    out = io.StringIO()
    with LiveView(3, enabled=False, console=Console(file=out)) as view:
        view.phase("starting")
        view.step(LINE)
        view.note("hello")
    assert out.getvalue() == ""
