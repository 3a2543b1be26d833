"""Whether a model's name in a recipe is a folder or a hub id, seen from the recipe's own folder.

Both may look alike: `models/student` and `Qwen/Qwen3-0.6B`. A name that is no folder counts as a folder that is missing where
something beside the recipe says so; all others are left to the hub, which is not asked here.
"""

from __future__ import annotations

import difflib
from pathlib import Path

_TYPO = 0.8
"""How alike a name must be to one that is there to count as a slip: `modls` and `models` are, `Qwen` and `qwen` are not."""


def resolved_model(name: str, base: Path) -> str:
    """A folder as an absolute path, also one that is missing and was surely meant; anything else as it came."""
    path = base / name
    if Path(name).is_absolute() or (not path.exists() and Path(name).exists()):
        return name
    if path.exists() or _is_missing_folder(name, base):
        return str(path.resolve())
    return name


def nearest_folder(path: Path, cutoff: float = 0.6) -> Path | None:
    """The folder most like one that does not exist: each missing part replaced by the nearest there is."""
    whole = path.resolve()
    found = Path(whole.anchor)
    for part in whole.parts[1:]:
        if not (found / part).is_dir():
            try:
                names = [entry.name for entry in found.iterdir() if entry.is_dir()]
            except OSError:  # a folder we may not look into
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
