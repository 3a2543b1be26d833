"""Requests whose tokens stay on a rollout worker, which sends them to the engine's host itself.

    from               message                                            to
    engine (trainer)   `Grant`: host, call, key, seed                     worker
    worker             tokens, sampling                                   host
    host               generated tokens, logprobs, versions               worker
    worker             `Brought`: length, stop reason, version range      engine (trainer)

The engine composes, places and retries such a batch like any other, but sees lengths only. The host is one
of our engine processes, or a server (vLLM, SGLang, OpenAI). A server returns a generation in pieces when
weights change in the middle of it. Each piece is one call and continues from the call before.
docs/decisions/0016-tokens-past-the-trainer.md and 0017-tokens-to-servers.md list what happens when a
process dies. The module needs no torch: rollout workers import it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import msgspec
import numpy as np

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.engines.servers.continuation import ServerOrder
from understudy.errors import EngineError
from understudy.types.trajectory import StopReason

PATIENCE_S = 600.0


class BearerGone(EngineError):
    """The worker that held a request's tokens is gone; the rest of its batch may be composed again."""


class Trouble(StrEnum):
    """Why a worker returned no generation."""

    WAY = "way"
    """The host was not reached, or the connection broke."""
    SERVER = "server"
    """The host was reached and gave no valid answer."""
    REFUSED = "refused"
    """The host refuses the request, and any other host would too."""


class NotBrought(EngineError):
    """The request or its answer was lost between worker and host; both processes may be alive."""

    def __init__(self, problem: str, trouble: Trouble = Trouble.WAY) -> None:
        super().__init__(problem)
        self.trouble = trouble


class CallGivenUp(EngineError):
    """The batch was cancelled or failed; the worker keeps its tokens and the engine asks again."""


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """Tells a worker where to send one request's tokens."""

    call: int
    """The number of its batch on the host."""
    url: str
    token: str | None
    key: str
    session: str
    seed: int
    after: int | None = None
    """The call that this one continues; None where the generation begins."""
    server: ServerOrder | None = None
    """How to ask, if the host is a server; None for one of our engine processes."""


class Brought(msgspec.Struct, frozen=True, array_like=True):
    """A worker's report of a generation; the tokens themselves stay on the worker."""

    tokens: int
    """Of this call and of the calls that it continues."""
    stop_reason: StopReason
    oldest: int = -1
    newest: int = -1
    """Versions of the weights that drew the tokens; −1 if there are none."""


class Bearer(Protocol):
    """The holder of one request's tokens: the engine's handle on a session of a rollout worker."""

    async def bring(self, grant: Grant) -> Brought:
        """Returns once the worker has the generation; may be called again under another call number.

        Raises `NotBrought` or `BearerGone`.
        """
        ...

    def cut(self, call: int) -> None:
        """The server has returned everything it had: `bring` waits a moment, then returns what arrived."""
        ...

    def give_up(self) -> None:
        """Fails the request, and `bring` with it, because its `patience_s` is over."""
        ...


@dataclass(frozen=True, slots=True)
class FarRequest(GenerateRequest):
    """A remote request: the worker holds its tokens. `tokens` has the right length and only zeros."""

    bearer: Bearer = field(kw_only=True)
    patience_s: float = PATIENCE_S
    """Longest time for the tokens to reach the host, and for the generation to come back."""

    @staticmethod
    def of(
        key: str,
        length: int,
        max_new_tokens: int,
        seed: int,
        session: str,
        bearer: Bearer,
        patience_s: float = PATIENCE_S,
    ) -> FarRequest:
        """The worker knows the real sampling settings; the engine only needs lengths."""
        blank = np.broadcast_to(np.int32(0), length)
        return FarRequest(key, blank, Sampling(max_new_tokens), seed, session, patience_s, bearer=bearer)


def told_of(brought: Brought) -> Generation:
    """A placeholder generation: arrays of the right length, zeros except for the oldest weight version."""

    def blank(value: np.generic) -> np.ndarray:
        return np.broadcast_to(value, brought.tokens)

    return Generation(
        blank(np.int32(0)), blank(np.float32(0)), blank(np.int32(brought.oldest)), brought.stop_reason
    )
