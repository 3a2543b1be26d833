"""The wire protocol between a teacher replica and its clients, as in docs/teacher-protocol.md.

    frame  = prefix (24 bytes) · header (JSON, space-padded to a multiple of 8) · body (little-endian arrays)
    prefix = magic "UDST" · version u16 · kind u16 · header bytes u32 · reserved u32 · body bytes u64

Requests and replies are columns, not lists of records: one array holds the tokens of every sequence,
another their counts. So encoding and decoding take a handful of copies and views, however many sequences
a request has, and no number is turned into text.

Legend: N sequences, T tokens (of all sequences together), P scored positions, K candidates, H hidden size.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import msgspec
import numpy as np

from understudy.errors import TeacherError
from understudy.types.scores import ScoreItem, Signal, TeacherScores
from understudy.types.usable_ids import UsableIds

MAGIC = b"UDST"
VERSION = 1
CONTENT_TYPE = "application/x-understudy-frame"
PREFIX = struct.Struct("<4sHHIIQ")
MAX_HEADER_BYTES = 8 << 20
MISSING_MEDIA = 409
"""Status of a request whose pictures the replica does not have; the client sends them and asks again."""
_SIGNALS = {signal.value: signal for signal in Signal}


class FrameKind(IntEnum):
    REQUEST = 1
    REPLY = 2
    HEAD = 3


class ProtocolError(TeacherError):
    """Bytes arrived that are not a frame of this protocol."""


class _RequestHeader(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    keys: list[str]
    signals: list[str]
    k: list[int]
    id_limit: int = 0
    """Ids from here on are excluded from the candidates and the softmax; 0: the teacher's default."""
    unused_ids: list[int] = []
    """Single ids below the limit that are excluded too."""
    media: list[list[str]] = []
    """Per sequence the hashes of its pictures, in the order of their placeholders; absent without pictures."""


class _ReplyHeader(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    teacher: str
    keys: list[str]
    signals: list[str]
    k: list[int]
    hidden_size: int
    version: int = -1


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Sequences to score, as columns."""

    keys: list[str]
    signals: list[Signal]
    k_N: list[int]
    """Candidates per position: K of `topk`, the number of ids of `at_ids`, 0 otherwise."""
    token_counts_N: np.ndarray
    position_counts_N: np.ndarray
    tokens_T: np.ndarray
    """int32, every sequence one after another."""
    positions_P: np.ndarray
    """int32, counted within each sequence."""
    ids: np.ndarray
    """int32, flat: P_i × k_i ids of each `at_ids` sequence, one after another."""
    usable: UsableIds | None = None
    """The ids that the teacher's softmax runs over; None: all ids with a token in the teacher's
    vocabulary."""
    media: tuple[tuple[str, ...], ...] = ()
    """Hashes of each sequence's pictures; empty if no sequence has any."""

    def media_of(self, row: int) -> tuple[str, ...]:
        return self.media[row] if self.media else ()

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def starts_N(self) -> np.ndarray:
        """int64: where each sequence starts in `tokens_T`."""
        return exclusive_cumsum(self.token_counts_N)

    @property
    def flat_positions_P(self) -> np.ndarray:
        """int64: the index in `tokens_T` of each scored token."""
        return self.positions_P.astype(np.int64) + np.repeat(self.starts_N, self.position_counts_N)

    @property
    def digests_N(self) -> np.ndarray:
        """uint64: the echo of each sequence, the first 8 bytes of SHA-256 over its tokens' bytes and the
        hashes of its pictures."""
        ends = np.cumsum(self.token_counts_N, dtype=np.int64)
        return np.array(
            [
                digest(self.tokens_T[end - count : end], self.media_of(row))
                for row, (end, count) in enumerate(zip(ends, self.token_counts_N, strict=True))
            ],
            dtype="<u8",
        )


@dataclass(frozen=True, slots=True)
class ScoreReply:
    """The scores of a request's sequences, as columns in the request's order."""

    teacher: str
    keys: list[str]
    signals: list[Signal]
    k_N: list[int]
    position_counts_N: np.ndarray
    digests_N: np.ndarray
    scored_P: np.ndarray
    """int32: the token each entry scores, so that the client detects a reply shifted by one position."""
    sampled_P: np.ndarray
    """float32."""
    ids: np.ndarray
    """int32, flat: P_i × k_i of each `topk` or `at_ids` sequence."""
    logprobs: np.ndarray
    """float32, beside `ids`."""
    hidden: np.ndarray
    """uint16 (bits of bfloat16), flat: P_i × H of each `hidden` sequence."""
    hidden_size: int = 0
    version: int = -1
    """The version of the weights that scored it; −1: those the replica was loaded with."""

    def __len__(self) -> int:
        return len(self.keys)

    def split(self) -> list[TeacherScores]:
        """One `TeacherScores` per sequence; the arrays are views, nothing is copied."""
        scores: list[TeacherScores] = []
        at = at_ids = at_hidden = 0
        counts = self.position_counts_N.tolist()
        for key, signal, k, count in zip(self.keys, self.signals, self.k_N, counts, strict=True):
            ids = logprobs = hidden = None
            if signal in (Signal.TOPK, Signal.AT_IDS):
                ids = self.ids[at_ids : at_ids + count * k].reshape(count, k)
                logprobs = self.logprobs[at_ids : at_ids + count * k].reshape(count, k)
                at_ids += count * k
            elif signal is Signal.HIDDEN:
                end = at_hidden + count * self.hidden_size
                hidden = self.hidden[at_hidden:end].reshape(count, self.hidden_size)
                at_hidden = end
            scores.append(
                TeacherScores(
                    key,
                    self.teacher,
                    signal,
                    self.sampled_P[at : at + count],
                    ids,
                    logprobs,
                    hidden,
                    version=self.version,
                )
            )
            at += count
        return scores


def exclusive_cumsum(counts: np.ndarray) -> np.ndarray:
    ends = np.cumsum(counts, dtype=np.int64)
    return ends - counts


def digest(tokens: np.ndarray, media: Sequence[str] = ()) -> int:
    found = hashlib.sha256(np.ascontiguousarray(tokens, dtype="<i4").data)
    found.update("".join(media).encode())
    return int.from_bytes(found.digest()[:8], "little")


def request_of(items: Sequence[ScoreItem], usable: UsableIds | None = None) -> ScoreRequest:
    """Pack items into columns. Raises `TeacherError` naming the first invalid item."""
    for item in items:
        if item.signal is Signal.TOPK and item.k < 1:
            raise TeacherError(f"row {item.key}: signal 'topk' needs k ≥ 1, got {item.k}")
        if item.signal is Signal.AT_IDS and (
            item.ids is None or item.ids.shape[:1] != item.positions.shape or item.ids.ndim != 2
        ):
            shape = None if item.ids is None else item.ids.shape
            raise TeacherError(f"row {item.key}: 'at_ids' needs ids [{len(item.positions)}, K], got {shape}")
    ids = [item.ids.reshape(-1) for item in items if item.signal is Signal.AT_IDS and item.ids is not None]
    request = ScoreRequest(
        keys=[item.key for item in items],
        signals=[item.signal for item in items],
        k_N=[_columns_of(item) for item in items],
        token_counts_N=np.array([len(item.tokens) for item in items], dtype="<u4"),
        position_counts_N=np.array([len(item.positions) for item in items], dtype="<u4"),
        tokens_T=_joined([item.tokens for item in items], "<i4"),
        positions_P=_joined([item.positions for item in items], "<i4"),
        ids=_joined(ids, "<i4"),
        usable=usable,
        media=tuple(item.media for item in items) if any(item.media for item in items) else (),
    )
    _check_positions(request, TeacherError)
    return request


def _columns_of(item: ScoreItem) -> int:
    if item.signal is Signal.TOPK:
        return item.k
    return 0 if item.signal is not Signal.AT_IDS or item.ids is None else item.ids.shape[1]


def _joined(parts: Sequence[np.ndarray], dtype: str) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)


def encode_request(request: ScoreRequest) -> bytes:
    header = _RequestHeader(request.keys, [signal.value for signal in request.signals], request.k_N)
    if request.usable is not None:
        header.id_limit, header.unused_ids = request.usable.limit, list(request.usable.holes)
    header.media = [list(names) for names in request.media]
    arrays = (
        request.token_counts_N.astype("<u4", copy=False),
        request.position_counts_N.astype("<u4", copy=False),
        request.tokens_T.astype("<i4", copy=False),
        request.positions_P.astype("<i4", copy=False),
        request.ids.astype("<i4", copy=False),
    )
    return frame(FrameKind.REQUEST, header, arrays)


def encode_reply(reply: ScoreReply) -> bytes:
    header = _ReplyHeader(
        reply.teacher,
        reply.keys,
        [signal.value for signal in reply.signals],
        reply.k_N,
        reply.hidden_size,
        reply.version,
    )
    arrays = (
        reply.digests_N.astype("<u8", copy=False),
        reply.position_counts_N.astype("<u4", copy=False),
        reply.scored_P.astype("<i4", copy=False),
        reply.sampled_P.astype("<f4", copy=False),
        reply.ids.astype("<i4", copy=False),
        reply.logprobs.astype("<f4", copy=False),
        reply.hidden.astype("<u2", copy=False),
    )
    return frame(FrameKind.REPLY, header, arrays)


def frame(kind: FrameKind, header: msgspec.Struct, arrays: Sequence[np.ndarray]) -> bytes:
    head = msgspec.json.encode(header)
    head += b" " * (-len(head) % 8)
    body_bytes = sum(array.nbytes for array in arrays)
    prefix = PREFIX.pack(MAGIC, VERSION, kind, len(head), 0, body_bytes)
    return b"".join([prefix, head, *(np.ascontiguousarray(array).data for array in arrays)])


H = TypeVar("H", bound=msgspec.Struct)


def unframe(data: bytes | memoryview, kind: FrameKind, header_type: type[H]) -> tuple[H, memoryview]:
    """The header and the body of a frame, or `ProtocolError` with the reason."""
    view = memoryview(data)
    if len(view) < PREFIX.size:
        raise ProtocolError(f"a frame starts with {PREFIX.size} bytes; got {len(view)}")
    magic, version, got_kind, header_bytes, reserved, body_bytes = PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise ProtocolError(f"a frame starts with {MAGIC!r}; got {magic!r}")
    if version != VERSION:
        raise ProtocolError(f"protocol version {version} is not spoken here; this side speaks {VERSION}")
    if got_kind != kind:
        raise ProtocolError(
            f"expected a frame of kind {kind.value} ({kind.name.lower()}); got kind {got_kind}"
        )
    if reserved != 0:
        raise ProtocolError(f"the reserved field must be 0; got {reserved}")
    if header_bytes > MAX_HEADER_BYTES or header_bytes % 8:
        raise ProtocolError(
            f"header of {header_bytes} bytes; at most {MAX_HEADER_BYTES} and a multiple of 8 is allowed"
        )
    if PREFIX.size + header_bytes + body_bytes != len(view):
        raise ProtocolError(
            f"the prefix promises {PREFIX.size} + {header_bytes} + {body_bytes} bytes; the frame has {len(view)}"
        )
    start = PREFIX.size + header_bytes
    try:
        header = msgspec.json.decode(view[PREFIX.size : start], type=header_type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"unreadable frame header: {error}") from error
    return header, view[start:]


class FrameReader:
    """Reads arrays from a frame's body one after another, never past its end."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.at = 0

    def take(self, name: str, dtype: str, count: int) -> np.ndarray:
        size = count * np.dtype(dtype).itemsize
        if size > len(self.view) - self.at:
            raise ProtocolError(
                f"'{name}' needs {size} bytes; {len(self.view) - self.at} are left in the frame"
            )
        array = np.frombuffer(self.view, dtype, count, self.at) if count else np.empty(0, dtype)
        self.at += size
        return array

    def end(self) -> None:
        if self.at != len(self.view):
            raise ProtocolError(f"{len(self.view) - self.at} bytes are left over at the end of the frame")


def _signals_of(names: Sequence[str], keys: Sequence[str], k_N: Sequence[int]) -> list[Signal]:
    if not len(names) == len(keys) == len(k_N):
        raise ProtocolError(
            f"{len(keys)} keys, {len(names)} signals and {len(k_N)} k: one of each per sequence"
        )
    signals = []
    for key, name, k in zip(keys, names, k_N, strict=True):
        signal = _SIGNALS.get(name)
        if signal is None:
            raise ProtocolError(f"row {key!r}: unknown signal {name!r}; known: {', '.join(_SIGNALS)}")
        wants_k = signal in (Signal.TOPK, Signal.AT_IDS)
        if wants_k != (k > 0) or not 0 <= k < 2**31:
            raise ProtocolError(
                f"row {key!r}: signal {name!r} with k = {k}; k > 0 belongs to topk and at_ids alone"
            )
        signals.append(signal)
    return signals


def _total(counts: np.ndarray) -> int:
    return int(counts.sum(dtype=np.int64))


def decode_request(data: bytes | memoryview) -> ScoreRequest:
    header, view = unframe(data, FrameKind.REQUEST, _RequestHeader)
    signals = _signals_of(header.signals, header.keys, header.k)
    body = FrameReader(view)
    token_counts_N = body.take("token counts", "<u4", len(signals))
    position_counts_N = body.take("position counts", "<u4", len(signals))
    tokens_T = body.take("tokens", "<i4", _total(token_counts_N))
    positions_P = body.take("positions", "<i4", _total(position_counts_N))
    counts = position_counts_N.tolist()
    named = sum(n * k for n, k, s in zip(counts, header.k, signals, strict=True) if s is Signal.AT_IDS)
    ids = body.take("ids", "<i4", named)
    body.end()
    if header.id_limit < 0 or any(not 0 <= one < header.id_limit for one in header.unused_ids):
        raise ProtocolError(f"id_limit = {header.id_limit}; expected 0 or more, and every unused id below it")
    usable = UsableIds(header.id_limit, tuple(header.unused_ids)) if header.id_limit else None
    if header.media and len(header.media) != len(signals):
        raise ProtocolError(f"media for {len(header.media)} sequences, expected {len(signals)}")
    media = tuple(tuple(names) for names in header.media)
    request = ScoreRequest(
        header.keys,
        signals,
        header.k,
        token_counts_N,
        position_counts_N,
        tokens_T,
        positions_P,
        ids,
        usable,
        media,
    )
    _check_positions(request, ProtocolError)
    return request


def _check_positions(request: ScoreRequest, error: type[TeacherError]) -> None:
    """Every position is in 1 … T−1 of its sequence, and they rise within it."""
    rows_P = np.repeat(np.arange(len(request)), request.position_counts_N)
    positions_P = request.positions_P
    wrong_P = (positions_P < 1) | (positions_P >= request.token_counts_N[rows_P].astype(np.int64))
    wrong_P[1:] |= (np.diff(positions_P) <= 0) & (rows_P[1:] == rows_P[:-1])
    if wrong_P.any():
        at = int(wrong_P.argmax())
        row = int(rows_P[at])
        raise error(
            f"row {request.keys[row]!r}: position {positions_P[at]} of a sequence of {request.token_counts_N[row]} tokens; "
            "positions rise and lie in 1 … tokens − 1 (the first token is never scored)"
        )


def decode_reply(data: bytes | memoryview) -> ScoreReply:
    header, view = unframe(data, FrameKind.REPLY, _ReplyHeader)
    signals = _signals_of(header.signals, header.keys, header.k)
    if not 0 <= header.hidden_size < 2**31:
        raise ProtocolError(f"hidden size {header.hidden_size}")
    body = FrameReader(view)
    digests_N = body.take("digests", "<u8", len(signals))
    position_counts_N = body.take("position counts", "<u4", len(signals))
    positions = _total(position_counts_N)
    scored_P = body.take("scored tokens", "<i4", positions)
    sampled_P = body.take("sampled logprobs", "<f4", positions)
    counts = position_counts_N.tolist()
    candidates = sum(n * k for n, k in zip(counts, header.k, strict=True))
    ids = body.take("ids", "<i4", candidates)
    logprobs = body.take("logprobs", "<f4", candidates)
    states = sum(n for n, signal in zip(counts, signals, strict=True) if signal is Signal.HIDDEN)
    hidden = body.take("hidden states", "<u2", states * header.hidden_size)
    body.end()
    return ScoreReply(
        header.teacher,
        header.keys,
        signals,
        header.k,
        position_counts_N,
        digests_N,
        scored_P,
        sampled_P,
        ids,
        logprobs,
        hidden,
        header.hidden_size,
        header.version,
    )
