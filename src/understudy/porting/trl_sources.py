"""Reads a TRL configuration: Python keywords, a YAML or JSON file, or a command with `--key value` flags."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from understudy.errors import ConfigError
from understudy.porting.hydra_values import read_value, read_yaml
from understudy.porting.shell import read_script
from understudy.porting.sources import Source

_CALL = re.compile(r"(?:Config|Trainer|Arguments)$")
_SOURCES = "give a Python file, a YAML or JSON file, a shell script or a command with --key value"


def read_trl(words: Sequence[str]) -> Source:
    """`Source.program` names the class, or the script that is run."""
    if len(words) == 1 and re.search(r"[\s(]", words[0]):
        text = words[0]
        return _python(text, "the text") if re.search(r"\w+\(", text) else _command(text, "the command")
    first = Path(words[0]).expanduser()
    if first.suffix in (".py", ".yaml", ".yml", ".json", ".sh"):
        try:
            text = first.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{first} cannot be read ({error}); {_SOURCES}") from None
        if first.suffix == ".sh":
            return _command(text, str(first))
        source = _python(text, str(first)) if first.suffix == ".py" else Source(read_yaml(text, str(first)))
        _flags(source, words[1:])
        return source
    source = Source()
    _flags(source, words)
    if not source.keys:
        raise ConfigError(f"no key in {' '.join(words)!r}; {_SOURCES}")
    return source


def _python(text: str, name: str) -> Source:
    """Keywords of every call of a `…Config` or `…Trainer`; only literals are read."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"{name} is not Python: {error}") from None
    source = Source()
    for node in ast.walk(tree):
        called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        if not isinstance(node, ast.Call) or not _CALL.search(called):
            continue
        for word in node.keywords:
            try:
                value = ast.literal_eval(word.value)
            except ValueError:
                if word.arg not in ("args", "processing_class", "peft_config", None):
                    source.notes.append(
                        f"{called}({word.arg}={ast.unparse(word.value)}) is no literal; set its counterpart yourself"
                    )
                continue
            if word.arg:
                source.keys[word.arg] = value
        source.program = (
            called if called.endswith("Config") and called != "LoraConfig" else source.program or called
        )
    if not source.keys:
        raise ConfigError(f"{name} calls no …Config(key=value); {_SOURCES}")
    return source


def _command(text: str, name: str) -> Source:
    script = read_script(text, os.environ)
    found = [one.words for one in script.commands if sum(word.startswith("--") for word in one.words) > 1]
    if not found:
        raise ConfigError(f"{name} has no command with --key value; {_SOURCES}")
    source = Source(unresolved=script.unresolved)
    _flags(source, found[-1])
    return source


def _flags(source: Source, words: Sequence[str]) -> None:
    place = 0
    while place < len(words):
        word, place = words[place], place + 1
        if word.endswith(".py"):
            source.program = source.program or Path(word).name
        if not word.startswith("--"):
            continue
        key, equals, text = word[2:].partition("=")
        values: list[Any] = [read_value(text)] if equals else []
        while (
            not equals
            and place < len(words)
            and not words[place].startswith("--")
            and not words[place].endswith(".py")
        ):
            values.append(read_value(words[place]))
            place += 1
        name = key.replace("-", "_")
        if name == "config" and values:
            source.keys |= read_trl([str(values[0])]).keys
        else:
            source.keys[name] = True if not values else values[0] if len(values) == 1 else values
