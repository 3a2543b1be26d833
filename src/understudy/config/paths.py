"""Makes the paths in a recipe absolute: what lies beside the recipe first, then what lies in the working directory.

A run may be resumed, evaluated or exported from another folder. A model's name may be a folder or a hub id, which
look alike: `models/student` and `Qwen/Qwen3-0.6B`. A name that is no existing folder counts as a
missing folder if the files beside the recipe suggest so; any other name counts as a hub id, and the hub is
not asked here.
"""

from __future__ import annotations

import difflib
import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from understudy.config.checks.self_teachers import STUDENT

_TYPO = 0.8
"""How similar a name must be to an existing one to count as a typo: `modls` and `models` are, `Qwen` and
`qwen` are not."""


def resolve_paths(table: dict[str, Any], base: Path) -> None:
    """Makes the paths in a recipe's plain tables absolute. `base`: the recipe's folder."""
    resolve_run_paths(table, base, python_path=["."])
    models = [table.get(role) for role in ("student", "critic", "reference")]
    models += _tables(table.get("teachers"))
    for section in models:
        if not isinstance(section, dict) or not isinstance(section.get("model"), str):
            continue
        if section is not table.get("student") and section["model"] == STUDENT:
            continue
        # The model name of an external server need not be a folder here.
        find = _beside if section.get("placement") == "external" else resolved_model
        section["model"] = find(section["model"], base)
    data = table.get("data")
    if isinstance(data, dict):
        for key in ("train", "eval"):
            if isinstance(data.get(key), str | list):
                given = data[key] if isinstance(data[key], list) else [data[key]]
                data[key] = [one for entry in given for one in _data_files(entry, base)]


def resolve_run_paths(table: dict[str, Any], base: Path, python_path: Sequence[str] | None = None) -> None:
    """The same for `run.dir`, `run.python_path` and paths of servers, which a resume may change. `python_path`: in
    place of one that is not given."""
    run = table.setdefault("run", {})
    if isinstance(run, dict):
        _expand_home(run, "dir")
        own = run.get("python_path", python_path)
        if isinstance(own, list):
            run["python_path"] = [
                str((base / _home(one)).resolve()) if isinstance(one, str) else one for one in own
            ]
    for section in (table.get("rollout"), *_tables(table.get("teachers"))):
        _expand_home(section, "vllm_python", "snapshots")


def _expand_home(section: Any, *keys: str) -> None:
    for key in keys:
        if isinstance(section, dict) and isinstance(section.get(key), str):
            section[key] = _home(section[key])


def _home(name: str) -> str:
    """`~` is expanded here: a shell leaves it alone in `key=~/folder`, and TOML knows nothing of it."""
    return os.path.expanduser(name)


def _tables(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else []


def _beside(name: str, base: Path) -> str:
    """A file or folder beside the recipe as an absolute path; any other name unchanged."""
    name = _home(name)
    path = base / name
    return str(path.resolve()) if name and not Path(name).is_absolute() and path.exists() else name


def _data_files(entry: Any, base: Path) -> list[Any]:
    """A file, or the files that a glob matches, in alphabetical order; anything else is unchanged. The recipe in a
    run directory names the files the run began with: a file added to the folder later does not change it."""
    if not isinstance(entry, str) or not entry.strip():  # an empty name is no name of the recipe's folder
        return [entry]
    entry = _home(entry)
    for place in (base / entry, Path(entry)):
        if place.exists():
            return [_file(place)]
        if glob.has_magic(entry) and (found := glob.glob(str(place), recursive=True)):
            return [_file(Path(one)) for one in sorted(found)]
    # In a folder beside the recipe: a mistyped path rather than a name on the hub.
    return (
        [str(base / entry)]
        if len(Path(entry).parts) > 1 and (base / Path(entry).parts[0]).is_dir()
        else [entry]
    )


def _file(place: Path) -> str:
    """The absolute path. A link keeps its own name if only that says what is in the file: the hub's cache and DVC
    link `train.jsonl` to a file named by its hash."""
    path = place.resolve()
    return str(path if path.suffix == place.suffix else place.absolute())


def resolved_model(name: str, base: Path) -> str:
    """A folder as an absolute path, also a missing one that was clearly meant; any other name unchanged."""
    if not name.strip():
        return name
    name = _home(name)
    path = base / name
    if Path(name).is_absolute():
        return name
    if path.exists() or (not Path(name).exists() and _is_missing_folder(name, base)):
        return str(path.resolve())
    return str(Path(name).resolve()) if Path(name).exists() else name


def nearest_folder(path: Path, cutoff: float = 0.6) -> Path | None:
    """The existing folder most like a missing one: each missing part is replaced by the nearest existing
    name."""
    whole = path.resolve()
    found = Path(whole.anchor)
    for part in whole.parts[1:]:
        if not (found / part).is_dir():
            try:
                names = [entry.name for entry in found.iterdir() if entry.is_dir()]
            except OSError:  # no permission to list the folder
                return None
            near = difflib.get_close_matches(part, names, n=1, cutoff=cutoff)
            if not near:
                return None
            found /= near[0]
        else:
            found /= part
    return found


def _is_missing_folder(name: str, base: Path) -> bool:
    if not name or name.startswith("."):
        return bool(name)
    first, *rest = Path(name).parts
    if rest and (base / first).is_dir():
        return True
    near = nearest_folder(base / name, _TYPO)
    return near is not None and (bool(rest) or (near / "config.json").is_file())
