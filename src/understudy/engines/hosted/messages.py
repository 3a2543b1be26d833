"""Messages between trainer and engine process: calls and answers as frames (`serving/frames.py`), orders as JSON."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.errors import EngineError
from understudy.serving.frames import Decoder, FrameError, encode

CONTENT_TYPE = "application/x-understudy-frame"
CLOSED = 503
"""The status of a refusal by a process that ends: another process may be asked."""


class MessageError(EngineError, FrameError):
    """Bytes arrived that are not a message of this protocol."""


class CallRequest(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """One request of a call."""

    key: str
    session: str
    seed: int
    sampling: int
    """Index into the call's sampling settings; most batches share one."""
    tokens: np.ndarray
    media: list[str] = []


class EngineCall(msgspec.Struct, forbid_unknown_fields=True):
    """One batch of requests."""

    call: int
    """Incremented by the client. An abort names the last call it applies to; both may arrive in any order."""
    samplings: list[Sampling]
    requests: list[CallRequest]


class CallReply(msgspec.Struct, forbid_unknown_fields=True):
    """Generations in the order of the call's requests."""

    version: int
    """Version of the engine's weights when it answered."""
    generations: list[Generation]


class AbortOrder(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /v1/abort`."""

    through: int
    """Applies to every call up to this one."""


_calls: Decoder[EngineCall] = Decoder(EngineCall, MessageError)
_answers: Decoder[CallReply] = Decoder(CallReply, MessageError)


def encode_call(call: int, requests: Sequence[GenerateRequest]) -> bytes:
    settings: dict[Sampling, int] = {}
    rows = [
        CallRequest(
            request.key,
            request.session,
            request.seed,
            settings.setdefault(request.sampling, len(settings)),
            request.tokens.astype(np.int32, copy=False),
            list(request.media),
        )
        for request in requests
    ]
    return encode(EngineCall(call, list(settings), rows))


def decode_call(body: bytes) -> tuple[int, list[GenerateRequest]]:
    came = _calls.decode(bytearray(body))
    requests = []
    for row in came.requests:
        if row.tokens.dtype != np.int32 or row.tokens.ndim != 1:
            raise MessageError(
                f"request {row.key} has tokens of type {row.tokens.dtype} {row.tokens.shape}; expected int32 [T]"
            )
        if not 0 <= row.sampling < len(came.samplings):
            raise MessageError(
                f"request {row.key} names sampling {row.sampling}; the call holds {len(came.samplings)}"
            )
        if not 0 <= row.seed < 1 << 63:
            raise MessageError(f"request {row.key} has seed {row.seed}; expected 63 bits")
        sampling = came.samplings[row.sampling]
        if not all(0 <= stop < 1 << 31 for stop in sampling.stop_ids):
            raise MessageError(f"request {row.key} has stop ids that are not token ids")
        requests.append(
            GenerateRequest(row.key, row.tokens, sampling, row.seed, row.session, tuple(row.media))
        )
    return came.call, requests


def encode_answer(version: int, generations: Sequence[Generation]) -> bytes:
    return encode(CallReply(version, list(generations)))


def decode_answer(body: bytes, expected: int) -> tuple[int, list[Generation]]:
    """The engine's version and `expected` generations; anything else is a `MessageError`."""
    # A bytearray, so that agent loops get arrays they may write into, as from an engine in this process.
    answer = _answers.decode(bytearray(body))
    if len(answer.generations) != expected:
        raise MessageError(f"{len(answer.generations)} generations came for {expected} requests")
    return answer.version, answer.generations
