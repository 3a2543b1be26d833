"""Flags and `key=value` overrides come in any order, and unknown ones are refused."""

from pathlib import Path

import pytest

from understudy.cli.main import _parsed, _parser, main

QUICKSTART = Path(__file__).parents[3] / "src/understudy/assets/quickstart/recipe.toml"


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "R", "a.b=1", "c.d=2", "--quiet"],
        ["train", "R", "--quiet", "a.b=1", "c.d=2"],
        ["train", "R", "a.b=1", "--quiet", "c.d=2"],
        ["train", "--quiet", "R", "a.b=1", "--debug", "c.d=2"],
        ["resume", "R", "--quiet", "a.b=1", "c.d=2"],
        ["resume", "--debug", "R", "a.b=1", "--quiet", "c.d=2"],
    ],
)
def test_flags_and_overrides_may_come_in_any_order(arguments: list[str]) -> None:
    options = _parsed(_parser(), arguments)
    assert options.overrides == ["a.b=1", "c.d=2"] and options.quiet
    assert options.debug == ("--debug" in arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "R", "--quite", "a.b=1"], "unrecognized arguments: --quite a.b=1"),
        (["audit", "R", "--debug", "a.b=1"], "unrecognized arguments: a.b=1"),
    ],
)
def test_unknown_flags_and_unexpected_overrides_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_an_override_after_a_flag_changes_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(QUICKSTART), "trainer.steps=7", "--gpus", "0", "trainer.batch_size=9"]) == 0
    assert "7 steps × 9 rollouts" in capsys.readouterr().out
    assert main(["check", str(QUICKSTART), "--debug", "trainer.steps"]) == 2
    assert "override 'trainer.steps': expected key=value" in capsys.readouterr().err
