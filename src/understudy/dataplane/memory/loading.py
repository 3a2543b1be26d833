"""Loads the state of a plane from its journal, at the start and after a rewind."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field

from understudy.dataplane.base import GroupPolicy, RowStatus
from understudy.dataplane.frame import SpillRef, pack, unpack
from understudy.dataplane.journal.schema import PACK_SHIFT, read_meta
from understudy.dataplane.journal.spill import SpillFiles
from understudy.dataplane.memory.admission import Admission
from understudy.dataplane.memory.partition import Partition, Partitions
from understudy.dataplane.memory.rows import StoredRow

_ROWS = "SELECT id, partition, key, grp, policy, status, step, arrival, attempts, tags FROM rows WHERE trained IS NULL ORDER BY id"
_PACKS = f"""
SELECT packs.id, packs.body FROM rows JOIN packs
ON packs.id >= rows.id << {PACK_SHIFT} AND packs.id < (rows.id + 1) << {PACK_SHIFT}
WHERE rows.trained IS NULL ORDER BY packs.id
"""
_ENDS = "SELECT kind, sign, partition, keys, step, detail FROM events WHERE kind != 'issued' ORDER BY seq"


@dataclass(slots=True)
class Loaded:
    partitions: Partitions = field(default_factory=Partitions)
    dead: list[tuple[str, str, int, str]] = field(default_factory=list)
    next_id: int = 1
    next_arrival: int = 1
    last_step: int = 0
    """The last step acked."""
    epoch: int = 0

    def partition(self, name: str) -> Partition:
        return self.partitions[name]


def load(connection: sqlite3.Connection, spill: SpillFiles, admission: Admission) -> Loaded:
    """Load every row in flight. Frames that do not fit into `max_bytes` are moved to spill files."""
    state = Loaded(epoch=read_meta(connection, "epoch", 0))
    _load_ends(connection, state)
    moved: list[tuple[int, dict[str, bytes | SpillRef]]] = []
    packs = _packs_by_row(connection)
    next_packs = next(packs, None)
    for row_id, partition, key, group, policy, status, step, arrival, attempts, tags in connection.execute(
        _ROWS
    ):
        row = StoredRow(row_id, partition, key, step, json.loads(tags))
        row.status, row.arrival, row.attempts = RowStatus(status), arrival, attempts
        if next_packs is not None and next_packs[0] == row_id:
            for pack_id, body in next_packs[1]:
                frames = unpack(body)
                if _fill(row, frames, spill, admission):
                    moved.append((pack_id, frames))
                row.packs = (pack_id & ((1 << PACK_SHIFT) - 1)) + 1
            next_packs = next(packs, None)
        part = state.partition(partition)
        part.add(row)
        if group is not None:
            part.join(row, group, GroupPolicy(policy))
        admission.enter()
        state.next_id = row_id + 1
        state.next_arrival = max(state.next_arrival, arrival + 1)
    highest = connection.execute("SELECT MAX(id) FROM rows").fetchone()[0]
    state.next_id = max(state.next_id, (highest or 0) + 1)
    _write_moved(connection, moved)
    return state


def _packs_by_row(connection: sqlite3.Connection) -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
    row_id = -1
    bodies: list[tuple[int, bytes]] = []
    for pack_id, body in connection.execute(_PACKS):
        if pack_id >> PACK_SHIFT != row_id:
            if bodies:
                yield row_id, bodies
            row_id, bodies = pack_id >> PACK_SHIFT, []
        bodies.append((pack_id, body))
    if bodies:
        yield row_id, bodies


def _fill(
    row: StoredRow, frames: dict[str, bytes | SpillRef], spill: SpillFiles, admission: Admission
) -> bool:
    """Put a pack's frames into the row; True if one was spilled (and is now a reference in `frames` too)."""
    moved = False
    for name, frame in list(frames.items()):
        before = row.columns.get(name)
        if isinstance(before, bytes):
            row.resident -= len(before)
            admission.leave(0, len(before))
        if isinstance(frame, bytes):
            if admission.hold(len(frame)):
                row.resident += len(frame)
            else:
                ref = spill.reserve(frame)
                spill.write(ref, frame)
                frames[name] = frame = ref
                moved = True
        row.columns[name] = frame
    return moved


def _write_moved(
    connection: sqlite3.Connection, moved: list[tuple[int, dict[str, bytes | SpillRef]]]
) -> None:
    connection.execute("BEGIN IMMEDIATE")
    for pack_id, frames in moved:
        connection.execute("UPDATE packs SET body=? WHERE id=?", (pack(frames), pack_id))
        for cell in frames.values():
            if isinstance(cell, SpillRef):
                connection.execute("INSERT OR IGNORE INTO spills VALUES (?, ?)", (pack_id, cell.segment))
    connection.execute("COMMIT")


def _load_ends(connection: sqlite3.Connection, state: Loaded) -> None:
    """Load which keys are settled, net of revoked events."""
    ended: dict[str, set[str]] = {}
    dead: dict[tuple[str, str], tuple[int, str]] = {}
    steps: dict[int, int] = {}
    for kind, sign, partition, names, step, detail in connection.execute(_ENDS):
        keys = json.loads(names)
        settled = ended.setdefault(partition, set())
        if sign > 0:
            settled.update(keys)
        else:
            settled.difference_update(keys)
        if kind == "trained":
            steps[step] = steps.get(step, 0) + sign * len(keys)
        elif kind == "dead" and sign > 0:
            dead |= {(partition, key): (step, detail) for key in keys}
        elif kind == "dead":
            for key in keys:
                dead.pop((partition, key), None)
    for partition, keys in ended.items():
        part = state.partition(partition)
        for key in keys:
            part.settled.add(key)
    state.dead = [(partition, key, step, detail) for (partition, key), (step, detail) in dead.items()]
    state.last_step = max((step for step, net in steps.items() if net > 0), default=0)
