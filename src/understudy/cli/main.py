"""The command `understudy`: one line per error, exit code 2 for errors that the user can fix.

Commands import what they need when they run, so `understudy check` never imports torch.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from understudy import __version__
from understudy.cli.parser import Parser
from understudy.cli.terminal import survive_closed_terminal
from understudy.errors import ConfigError, UnderstudyError, lacks_memory
from understudy.trainers.early_interrupt import raise_if_interrupted, remembering_interrupts

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = 130
_COMMANDS = {
    "train": "train",
    "check": "recipes.check",
    "plan": "recipes.plan",
    "launch": "recipes.launch",
    "keys": "recipes.keys",
    "schema": "recipes.schema",
    "import-verl": "recipes.import_verl",
    "import-trl": "recipes.import_trl",
    "resume": "resume",
    "eval": "evaluate",
    "audit": "audit",
    "export": "export",
    "replay": "replay",
    "doctor": "doctor",
    "view": "view",
    "quickstart": "quickstart",
    "serve-teacher": "serve_teacher",
    "teachers": "teachers",
    "score": "score",
    "completion": "completion",
}
"""Name → module below `cli.commands`."""


def program() -> int:
    """The entry point: runs `main`, then ends the process even if a thread still hangs."""
    if sys.stderr is not None:
        faulthandler.enable(file=2)  # a crash in native code writes the Python stacks to stderr
    survive_closed_terminal()
    code = main()
    from understudy.run.entry import exit_soon

    exit_soon(code, always=code == INTERRUPTED)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        with remembering_interrupts():
            return _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:  # also while a command is imported
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(arguments: list[str]) -> int:
    debug = "--debug" in arguments
    try:
        parser = _parser(arguments)
        options = _parsed(parser, arguments)
        if not hasattr(options, "run_command"):
            parser.print_help()
            return 2
        command: Callable[[argparse.Namespace], int | None] = options.run_command
        raise_if_interrupted()
        return command(options) or 0
    except UnderstudyError as error:
        raise_if_interrupted()
        if debug:
            traceback.print_exc()
        _say(error)
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output (`| head`) has closed it, which is no error.
        sys.stderr.close()
        return 0
    except Exception as error:
        if lacks_memory(error):
            # Not by rich, whose import needs memory.
            os.write(
                2,
                b"error: out of memory on this machine; stop other programs, then give the same command or resume\n",
            )
            return 2
        raise_if_interrupted()  # an import may have made an ImportError of it
        if debug:
            raise
        from understudy.planning.installed import too_old

        outdated = too_old()
        if outdated:  # the likely cause
            _say(ConfigError(outdated))
        console = _stderr()
        console.print(f"[red]error:[/] unexpected {type(error).__name__}: {_escape(str(error))}")
        console.print("run the same command with --debug for the stack trace", style="dim")
        return 2 if outdated else 1


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _escape(text: str) -> str:
    from rich.markup import escape

    from understudy.observability.redact import printable

    return escape(printable(text))


def _parsed(parser: Parser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses flags and `key=value` words in any order: argparse takes the words up to the first flag and no
    later ones, and its `parse_intermixed_args` does not support subcommands."""
    options, left = parser.parse_known_args(arguments)
    if left and (not hasattr(options, "overrides") or any(word.startswith("-") for word in left)):
        own: Parser = getattr(options, "own_parser", parser)
        own.unknown_arguments(left, takes_keys=hasattr(options, "overrides"))
    if left:
        options.overrides = [*options.overrides, *left]
    return options


def _say(error: UnderstudyError) -> None:
    console = _stderr()
    problems = error.problems if isinstance(error, ConfigError) else [str(error)]
    for problem in problems:
        console.print(f"[red]error:[/] {_escape(problem)}", highlight=False, soft_wrap=True)
    if len(problems) > 1:
        console.print(f"{len(problems)} problems", style="dim")


def _parser(arguments: Sequence[str] = ()) -> Parser:
    """The parser of the command that `arguments` begin with; of all commands if they name none.

    With one command named, no other command is imported: `understudy quickstart` prints something before it
    has loaded what it needs.
    """
    named = next((word for word in arguments if not word.startswith("-")), "")
    parser = Parser(prog="understudy", description="On-policy distillation of language models.")
    parser.add_argument("--version", action="version", version=f"understudy {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the stack trace of an error")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    shared = Parser(add_help=False)
    shared.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for name in [named] if named in _COMMANDS else _COMMANDS:
        module = importlib.import_module(f"understudy.cli.commands.{_COMMANDS[name]}")
        summary = (module.__doc__ or "").strip().splitlines()[0]
        command = commands.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            parents=[shared],
            epilog=f"example: {module.EXAMPLE}",
        )
        module.add_arguments(command)
        command.set_defaults(run_command=module.run, own_parser=command)
    return parser


if __name__ == "__main__":
    sys.exit(program())
