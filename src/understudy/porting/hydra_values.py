"""YAML as hydra reads it, values of its overrides, and its references between keys (`${a.b}`)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import yaml

from understudy.config.base import flatten
from understudy.errors import ConfigError

_WHOLE = re.compile(r"[-+]?(0|[1-9]\d*)")
_NUMBER = re.compile(r"[-+]?((\d+\.\d*|\.\d+)([eE][-+]?\d+)?|\d+[eE][-+]?\d+)")
_REFERENCE = re.compile(r"\$\{(oc\.\w+:[^${}]*|\.*[A-Za-z_][\w-]*\.[\w.-]+|\.+[\w.-]+)\}")
_DEEPEST = 8
_NO_KEYS = ("_target_", "defaults", "hydra")
"""Parts of a hydra file that are about hydra."""


class _Loader(yaml.SafeLoader):
    """Without dates and numbers of base 60: hydra has neither, and `2026-01-02` is a name."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if not tag.endswith((":timestamp", ":int", ":float", ":value"))
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][\d_]*)$"), list("-+0123456789")
)


def read_table(text: str, name: str) -> Any:
    """A YAML file: a table, or the list of words that hydra writes into `overrides.yaml`."""
    try:
        table = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not YAML: {error}") from None
    if table is None:
        raise ConfigError(f"{name} is empty; expected a table of keys")
    if isinstance(table, list) and table and all(isinstance(one, str) and "=" in one for one in table):
        return table
    if not isinstance(table, Mapping):
        raise ConfigError(f"{name} holds {type(table).__name__}; expected a table of keys")
    return table


def is_table(text: str) -> bool:
    try:
        return isinstance(yaml.load(text, _Loader), Mapping)
    except yaml.YAMLError:
        return False


def dotted(table: Mapping[str, Any]) -> dict[str, Any]:
    """Its keys, dotted, without those about hydra."""
    flat = flatten({str(key): value for key, value in table.items() if key not in _NO_KEYS})
    return {key: _typed(value) for key, value in flat.items() if key.rpartition(".")[2] not in _NO_KEYS}


def read_yaml(text: str, name: str) -> dict[str, Any]:
    """Dotted keys of a YAML or JSON file, with its references followed."""
    table = read_table(text, name)
    if not isinstance(table, Mapping):
        raise ConfigError(f"{name} holds a list; expected a table of keys")
    return followed(dotted(table))[0]


def read_value(text: str) -> Any:
    """A value of an override. YAML, but `1e-6` is a number, and `{a:1}` needs no blank."""
    try:
        value = yaml.load(text, _Loader) if text.strip() else ""
        if text.lstrip().startswith("{") and _unspaced(value):
            value = yaml.load(re.sub(r":(?=[^\s/])", ": ", text), _Loader)
    except yaml.YAMLError:
        value = text
    return text if isinstance(value, Mapping) and not text.lstrip().startswith("{") else _typed(value)


def _unspaced(value: Any) -> bool:
    """`{a:1}` as YAML reads it: one key, `a:1`, without a value."""
    if isinstance(value, Mapping):
        return any((one is None and ":" in str(key)) or _unspaced(one) for key, one in value.items())
    return isinstance(value, list) and any(_unspaced(one) for one in value)


def _typed(value: Any) -> Any:
    if isinstance(value, list):
        return [_typed(one) for one in value]
    if isinstance(value, Mapping):
        return {key: _typed(one) for key, one in value.items()}
    if isinstance(value, str):
        if _WHOLE.fullmatch(value):
            return int(value)
        if _NUMBER.fullmatch(value):
            return float(value)
        return None if value in ("None", "none", "???") else value  # ???: needed, and not given
    return value


def followed(keys: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The keys with the values that they refer to, and `key = reference` of those that refer to a key that is not
    there; these are left out."""
    found: dict[str, Any] = {}
    missing: list[str] = []
    for key, value in keys.items():
        try:
            followed_value = _follow(keys, key, value, 0)
        except KeyError:
            missing.append(f"{key} = {value}")
        else:
            found |= flatten({key: followed_value})
    return found, missing


def _follow(keys: Mapping[str, Any], key: str, value: Any, depth: int) -> Any:
    if isinstance(value, list):
        return [_follow(keys, key, one, depth) for one in value]
    if not isinstance(value, str) or depth > _DEEPEST:
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole is not None:
        return _referred(keys, key, whole[1], depth)
    filled = _REFERENCE.sub(lambda found: str(_referred(keys, key, found[1], depth)), value)
    return value if filled == value else _follow(keys, key, filled, depth + 1)  # `${a.b,${c.d}}`


def _referred(keys: Mapping[str, Any], key: str, reference: str, depth: int) -> Any:
    kind, colon, rest = reference.partition(":")
    name, comma, default = (rest if colon else kind).partition(",")
    name = name.strip()
    if kind == "oc.env":
        if name not in os.environ and not comma:
            raise KeyError(name)
        return _typed(os.environ[name]) if name in os.environ else read_value(default.strip())
    if colon and kind != "oc.select":
        raise KeyError(reference)
    dots = len(name) - len(name.lstrip("."))
    if dots:
        parents = key.split(".")[: -dots or None]
        name = ".".join([*parents, name[dots:]])
    if name in keys:
        return _follow(keys, name, keys[name], depth + 1)
    section = [one for one in keys if one.startswith(f"{name}.")]
    if section and depth < _DEEPEST:
        return {one.removeprefix(f"{name}."): _follow(keys, one, keys[one], depth + 1) for one in section}
    if kind == "oc.select":
        return read_value(default.strip()) if comma else None
    raise KeyError(name)
