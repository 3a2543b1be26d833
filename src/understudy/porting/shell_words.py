"""Words of a shell script with their variables expanded: quotes, arrays, defaults, arithmetic."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.DOTALL)
DECLARATIONS = frozenset(["export", "local", "readonly", "declare", "typeset"])
_NAME = re.compile(r"[A-Za-z_]\w*")
_ITEMS = re.compile(r"\$\{([A-Za-z_]\w*|@|\*)(\[[@*]\])?(?::?[-+](?:[^{}]|\$\{[^{}]*\})*)?\}")
_PARAMETER = re.compile(
    r"([A-Za-z_]\w*|[0-9@*])(?:\[([^\]]*)\])?(:?[-=+?]|%%?|##?|//?|,,|\^\^)?(.*)", re.DOTALL
)
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),
    ast.FloorDiv: lambda a, b: int(a / b),
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type, Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_LONGEST_NUMBER = 40


class WordReader:
    """Reads words from `text`; `at` is the next character. Expansions have effects only while `live` is not False."""

    def __init__(self, text: str, variables: Mapping[str, str]) -> None:
        self.text, self.at = text, 0
        self.variables: dict[str, str] = dict(variables)
        self.arrays: dict[str, list[str]] = {}
        self.undecided: dict[str, set[str]] = {}
        """Variables whose value hangs on a condition that only a shell could tell → the names that were set under one."""
        self.used: set[str] = set()
        """Such names in what was read since this was last emptied."""
        self.unresolved: list[str] = []
        self.live: bool | None = True
        """Whether what is read here runs; None where only a shell could tell."""
        self.testing = False
        """In a condition a name that is set nowhere is empty, and `<`, `>`, `(`, `)` and `&` are words."""

    def assign(self, name: str, value: str | list[str], added: bool = False) -> None:
        if self.live is False:
            return
        if isinstance(value, list):
            self.arrays[name] = [*self.arrays.get(name, []), *value] if added else value
        else:
            self.variables[name] = self.variables.get(name, "") + value if added else value
        reasons = self.used | ({name} if self.live is None else set())
        reasons |= self.undecided.get(name, set()) if added else set()
        self.undecided[name] = reasons

    def words(self, end: str) -> list[str]:
        """Words up to an unquoted character of `end`, which is not consumed. Arrays in assignments are assigned."""
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
            if self.text.startswith("\\\n", self.at):
                self.at += 2
            elif char in " \t\n":
                finish()
                self.at += 1
            elif char == "#" and not started:
                self.at = _index(self.text, "\n", self.at)
            elif char in "<>" and not self.testing:
                if "".join(word).isdigit():
                    word.clear()
                    started = False
                finish()
                self._redirection()
            elif char == "(" and started and (found := ASSIGNMENT.fullmatch("".join(word))):
                self.at += 1
                items = self.words(end=")")
                self.at += 1
                self.assign(found[1], items, bool(found[2]))
                word.clear()
                started = False
            elif char == "(" and not started and not self.testing:
                self.at = closing(self.text, self.at) + 1
            else:
                piece = self._piece(char)
                if isinstance(piece, list):
                    words += piece
                elif char == "$" and re.search(r"\s", piece) and not _holds(words, "".join(word), piece):
                    *before, last = re.split(r"\s+", piece)
                    for part in before:
                        word.append(part)
                        started = started or bool(part)
                        finish()
                    word.append(last)
                    started = bool(last)
                else:
                    word.append(piece)
                    started = True
        finish()
        return words

    def expanded(self, text: str) -> str:
        """`text` as one word, with its blanks."""
        outer, at = self.text, self.at
        self.text, self.at = text, 0
        parts: list[str] = []
        while self.at < len(self.text):
            piece = self._piece(self.text[self.at])
            parts.append(piece if isinstance(piece, str) else " ".join(piece))
        self.text, self.at = outer, at
        return "".join(parts)

    def evaluated(self, text: str) -> int | None:
        """Of an arithmetic expression; None if only a shell could tell."""
        plain = self.expanded(text) if "$" in text else text
        plain = plain.replace("&&", " and ").replace("||", " or ").replace("!(", " not (").strip()
        self.used |= {reason for name in _NAME.findall(plain) for reason in self.undecided.get(name, ())}
        try:
            return int(self._value(ast.parse(plain, mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, KeyError, OverflowError):
            return None

    def substitution(self, inner: str) -> str | None:
        """The output of the commands `inner`; None if only a shell could tell."""
        return None

    def _piece(self, char: str) -> str | list[str]:
        if char == "'":
            close = _index(self.text, "'", self.at + 1)
            quoted, self.at = self.text[self.at + 1 : close], close + 1
            return quoted
        if char == '"':
            return self._double_quoted()
        if char == "$" and (items := self._items()) is not None:
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
        if (items := self._items()) is not None and self.text[self.at : self.at + 1] == '"':
            self.at += 1
            return items
        parts: list[str] = [] if items is None else [" ".join(items)]
        while self.at < len(self.text) and self.text[self.at] != '"':
            char = self.text[self.at]
            if char in "$`":
                parts.append(self._expansion())
            elif char == "\\" and self.text[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`", "\n"):
                parts.append(self.text[self.at + 1].strip("\n"))
                self.at += 2
            else:
                parts.append(char)
                self.at += 1
        self.at += 1
        return "".join(parts)

    def _items(self) -> list[str] | None:
        """The items of `${NAME[@]}` or `$@` here, consumed; None if there is something else."""
        if self.text.startswith(("$@", "$*"), self.at):
            self.at += 2
            return []
        found = _ITEMS.match(self.text, self.at)
        if found is None or not (found[2] or found[1] in "@*"):
            return None
        self.at = found.end()
        self.used |= self.undecided.get(found[1], set())
        return list(self.arrays.get(found[1], []))

    def _expansion(self) -> str:
        start, text = self.at, self.text
        if text.startswith("$((", start):
            self.at = closing(text, start + 1) + 1
            number = self.evaluated(text[start + 3 : self.at - 2])
            return self._unresolved(text[start : self.at]) if number is None else str(number)
        if text.startswith("$(", start) or text[start] == "`":
            quoted = text[start] == "`"
            self.at = (_index(text, "`", start + 1) if quoted else closing(text, start + 1)) + 1
            output = self.substitution(text[start + (1 if quoted else 2) : self.at - 1])
            return self._unresolved(text[start : self.at]) if output is None else output
        if text.startswith("${", start):
            self.at = closing(text, start + 1) + 1
            return self._parameter(text[start + 2 : self.at - 1], text[start : self.at])
        name = _NAME.match(text, start + 1)
        if name is None:
            self.at = start + 2
            digit = text[start + 1 : start + 2].isdigit()
            return (
                self._parameter(text[start + 1], text[start : start + 2]) if digit else text[start : self.at]
            )
        self.at = name.end()
        return self._parameter(name[0], f"${name[0]}")

    def _parameter(self, inside: str, shown: str) -> str:
        """`NAME`, `NAME:-default`, `NAME[2]`, `NAME%suffix`, …"""
        found = _PARAMETER.fullmatch(inside)
        if found is None:
            return self._unresolved(shown)
        name, place, kind, rest = found[1], found[2], found[3] or "", found[4]
        self.used |= self.undecided.get(name, set())
        items = self.arrays.get(name)
        if place in ("@", "*"):
            value: str | None = " ".join(items or [])
        elif place and not place.isdigit():
            return self._unresolved(shown)
        elif items is None:
            value = self.variables.get(name)
        else:
            value = items[int(place or 0)] if int(place or 0) < len(items) else None
        missing = not value if kind.startswith(":") else value is None
        if kind and kind[-1] in "-=" and missing:
            value = self.expanded(rest)
            if kind[-1] == "=":
                self.assign(name, value)
            return value
        if kind.endswith("+"):
            return "" if missing else self.expanded(rest)
        if value is None:
            plain = f"${name}" if _NAME.fullmatch(name) else shown
            return "" if self.testing else self._unresolved(plain)
        edited = value if not kind or kind[-1] in "-=?" else self._edited(value, kind, rest)
        return self._unresolved(shown) if edited is None or (rest and not kind) else edited

    def _edited(self, value: str, kind: str, rest: str) -> str | None:
        """The value with a prefix or suffix taken off, parts replaced, or in other case."""
        if kind in (",,", "^^"):
            return value.lower() if kind == ",," else value.upper()
        if kind in ("/", "//"):
            old, _, new = rest.partition("/")
            old, new = self.expanded(old), self.expanded(new)
            return None if set(old) & set("*?[") else value.replace(old, new, -1 if kind == "//" else 1)
        pattern, length = self.expanded(rest), len(value)
        if kind.startswith("%"):
            cuts = range(length + 1) if len(kind) == 2 else range(length, -1, -1)
            return next((value[:cut] for cut in cuts if fnmatchcase(value[cut:], pattern)), value)
        cuts = range(length, -1, -1) if len(kind) == 2 else range(length + 1)
        return next((value[cut:] for cut in cuts if fnmatchcase(value[:cut], pattern)), value)

    def _value(self, node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](self._value(node.left), self._value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._value(node.operand)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not self._value(node.operand)
        if isinstance(node, ast.BoolOp):
            values = [bool(self._value(one)) for one in node.values]
            return all(values) if isinstance(node.op, ast.And) else any(values)
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
            return _COMPARISONS[type(node.ops[0])](self._value(node.left), self._value(node.comparators[0]))
        if isinstance(node, ast.Name) and len(self.variables[node.id]) < _LONGEST_NUMBER:
            return int(self.variables[node.id])
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        raise ValueError(ast.dump(node))

    def _unresolved(self, shown: str) -> str:
        if self.live is not False and shown not in self.unresolved:
            self.unresolved.append(shown)
        return shown

    def _redirection(self) -> None:
        """`> file`, `2>&1`, `<<EOF … EOF`."""
        document = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?").match(self.text, self.at)
        if document:
            end = re.compile(rf"^\s*{document[1]}$", re.MULTILINE).search(self.text, document.end())
            self.at = end.end() if end else len(self.text)
            return
        skipped = re.compile(r"[<>]+&?\s*[^\s;|&]*").match(self.text, self.at)
        self.at = skipped.end() if skipped else self.at + 1


def _holds(words: list[str], word: str, piece: str) -> bool:
    """Whether blanks in an unquoted variable do not split the word: in an assignment, and in what is not expanded."""
    assigned = ASSIGNMENT.match(word) is not None and (not words or words[0] in DECLARATIONS)
    return assigned or "$(" in piece or "`" in piece


def closing(text: str, start: int) -> int:
    """The place of the bracket that closes the one at `start`; brackets in quotes do not count."""
    opening, depth, place = text[start], 0, start
    closes = {"(": ")", "{": "}"}[opening]
    while place < len(text):
        char = text[place]
        if char == "\\":
            place += 1
        elif char == "'" and opening == "(":
            place = _index(text, "'", place + 1)
        elif char == '"':
            place = _quote_end(text, place)
        depth += (char == opening) - (char == closes)
        if depth == 0:
            return place
        place += 1
    return len(text)


def _quote_end(text: str, start: int) -> int:
    """The double quote that closes the one at `start`; `$(…)` in between may hold quotes of its own."""
    place = start + 1
    while place < len(text) and text[place] != '"':
        if text[place] == "\\":
            place += 1
        elif text.startswith("$(", place):
            place = closing(text, place + 1)
        place += 1
    return place


def _index(text: str, wanted: str, start: int) -> int:
    found = text.find(wanted, start)
    return len(text) if found < 0 else found
