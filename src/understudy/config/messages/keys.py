"""Every key of a recipe by its path, and a description of its allowed values.

Paths hold NAME where a user chooses the name: `teachers.NAME.model`, `cluster.pools.NAME.nodes`.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

NAME = "NAME"


@dataclass(frozen=True, slots=True)
class KeyType:
    """An annotation without `Annotated` and `None`: its arms (more than one for a union), and the bounds of a number."""

    arms: tuple[Any, ...]
    bounds: tuple[Any, ...] = ()

    @property
    def section(self) -> type[BaseModel] | None:
        """The config section, if it is one."""
        arm = self.arms[0]
        return arm if isinstance(arm, type) and issubclass(arm, BaseModel) else None

    @property
    def values(self) -> Any:
        """The annotation of a mapping's values, or None."""
        return next((typing.get_args(arm)[1] for arm in self.arms if typing.get_origin(arm) is dict), None)

    @property
    def items(self) -> Any:
        """The annotation of a list's items, or None."""
        return next((typing.get_args(arm)[0] for arm in self.arms if typing.get_origin(arm) is list), None)

    @property
    def choices(self) -> tuple[Any, ...]:
        return next((typing.get_args(arm) for arm in self.arms if typing.get_origin(arm) is Literal), ())


def kind_of(annotation: Any, metadata: Sequence[Any] = ()) -> KeyType:
    if isinstance(annotation, FieldInfo):
        return kind_of(annotation.annotation, annotation.metadata)
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        inner, *more = typing.get_args(annotation)
        found = [bound for one in more for bound in (one.metadata if isinstance(one, FieldInfo) else [one])]
        return kind_of(inner, [*metadata, *found])
    if origin in (typing.Union, types.UnionType):
        kinds = [kind_of(arm, metadata) for arm in typing.get_args(annotation) if arm is not type(None)]
        return KeyType(
            tuple(arm for kind in kinds for arm in kind.arms), tuple(b for kind in kinds for b in kind.bounds)
        )
    return KeyType((annotation,), tuple(metadata))


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key below a section with its path, without the sections themselves; free-form tables such as
    `rollout.agent_options` are keys."""
    for name, field in model.model_fields.items():
        kind = kind_of(field)
        inner = kind_of(kind.values) if kind.values is not None else kind
        path = f"{prefix}{name}" if inner is kind else f"{prefix}{name}.{NAME}"
        if inner.section is not None:
            yield from fields(inner.section, f"{path}.")
        else:
            yield f"{prefix}{name}", field


def walk(model: type[BaseModel], place: Sequence[int | str]) -> tuple[list[int | str], KeyType | None]:
    """The recipe path that a pydantic location means, and the kind of value that belongs there.

    Inside a union the location names the arm that was tried ("list[str]"); the walk ends there.
    """
    found: list[int | str] = []
    kind: KeyType | None = KeyType((model,))
    for part in place:
        if kind is None or len(kind.arms) > 1 or part == "[key]":
            break
        found.append(part)
        if kind.section is not None:
            field = kind.section.model_fields.get(str(part))
            kind = None if field is None else kind_of(field)
        elif kind.values is not None:
            kind = kind_of(kind.values)
        else:
            kind = None if kind.items is None else kind_of(kind.items)
    return found, kind


_PLURALS = {str: "strings", int: "whole numbers", float: "numbers"}


def described(kind: KeyType, where: str) -> str:
    """What a value of this kind looks like, as a user would write it at `where`."""
    return " or ".join(_described(KeyType((arm,), kind.bounds), where) for arm in kind.arms)


def _described(kind: KeyType, where: str) -> str:
    (arm,) = kind.arms
    if kind.choices:
        return one_of(kind.choices)
    if kind.section is not None:
        return f"a table of keys, [{where}]"
    if kind.values is not None:
        inner = kind_of(kind.values)
        return f"a table for each, [{where}.{NAME}]" if inner.section is not None else f"a table, [{where}]"
    if kind.items is not None:
        inner = kind_of(kind.items)
        what = one_of(inner.choices) if inner.choices else _PLURALS.get(inner.arms[0], "values")
        return f"a list of {what}"
    if arm is bool:
        return "true or false"
    if arm in (int, float):
        return ("a whole number" if arm is int else "a number") + _bounds(kind.bounds)
    return "a string" if arm is str else "another value"


def one_of(choices: Sequence[Any]) -> str:
    names = [repr(choice) for choice in choices]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _bounds(bounds: Sequence[Any]) -> str:
    limits = {
        name: getattr(bound, name)
        for bound in bounds
        for name in ("ge", "gt", "le", "lt")
        if getattr(bound, name, None) is not None
    }
    phrases = {"ge": "of at least", "gt": "above", "le": "at most", "lt": "below"}
    parts = [f"{phrases[name]} {limit}" for name, limit in limits.items()]
    return f" {' and '.join(parts)}" if parts else ""
