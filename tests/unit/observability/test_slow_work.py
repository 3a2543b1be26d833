"""Progress of slow work is shown, as a bar in a terminal and as lines elsewhere; quick work shows nothing."""

import io
import time
from importlib import resources
from pathlib import Path

import pytest
from rich.console import Console

from understudy.cli.main import main
from understudy.observability import slow_work as module
from understudy.observability.slow_work import SlowWork

QUICKSTART = Path(str(resources.files("understudy.assets") / "quickstart" / "recipe.toml"))


def shown_after(seconds: float, *, terminal: bool = False, enabled: bool = True) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with SlowWork(enabled=enabled, console=console).work("reading rows", 1000) as advance:
        advance(250)
        time.sleep(seconds)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_progress_is_shown_only_for_slow_work_and_as_a_bar_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert shown_after(0.0) == ""
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.05)
    assert shown_after(0.1) == "", "the piece of work was too short to be shown"
    monkeypatch.setattr(module, "SHORT_SECONDS", 0.05)
    assert shown_after(0.5) == "reading rows: 250 of 1,000\n"
    assert shown_after(0.5, enabled=False) == ""
    shown = shown_after(0.8, terminal=True)
    assert "reading rows" in shown and "250/1000" in shown


def test_the_interval_between_progress_lines_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("QUIET_SECONDS", 0.0), ("SHORT_SECONDS", 0.0), ("_PLAIN_SECONDS", 0.1)):
        monkeypatch.setattr(module, name, value)
    lines = shown_after(1.2).splitlines()
    assert 3 <= len(lines) <= 4, "after 0, 0.1, 0.3 and 0.7 s"


def test_the_quiet_time_is_counted_once_over_all_pieces_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.3)
    monkeypatch.setattr(module, "SHORT_SECONDS", 0.05)
    console = Console(file=io.StringIO())
    slow_work = SlowWork(console=console)
    for number in range(4):
        with slow_work.work(f"piece {number}"):
            time.sleep(0.2)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "piece 0" not in output and "piece 2" in output and "piece 3" in output


def test_an_error_inside_the_work_is_raised_unchanged() -> None:
    with pytest.raises(ValueError, match="broken"), SlowWork().work("reading"):
        raise ValueError("broken")


def test_check_reports_that_it_reads_rows_when_the_quiet_time_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(QUICKSTART)]) == 0
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(module, "SHORT_SECONDS", 0.0)
    assert main(["check", str(QUICKSTART)]) == 0
    assert "checking the rows of data.train: " in capsys.readouterr().err
