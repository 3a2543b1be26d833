"""Nothing is said about work that is over soon; long work says what it is, in a terminal and out of one."""

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


def test_only_work_that_takes_longer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown_after(0.0) == ""
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.05)
    assert shown_after(0.1) == "", "too short a piece"
    monkeypatch.setattr(module, "SHORT_SECONDS", 0.05)
    assert shown_after(0.5) == "reading rows: 250 of 1,000\n"
    assert shown_after(0.5, enabled=False) == ""
    shown = shown_after(0.8, terminal=True)
    assert "reading rows" in shown and "250/1000" in shown


def test_long_work_is_told_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("QUIET_SECONDS", 0.0), ("SHORT_SECONDS", 0.0), ("_PLAIN_SECONDS", 0.1)):
        monkeypatch.setattr(module, name, value)
    lines = shown_after(1.2).splitlines()
    assert 3 <= len(lines) <= 4, "after 0, 0.1, 0.3 and 0.7 s"


def test_the_quiet_time_is_one_for_all_that_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.3)
    monkeypatch.setattr(module, "SHORT_SECONDS", 0.05)
    console = Console(file=io.StringIO())
    whole = SlowWork(console=console)
    for number in range(4):
        with whole.work(f"piece {number}"):
            time.sleep(0.2)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "piece 0" not in output and "piece 2" in output and "piece 3" in output


def test_an_error_ends_the_talk() -> None:
    with pytest.raises(ValueError, match="broken"), SlowWork().work("reading"):
        raise ValueError("broken")


def test_check_says_what_it_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(QUICKSTART)]) == 0
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(module, "SHORT_SECONDS", 0.0)
    assert main(["check", str(QUICKSTART)]) == 0
    assert "checking the rows of data.train: " in capsys.readouterr().err
