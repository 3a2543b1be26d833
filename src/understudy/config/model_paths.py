"""Decides whether a model's name in a recipe is a folder or a hub id, relative to the recipe's folder.

Both may look alike: `models/student` and `Qwen/Qwen3-0.6B`. A name that is no existing folder counts as a
missing folder if the files beside the recipe suggest so; any other name counts as a hub id, and the hub is
not asked here.
"""

from __future__ import annotations

import difflib
from pathlib import Path

_TYPO = 0.8
"""How similar a name must be to an existing one to count as a typo: `modls` and `models` are, `Qwen` and
`qwen` are not."""


def resolved_model(name: str, base: Path) -> str:
    """A folder as an absolute path, also a missing one that was clearly meant; any other name unchanged."""
    path = base / name
    if not name.strip():
        return name
    if Path(name).is_absolute() or (not path.exists() and Path(name).exists()):
        return name
    if path.exists() or _is_missing_folder(name, base):
        return str(path.resolve())
    return name


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
