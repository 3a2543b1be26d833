"""Print a completion script for bash, zsh or fish: commands, flags, their choices, and files.

For example in ~/.bashrc: `eval "$(understudy completion bash)"`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from understudy.errors import ConfigError

EXAMPLE = "understudy completion bash"
SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="bash, zsh or fish")


def run(options: argparse.Namespace) -> None:
    try:
        import shtab
    except ImportError:
        raise ConfigError(
            "completion scripts are written by shtab, which is not installed: pip install 'understudy[completion]'"
        ) from None
    from understudy.cli.main import _parser

    parser = _parser()
    _complete_files(parser, shtab.FILE)
    sys.stdout.write(shtab.complete(parser, shell=options.shell) + "\n")


def _complete_files(parser: argparse.ArgumentParser, files: dict[str, str]) -> None:
    """Arguments that are paths complete to files; so do recipes and runs, which are positional."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command, files)
        elif action.type is Path or (not action.option_strings and not action.choices):
            action.complete = files  # type: ignore[attr-defined]
