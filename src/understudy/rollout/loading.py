"""User code enters by name: `"package.module:object"`."""

from __future__ import annotations

import importlib
from typing import Any

from understudy.errors import ConfigError


def load_object(name: str, what: str) -> Any:
    """The object at `module:object`; `what` says in the error which setting named it."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f'{what} = "{name}": expected "package.module:object"')
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f'{what} = "{name}": module {module_name} cannot be imported ({error})') from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f'{what} = "{name}": {module_name} has no {attribute}')
        found = getattr(found, part)
    return found
