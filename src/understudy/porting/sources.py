"""Reads what a user of hydra has: a YAML file, a shell script, or a command line with overrides, as dotted keys."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from understudy.config.base import flatten
from understudy.errors import ConfigError
from understudy.porting.hydra_values import dotted, followed, is_table, read_table, read_value
from understudy.porting.shell import Command, Script, read_script

_OVERRIDE = re.compile(r"(\+{0,2})([A-Za-z_]\w*(?:[./][\w-]+)*)(@[\w.]+)?=(.*)", re.DOTALL)
_REMOVAL = re.compile(r"~([A-Za-z_][\w./-]*)(=.*)?", re.DOTALL)
_YAML = (".yaml", ".yml", ".json")
_FORMS = "give a YAML file, a shell script or a command"


@dataclass(slots=True)
class Source:
    """What was given, as dotted keys, and what could not be read."""

    keys: dict[str, Any] = field(default_factory=dict)
    program: str = ""
    """The module or file that the command runs."""
    config: str = ""
    """The file that the command names with `--config-name`."""
    not_read: list[str] = field(default_factory=list)
    """Files of hydra that the configuration builds on."""
    notes: list[str] = field(default_factory=list)
    unresolved: list[str] = field(default_factory=list)
    """Parts of values that only a shell could expand."""


def read_source(words: Sequence[str]) -> Source:
    """Of a file and overrides, or of a command."""
    if len(words) == 1 and re.search(r"\s", words[0]):
        return _of_script(words[0], Path(), "the command")
    first = Path(words[0]).expanduser()
    if first.is_file():
        text = _text(first)
        if first.suffix in _YAML or (first.suffix != ".sh" and is_table(text)):
            source = Source()
            _of_file(source, first, text)
            _overrides(source, words[1:])
            return _finished(source)
        return _of_script(text, first, str(first), words[1:])
    if first.is_dir() or first.suffix in (*_YAML, ".sh"):
        what = "a folder" if first.is_dir() else "no file"
        raise ConfigError(f"{first} is {what}; {_FORMS}")
    source = Source()
    _of_command(source, words, Path())
    if not source.keys:
        raise ConfigError(f"{words[0]!r} is not a file, and no word of the command is key=value; {_FORMS}")
    return _finished(source)


def notes_on_shell(script: Script, command: Command) -> list[str]:
    """What a reader of the recipe should know of how the command was read."""
    notes = [
        f"the script reads {one} (`source`), which was not read here: its variables are not known"
        for one in script.sourced
    ]
    if command.undecided:
        names = ", ".join(f"${name}" for name in command.undecided)
        notes.append(
            f"{names}: set in a loop, or under a condition that only a shell can tell; the last value in the script was taken"
        )
    return notes


def _of_script(text: str, path: Path, name: str, more: Sequence[str] = ()) -> Source:
    """`more`: overrides behind the script's name."""
    script = read_script(text, os.environ, path)
    starts = [one for one in script.commands if _program(one.words) is not None]
    found = [one for one in starts if any(_is_key(word) for word in _arguments(one.words))]
    found = found or [one for one in script.commands if sum(map(_is_key, one.words)) > 2]
    if not found:
        raise ConfigError(f"{name} has no command with key=value words; {_FORMS} that starts a training")
    command = found[-1]
    source = Source(unresolved=script.unresolved, notes=notes_on_shell(script, command))
    _of_command(source, command.words, path.parent)
    if len(found) > 1:
        source.notes.append(f"{len(found)} commands have key=value words; the last one was read")
    source.notes += [
        f"{one.words[0]} begins a command of its own, for the line before it does not end with \\: it was not read"
        for one in script.commands
        if one is not command and _is_key(one.words[0])
    ]
    _overrides(source, more)
    return _finished(source)


def _of_command(source: Source, words: Sequence[str], folder: Path) -> None:
    """`folder`: where the script lies."""
    source.program = _program(words) or ""
    arguments = _arguments(words)
    given: dict[str, str] = {}
    for place, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        if flag in ("--config-name", "--config-path", "--config-dir", "-cn", "-cp", "-cd"):
            name = {"n": "name", "p": "path", "d": "path"}[flag[-1]] if flag[1] != "-" else flag[9:]
            given[name.replace("dir", "path")] = (
                value if equals else "".join(arguments[place + 1 : place + 2])
            )
    if "name" in given:
        source.config = given["name"].removesuffix(".yaml")
        path = given.get("path", "config")
        _compose(source, source.config, [Path(path), folder / path])
    _overrides(source, arguments)


def _compose(source: Source, name: str, folders: Sequence[Path]) -> None:
    """The keys of a file of hydra's and of those in its folder that it builds on, where they can be found."""
    found = next((file for one in folders if (file := one.expanduser() / f"{name}.yaml").is_file()), None)
    if found is None:
        source.not_read.append(name)
    else:
        _of_file(source, found, _text(found))


def _of_file(source: Source, path: Path, text: str) -> None:
    table = read_table(text, str(path))
    if not isinstance(table, Mapping):
        _overrides(source, table)
        return
    for one in table.get("defaults") or ():
        if isinstance(one, str) and one != "_self_" and one != path.stem:
            _compose(source, one, [path.parent])
        elif isinstance(one, Mapping):
            source.not_read += [f"{key}: {value}" for key, value in one.items() if value is not None]
    source.keys |= dotted(table)


def _finished(source: Source) -> Source:
    source.keys, missing = followed(source.keys)
    if missing:
        shown = "; ".join(missing[:5]) + (" …" if len(missing) > 5 else "")
        source.notes.append(
            f"{len(missing)} values refer to settings that are not given, and were left out: {shown}"
        )
    return source


def _overrides(source: Source, words: Sequence[str]) -> None:
    for word in words:
        found, removed = _OVERRIDE.fullmatch(word), _REMOVAL.fullmatch(word)
        if found and found[3]:
            source.not_read.append(word)
        elif found:
            value, key = read_value(found[4]), found[2].replace("/", ".")
            source.keys |= flatten({key: value}) if isinstance(value, Mapping) and value else {key: value}
        elif removed:
            name = removed[1].replace("/", ".")
            gone = [key for key in source.keys if key == name or key.startswith(f"{name}.")]
            for key in gone:
                del source.keys[key]
            source.notes.append(f"{word} takes the key out: it counts as not given")
        elif "=" in word and not word.startswith("-"):
            source.notes.append(f"{word} is not an override in hydra's form; it was not read")


def _program(words: Sequence[str]) -> str | None:
    """The module behind `-m`, or the Python file."""
    place = _program_place(words)
    return None if place is None else words[place]


def _arguments(words: Sequence[str]) -> Sequence[str]:
    place = _program_place(words)
    return words if place is None else words[place + 1 :]


def _program_place(words: Sequence[str]) -> int | None:
    for place, word in enumerate(words):
        if word.endswith(".py") or (place and words[place - 1] == "-m"):
            return place
    return None


def _is_key(word: str) -> bool:
    """`a.b=value`"""
    found = _OVERRIDE.fullmatch(word)
    return found is not None and "." in found[2]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
