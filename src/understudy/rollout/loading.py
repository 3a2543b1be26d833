"""Loads user code by name: `"package.module:object"`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from understudy.errors import ConfigError

_added: list[str] = []
"""Folders that `set_python_path` added to the Python path."""
_found: set[str] = set()
"""Top-level modules that were imported from them."""

_MOVED = {
    "understudy.rollout.reward": "understudy.rollout.rewards.builtin",
    "understudy.rollout.math_reward": "understudy.rollout.rewards.math_reward",
    "understudy.rollout.judge": "understudy.rollout.rewards.judge",
    "understudy.rollout.single_turn": "understudy.rollout.agents.single_turn",
    "understudy.rollout.tool_loop": "understudy.rollout.agents.tool_loop",
    "understudy.rollout.verifiers_env": "understudy.rollout.agents.verifiers_env",
}
"""Old names of modules that recipes may name → their current names."""


def moved(name: str) -> str | None:
    """What `module:object` is called now, where the module was moved."""
    module, _, attribute = name.partition(":")
    return f"{_MOVED[module]}:{attribute}" if module in _MOVED else None


def without_suffix(name: str) -> str | None:
    """What to write for `folder/module.py:object`; None if the name is not that of a file."""
    path, _, attribute = name.partition(":")
    if not path.endswith(".py") and "/" not in path:
        return None
    folder, module = str(Path(path).parent), Path(path).name.removesuffix(".py")
    where = f", with run.python_path = [{folder!r}]" if folder != "." else ""
    return f"a module is named without folder and .py; write {f'{module}:{attribute}'!r}{where}"


def set_python_path(folders: Sequence[str]) -> None:
    """Append these folders to the Python path, where they cannot hide an installed module. The folders
    of an earlier call are removed and their modules unloaded: two recipes may each have a `reward.py`."""
    folders = list(dict.fromkeys(folders))
    if folders == _added:
        return
    for folder in _added:
        if folder in sys.path:  # the program may have changed its path meanwhile
            sys.path.remove(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] in _found]:
        del sys.modules[name]
    _found.clear()
    _added[:] = [folder for folder in folders if folder not in sys.path]
    sys.path.extend(_added)
    importlib.invalidate_caches()


def load_object(name: str, what: str) -> Any:
    """The object at `module:object`; `what` is the setting that named it, for errors."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f'{what} = "{name}": expected "package.module:object"')
    if (hint := without_suffix(name)) is not None:
        raise ConfigError(f'{what} = "{name}": {hint}')
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        if (moved := _MOVED.get(module_name)) is not None:
            raise ConfigError(
                f'{what} = "{name}": the module is now {moved}; write "{moved}:{attribute}"'
            ) from None
        where = f"in {', '.join(_added)}" if _added else "beside the recipe"
        raise ConfigError(
            f'{what} = "{name}": module {module_name} cannot be imported ({error}); modules are looked up {where} and on '
            "the Python path (PYTHONPATH)"
        ) from error
    except Exception as error:
        raise ConfigError(
            f'{what} = "{name}": importing {module_name} raised {type(error).__name__}: {error}'
        ) from error
    place = getattr(found, "__file__", None) or "built in"
    top = module_name.partition(".")[0]
    if _folder_of(top) in _added:
        _found.add(top)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f'{what} = "{name}": {module_name} ({place}) has no {attribute}')
        found = getattr(found, part)
    return found


def _folder_of(module: str) -> str | None:
    """The folder of the Python path that a top-level module comes from."""
    origin = getattr(sys.modules.get(module), "__file__", None)
    if origin is None or module == __name__.partition(".")[0]:
        return None
    path = Path(origin)
    return str(path.parent.parent if path.stem == "__init__" else path.parent)
