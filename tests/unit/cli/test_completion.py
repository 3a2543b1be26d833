"""Completion scripts name every command and flag, and complete in a real bash."""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from understudy.cli.commands.completion import SHELLS
from understudy.cli.main import _parser, main


def commands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (one for one in _parser()._actions if isinstance(one, argparse._SubParsersAction))
    return dict(action.choices)


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_the_completion_script_contains_every_command_and_flag(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script(shell, capsys)
    for name, command in commands().items():
        assert name in text
        for action in command._actions:
            if action.help != argparse.SUPPRESS:
                assert all(flag.strip("-") in text for flag in action.option_strings), (name, action.dest)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("understudy qui", "quickstart"),
        ("understudy train --qu", "--quiet"),
        ("understudy completion z", "zsh"),
        ("understudy check rec", "recipe.toml"),
    ],
)
def test_bash_completes_commands_flags_choices_and_file_names(
    line: str, offered: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.toml").touch()
    (tmp_path / "completion.sh").write_text(script("bash", capsys))
    asked = (
        f"source completion.sh; COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMP_LINE='{line}'; "
        "COMP_POINT=${#COMP_LINE}; $(complete -p understudy | sed 's/.*-F \\([^ ]*\\).*/\\1/') understudy "
        '"${COMP_WORDS[COMP_CWORD]}" ""; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", asked], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert offered in done.stdout.split(), done


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_completion_script_has_valid_zsh_and_fish_syntax(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(script(shell, capsys))
    assert subprocess.run([shell, "-n", str(tmp_path / "script")], check=False).returncode == 0


def test_completion_without_shtab_says_what_to_install_and_does_not_import_torch() -> None:
    code = (
        "import sys; sys.modules['shtab'] = None; from understudy.cli.main import main; "
        "code = main(['completion', 'bash']); sys.exit(10 + code if 'torch' not in sys.modules else 1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 12 and "understudy[completion]" in done.stderr
