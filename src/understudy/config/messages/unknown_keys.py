"""The message for an unknown key: its name here, or where the keys are listed.

Tried in this order: its name in other projects, the same key in another section, a typo, keys of this
section that share a word with it. A key is offered by its spelling only if it is nearly the same word:
`save_every` is not `sync_every`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from understudy.config.base import nearest
from understudy.config.messages.keys import NAME, fields, walk
from understudy.config.messages.synonyms import FAMILIES, KEYS

_TYPO = 0.8
"""How similar two keys must be to count as a typo: `stpes` and `steps` are, `max_steps` and `max_staleness`
are not."""
_OFFERED = 4
_SAY_LITTLE = {"max", "min", "size", "every", "steps", "use", "num", "seconds", "token", "tokens", "length"}
"""Words that many keys contain and that do not make two keys similar."""


def unknown_key(model: type[BaseModel], place: Sequence[str], value: Any) -> list[str]:
    """A line for the key; for an unknown table, a line for each key in it that has a known counterpart."""
    if not isinstance(value, Mapping) or not value or _typo(model, place):
        return [f"unknown key `{'.'.join(place)}`; {_answer(model, place) or _listed(place)}"]
    answered, others = [], 0
    for leaf in _leaves(value, place):
        answer = _answer(model, leaf)
        if answer:
            answered.append(f"unknown key `{'.'.join(leaf)}`; {answer}")
        else:
            others += 1
    if others:
        rest = f" ({others} more in it)" if answered and others > 1 else ""
        answered.append(f"unknown section `{'.'.join(place)}`{rest}; {_sections(model, place)}")
    return answered


def _answer(model: type[BaseModel], place: Sequence[str]) -> str | None:
    path = [part.lower().replace("-", "_").lstrip("+") for part in place]
    paths = dict(fields(model))
    known = list(_known(model, place))
    here = {_plain(name): name for name in known}
    if _plain(path[-1]) in here and ".".join(path) not in KEYS:
        return f"did you mean `{'.'.join([*place[:-1], here[_plain(path[-1])]])}`?"
    for start in range(len(path)):
        ending = ".".join(path[start:])
        answer = next((text for name, text in KEYS.items() if _matches(name, ending)), None)
        if answer is not None:
            return _worded(answer, place)
        if start and ending in paths:
            return f"it is `{ending}` here"
    elsewhere = [name for name in paths if name.rpartition(".")[2] == path[-1]]
    elsewhere.sort(
        key=lambda name: name.startswith(("critic.", "reference."))
    )  # sections that few recipes have come last
    if elsewhere and len(path) > 1 and path[0] == "teachers":
        elsewhere = [name for name in elsewhere if not name.startswith(f"teachers.{NAME}.")] or elsewhere
    if elsewhere:
        return f"it is {' or '.join(f'`{name}`' for name in elsewhere[:_OFFERED])} here"
    typo = _typo(model, place)
    if typo:
        return f"did you mean `{'.'.join([*place[:-1], typo])}`?"
    if path[0] in FAMILIES:
        return _worded(FAMILIES[path[0]], place)
    parts = {word for word in path[-1].split("_") if len(word) > 2} - _SAY_LITTLE
    like = [name for name in known if parts & set(name.split("_"))]
    if like:
        names = ", ".join(f"`{'.'.join([*place[:-1], name])}`" for name in like[:_OFFERED])
        return f"keys like it: {names}; {_listed(place)}"
    return None


def _typo(model: type[BaseModel], place: Sequence[str]) -> str | None:
    return nearest(place[-1].lower().replace("-", "_"), _known(model, place), _TYPO)


def _known(model: type[BaseModel], place: Sequence[str]) -> Iterator[str]:
    """The keys of the section that holds this key; none if there is no such section."""
    _, kind = walk(model, place[:-1])
    if kind is not None and kind.section is not None:
        yield from kind.section.model_fields


def _matches(name: str, ending: str) -> bool:
    if "*" not in name:
        return name == ending
    return re.fullmatch(re.escape(name).replace(r"\*", r"[^.]+"), ending) is not None


def _worded(answer: str, place: Sequence[str]) -> str:
    """Turns a bare key into a sentence; NAME becomes the teacher's own name if the user wrote one."""
    sentence = answer if " " in answer else f"it is `{answer}` here"
    if len(place) > 2 and place[0] == "teachers":
        sentence = sentence.replace(f"teachers.{NAME}", f"teachers.{place[1]}")
    return sentence


def _listed(place: Sequence[str]) -> str:
    section = place[0] if len(place) > 1 else ""
    return f"`understudy keys{' ' if section else ''}{section}` lists all"


def _sections(model: type[BaseModel], place: Sequence[str]) -> str:
    return f"{_listed(place)}" if len(place) > 1 else f"sections are {', '.join(model.model_fields)}"


def _leaves(table: Mapping[str, Any], place: Sequence[str]) -> Iterator[list[str]]:
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, [*place, str(name)])
        else:
            yield [*place, str(name)]


def _plain(word: str) -> str:
    return word.replace("_", "").replace("-", "").lower()
