"""References: what the trainer holds of rows, scoring requests, scores and batches.

The arrays may be in this process or lie where a worker on another machine wrote them. The trainer's code is
the same for both.

| reference   | in this process | remote (`trainers/remote_rows/`) |
|-------------|-----------------|----------------------------------|
| `RowRef`    | `Trajectory`    | `RemoteRow`                      |
| `ScoreRef`  | `ScoreItem`     | `RemoteItem`                     |
| `ScoresRef` | `TeacherScores` | `RemoteScores`                   |

A data class is its own reference: its `fetch` is a look-up. A remote reference has sizes and a place, and its
`fetch` reads the arrays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from understudy.types.scores import ScoreItem, Signal, TeacherScores
from understudy.types.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Where a remote row lies."""

    maker: int | None = None
    """The life (one process start) of the worker that holds its tokens in memory; None if none does."""
    mark: str = ""
    """The id of the write that the ledger took (`dataplane/transfer_queue/write_ids.py`)."""


class RowRef(Protocol):
    """A rollout that was written. It becomes a row to train on once it has its teacher's scores."""

    @property
    def key(self) -> str: ...
    @property
    def length(self) -> int:
        """All its tokens."""
        ...

    @property
    def loss_length(self) -> int:
        """Loss-bearing tokens."""
        ...

    @property
    def candidates(self) -> int:
        """The student's candidate ids per loss-bearing token; 0 if it has none."""
        ...

    @property
    def here(self) -> Trajectory | None:
        """The rollout itself, if it is in this process."""
        ...

    def to_score(self, signal: Signal, k: int) -> ScoreRef:
        """The request to its teacher. `at_ids` asks for the student's candidates."""
        ...


class ScoreRef(Protocol):
    """A row to be scored. Either `here` or `place` is set."""

    @property
    def key(self) -> str: ...
    @property
    def signal(self) -> Signal: ...
    @property
    def k(self) -> int: ...
    @property
    def length(self) -> int:
        """Tokens of the row."""
        ...

    @property
    def ids_each(self) -> int:
        """Ids to score per position (`at_ids` only)."""
        ...

    @property
    def here(self) -> ScoreItem | None:
        """The request with its arrays, if they are in this process."""
        ...

    @property
    def place(self) -> RowPlace | None: ...
    @property
    def own_prompt(self) -> np.ndarray | None:
        """The prompt given to `after`, if the arrays are not here; None: the row's own tokens are read."""
        ...

    def after(self, prompt: np.ndarray) -> ScoreRef:
        """The same request for a teacher that reads this prompt instead of the student's
        (`ScoreItem.after`)."""
        ...

    async def fetch(self) -> ScoreItem: ...


class ScoresRef(Protocol):
    """A teacher's scores of one row."""

    @property
    def key(self) -> str: ...
    @property
    def teacher(self) -> str: ...
    @property
    def replica(self) -> str: ...
    @property
    def version(self) -> int: ...
    def by(self, replica: str) -> ScoresRef:
        """The same scores with the name of the replica that answered."""
        ...

    async def fetch(self) -> TeacherScores: ...

    async def record(self, put: Callable[[TeacherScores], Awaitable[None]]) -> None:
        """Makes them columns of their row in the ledger. `put` stores arrays that are in this process."""
        ...


async def fetched(items: Sequence[ScoreRef]) -> list[ScoreItem]:
    """The items with their arrays, in this process."""
    here = [item.here for item in items]
    found = [item for item in here if item is not None]
    if len(found) == len(items):
        return found
    return list(await asyncio.gather(*(item.fetch() for item in items)))
