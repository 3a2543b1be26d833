"""Requests whose tokens are held by another process, which brings them to the engine by itself.

    engine: which host, which call ──Grant──> bearer ──tokens──> host ──what was written──> bearer ──Brought──> engine

The engine composes, places and repeats such a batch as any other, and sees lengths. The host is an engine process of ours, or a
server (vLLM, SGLang, OpenAI), which gives a generation in pieces where weights change: each is a call, and goes on from another.
Who dies when, and what then, is in docs/decisions/0016-tokens-past-the-trainer.md and 0017-tokens-to-servers.md. The module
needs no torch: rollout workers import it.
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
    """Whoever had a request's tokens has left; the rest of its batch may be composed anew."""


class Trouble(StrEnum):
    """Why nothing was brought."""

    WAY = "way"
    """Nobody was reached there, or the connection broke."""
    SERVER = "server"
    """It was reached, and gave nothing that is good."""
    REFUSED = "refused"
    """It will not have the request, nor would another."""


class NotBrought(EngineError):
    """The tokens, or what was written for them, did not get from one side to the other; both may be well."""

    def __init__(self, problem: str, trouble: Trouble = Trouble.WAY) -> None:
        super().__init__(problem)
        self.trouble = trouble


class CallGivenUp(EngineError):
    """Whoever composed the batch, or could not write it, knows why; who brought tokens to it waits to be asked again."""


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """Where one request's tokens are wanted."""

    call: int
    """The batch it belongs to, there."""
    url: str
    token: str | None
    key: str
    session: str
    seed: int
    after: int | None = None
    """The call whose tokens this one goes on from; the generation begins where there is none."""
    server: ServerOrder | None = None
    """How it is asked, where it is a server and no engine process of ours."""


class Brought(msgspec.Struct, frozen=True, array_like=True):
    """What the bearer tells of what was written; the rest stays with it."""

    tokens: int
    """In this call and in those it went on from."""
    stop_reason: StopReason
    oldest: int = -1
    newest: int = -1
    """Versions of the weights that wrote it; −1 where nothing was written."""


class Bearer(Protocol):
    """Who has a request's tokens."""

    async def bring(self, grant: Grant) -> Brought:
        """Returns when it has what was written; may be asked again under another call. `NotBrought`, `BearerGone`."""
        ...

    def cut(self, call: int) -> None:
        """The server has handed back everything it had: what did not come in a moment never does. `bring` returns what there is."""
        ...

    def give_up(self) -> None:
        """It took longer than the request's patience: the request fails, and `bring` with it."""
        ...


@dataclass(frozen=True, slots=True)
class FarRequest(GenerateRequest):
    """One continuation to write, by name. Its tokens are as many as there are, and none of them is known."""

    bearer: Bearer = field(kw_only=True)
    patience_s: float = PATIENCE_S
    """How long the tokens may be on their way to the host, and what was written on its way back."""

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
        """How tokens are drawn is the bearer's to know; the engine counts by lengths."""
        blank = np.broadcast_to(np.int32(0), length)
        return FarRequest(key, blank, Sampling(max_new_tokens), seed, session, patience_s, bearer=bearer)


def told_of(brought: Brought) -> Generation:
    """A generation whose arrays have the right lengths and nothing in them, but for the oldest version."""

    def blank(value: np.generic) -> np.ndarray:
        return np.broadcast_to(value, brought.tokens)

    return Generation(
        blank(np.int32(0)), blank(np.float32(0)), blank(np.int32(brought.oldest)), brought.stop_reason
    )
