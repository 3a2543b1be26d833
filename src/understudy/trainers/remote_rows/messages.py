"""What the run and a worker that writes rows itself say to each other, inside `rollout.worker_wire`'s bytes.

RowSettings   what such a worker needs once
KeptRow       a trajectory it wrote: where its columns lie, and what the run decides by
ScoreOrder    rows to be judged at one replica's door, by name; a few items (the fixed tokens) with their tokens
RecallOrder   rows whose verdict a worker remembers from another row with the same tokens
MixOrder      a row that several teachers were asked about, whose opinions are to be made one verdict
ScoreAnswer   where the verdicts lie, or what went wrong in the words the teacher's pool understands
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
import numpy as np

from understudy.dataplane.frame import SpillRef
from understudy.dataplane.transfer_queue.segments import Written
from understudy.errors import TeacherError, TeacherReplyError, TeacherUnavailable
from understudy.teacher.clients.http import ReplicaTimeout, RequestRefused, ServerFailed
from understudy.types.scores import ScoreItem, Signal, TeacherScores
from understudy.types.usable_ids import UsableIds

SCORE, RECALL, MIX = "score", "recall", "mix"
"""The errands."""


class Use(StrEnum):
    """What scores are for."""

    VERDICT = "verdict"
    """The row's own."""
    OPINION = "opinion"
    """Of one teacher among several, to be mixed with the others'."""
    REST = "rest"
    """Of the same teacher, on candidates of the others."""


class RowSettings(msgspec.Struct):
    folder: str
    """The data plane's, in the run directory."""
    queue: str
    """`far_rows.address_of`."""
    partition: str
    patience: float
    disk_bytes: float | None
    reward: str | None
    deadline_seconds: float
    """Of one reward."""
    digests: bool = False
    """Whether some teacher's scores are remembered, so that rows with the same tokens must be told."""


class KeptRow(msgspec.Struct):
    key: str
    tokens: int
    loss: int
    """Loss-bearing tokens."""
    candidates: int
    """The student's own ids per loss-bearing token; 0 where none were asked for."""
    reward: float | None
    seconds: dict[str, float]
    written: Written
    digest: bytes = b""
    """Of what a teacher is told of it, where digests are wanted."""
    failed: str = ""
    """Why it cannot be trained on; then nothing of it was written."""


class External(msgspec.Struct, frozen=True):
    """What is needed to speak to a server that is not one of ours."""

    vocab_size: int
    vocab_fingerprint: str
    model: str
    backend: str
    k: int = 0
    """The K of the recipe, tried first when the server is asked what it can give."""


class Door(msgspec.Struct, frozen=True):
    """Where one replica of a teacher answers."""

    teacher: str
    replica: str
    url: str
    token: str | None
    external: External | None = None
    usable: UsableIds | None = None
    """The ids of this run."""


class Inline(msgspec.Struct):
    """The tokens of an item that is not a row."""

    tokens: bytes
    positions: bytes
    ids: tuple[int, bytes] | None = None


class OrderItem(msgspec.Struct, omit_defaults=True):
    key: str
    signal: str
    k: int
    inline: Inline | None = None
    mark: str = ""
    """Which write of the row is meant (`dataplane/transfer_queue/write_ids.py`)."""
    use: Use = Use.VERDICT
    ids_at: list[SpillRef] = []
    """Where the ids to be judged lie, side by side: other teachers' best."""


class ScoreOrder(msgspec.Struct):
    door: Door
    items: list[OrderItem]
    seconds: float | None
    remember_bytes: int = 0
    """Of this teacher's scores the worker keeps as much in memory."""


class RecallItem(msgspec.Struct):
    key: str
    memory: str
    use: Use


class RecallOrder(msgspec.Struct):
    teacher: str
    items: list[RecallItem]


class OpinionAt(msgspec.Struct):
    """One teacher's scores of a row, by where they lie."""

    teacher: str
    weight: float
    best: Written
    rest: Written | None
    """Its logprobs at the others' candidates."""


class MixOrder(msgspec.Struct):
    key: str
    signal: str
    k: int
    opinions: list[OpinionAt]


class Verdict(msgspec.Struct, omit_defaults=True):
    key: str
    teacher: str
    written: Written | None = None
    logprobs: bytes = b""
    """float32, of an inline item."""
    memory: str = ""
    """What it is remembered as, where it is."""
    size: int = 0
    """Of memory that takes."""
    ids_digest: bytes = b""
    """Of an opinion's candidates, where rows are told by their digests."""


class ScoreAnswer(msgspec.Struct):
    verdicts: list[Verdict]
    trouble: str | None = None
    """A name in `TROUBLES`, or `ROWS`."""
    message: str = ""


ROWS = "rows"
"""The worker could not get at the rows, or at what it remembered; no teacher was asked."""
TROUBLES: dict[str, type[TeacherError]] = {
    "reply": TeacherReplyError,
    "timeout": ReplicaTimeout,
    "server": ServerFailed,
    "refused": RequestRefused,
    "unavailable": TeacherUnavailable,
    "teacher": TeacherError,
}
"""Narrowest first: how a pool treats a failed request depends on its kind."""

encode = msgspec.msgpack.Encoder().encode
decode_settings = msgspec.msgpack.Decoder(RowSettings).decode
decode_kept = msgspec.msgpack.Decoder(list[KeptRow]).decode
decode_order = msgspec.msgpack.Decoder(ScoreOrder).decode
decode_recall = msgspec.msgpack.Decoder(RecallOrder).decode
decode_mix = msgspec.msgpack.Decoder(MixOrder).decode
decode_answer = msgspec.msgpack.Decoder(ScoreAnswer).decode


def trouble_of(error: TeacherError) -> str:
    return next(name for name, kind in TROUBLES.items() if isinstance(error, kind))


def inline(item: ScoreItem) -> OrderItem:
    ids = None if item.ids is None else (item.ids.shape[1], _bytes(item.ids))
    return OrderItem(
        item.key, str(item.signal), item.k, Inline(_bytes(item.tokens), _bytes(item.positions), ids)
    )


def from_inline(item: OrderItem, told: Inline) -> ScoreItem:
    ids = None if told.ids is None else _ints(told.ids[1]).reshape(-1, told.ids[0])
    return ScoreItem(item.key, _ints(told.tokens), _ints(told.positions), Signal(item.signal), item.k, ids)


def inline_scores(verdict: Verdict, signal: Signal) -> TeacherScores:
    return TeacherScores(
        verdict.key,
        verdict.teacher,
        signal,
        np.frombuffer(verdict.logprobs, "<f4").astype(np.float32),
    )


def inline_verdict(scores: TeacherScores) -> Verdict:
    return Verdict(scores.key, scores.teacher, logprobs=scores.sampled_logprobs.astype("<f4").tobytes())


def _bytes(ids: np.ndarray) -> bytes:
    return ids.astype("<i4").tobytes()


def _ints(told: bytes) -> np.ndarray:
    return np.frombuffer(told, "<i4").astype(np.int32)
