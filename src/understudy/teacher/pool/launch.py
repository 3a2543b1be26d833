"""How a pool gets processes without making any: whoever owns processes hands it a `Launcher`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Endpoint:
    url: str
    token: str | None = None

    def __repr__(self) -> str:  # tokens do not belong in logs
        return f"Endpoint({self.url!r})"


class Launcher(Protocol):
    async def start(self, replica: str) -> Endpoint:
        """Start the replica's process and return where it answers, once it can score."""
        ...

    async def stop(self, replica: str) -> None:
        """End the replica's process, if there is one, and return when it is gone."""
        ...

    def alive(self, replica: str) -> bool:
        """Whether the replica's process exists; says nothing about whether it answers."""
        ...


@runtime_checkable
class Witness(Protocol):
    """A launcher that heard its processes."""

    def last_words(self, replica: str) -> str:
        """What the replica's process said last, for an error that begins with it."""
        ...


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One replica of a pool: launched by the pool's launcher, or external at a fixed address."""

    name: str
    endpoint: Endpoint | None = None

    @property
    def external(self) -> bool:
        return self.endpoint is not None
