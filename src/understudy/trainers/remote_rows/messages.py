"""Messages between the trainer and a worker on another machine that writes rows itself.

They travel as opaque bytes inside the messages of `rollout/workers/messages.py`.

| message     | direction         | content |
|-------------|-------------------|---------|
| RowSettings | trainer -> worker | sent once: where the run directory and the queue are, and the reward |
| KeptRow     | worker -> trainer | a trajectory that was written: sizes, reward, location of its columns |
| ScoreOrder  | trainer -> worker | rows, by key, for one replica to score; fixed tokens are sent inline |
| ScoreAnswer | worker -> trainer | the location of the scores, or an error that the pool can handle |
"""

from __future__ import annotations

import msgspec
import numpy as np

from understudy.dataplane.transfer_queue.segments import Written
from understudy.errors import TeacherError, TeacherReplyError, TeacherUnavailable
from understudy.teacher.clients.http import ReplicaTimeout, RequestRefused, ServerFailed
from understudy.types.scores import ScoreItem, Signal, TeacherScores
from understudy.types.usable_ids import UsableIds

SCORE = "score"
"""The work that the trainer requests of a worker."""


class RowSettings(msgspec.Struct):
    """What a worker needs to write rows, sent once at its start."""

    folder: str
    """The data plane's folder in the run directory."""
    queue: str
    """The address of the queue, from `batches.address_of`."""
    partition: str
    patience: float
    disk_bytes: float | None
    reward: str | None
    deadline_seconds: float
    """The time limit of one reward call."""


class KeptRow(msgspec.Struct):
    """A worker's report of one output: its sizes, its reward and where its columns are."""

    key: str
    tokens: int
    loss: int
    """Loss-bearing tokens."""
    candidates: int
    """The student's candidate ids per loss-bearing token; 0 if the recipe needs none."""
    reward: float | None
    seconds: dict[str, float]
    written: Written
    failed: str = ""
    """Why the row cannot be trained on. If set, none of its columns were written."""


class External(msgspec.Struct, frozen=True):
    """What a client needs to connect to a teacher server that Understudy did not start."""

    vocab_size: int
    vocab_fingerprint: str
    model: str
    backend: str
    k: int = 0
    """The recipe's K, tried first when the client probes how many logprobs the server returns."""


class Door(msgspec.Struct, frozen=True):
    """The address of one teacher replica."""

    teacher: str
    replica: str
    url: str
    token: str | None
    external: External | None = None
    usable: UsableIds | None = None
    """The token ids that this run may use."""


class Inline(msgspec.Struct):
    """The tokens of an item that is not a row, sent with the message."""

    tokens: bytes
    positions: bytes
    ids: tuple[int, bytes] | None = None


class OrderItem(msgspec.Struct, omit_defaults=True):
    """One row, or one inline item, of a `ScoreOrder`."""

    key: str
    signal: str
    k: int
    inline: Inline | None = None
    mark: str = ""
    """The id of the write that is meant, if a row was written more than once
    (`dataplane/transfer_queue/write_ids.py`)."""


class ScoreOrder(msgspec.Struct):
    """A scoring request that a worker sends to one replica."""

    door: Door
    items: list[OrderItem]
    seconds: float | None


class ItemScores(msgspec.Struct, omit_defaults=True):
    """The answer for one item: where its scores are stored, or the scores themselves if it was inline."""

    key: str
    teacher: str
    written: Written | None = None
    logprobs: bytes = b""
    """float32 logprobs of an inline item, which are returned and not stored."""


class ScoreAnswer(msgspec.Struct):
    """The answer to a `ScoreOrder`: one `ItemScores` per item, or the kind of error and its message."""

    scores: list[ItemScores]
    trouble: str | None = None
    """A name in `TROUBLES`, or `ROWS`."""
    message: str = ""


ROWS = "rows"
"""The worker could not read the rows; it sent no request to a teacher."""
TROUBLES: dict[str, type[TeacherError]] = {
    "reply": TeacherReplyError,
    "timeout": ReplicaTimeout,
    "server": ServerFailed,
    "refused": RequestRefused,
    "unavailable": TeacherUnavailable,
    "teacher": TeacherError,
}
"""Error classes by name, subclasses before their bases. The pool handles a failed request by its class."""

encode = msgspec.msgpack.Encoder().encode
decode_settings = msgspec.msgpack.Decoder(RowSettings).decode
decode_kept = msgspec.msgpack.Decoder(list[KeptRow]).decode
decode_order = msgspec.msgpack.Decoder(ScoreOrder).decode
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


def inline_scores(told: ItemScores, signal: Signal) -> TeacherScores:
    logprobs = np.frombuffer(told.logprobs, "<f4").astype(np.float32)
    return TeacherScores(told.key, told.teacher, signal, logprobs)


def inline_answer(scores: TeacherScores) -> ItemScores:
    return ItemScores(scores.key, scores.teacher, logprobs=scores.sampled_logprobs.astype("<f4").tobytes())


def _bytes(ids: np.ndarray) -> bytes:
    return ids.astype("<i4").tobytes()


def _ints(told: bytes) -> np.ndarray:
    return np.frombuffer(told, "<i4").astype(np.int32)
