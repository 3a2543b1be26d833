"""Reads the commands of a shell script with their variables expanded, without running anything.

    >>> read_script('A=2\\nX=(a.b=$A "c=$((A + 1))")\\npython -m verl "${X[@]}"', {}).commands[-1]
    ['python', '-m', 'verl', 'a.b=2', 'c=3']

Supported is what launch scripts use: assignments, arrays, `${NAME:-default}`, integer arithmetic, quotes,
comments and line continuations. Both branches of an `if` are read, in order. What only a shell can evaluate
(`$(…)`, positional arguments, names that are set nowhere) stays in the text and is listed as unresolved.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_KEYWORDS = frozenset(
    [
        "if",
        "then",
        "else",
        "elif",
        "fi",
        "for",
        "while",
        "until",
        "do",
        "done",
        "case",
        "esac",
        "function",
        "{",
        "}",
        "!",
        "time",
        "exec",
        "export",
        "local",
        "readonly",
        "declare",
        "nohup",
        "env",
    ]
)
"""Words before a command that do not belong to it."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_PARAMETER = re.compile(r"([A-Za-z_]\w*|[@*#?$!0-9])(\[[@*]\])?(?:(:?[-=+])(.*))?", re.DOTALL)
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),
    ast.FloorDiv: lambda a, b: int(a / b),
    ast.Mod: operator.mod,
}
_LONGEST_NUMBER = 40


@dataclass(slots=True)
class Script:
    commands: list[list[str]] = field(default_factory=list)
    """Words of each command, expanded; assignments alone are no command."""
    unresolved: list[str] = field(default_factory=list)
    """What the script uses and only a shell could expand, in order, each once."""


def read_script(text: str, environment: Mapping[str, str]) -> Script:
    return _Reader(text.replace("\\\n", " "), environment).read()


class _Reader:
    """One pass over the text; `at` is the next character."""

    def __init__(self, text: str, environment: Mapping[str, str]) -> None:
        self.text, self.at = text, 0
        self.variables: dict[str, str] = dict(environment)
        self.arrays: dict[str, list[str]] = {}
        self.script = Script()

    def read(self) -> Script:
        while self.at < len(self.text):
            words = self._words(end="\n;|&")
            self.at += 1
            self._run(words)
        return self.script

    def _run(self, words: list[str]) -> None:
        while words and words[0] in _KEYWORDS:
            words = words[1:]
        while words and (found := _ASSIGNMENT.match(words[0])):
            name, added = found.groups()
            value = words[0][found.end() :]
            self.variables[name] = self.variables.get(name, "") + value if added else value
            words = words[1:]
        if words:
            self.script.commands.append(words)

    def _words(self, end: str) -> list[str]:
        """Words up to an unquoted character of `end`, which is not consumed."""
        words: list[str] = []
        word: list[str] = []
        started = False

        def finish() -> None:
            nonlocal started
            if started:
                words.append("".join(word))
            word.clear()
            started = False

        while self.at < len(self.text) and self.text[self.at] not in end:
            char = self.text[self.at]
            if char in " \t\n":
                finish()
                self.at += 1
            elif char == "#" and not started:
                self.at = _index(self.text, "\n", self.at)
            elif char in "<>":
                if "".join(word).isdigit():
                    word.clear()
                    started = False
                finish()
                self._redirection()
            elif char == "(" and started and (found := _ASSIGNMENT.fullmatch("".join(word))):
                self.at += 1
                items = self._words(end=")")
                self.at += 1
                self.arrays[found[1]] = [*self.arrays.get(found[1], []), *items] if found[2] else items
                word.clear()
                started = False
            elif char == "(" and not started:
                self._skip_brackets()
            else:
                piece = self._piece(char)
                if isinstance(piece, list):
                    words += piece
                else:
                    word.append(piece)
                    started = True
        finish()
        return words

    def _piece(self, char: str) -> str | list[str]:
        if char == "'":
            close = _index(self.text, "'", self.at + 1)
            quoted, self.at = self.text[self.at + 1 : close], close + 1
            return quoted
        if char == '"':
            return self._double_quoted()
        if char == "$" and (items := self._array_at(self.at)) is not None:
            return items
        if char in "$`":
            return self._expansion()
        if char == "\\":
            self.at += 2
            return self.text[self.at - 1 : self.at]
        self.at += 1
        return char

    def _double_quoted(self) -> str | list[str]:
        self.at += 1
        if (items := self._array_at(self.at)) is not None and self.text[self.at : self.at + 1] == '"':
            self.at += 1
            return items
        parts: list[str] = []
        while self.at < len(self.text) and self.text[self.at] != '"':
            char = self.text[self.at]
            if char in "$`":
                parts.append(self._expansion())
            elif char == "\\" and self.text[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`"):
                parts.append(self.text[self.at + 1])
                self.at += 2
            else:
                parts.append(char)
                self.at += 1
        self.at += 1
        return "".join(parts)

    def _array_at(self, at: int) -> list[str] | None:
        """The items of `${NAME[@]}` or `$@` here, consumed; None if there is something else."""
        if self.text.startswith(("$@", "$*"), at):
            self.at = at + 2
            return []
        found = re.compile(r"\$\{([A-Za-z_]\w*|@|\*)(\[[@*]\])?(?::[-+][^}]*)?\}").match(self.text, at)
        if found is None or not (found[2] or found[1] in "@*"):
            return None
        self.at = found.end()
        return list(self.arrays.get(found[1], []))

    def _expansion(self) -> str:
        start = self.at
        if self.text.startswith("$((", start):
            self.at = _closing(self.text, start + 1) + 1
            return self._arithmetic(self.text[start + 3 : self.at - 2], self.text[start : self.at])
        if self.text.startswith("$(", start):
            self.at += 1
            self._skip_brackets()
            return self._unresolved(self.text[start : self.at])
        if self.text[start] == "`":
            self.at = _index(self.text, "`", start + 1) + 1
            return self._unresolved(self.text[start : self.at])
        if self.text.startswith("${", start):
            self.at = _closing(self.text, start + 1) + 1
            return self._parameter(self.text[start + 2 : self.at - 1], self.text[start : self.at])
        name = _NAME.match(self.text, start + 1)
        if name is None:
            self.at = start + 2
            shown = self.text[start : self.at]
            return self._unresolved(shown) if shown[1:].isdigit() else shown
        self.at = name.end()
        return self._parameter(name[0], name[0])

    def _parameter(self, inside: str, shown: str) -> str:
        found = _PARAMETER.fullmatch(inside)
        if found is None or not _NAME.fullmatch(found[1]):
            return self._unresolved(shown if shown.startswith("$") else f"${shown}")
        name, whole, kind, other = found.groups()
        if whole:
            return " ".join(self.arrays.get(name, []))
        value = self.variables.get(name)
        missing = not value if kind and kind.startswith(":") else value is None
        if kind and kind[-1] in "-=":
            return self._inner(other) if missing else str(value)
        if kind and kind[-1] == "+":
            return "" if missing else self._inner(other)
        if value is None:
            return self._unresolved(f"${name}")
        return value

    def _inner(self, text: str) -> str:
        """The text of a default, itself expanded."""
        reader = _Reader("", {})
        reader.text, reader.variables, reader.arrays = f'"{text.strip(chr(34))}"', self.variables, self.arrays
        reader.script = self.script
        value = reader._double_quoted()
        return value if isinstance(value, str) else " ".join(value)

    def _arithmetic(self, text: str, shown: str) -> str:
        plain = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", text).strip()
        try:
            return str(self._value(ast.parse(plain, mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, KeyError):
            return self._unresolved(shown)

    def _value(self, node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](self._value(node.left), self._value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._value(node.operand)
        if isinstance(node, ast.Name) and len(self.variables[node.id]) < _LONGEST_NUMBER:
            return int(self.variables[node.id])
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        raise ValueError(ast.dump(node))

    def _unresolved(self, shown: str) -> str:
        if shown not in self.script.unresolved:
            self.script.unresolved.append(shown)
        return shown

    def _skip_brackets(self) -> None:
        """From an opening bracket to behind its partner."""
        self.at = _closing(self.text, self.at) + 1

    def _redirection(self) -> None:
        """`> file`, `2>&1`, `<<EOF … EOF`."""
        document = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?").match(self.text, self.at)
        if document:
            end = re.compile(rf"^\s*{document[1]}$", re.MULTILINE).search(self.text, document.end())
            self.at = end.end() if end else len(self.text)
            return
        skipped = re.compile(r"[<>]+&?\s*[^\s;|&]*").match(self.text, self.at)
        self.at = skipped.end() if skipped else self.at + 1


def _index(text: str, wanted: str, start: int) -> int:
    found = text.find(wanted, start)
    return len(text) if found < 0 else found


def _closing(text: str, start: int) -> int:
    """The place of the bracket that closes the one at `start`."""
    pairs = {"(": ")", "{": "}"}
    opening, closing, depth = text[start], pairs[text[start]], 0
    for place in range(start, len(text)):
        depth += (text[place] == opening) - (text[place] == closing)
        if depth == 0:
            return place
    return len(text)
