"""Names of rows in TransferQueue: a remote writer adds a write id (mark) to the row's key.

    00000-0000017_3_0            uploaded by the plane itself
    00000-0000017_3_0~5f0c2a.14  the 14th write of one worker process

A row is made again when its worker seems dead, and scored twice when a teacher is slow, so several writers
may upload the same row. Under one name the last upload would win, even after the ledger adopted another
writer's announcement. With a name per write there is no conflict: readers use the name that the ledger
adopted, and copies of late writers are cleared with the row.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence

Marks = Mapping[str, tuple[str, ...]]
"""By column: one mark per row. Columns not listed are stored under the rows' own keys."""
_MARKED = re.compile(r"(?P<key>.*)~[0-9a-f]{6}\.[0-9]+", re.DOTALL)


def write_ids() -> Iterator[str]:
    """The marks of one process; a restarted process generates different ones."""
    process = secrets.token_hex(3)
    return (f"{process}.{number}" for number in itertools.count(1))


def queue_key(key: str, mark: str) -> str:
    """The name of this copy of a row in the queue; without a mark, the plane's own copy.

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
    """Groups columns that one fetch can bring, because their rows have the same names: (names, columns)."""
    plain = ("",) * len(keys)
    groups: dict[tuple[str, ...], list[str]] = {}
    for column in columns:
        groups.setdefault(tuple(marks.get(column, plain)), []).append(column)
    return [(tuple(map(queue_key, keys, own)), together) for own, together in groups.items()]
