"""What a writer elsewhere calls its copy of a row in the queue: the row's key and a mark that no other write has.

    00000-0000017_3_0            uploaded by the plane itself
    00000-0000017_3_0~5f0c2a.14  the 14th write of one life of one worker

Rows are made again where a worker seems dead, and judged twice where a teacher straggles, so several writers may upload the same
row. Under one name the last of them would win, whenever it comes: also after the ledger took another's announcement. Under
names of their own they never meet: readers ask for the name the ledger took, and what a late writer leaves is cleared
with the row.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Mapping, Sequence

Marks = Mapping[str, tuple[str, ...]]
"""By column, one per row; a column that is not named lies under the rows' own keys."""
_MARKED = re.compile(r"(?P<key>.*)~[0-9a-f]{6}\.[0-9]+", re.DOTALL)


class Marking:
    """Marks of one process; another process, also a later life of this one, gives others."""

    def __init__(self) -> None:
        self._life = secrets.token_hex(3)
        self._next = itertools.count(1)

    def new(self) -> str:
        return f"{self._life}.{next(self._next)}"


def queue_key(key: str, mark: str) -> str:
    """What the queue calls this copy of a row; without a mark, the plane's own.

    >>> queue_key("p_0_0", "5f0c2a.14")
    'p_0_0~5f0c2a.14'
    """
    return f"{key}~{mark}" if mark else key


def row_of(name: str) -> str:
    """The row that a name in the queue belongs to.

    >>> row_of("p_0_0~5f0c2a.14"), row_of("p~1_0_0")
    ('p_0_0', 'p~1_0_0')
    """
    found = _MARKED.fullmatch(name)
    return name if found is None else found["key"]


def by_name(
    keys: Sequence[str], columns: Sequence[str], marks: Marks
) -> list[tuple[tuple[str, ...], list[str]]]:
    """Columns that lie under the same names, which one fetch can bring: (names in the queue, columns)."""
    plain = ("",) * len(keys)
    groups: dict[tuple[str, ...], list[str]] = {}
    for column in columns:
        groups.setdefault(tuple(marks.get(column, plain)), []).append(column)
    return [(tuple(map(queue_key, keys, own)), together) for own, together in groups.items()]
