"""Makes a Python caller's objects storable in a recipe: rows, functions and classes.

| object                | stored as                                                                      |
|-----------------------|--------------------------------------------------------------------------------|
| rows                  | a temporary jsonl file, which `launch` copies into the run directory           |
| functions and classes | "module:name", if a process can import it; the folder is in `run.python_path`  |

Other processes resume and evaluate a run, and they have only the run directory. Imports no torch.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import site
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from understudy.config import DataConfig
from understudy.errors import ConfigError
from understudy.observability.rundir import RunDir, copy_durably
from understudy.rollout.loading import load_object
from understudy.rollout.sources import write_rows

_ROWS = ("train", "eval")
"""Keys of `[data]` whose value may be rows."""
_ADVICE = "put it into a module of its own (a .py file) and import it from there"
_GUARDS = ("__name__ == '__main__'", "'__main__' == __name__")


@dataclass(frozen=True, slots=True)
class GivenRows:
    """The temporary files of rows that the caller gave as objects. The run directory gets copies."""

    folder: Path

    def reworded(self, problem: str) -> str:
        """An error message with the file and line replaced by the key and row number that the caller
        knows."""
        files = "|".join(re.escape(str(self.folder / f"{key}.jsonl")) for key in _ROWS)
        return re.sub(
            f"({files})(?:, line (\\d+))?",
            lambda found: f"data.{Path(found[1]).stem}" + (f", row {found[2]}" if found[2] else ""),
            problem,
        )

    def keep(self, data: DataConfig, run: RunDir) -> DataConfig:
        """Copies the rows into the run directory. Returns the section that names the copies."""
        changes: dict[str, Any] = {}
        for key in _ROWS:
            given = self.folder / f"{key}.jsonl"
            if given.is_file():
                changes[key] = [str(copy_durably(given, run.data / given.name))]
        return data.model_copy(update=changes)


@contextmanager
def storable(table: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], GivenRows]]:
    """The recipe's tables with plain values only, and the files of the rows that were in them."""
    with TemporaryDirectory(prefix="understudy-") as name:
        folder, tables = Path(name), dict(table)
        data = tables.get("data")
        if isinstance(data, Mapping):
            tables["data"] = dict(data)
            for key in _ROWS:
                if not isinstance(data.get(key), str | Path | None) and not _are_paths(data[key]):
                    _refuse_no_rows(data[key], f"data.{key}")
                    path = folder / f"{key}.jsonl"
                    write_rows(data[key], path, f"data.{key}")
                    tables["data"][key] = str(path)
        plain, folders = _plain(tables, ""), sorted(_folders(tables))
        if folders:
            run = plain.setdefault("run", {})
            run["python_path"] = [*run.get("python_path", []), *folders]
        yield plain, GivenRows(folder)


def name_of(thing: Any, key: str) -> str:
    """`module:name` of a function or class. `ConfigError` if another process could not import it by that
    name."""
    module_name, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module_name, str) or not isinstance(name, str):
        raise ConfigError(
            f"{key} is a {type(thing).__name__} without a name to import it by; make it a function, or name the object "
            "as 'module:object'"
        )
    shown = f"{key} = {name}"
    if "<" in name:
        kind = "a lambda" if name.endswith("<lambda>") else "defined inside a function"
        raise ConfigError(f"{shown} is {kind}, and a resumed run could not import it; {_ADVICE}")
    if module_name == "__main__":
        return f"{_importable_main(thing, shown)}:{name}"
    reference = f"{module_name}:{name}"
    if load_object(reference, key) is not thing:
        raise ConfigError(
            f"{shown}: {reference} is another object than the one given (a bound method, or redefined), and a resumed run "
            f"would import that one; {_ADVICE}"
        )
    return reference


def _importable_main(thing: Any, shown: str) -> str:
    """The module name of the running script. `ConfigError` if importing it would start the run again."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    code = getattr(thing, "__code__", None)
    if file is None or (code is not None and Path(code.co_filename).resolve() != Path(file).resolve()):
        raise ConfigError(
            f"{shown} was typed into a notebook or an interpreter, and a resumed run could not import it; {_ADVICE} "
            "(in a notebook: %%writefile my_rewards.py)"
        )
    spec = getattr(main, "__spec__", None)
    module = spec.name if spec is not None else Path(file).stem
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None or not Path(found.origin).samefile(file):
        raise ConfigError(f"{shown} is in {file}, which cannot be imported as {module}; {_ADVICE}")
    if not _is_guarded(main, Path(file)):
        raise ConfigError(
            f"{shown} is in the script {file} itself, and importing it again would start the run again: write the call under "
            f"`if __name__ == '__main__':`, or {_ADVICE}"
        )
    return module


def _is_guarded(main: ModuleType, file: Path) -> bool:
    """Whether the statement that the script is executing now is under `if __name__ == '__main__':`."""
    inside = threading.current_thread() is threading.main_thread()
    frame = sys._getframe() if inside else sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and (frame.f_globals is not vars(main) or frame.f_code.co_name != "<module>"):
        frame = frame.f_back
    if frame is None:
        return False
    line = frame.f_lineno
    for statement in ast.parse(file.read_bytes()).body:
        if statement.lineno <= line <= (statement.end_lineno or line):
            return isinstance(statement, ast.If) and ast.unparse(statement.test) in _GUARDS
    return False


def _refuse_no_rows(value: Any, key: str) -> None:
    if hasattr(value, "to_dict") and hasattr(value, "iloc"):
        raise ConfigError(f"{key} is a {type(value).__name__}; give its rows: table.to_dict('records')")
    if not isinstance(value, Iterable) or isinstance(value, bytes):
        raise ConfigError(
            f"{key} is a {type(value).__name__}; expected a path, a list of paths, or rows (a list of dicts, a datasets.Dataset)"
        )


def _plain(value: Any, key: str) -> Any:
    """A copy of tables and lists, with paths as text and functions and classes by name."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one, f"{key}.{name}" if key else str(name)) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, f"{key}[{number}]") for number, one in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    return name_of(value, key) if callable(value) else value


def _folders(value: Any) -> set[str]:
    """The folders from which these functions and classes are imported, without those of installed
    packages."""
    if isinstance(value, Mapping):
        return set().union(*map(_folders, value.values()))
    if isinstance(value, list | tuple):
        return set().union(*map(_folders, value))
    module = sys.modules.get(getattr(value, "__module__", "")) if callable(value) else None
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__.startswith("understudy."):
        return set()
    spec = getattr(module, "__spec__", None)
    name = spec.name if spec is not None else Path(file).stem  # a script has no spec
    depth = name.count(".") + (Path(file).stem == "__init__")
    folder = Path(file).resolve().parents[depth]
    installed = (Path(path) for path in (sys.prefix, sys.base_prefix, *site.getsitepackages()))
    return set() if any(folder.is_relative_to(place) for place in installed) else {str(folder)}


def _are_paths(value: Any) -> bool:
    return (
        isinstance(value, list | tuple) and bool(value) and all(isinstance(one, str | Path) for one in value)
    )
