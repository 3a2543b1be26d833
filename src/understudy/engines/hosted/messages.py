"""The wire format between trainer and engine process: a msgpack header, then raw little-endian arrays.

    frame = magic "UDEN" · header bytes u32 · header (msgpack) · arrays, one after another, in the header's order

No pickle, and no number is converted to text. The header lists every array that follows with its type and
shape. So a frame that was truncated, extended or damaged is rejected before anything is computed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

import msgspec
import numpy as np

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.errors import EngineError
from understudy.types.trajectory import StopReason
from understudy.weights.broadcast import StreamOrder

MAGIC = b"UDEN"
PREFIX = struct.Struct("<4sI")
CONTENT_TYPE = "application/x-understudy-engine-frame"
BROKEN_TRANSFER = 409
"""Status of a weights order whose tensors did not all arrive: the engine keeps its current weights."""
MAX_HEADER_BYTES = 64 << 20
_TYPES = {"<i4": np.int32, "<f4": np.float32, "<u2": np.uint16, "|b1": np.bool_}
_STREAMS = tuple(field.name for field in fields(Generation) if field.name != "stop_reason")
"""Every array of a generation; one added to `Generation` is sent without a change here."""


class FrameError(EngineError):
    """Bytes arrived that are not a frame of this protocol."""


class ArrayNote(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Name, type and shape of one array behind the header."""

    name: str
    type: str
    shape: list[int]


class WireRequest(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """One request of a call; its tokens follow the header."""

    key: str
    session: str
    seed: int
    sampling: int
    """Index into the header's sampling settings; most batches share one."""
    tokens: int


class CallHeader(msgspec.Struct, forbid_unknown_fields=True):
    """The header of a call frame: one batch of requests."""

    call: int
    """Incremented by the client. An abort names the last call it applies to; both may arrive in any order."""
    samplings: list[Sampling]
    requests: list[WireRequest]


class WireGeneration(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """One generation of an answer; its arrays follow the header."""

    stop_reason: str
    streams: list[ArrayNote]


class AnswerHeader(msgspec.Struct, forbid_unknown_fields=True):
    """The header of an answer frame: generations in the order of the call's requests."""

    version: int
    """Version of the engine's weights when it answered."""
    generations: list[WireGeneration]


class WeightsOrder(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /v1/weights`: load `file`, a name in the shared folder, or receive `stream`.

    With neither, only the version changes.
    """

    version: int
    file: str | None = None
    stream: StreamOrder | None = None


class AbortOrder(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /v1/abort`."""

    through: int
    """Applies to every call up to this one."""


_calls = msgspec.msgpack.Decoder(CallHeader)
_answers = msgspec.msgpack.Decoder(AnswerHeader)
Header = TypeVar("Header")


def encode_call(call: int, requests: Sequence[GenerateRequest]) -> bytes:
    settings: dict[Sampling, int] = {}
    rows = [
        WireRequest(
            request.key,
            request.session,
            request.seed,
            settings.setdefault(request.sampling, len(settings)),
            len(request.tokens),
        )
        for request in requests
    ]
    header = CallHeader(call, list(settings), rows)
    return _frame(header, [request.tokens.astype("<i4", copy=False) for request in requests])


def decode_call(body: bytes) -> tuple[int, list[GenerateRequest]]:
    header, rest = _open(body, _calls)
    counts = [row.tokens for row in header.requests]
    if any(count < 0 for count in counts):
        raise FrameError("a request has a negative number of tokens")
    if 4 * sum(counts) != len(rest):
        raise FrameError(f"the header promises {4 * sum(counts)} bytes of tokens; {len(rest)} came")
    tokens = np.frombuffer(rest, dtype="<i4")
    requests, start = [], 0
    for row in header.requests:
        if not 0 <= row.sampling < len(header.samplings):
            raise FrameError(
                f"request {row.key} names sampling {row.sampling}; the frame holds {len(header.samplings)}"
            )
        if not 0 <= row.seed < 1 << 63:
            raise FrameError(f"request {row.key} has seed {row.seed}; expected 63 bits")
        if not all(0 <= stop < 1 << 31 for stop in header.samplings[row.sampling].stop_ids):
            raise FrameError(f"request {row.key} has stop ids that are no token ids")
        ids = tokens[start : start + row.tokens].astype(np.int32)
        start += row.tokens
        requests.append(GenerateRequest(row.key, ids, header.samplings[row.sampling], row.seed, row.session))
    return header.call, requests


def encode_answer(version: int, generations: Sequence[Generation]) -> bytes:
    rows, arrays = [], []
    for generation in generations:
        streams = []
        for name in _STREAMS:
            array = getattr(generation, name)
            if array is None:
                continue
            array = np.ascontiguousarray(array)
            wire = array.astype(array.dtype.newbyteorder("<"), copy=False)
            streams.append(ArrayNote(name, wire.dtype.str, list(wire.shape)))
            arrays.append(wire)
        rows.append(WireGeneration(str(generation.stop_reason), streams))
    return _frame(AnswerHeader(version, rows), arrays)


def decode_answer(body: bytes, expected: int) -> tuple[int, list[Generation]]:
    """The engine's version and `expected` generations; anything else is a `FrameError`."""
    header, rest = _open(body, _answers)
    if len(header.generations) != expected:
        raise FrameError(f"{len(header.generations)} generations came for {expected} requests")
    generations, at = [], 0
    for row in header.generations:
        streams: dict[str, Any] = {}
        for note in row.streams:
            if note.name not in _STREAMS or note.type not in _TYPES or min(note.shape, default=0) < 0:
                raise FrameError(f"an answer holds {note.name} of type {note.type}, shape {note.shape}")
            count = math.prod(note.shape)
            size = count * np.dtype(note.type).itemsize
            if at + size > len(rest):
                raise FrameError(f"an answer ends within {note.name}")
            found = np.frombuffer(rest, note.type, count, at).reshape(note.shape)
            streams[note.name] = found.astype(_TYPES[note.type])
            at += size
        try:
            generations.append(Generation(**streams, stop_reason=StopReason(row.stop_reason)))
        except (TypeError, ValueError, EngineError) as error:
            raise FrameError(f"an answer holds a generation that is none: {error}") from error
    if at != len(rest):
        raise FrameError(f"{len(rest) - at} bytes follow the last generation")
    return header.version, generations


def _frame(header: Any, arrays: Sequence[np.ndarray]) -> bytes:
    head = msgspec.msgpack.encode(header)
    return b"".join([PREFIX.pack(MAGIC, len(head)), head, *(array.tobytes() for array in arrays)])


def _open(body: bytes, decoder: msgspec.msgpack.Decoder[Header]) -> tuple[Header, memoryview]:
    if len(body) < PREFIX.size:
        raise FrameError(f"a frame has at least {PREFIX.size} bytes; {len(body)} came")
    magic, size = PREFIX.unpack_from(body)
    if magic != MAGIC:
        raise FrameError(f"a frame begins with {MAGIC!r}; {magic!r} came")
    if size > MAX_HEADER_BYTES or PREFIX.size + size > len(body):
        raise FrameError(
            f"a header of {size} bytes is promised in a frame of {len(body)}; at most {MAX_HEADER_BYTES}"
        )
    view = memoryview(body)
    try:
        header = decoder.decode(view[PREFIX.size : PREFIX.size + size])
    except (msgspec.MsgspecError, EngineError, UnicodeDecodeError) as error:
        raise FrameError(f"the header cannot be read: {error}") from error
    return header, view[PREFIX.size + size :]
