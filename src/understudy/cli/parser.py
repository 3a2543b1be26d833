"""The command line's parser: reports an error in one line, with an example that works."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

_MISSING = re.compile(r"the following arguments are required: (.*)")
_SHORT = 60
"""Characters of an argument's help that fit into an error."""
_UNKNOWN = re.compile(r"argument (\S+): invalid choice: '([^']*)' \(choose from (.*)\)")

_OTHER_COMMANDS = {
    "config": "`understudy keys` lists every key, `understudy plan RECIPE --toml` a whole recipe",
    "distill": "it is `understudy train`",
    "fit": "it is `understudy train`",
    "import": "`understudy import-verl` and `understudy import-trl` write a recipe",
    "list": "a run is a folder under runs/; `understudy doctor RUN` shows its state",
    "merge": "`understudy export RUN OUT` writes merged weights",
    "report": "a run writes report.html into its directory when it ends; `understudy view RUN` shows any run",
    "run": "it is `understudy train`",
    "status": "it is `understudy doctor RUN`",
    "validate": "it is `understudy check`",
}
"""Commands of other tools → ours."""


class Parser(argparse.ArgumentParser):
    """`ArgumentParser` with our own error messages. The epilog is `example: ` and a whole command."""

    def error(self, message: str) -> NoReturn:
        from understudy.config.base import nearest

        if missing := _MISSING.fullmatch(message):
            helps = {str(action.metavar or action.dest): action.help or "" for action in self._actions}
            names = [_explained(name, helps.get(name, "")) for name in missing[1].split(", ")]
            message = f"{self.prog} needs {' and '.join(names)}"
        elif unknown := _UNKNOWN.fullmatch(message):
            what, word, choices = unknown.groups()
            guess = nearest(word, re.findall(r"'([^']*)'", choices))
            hint = f"did you mean {guess}?" if guess else f"there are {choices.replace(chr(39), '')}"
            if what == "COMMAND":
                hint = _OTHER_COMMANDS.get(word, hint)
            message = f"{what} {word!r} is not known; {hint}"
        lines = [f"error: {message}", *([self.epilog] if self.epilog else []), f"help:    {self.prog} --help"]
        sys.stderr.write("\n".join(lines) + "\n")
        raise SystemExit(2)

    def unknown_arguments(self, arguments: Sequence[str], takes_keys: bool) -> NoReturn:
        """Words that belong to no argument: a misspelt flag, or a key of a recipe written as a flag
        (`--learning_rate 1e-5`)."""
        from understudy.config.base import nearest
        from understudy.config.messages.keys import walk
        from understudy.config.messages.unknown_keys import unknown_key
        from understudy.config.tables import RecipeTables

        flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        hints = []
        for word in arguments:
            name, _, value = word.partition("=")
            key = name.strip("-")
            if not name.startswith("--"):
                continue
            if guess := nearest(name, flags, 0.75):
                hints.append(f"did you mean {guess}?")
            elif takes_keys and "." in key and walk(RecipeTables, key.split("."))[1] is not None:
                hints.append(f"settings are written without dashes: {key}={value or 'VALUE'}")
            elif takes_keys:
                answer = unknown_key(RecipeTables, key.split("."), None)[0].partition("; ")[2]
                hints.append(f"settings are written key=value, without dashes; `{key}`: {answer}")
        self.error("; ".join([f"unrecognized arguments: {' '.join(arguments)}", *hints]))


def _explained(name: str, help: str) -> str:
    return f"`{name}` ({help})" if 0 < len(help) < _SHORT else f"`{name}`"
