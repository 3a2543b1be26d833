"""Reads the commands of a shell script with their variables expanded, without running anything.

    >>> read_script('A=2\\nX=(a.b=$A "c=$((A + 1))")\\npython -m verl "${X[@]}"', {}).commands[-1].words
    ['python', '-m', 'verl', 'a.b=2', 'c=3']

Supported is what launch scripts use: assignments, arrays, `${NAME:-default}`, integer arithmetic, quotes, comments,
line continuations, `if`, `case`, `&&` and `||`. Conditions over texts and numbers are decided, and only the branch
that runs is read; of a condition that only a shell could tell (`[ -d … ]`, a program's exit code) every branch is
read in order, and what was set there is named with the commands that use it. The body of a loop is read once, of a
`for` with its last item. What else only a shell could tell (`$(…)`, positional arguments, names that are set nowhere)
stays in the text and is listed as unresolved.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from os.path import normpath
from pathlib import Path, PurePosixPath

from understudy.porting.shell_words import ASSIGNMENT, DECLARATIONS, WordReader, closing

_PREFIXES = frozenset(["time", "exec", "nohup", "env", "command"])
"""Words before a command that do not belong to it."""
_WORD = re.compile(r"[^\s;|&()<>\"'`$#]+")
_FUNCTION = re.compile(r"(?:function\s+[\w.-]+\s*(?:\(\s*\))?|[\w.-]+\s*\(\s*\))\s*")
_NUMBERS: dict[str, Callable[[int, int], bool]] = {"-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt,
            "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Command:
    words: list[str]
    """Expanded."""
    undecided: list[str]
    """Variables in it that were set under a condition that only a shell could tell, or in a loop."""


@dataclass(slots=True)
class Script:
    commands: list[Command] = field(default_factory=list)
    """Those that run, or may run; assignments alone are no command."""
    unresolved: list[str] = field(default_factory=list)
    """What the script uses and only a shell could expand, in order, each once."""
    sourced: list[str] = field(default_factory=list)
    """Files that the script reads with `source`; they are not read here."""


def read_script(text: str, environment: Mapping[str, str], path: Path | None = None) -> Script:
    """`path`: where the script lies, for the folder that `$0` and `BASH_SOURCE` name."""
    reader = _Reader(text.replace("\r\n", "\n"), environment)
    if path is not None:
        reader.variables["0"] = str(path.absolute())
        reader.arrays["BASH_SOURCE"] = [str(path.absolute())]
    while reader.at < len(reader.text):
        reader.run((), True)
        reader.skip_word()  # it closes something that was not begun
    return Script(reader.commands, reader.unresolved, reader.sourced)


class _Reader(WordReader):
    """Reads statements and does at once what they do to variables. A status is None where only a shell could tell."""

    def __init__(self, text: str, variables: Mapping[str, str]) -> None:
        super().__init__(text, variables)
        self.commands: list[Command] = []
        self.sourced: list[str] = []
        self.output: list[str] | None = None
        """What a command substitution has printed so far."""
        self.opaque = False
        """A command substitution ran something that cannot be followed."""
        self.folder = variables.get("PWD")
        self.program = False
        """The last status is a program's exit code; before `&&` and `||` it is taken to be 0."""

    def substitution(self, inner: str) -> str | None:
        reader = _Reader(inner, self.variables)
        reader.arrays, reader.output, reader.folder = dict(self.arrays), [], self.folder
        reader.run((), True)
        printed = "\n".join(reader.output)
        return None if reader.opaque or reader.unresolved or "$" in printed else printed

    def run(self, until: tuple[str, ...], live: bool | None) -> bool | None:
        """The statements up to a word of `until`, which is not consumed; their last status."""
        status: bool | None = True
        outer, self.live = self.live, live
        while self.at < len(self.text):
            self._skip(";&")
            closes = (*until, "fi", "done", "esac", "}")
            if self.at == len(self.text) or self.text.startswith(";;", self.at) or self._ahead() in closes:
                break
            self.program = False
            status = self._and_or(live)
            self.live = live
        self.live = outer
        return status

    def skip_word(self) -> None:
        self.at += len(self._ahead()) or 1

    def _skip(self, more: str = "") -> None:
        """Blanks, line ends and comments."""
        while self.at < len(self.text):
            if self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.text[self.at] in f" \t\n{more}" and not self.text.startswith(";;", self.at):
                self.at += 1
            else:
                return

    def _ahead(self) -> str:
        found = _WORD.match(self.text, self.at)
        return found[0] if found else ""

    def _take(self, word: str) -> bool:
        self._skip(";")
        found = self._ahead() == word or (not word[0].isalpha() and self.text.startswith(word, self.at))
        self.at += len(word) if found else 0
        return found

    def _and_or(self, live: bool | None) -> bool | None:
        status = self._pipeline(live)
        while (both := self.text.startswith("&&", self.at)) or self.text.startswith("||", self.at):
            self.at += 2
            self._skip()
            status = True if status is None and self.program else status
            runs = status if both else _not(status)
            now = self._pipeline(_and(live, runs))
            status = _and(status, now) if both else _not(_and(_not(status), _not(now)))
        return status

    def _pipeline(self, live: bool | None) -> bool | None:
        negated = self._ahead() == "!"
        self.at += negated
        status = self._command(live)
        while self.text.startswith("|", self.at) and not self.text.startswith("||", self.at):
            self.at += 2 if self.text.startswith("|&", self.at) else 1
            self._skip()
            status = self._command(live)
        return _not(status) if negated else status

    def _command(self, live: bool | None) -> bool | None:
        self._blanks()
        self.live = live
        ahead = self._ahead()
        if self.text.startswith("((", self.at):
            return self._numeric()
        if self.text.startswith("(", self.at):
            return self._group(live)
        if ahead == "[[":
            return self._double_brackets()
        if ahead == "{":
            self.at += 1
            status = self.run(("}",), live)
            self._take("}")
            return status
        if ahead in ("if", "case", "for", "while", "until"):
            self.at += len(ahead)
            {"if": self._if, "case": self._case, "for": self._for}.get(ahead, self._while)(live)
            return None
        function = _FUNCTION.match(self.text, self.at)
        if function:
            self.at = function.end()
            self._skip()
            return self._command(live)
        return self._simple(live, testing=ahead in ("[", "test"))

    def _blanks(self) -> None:
        while self.text.startswith((" ", "\t", "\\\n"), self.at):
            self.at += 2 if self.text[self.at] == "\\" else 1

    def _numeric(self) -> bool | None:
        end = closing(self.text, self.at)
        inner, self.at = self.text[self.at + 2 : end - 1], end + 1
        value = self.evaluated(inner)
        return None if value is None else value != 0

    def _group(self, live: bool | None) -> bool | None:
        end = closing(self.text, self.at)
        text, inner = self.text, self.text[self.at + 1 : end]
        self.text, self.at = inner, 0
        status = self.run((), live)
        self.text, self.at = text, end + 1
        return status

    def _double_brackets(self) -> bool | None:
        found = re.compile(r"\s\]\]").search(self.text, self.at)
        end = found.end() if found else len(self.text)
        text, inner = self.text, self.text[self.at + 2 : end - 2]
        self.text, self.at, self.testing = inner, 0, True
        words = self.words(end="")
        self.text, self.at, self.testing = text, end, False
        return _test(words)

    def _if(self, live: bool | None) -> None:
        taken: bool | None = False
        while True:
            chosen = self.run(("then",), _and(live, _not(taken)))
            if not self._take("then"):
                return
            self.run(("elif", "else"), _and(_and(live, _not(taken)), chosen))
            taken = _not(_and(_not(taken), _not(chosen)))
            if self._take("elif"):
                continue
            if self._take("else"):
                self.run((), _and(live, _not(taken)))
            self._take("fi")
            return

    def _case(self, live: bool | None) -> None:
        self._blanks()
        self.testing = True
        words = self.words(end=" \t\n;")
        self.testing = False
        self._take("in")
        taken: bool | None = False
        subject = "".join(words)
        while not self._take("esac") and self.at < len(self.text):
            self._take("(")
            end = self.text.find(")", self.at)
            if end < 0:
                self.at = len(self.text)
                return
            patterns = [one.strip().strip("\"'") for one in self.text[self.at : end].split("|")]
            self.at = end + 1
            chosen: bool | None = any(fnmatchcase(subject, one) for one in patterns)
            chosen = None if _unknown(subject) else chosen
            self.run((), _and(_and(live, _not(taken)), chosen))
            taken = _not(_and(_not(taken), _not(chosen)))
            self.at += 2 if self.text.startswith(";;", self.at) else 0

    def _for(self, live: bool | None) -> None:
        self._blanks()
        if self.text.startswith("((", self.at):
            self.at = closing(self.text, self.at) + 1
        else:
            words = self.words(end="\n;")
            if len(words) > 2 and live is not False:
                self.live, self.used = None, set()  # it changes from turn to turn
                self.assign(words[0], words[-1])
        self._while(live)

    def _while(self, live: bool | None) -> None:
        self.run(("do",), live)
        self._take("do")
        self.run((), _and(live, None))
        self._take("done")

    def _simple(self, live: bool | None, testing: bool) -> bool | None:
        self.used = set()
        start, self.testing = self.at, testing
        words = self.words(end="\n;|&")
        self.testing = False
        self.at += self.at == start  # nothing that a command could begin with
        declares = False
        while words and (words[0] in _PREFIXES or words[0] in DECLARATIONS):
            declares = words[0] in DECLARATIONS
            words = words[1:]
            while words and words[0].startswith("-"):
                words = words[1:]
        while words and (found := ASSIGNMENT.match(words[0])):
            self.assign(found[1], words[0][found.end() :], bool(found[2]))
            words = words[1:]
        if not words or declares or words[0] in (":", "true"):
            return True
        if words[0] in ("[", "test"):
            return _test(words[1 : -1 if words[0] == "[" else None])
        if words[0] == "false" or any("torch_npu" in word for word in words):
            return False  # the second asks whether this machine has NPUs; recipes are for GPUs
        if live is not False:
            self.program = True
            self._program(words)
        return None

    def _program(self, words: list[str]) -> None:
        if self.output is not None:
            self._print(words)
        elif words[0] in ("source", "."):
            self.sourced += words[1:2]
        else:
            self.commands.append(Command(words, sorted(self.used)))

    def _print(self, words: list[str]) -> None:
        """A command of a substitution."""
        target = words[-1] if len(words) > 1 else ""
        if self.live is None:
            self.opaque = True
        elif words[0] == "echo":
            self.output = [*(self.output or []), " ".join(words[1:])]
        elif words[0] == "pwd" and self.folder is not None:
            self.output = [*(self.output or []), self.folder]
        elif words[0] == "cd" and target.startswith("/"):
            self.folder = normpath(target)
        elif words[0] in ("basename", "dirname") and target:
            path = PurePosixPath(target)
            self.output = [*(self.output or []), path.name if words[0] == "basename" else str(path.parent)]
        else:
            self.opaque = True


def _test(words: list[str]) -> bool | None:
    """What stands between the brackets of `[ … ]` or `[[ … ]]`."""
    for either, names in ((True, ("||", "-o")), (False, ("&&", "-a"))):
        for place, word in enumerate(words):
            if word in names:
                before, after = _test(words[:place]), _test(words[place + 1 :])
                return _not(_and(_not(before), _not(after))) if either else _and(before, after)
    if words[:1] == ["!"]:
        return _not(_test(words[1:]))
    if any(_unknown(word) for word in words):
        return None
    if len(words) < 2:
        return bool(words and words[0])
    if len(words) == 2:
        return {"-n": bool(words[1]), "-z": not words[1]}.get(words[0])
    left, kind, right = words[0], words[1], words[2]
    if len(words) == 3 and kind in ("=", "==", "!="):
        return fnmatchcase(left, right) is not (kind == "!=")
    if len(words) == 3 and kind in _NUMBERS and left.lstrip("-").isdigit() and right.lstrip("-").isdigit():
        return _NUMBERS[kind](int(left), int(right))
    return None


def _unknown(word: str) -> bool:
    return "$" in word or "`" in word


def _not(status: bool | None) -> bool | None:
    return None if status is None else not status


def _and(left: bool | None, right: bool | None) -> bool | None:
    if left is False or right is False:
        return False
    return None if left is None or right is None else True
