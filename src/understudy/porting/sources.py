"""Reads what a user has: a YAML file, a shell script, or a command line with hydra overrides, as dotted keys."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from understudy.config.base import flatten
from understudy.errors import ConfigError
from understudy.porting.shell import read_script

_OVERRIDE = re.compile(r"(\+{0,2})([A-Za-z_]\w*(?:[./][\w-]+)*)=(.*)", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,\s*([^}]*))?\}")
_YAML = (".yaml", ".yml", ".json")
_NO_KEYS = ("_target_", "defaults", "hydra")
"""Parts of a hydra file that are about hydra."""


@dataclass(slots=True)
class Source:
    """What was given, as dotted keys, and what could not be read."""

    keys: dict[str, Any] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    """Flags of hydra, such as `--config-name=…`."""
    program: str = ""
    """The module that the command runs."""
    notes: list[str] = field(default_factory=list)
    unresolved: list[str] = field(default_factory=list)
    """Parts of values that only a shell could expand."""


def read_source(arguments: Sequence[str], marker: str) -> Source:
    """Of a file and overrides, or of a command. `marker` is in the command that a script is searched for."""
    if len(arguments) == 1 and re.search(r"\s", arguments[0]):
        return _of_script(arguments[0], marker, "the command")
    first = Path(arguments[0]).expanduser()
    if first.is_file():
        text = _text(first)
        yaml_file = first.suffix in _YAML or (first.suffix != ".sh" and _is_yaml(text))
        source = Source(read_yaml(text, str(first))) if yaml_file else _of_script(text, marker, str(first))
        _add(source, arguments[1:])
        return source
    if first.suffix in (*_YAML, ".sh"):
        raise ConfigError(f"no file at {first}; give a YAML file, a shell script or a command")
    source = Source()
    _add(source, arguments)
    if not source.keys:
        raise ConfigError(
            f"{arguments[0]!r} is no file, and no word of the command is key=value; give a YAML file, a shell script or a command"
        )
    return source


def read_yaml(text: str, name: str) -> dict[str, Any]:
    try:
        table = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not YAML: {error}") from None
    if not isinstance(table, Mapping):
        raise ConfigError(f"{name} holds {type(table).__name__}; expected a table of keys")
    flat = {
        key: _typed(value)
        for key, value in flatten({k: v for k, v in table.items() if k not in _NO_KEYS}).items()
        if key.rpartition(".")[2] not in _NO_KEYS
    }
    return {key: value for key in flat if (value := _resolved(flat, key, 0)) is not _UNKNOWN}


def read_value(text: str) -> Any:
    """A value of a hydra override. YAML, but `1e-6` is a number."""
    try:
        value = yaml.safe_load(text) if text.strip() else ""
    except yaml.YAMLError:
        value = text
    return text if isinstance(value, Mapping) and not text.lstrip().startswith("{") else _typed(value)


def _typed(value: Any) -> Any:
    if isinstance(value, list):
        return [_typed(one) for one in value]
    if isinstance(value, str):
        if _NUMBER.fullmatch(value):
            return float(value)
        return None if value in ("None", "none", "???") else value  # ???: needed, and not given
    return value


_UNKNOWN = object()
"""Marks a reference that leads nowhere: the value is another key's, or hydra's own."""


def _resolved(flat: Mapping[str, Any], key: str, depth: int) -> Any:
    value = flat[key]
    if not isinstance(value, str) or "${" not in value or depth > 8:
        return value
    found = _REFERENCE.fullmatch(value)
    if found is None:
        return _UNKNOWN
    if found[1] in flat:
        return _resolved(flat, found[1], depth + 1)
    return read_value(found[2]) if found[2] else _UNKNOWN


def _of_script(text: str, marker: str, name: str) -> Source:
    script = read_script(text, os.environ)
    ours = [command for command in script.commands if any(marker in word for word in command)]
    ours = ours or [command for command in script.commands if sum(map(_is_override, command)) > 2]
    if not ours:
        raise ConfigError(
            f"{name} has no command with {marker!r} in it and no key=value words; nothing to import"
        )
    source = Source()
    _add(source, ours[-1])
    if len(ours) > 1:
        source.notes.append(f"{len(ours)} commands run {marker}; the last one was read")
    source.unresolved = script.unresolved
    return source


def _is_override(word: str) -> bool:
    return _OVERRIDE.fullmatch(word) is not None


def _add(source: Source, arguments: Sequence[str]) -> None:
    for place, word in enumerate(arguments):
        found = _OVERRIDE.fullmatch(word)
        if found:
            source.keys[found[2].replace("/", ".")] = read_value(found[3])
        elif word.startswith("--"):
            source.flags.append(word)
        elif word.startswith("~"):
            source.notes.append(f"{word} removes a key; it was not followed")
        elif place and arguments[place - 1] == "-m":
            source.program = word


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _is_yaml(text: str) -> bool:
    try:
        return isinstance(yaml.safe_load(text), Mapping)
    except yaml.YAMLError:
        return False
