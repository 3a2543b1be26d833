"""A recipe in the making: each value with where it comes from, and what became of each key that was given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from understudy.config.messages.keys import NAME, fields
from understudy.config.recipe import examine, set_key
from understudy.config.tables import RecipeTables
from understudy.config.toml import recipe_as_toml

_DEFAULTS = {path: field.default for path, field in fields(RecipeTables) if not field.is_required()}


class Verdict(StrEnum):
    CARRIED = "carried over"
    THEIR_DEFAULT = "defaults of theirs, written out"
    IMPLIED = "implied by a default here"
    NOT_NEEDED = "not needed here"
    UNSUPPORTED = "not supported"


@dataclass(frozen=True, slots=True)
class Entry:
    key: str
    value: Any
    verdict: Verdict
    text: str
    """Our key and value, why it is not needed, or what to use instead."""


@dataclass(slots=True)
class Draft:
    given: Mapping[str, Any]
    """Their keys, dotted."""
    project: str
    """Whose they are."""
    tables: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    """Our key → where its value comes from."""
    entries: dict[str, Entry] = field(default_factory=dict)
    """By their key."""
    notes: list[str] = field(default_factory=list)

    def get(self, key: str, default: Any = None) -> Any:
        """Their value, or their default. An explicit null counts as not given, and so does a text where a
        number is due: a variable that only a shell could expand."""
        value = self.given.get(key)
        if isinstance(default, int | float) and isinstance(value, str):
            self.tell(key, Verdict.UNSUPPORTED, f"expected a number; {default} is taken")
            return default
        return default if value is None else value

    def put(self, ours: str, value: Any, *theirs: str) -> None:
        """Sets a key of ours from keys of theirs: the given ones, or else their default."""
        usual = _DEFAULTS.get(_generic(ours), ...)
        given = [key for key in theirs if self.given.get(key) is not None]
        # A section that is off unless it is written is written, whatever its keys.
        implied = value == usual and not ours.startswith(("student.lora.", "critic."))
        shown = f"{ours} = {_shown(value)}"
        if not implied:
            set_key(self.tables, ours, value, shown)
            self.sources[ours] = ", ".join(given) if given else f"{self.project}'s default"
        for key in given:
            self.tell(key, Verdict.IMPLIED if implied else Verdict.CARRIED, shown)
        if not given and theirs and not implied:
            self.tell(theirs[0], Verdict.THEIR_DEFAULT, shown, value)

    def follow(self, ours: str, value: Any, what: str) -> None:
        """Sets a key of ours to what they do without a key for it."""
        set_key(self.tables, ours, value, ours)
        self.sources[ours] = f"{self.project}: {what}"
        self.tell(what, Verdict.THEIR_DEFAULT, f"{ours} = {_shown(value)}", value)

    def vllm(self, replicas: int, gpus_each: int, shared: bool) -> None:
        """Notes on servers that the run starts; `shared`: they sit on the GPUs that train, on one machine."""
        self.notes.append(
            "vLLM has an environment of its own: set rollout.vllm_python, or UNDERSTUDY_VLLM_PYTHON, to its interpreter"
        )
        if not shared:
            return
        places = [
            ",".join(str(unit * gpus_each + rank) for rank in range(gpus_each)) for unit in range(replicas)
        ]
        self.follow("rollout.devices", places, "engines share the GPUs that train")
        self.notes.append(
            "on shared GPUs engine and trainer both stay in memory, the engine is not put to sleep: lower "
            "--gpu-memory-utilization if memory is short"
        )

    def tell(self, key: str, verdict: Verdict, text: str, value: Any = None) -> None:
        """Records what became of their key, the first time; keys that were not given only as defaults."""
        if key in self.given or verdict is Verdict.THEIR_DEFAULT:
            self.entries.setdefault(key, Entry(key, self.given.get(key, value), verdict, text))

    def not_needed(self, key: str, why: str) -> None:
        self.tell(key, Verdict.NOT_NEEDED, why)

    def unsupported(self, key: str, instead: str) -> None:
        self.tell(key, Verdict.UNSUPPORTED, instead)

    def problems(self) -> list[str]:
        """What `understudy check` would say about keys and their combinations."""
        return examine(self.tables)[1]

    def toml(self) -> str:
        order = [name for name in RecipeTables.model_fields if name in self.tables]
        return recipe_as_toml({name: self.tables[name] for name in order}, self.sources)

    def report(self) -> str:
        """Every key that was given, by what became of it."""
        lines: list[str] = []
        for verdict in Verdict:
            found = [entry for entry in self.entries.values() if entry.verdict is verdict]
            if found:
                lines += ["", f"{verdict} ({len(found)})"]
            for entry in found:
                value = "" if verdict is Verdict.THEIR_DEFAULT else f"={_shown(entry.value)}"
                lines.append(f"  {entry.key}{value}: {entry.text}")
        if self.notes:
            lines += ["", "notes", *(f"  {note}" for note in self.notes)]
        return "\n".join(lines).strip() + "\n"


def _generic(ours: str) -> str:
    """`teachers.math.model` → `teachers.NAME.model`."""
    parts = ours.split(".")
    if parts[0] == "teachers":
        parts[1] = NAME
    elif parts[:2] == ["cluster", "pools"]:
        parts[2] = NAME
    return ".".join(parts)


def _shown(value: Any) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else repr(value)
        if isinstance(value, str)
        else str(value)
    )


def expanded(path: Any) -> str:
    """A path with `~` expanded, which a recipe does not do."""
    return str(Path(path).expanduser()) if str(path).startswith("~") else str(path)
