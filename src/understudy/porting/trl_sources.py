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
from understudy.porting.shell import Command, read_script
from understudy.porting.sources import Source, notes_on_shell

_CALL = re.compile(r"(?:Config|Trainer|Arguments)$")
_SOURCES = "give a Python file, a YAML or JSON file, a shell script or a command with --key value"
_ADAPTER = {"r": "lora_r", "lora_alpha": "lora_alpha", "target_modules": "lora_target_modules",
            "lora_dropout": "lora_dropout"}  # fmt: skip
_QUANTIZED = {"load_in_4bit": "load_in_4bit", "load_in_8bit": "load_in_8bit"}
_NOT_OURS = ("GenerationConfig", "PretrainedConfig", "AutoConfig", "SamplingConfig")
_OBJECTS = ("args", "processing_class", "peft_config", "eval_dataset", "callbacks", "quantization_config")
"""Arguments that other calls of the file make, or that nothing is carried over from."""
_ROW_CHANGES = (
    "map",
    "filter",
    "select",
    "shuffle",
    "rename_column",
    "remove_columns",
    "select_columns",
    "sort",
    "cast",
)
_OPERATORS: dict[type, Any] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
}
_PROCESSES = ("num_processes", "nproc_per_node", "num_gpus")
_PRESETS = ("fsdp1", "fsdp2", "multi_gpu", "single_gpu", "zero1", "zero2", "zero3")
"""Files of accelerate that TRL ships; each has 8 processes."""


def read_trl(words: Sequence[str]) -> Source:
    """`Source.program` names the classes, or the script that is run."""
    if len(words) == 1 and re.search(r"[\s(]", words[0]):
        text = words[0]
        return (
            _python(text, "the text") if re.search(r"\w+\(", text) else _script(text, Path(), "the command")
        )
    first = Path(words[0]).expanduser()
    if first.suffix in (".py", ".yaml", ".yml", ".json", ".sh"):
        text = _text(first)
        if first.suffix == ".sh":
            return _script(text, first, str(first), words[1:])
        source = _python(text, str(first)) if first.suffix == ".py" else _table(text, first)
        _flags(source, words[1:], first.parent)
        return source
    source = Source()
    _command(source, words, Path())
    if not source.keys:
        raise ConfigError(f"no key in {' '.join(words)!r}; {_SOURCES}")
    return source


def _table(text: str, path: Path) -> Source:
    keys = {key: value for key, value in read_yaml(text, str(path)).items() if not key.startswith("env.")}
    if "distributed_type" in keys or "compute_environment" in keys:
        raise ConfigError(
            f"{path} is accelerate's file; give the command that uses it: -- accelerate launch --config_file {path} SCRIPT.py --key value"
        )
    source = Source(keys)
    _accelerate(source, keys.pop("accelerate_config", None), path.parent)
    return source


# Python


def _python(text: str, name: str) -> Source:
    """Keywords of the calls of a `…Config` or `…Trainer`, with names that are assigned once followed."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"{name} is not Python: {error}") from None
    source, values = Source(), _Values(tree)
    for node in ast.walk(tree):
        called = _called(node)
        if isinstance(node, ast.Call) and _CALL.search(called) and called not in _NOT_OURS:
            _read_call(source, node, called, values)
    if not source.keys:
        parser = "TrlParser" in text or "HfArgumentParser" in text
        raise ConfigError(
            f"{name} reads its settings from the command line; give the command: -- python {name} --key value"
            if parser
            else f"{name} calls no …Config(key=value); {_SOURCES}"
        )
    return source


def _read_call(source: Source, node: ast.Call, called: str, values: _Values) -> None:
    trainer = called.endswith("Trainer")
    if called == "LoraConfig":
        source.keys["use_peft"] = True
    names = {"LoraConfig": _ADAPTER, "BitsAndBytesConfig": _QUANTIZED}.get(called)
    given = [*zip(("model", "teacher_model") if trainer else ("output_dir",), node.args, strict=False)]
    given += [(word.arg, word.value) for word in node.keywords if word.arg]
    for key, value in given:
        if key in _OBJECTS or (names is not None and key not in names):
            continue
        key = key if names is None else names[key]
        if key == "train_dataset":
            _rows(source, value, values)
            continue
        try:
            source.keys[key] = values.of(value)
        except ValueError:
            source.notes.append(
                f"{called}({key}={ast.unparse(value)}) is not a literal; set its counterpart yourself"
            )
    if names is None and called not in source.program.split():
        source.program = f"{source.program} {called}".strip()


def _rows(source: Source, value: ast.expr, values: _Values) -> None:
    """`load_dataset(…)`, through names, `["train"]` and what changes its rows."""
    split, changes = None, list[str]()
    node, seen = value, set[str]()
    while not (isinstance(node, ast.Call) and _called(node) == "load_dataset"):
        if isinstance(node, ast.Name) and node.id in values.assigned_to and node.id not in seen:
            seen.add(node.id)
            changes = [*values.changes.get(node.id, ()), *changes]
            node = values.assigned_to[node.id]
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            split, node = str(node.slice.value), node.value
        elif (change := _row_change(node)) is not None:
            changes, node = [change[0], *changes], change[1]
        else:
            source.notes.append(
                f"train_dataset={ast.unparse(value)} is not a literal; set data.train yourself"
            )
            return
    names = dict(zip(("dataset_name", "dataset_config"), node.args, strict=False))
    words = {
        "path": "dataset_name",
        "name": "dataset_config",
        "split": "dataset_train_split",
        "data_files": "dataset_name",
    }
    names |= {words[word.arg]: word.value for word in node.keywords if word.arg in words}
    try:
        found = {key: values.of(one) for key, one in names.items()}
    except ValueError:
        source.notes.append(f"{ast.unparse(node)} is not a literal; set data.train yourself")
        return
    source.keys |= found | ({"dataset_train_split": split} if split else {})
    if changes:
        source.notes.append(
            f"the script changes the rows with .{', .'.join(changes)}: data.train is the dataset before that; save what it makes, and name the file"
        )


def _row_change(node: ast.expr) -> tuple[str, ast.expr] | None:
    """`rows.map(…)` as `map` and `rows`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ROW_CHANGES:
        return node.func.attr, node.func.value
    return None


class _Values:
    """Literal values of expressions, with names followed to what the file assigns to them."""

    def __init__(self, tree: ast.AST) -> None:
        self.assigned_to: dict[str, ast.expr] = {}
        self.changes: dict[str, list[str]] = {}
        """Of `rows = rows.map(…)`, by name: what it was before is in `assigned_to`."""
        for node in ast.walk(tree):
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    self._assign(target.id, node.value)

    def _assign(self, name: str, value: ast.expr) -> None:
        if any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(value)):
            changes: list[str] = []
            while (change := _row_change(value)) is not None:
                changes, value = [change[0], *changes], change[1]
            self.changes.setdefault(name, []).extend(changes)
        else:
            self.assigned_to[name] = value

    def assigned(self, node: ast.expr, depth: int = 0) -> ast.expr:
        if isinstance(node, ast.Name) and node.id in self.assigned_to and depth < 8:
            return self.assigned(self.assigned_to[node.id], depth + 1)
        return node

    def of(self, node: ast.expr) -> Any:
        node = self.assigned(node)
        if isinstance(node, ast.Call) and _called(node) == "from_pretrained" and node.args:
            return self.of(node.args[0])
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            try:
                return _OPERATORS[type(node.op)](self.of(node.left), self.of(node.right))
            except (TypeError, ZeroDivisionError) as error:
                raise ValueError(str(error)) from None
        if isinstance(node, ast.JoinedStr):
            return "".join(
                str(self.of(one.value if isinstance(one, ast.FormattedValue) else one)) for one in node.values
            )
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            return node.attr
        return ast.literal_eval(node)


def _called(node: ast.AST) -> str:
    return ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


# Commands


def _script(text: str, path: Path, name: str, more: Sequence[str] = ()) -> Source:
    script = read_script(text, os.environ, path)
    found = [one for one in script.commands if _program_place(one.words) is not None and _has_flags(one)]
    found = found or [one for one in script.commands if sum(word.startswith("--") for word in one.words) > 1]
    if not found:
        raise ConfigError(f"{name} has no command with --key value; {_SOURCES}")
    command = found[-1]
    source = Source(unresolved=script.unresolved, notes=notes_on_shell(script, command))
    if len(found) > 1:
        source.notes.append(f"{len(found)} commands have --key value words; the last one was read")
    _command(source, [*command.words, *more], path.parent)
    return source


def _has_flags(command: Command) -> bool:
    place = _program_place(command.words)
    return any(word.startswith("--") for word in command.words[place:])


def _program_place(words: Sequence[str]) -> int | None:
    """Of the Python file, or of the word behind `trl`."""
    for place, word in enumerate(words):
        if word.endswith(".py"):
            return place
        if place and words[place - 1] == "trl" and not word.startswith("-"):
            return None if word in ("vllm-serve", "env") else place
    return None


def _command(source: Source, words: Sequence[str], folder: Path) -> None:
    place = _program_place(words)
    if place is None:
        _flags(source, words, folder)
        return
    source.program = Path(words[place]).name
    launcher = Source()
    _flags(launcher, words[:place], folder)
    _flags(source, words[place + 1 :], folder)
    _accelerate(source, source.keys.pop("accelerate_config", None), folder)
    for key, value in launcher.keys.items():
        if key == "config_file":
            _accelerate(source, value, folder)
    nodes = launcher.keys.get("nnodes", 1)
    for key, value in launcher.keys.items():
        if key in _PROCESSES and isinstance(value, int):
            several = key == "nproc_per_node" and isinstance(nodes, int)
            source.keys["num_processes"] = value * nodes if several else value
        else:
            source.keys[f"launcher.{key}"] = value


def _accelerate(source: Source, name: Any, folder: Path) -> None:
    """The number of processes in a file of accelerate's, or in one of those that TRL ships."""
    if name is None:
        return
    file = next((one for one in (Path(str(name)).expanduser(), folder / str(name)) if one.is_file()), None)
    if file is not None:
        processes = read_yaml(_text(file), str(file)).get("num_processes")
        if isinstance(processes, int):
            source.keys.setdefault("num_processes", processes)
    elif str(name) in _PRESETS:
        source.keys.setdefault("num_processes", 8)
    else:
        source.notes.append(
            f"{name} was not found: set trainer.ranks to the number of processes in it, and multiply trainer.batch_size"
        )


def _flags(source: Source, words: Sequence[str], folder: Path) -> None:
    """`--key value`, `--key=value`, `--key`, `--key a b`; `--no_key` turns one off."""
    place = 0
    while place < len(words):
        word, place = words[place], place + 1
        if not word.startswith("--"):
            continue
        key, equals, text = word[2:].partition("=")
        values: list[Any] = [read_value(text)] if equals else []
        while not equals and place < len(words) and not words[place].startswith("--"):
            values.append(read_value(words[place]))
            place += 1
        name = key.replace("-", "_")
        if name == "config" and values:
            path = Path(str(values[0])).expanduser()
            path = path if path.is_file() or path.is_absolute() else folder / path
            base = _table(_text(path), path)
            source.keys = base.keys | source.keys
            source.notes += base.notes
        elif not values and name.startswith("no_"):
            source.keys[name.removeprefix("no_")] = False
        else:
            source.keys[name] = True if not values else values[0] if len(values) == 1 else values


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); {_SOURCES}") from None
