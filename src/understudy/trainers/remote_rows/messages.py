"""Messages between the trainer and a worker on another machine that writes rows itself.

They travel as frames (`serving/frames.py`) inside the messages of `rollout/workers/messages.py`.

| message     | direction         | content |
|-------------|-------------------|---------|
| RowSettings | trainer -> worker | sent once: where the run directory and the queue are, and the reward |
| RowReport   | worker -> trainer | a trajectory that was written: sizes, reward, location of its columns |
| ScoreOrder  | trainer -> worker | rows, by key, for one replica to score; fixed tokens are sent inline |
| ScoreAnswer | worker -> trainer | the location of the scores, or an error that the pool can handle |
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from understudy.dataplane.transfer_queue.segments import WrittenRow
from understudy.errors import TeacherError, TeacherReplyError, TeacherUnavailable
from understudy.serving import frames
from understudy.teacher.clients.discover import ExternalServer
from understudy.teacher.clients.http import (
    NoSuchRoute,
    NotAllowed,
    ReplicaTimeout,
    RequestRefused,
    ScoringFailed,
)
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
    timeout_s: float
    disk_bytes: float | None
    reward: str | None
    deadline_seconds: float
    """The time limit of one reward call."""


class RowReport(msgspec.Struct):
    """A worker's report of one output: its sizes, its reward and where its columns are."""

    key: str
    tokens: int
    loss: int
    """Loss-bearing tokens."""
    first: int
    """The index of the first loss-bearing token; `tokens` if there is none."""
    candidates: int
    """The student's candidate ids per loss-bearing token; 0 if the recipe needs none."""
    reward: float | None
    seconds: dict[str, float]
    written: WrittenRow
    failed: str = ""
    """Why the row cannot be trained on. If set, none of its columns were written."""


class ReplicaAddress(msgspec.Struct, frozen=True):
    """The address of one teacher replica."""

    teacher: str
    replica: str
    url: str
    token: str | None
    external: ExternalServer | None = None
    usable: UsableIds | None = None
    """The token ids that this run may use."""


class OrderItem(msgspec.Struct, omit_defaults=True):
    """One row, or one inline item, of a `ScoreOrder`."""

    key: str
    signal: Signal
    k: int
    inline: ScoreItem | None = None
    """An item that is not a row."""
    mark: str = ""
    """Which write of the row, by its id, if it was written more than once
    (`dataplane/transfer_queue/write_ids.py`)."""
    prompt: np.ndarray | None = None
    """int32: the ids that this teacher reads instead of the student's prompt; None: the student's."""


class ScoreOrder(msgspec.Struct):
    """A scoring request that a worker sends to one replica."""

    address: ReplicaAddress
    items: list[OrderItem]
    seconds: float | None


class ItemScores(msgspec.Struct, omit_defaults=True):
    """The answer for one item: where its scores are stored, or the scores themselves if it was inline."""

    key: str
    teacher: str
    written: WrittenRow | None = None
    scores: TeacherScores | None = None
    """Of an inline item: the logprobs of its tokens, which are returned and not stored."""
    version: int = -1
    """The version of the weights that scored it (`TeacherScores.version`)."""


class ScoreAnswer(msgspec.Struct):
    """The answer to a `ScoreOrder`: one `ItemScores` per item, or the kind of error and its message."""

    scores: list[ItemScores]
    trouble: str | None = None
    """A name in `TROUBLES`, or `ROWS`."""
    message: str = ""
    retry_after: float | None = None
    """Of trouble `unavailable`: `TeacherUnavailable.retry_after`."""


ROWS = "rows"
"""The worker could not read the rows; it sent no request to a teacher."""
TROUBLES: dict[str, type[TeacherError]] = {
    "reply": TeacherReplyError,
    "timeout": ReplicaTimeout,
    "server": ScoringFailed,
    "route": NoSuchRoute,
    "token": NotAllowed,
    "refused": RequestRefused,
    "unavailable": TeacherUnavailable,
    "teacher": TeacherError,
}
"""Error classes by name, subclasses before their bases. The pool handles a failed request by its class."""

encode = frames.encode
decode_settings = frames.Decoder[RowSettings](RowSettings).decode
decode_reports = frames.Decoder[list[RowReport]](list[RowReport]).decode
decode_order = frames.Decoder[ScoreOrder](ScoreOrder).decode
decode_answer = frames.Decoder[ScoreAnswer](ScoreAnswer).decode


def trouble_of(error: TeacherError) -> str:
    return next(name for name, kind in TROUBLES.items() if isinstance(error, kind))


def failed(error: TeacherError) -> ScoreAnswer:
    wait = error.retry_after if isinstance(error, TeacherUnavailable) else None
    return ScoreAnswer([], trouble_of(error), str(error), wait)


def as_error(answer: ScoreAnswer) -> TeacherError:
    """The error of an answer with trouble, as the worker met it."""
    error = TROUBLES[answer.trouble or "teacher"](answer.message)
    if isinstance(error, TeacherUnavailable):
        error.retry_after = answer.retry_after
    return error


def as_ordered(item: ScoreItem, order: OrderItem) -> ScoreItem:
    """The row after the teacher's own prompt, if the order has one."""
    return item if order.prompt is None else item.after(order.prompt)


def inline_answer(scores: TeacherScores) -> ItemScores:
    return ItemScores(
        scores.key,
        scores.teacher,
        scores=replace(scores, ids=None, logprobs=None, hidden=None),
        version=scores.version,
    )
