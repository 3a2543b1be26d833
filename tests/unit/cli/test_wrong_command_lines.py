"""A wrong command line is answered with what is missing, what was meant, and an example that the parser takes."""

import importlib
import json
import shlex
import time
from pathlib import Path

import pytest
from rich.console import Console

from understudy.cli.main import _COMMANDS, _parsed, _parser, main
from understudy.observability.live import LiveView


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "error: understudy train needs `recipe` (a TOML recipe)"),
        (["resume"], "error: understudy resume needs `run` (a run directory)"),
        (["export", "R"], "error: understudy export needs `out` (the folder to write; it must not exist or be empty)"),
        (["score"], "error: understudy score needs `url` (for example http://127.0.0.1:8100) and `file`"),
        (["teachers", "R", "add"], "needs `teacher`"),
        (["trian"], "did you mean train?"),
        (["train", "R", "--quite"], "unrecognized arguments: --quite; did you mean --quiet?"),
        (["train", "R", "--lr", "1e-5"], "settings are written key=value, without dashes; `lr`: it is `trainer.learning_rate` here"),
        (["train", "R", "--trainer.steps=3"], "settings are written without dashes: trainer.steps=3"),
        (["report", "R"], "a run writes report.html into its directory when it ends; `understudy view RUN` shows any run"),
        (["serve-teacher", "m", "--dtype", "bf16"], "--dtype 'bf16' is not known; did you mean bfloat16?"),
    ],
)  # fmt: skip
def test_the_error_names_the_missing_argument_or_the_wrong_flag(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = refused(arguments, capsys).splitlines()[0]
    assert message in first and "key=value" not in first.partition("settings are")[0]


@pytest.mark.parametrize("name", list(_COMMANDS))
def test_every_command_has_an_example_that_parses(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    example = importlib.import_module(f"understudy.cli.commands.{_COMMANDS[name]}").EXAMPLE
    program, *arguments = shlex.split(example)
    assert program == "understudy" and arguments[0] == name
    _parsed(_parser(), arguments)
    if name not in ("quickstart", "doctor", "keys", "schema", "view"):  # these need nothing
        assert f"example: {example}" in refused([name], capsys)


def test_the_example_of_a_replicas_removal_names_it_as_list_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert "example: understudy teachers runs/RUN remove math 1" in refused(
        ["teachers", "R", "remove", "math"], capsys
    )


def test_the_error_of_score_names_the_address_at_which_no_teacher_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"tokens": [1, 2, 3]}) + "\n")
    assert main(["score", "http://127.0.0.1:9", str(rows)]) == 2
    output = capsys.readouterr().err
    assert "error: teacher at http://127.0.0.1:9: " in output and "teacher ," not in output


@pytest.mark.parametrize("terminal", [False, True])
def test_the_live_view_shows_paths_that_look_like_markup_unchanged(
    terminal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(force_terminal=terminal, width=100, stderr=True)
    with LiveView(3, console=console) as view, view.work("loading a[/b]/m [bold]x"):
        view.phase("starting a[/b]/m [red]")
        view.step({"step": 0, "actor/loss": 1.0})
        output, deadline = "", time.monotonic() + 60
        while "loading a[/b]/m [bold]x" not in output and time.monotonic() < deadline:
            time.sleep(0.05)  # the display is redrawn by a thread, several times a second
            output += capsys.readouterr().err
    assert "loading a[/b]/m [bold]x" in output


def test_check_and_plan_raise_no_markup_error_for_a_model_folder_that_looks_like_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[student]\nmodel="a[/b]/m"\n[teachers.t]\nmodel="a[/b]/m"\n[data]\ntrain="d.jsonl"\n')
    (tmp_path / "d.jsonl").write_text('{"prompt": "x"}\n')
    assert main(["check", str(recipe)]) in (0, 2) and main(["plan", str(recipe), "--gpus", "0"]) in (0, 2)
    captured = capsys.readouterr()
    assert "MarkupError" not in captured.err and "unexpected" not in captured.err


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["data.train=5"], ["`data.train` = 5: expected a list of strings"]),
        (["data.train=[3]"], ["`data.train[0]` = 3: expected a string; write it in quotes: \"3\", on a command line '\"3\"'"]),
        (["student.model=5"], ["`student.model` = 5: expected a string; write it in quotes: \"5\", on a command line '\"5\"'"]),
        (["student=5"], ["`student` = 5: expected a table of keys, [student]"]),
        (["trainer.steps=no", "data.train=5"], ["`data.train` = 5: expected a list of strings", "`trainer.steps` = 'no': expected a whole number of at least 1"]),
    ],
)  # fmt: skip
def test_each_wrong_value_is_reported_once(
    arguments: list[str], messages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The checks of models and data do not also report the key as missing."""
    recipe = Path(__file__).parents[3] / "src/understudy/assets/quickstart/recipe.toml"
    assert main(["check", str(recipe), *arguments]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert lines == [f"error: {line}" for line in messages]
