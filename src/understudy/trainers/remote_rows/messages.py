"""Messages between the trainer and a worker on another machine that writes rows itself.

They travel as opaque bytes inside the messages of `rollout/workers/messages.py`.

| message     | direction         | content |
|-------------|-------------------|---------|
| RowSettings | trainer -> worker | sent once: where the run directory and the queue are, and the reward |
| KeptRow     | worker -> trainer | a trajectory that was written: sizes, reward, location of its columns |
| ScoreOrder  | trainer -> worker | rows, by key, for one replica to score; fixed tokens are sent inline |
| RecallOrder | trainer -> worker | rows whose scores the worker has cached from rows with the same tokens |
| MixOrder    | trainer -> worker | partial scores of several teachers, to be mixed into final scores |
| ScoreAnswer | worker -> trainer | the location of the scores, or an error that the pool can handle |
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
"""The kinds of errand that a worker carries out for the trainer."""


class Use(StrEnum):
    """What a teacher's scores are used for."""

    VERDICT = "verdict"
    """Final scores: the row is trained on them."""
    OPINION = "opinion"
    """Partial scores: one teacher's part of a mixture."""
    REST = "rest"
    """Cross scores: the same teacher's logprobs at the candidates of the other teachers in the mixture."""


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
    digests: bool = False
    """Whether rows need a content digest: some teacher caches its scores, and rows with the same tokens must
    be recognised."""


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
    digest: bytes = b""
    """The digest of what is sent to a teacher; empty unless `RowSettings.digests` is set."""
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
    use: Use = Use.VERDICT
    ids_at: list[SpillRef] = []
    """Where the ids to score are stored: the top-K ids of the mixture's other teachers, one column block
    each."""


class ScoreOrder(msgspec.Struct):
    """A scoring request that a worker sends to one replica."""

    door: Door
    items: list[OrderItem]
    seconds: float | None
    remember_bytes: int = 0
    """How many bytes of this teacher's scores the worker caches in memory."""


class RecallItem(msgspec.Struct):
    """One row, and the cache entry (`memory`) with its scores."""

    key: str
    memory: str
    use: Use


class RecallOrder(msgspec.Struct):
    """Cached scores of one teacher, to be stored for other rows."""

    teacher: str
    items: list[RecallItem]


class OpinionAt(msgspec.Struct):
    """One teacher's partial scores of a row, by location."""

    teacher: str
    weight: float
    best: Written
    rest: Written | None
    """Its cross scores: logprobs at the other teachers' candidates. None where the signal needs none."""


class MixOrder(msgspec.Struct):
    """The partial scores of one row, to be mixed into its final scores."""

    key: str
    signal: str
    k: int
    opinions: list[OpinionAt]


class Verdict(msgspec.Struct, omit_defaults=True):
    """The answer for one item: where its scores are stored, or the scores themselves if it was inline."""

    key: str
    teacher: str
    written: Written | None = None
    logprobs: bytes = b""
    """float32 logprobs of an inline item, which are returned and not stored."""
    memory: str = ""
    """The name of the worker's cache entry; empty if the scores were not cached."""
    size: int = 0
    """The cache entry's size in bytes."""
    ids_digest: bytes = b""
    """The digest of partial scores' candidate ids; empty unless `RowSettings.digests` is set."""


class ScoreAnswer(msgspec.Struct):
    """The answer to any errand: one `Verdict` per item, or the kind of error and its message."""

    verdicts: list[Verdict]
    trouble: str | None = None
    """A name in `TROUBLES`, or `ROWS`."""
    message: str = ""


ROWS = "rows"
"""The worker could not read the rows or the cache entry; it sent no request to a teacher."""
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
