"""One generation by a server in pieces: builds each request, checks each answer, joins the pieces.

    prompt ──ask──> server ──piece──> prompt and piece ──ask──> server ──piece──> …

It ends with the first piece that was not aborted. A server looks for stop texts in the tokens that it draws for
a request, so one that begins in a piece and ends in the next is found here.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from understudy.engines.base import Detokenize, GenerateRequest, Generation, Sampling
from understudy.engines.servers.dialects import Dialect, GeneratedPart, Json, PieceRequest
from understudy.errors import DataError, EngineError
from understudy.media.for_vllm import other_ids
from understudy.serving.client import Reply, ServerClient, ServerGone
from understudy.serving.endpoint import Endpoint, Traffic
from understudy.types.trajectory import StopReason

PAUSED = 423
"""Status of our proxy (`vllm_proxy.py`) while weights change: ask again afterwards."""
BAD_GATEWAY = 502
"""Status of our proxy when vLLM behind it does not answer."""
_REFUSALS = (400, 401, 403, 404, 422)


class RefusedError(EngineError):
    """The server understood and rejected the request: a retry, there or on another server, is no use."""


class UnreachableError(EngineError, ServerGone):
    """The address no longer answers: the server or its machine has died."""


class BusyError(EngineError):
    """The server asks not to be asked again for `retry_after` seconds."""

    retry_after = 0.0


@dataclass(frozen=True, slots=True)
class ServerOrder:
    """How to ask a server for one piece; `Continuation` adds the request itself."""

    dialect: Dialect
    name: str
    """The server's name in errors."""
    model: str
    version: int
    """Version of the server's weights."""
    label: str | None
    """The name we gave the server for its weights; empty or None if we gave none."""
    seeded: bool
    timeout_s: float

    @property
    def salt(self) -> str:
        """Prevents hits on prefix-cache entries that another version of the weights computed."""
        return f"weights-{self.version}"


class Continuation:
    """The tokens generated for one request so far."""

    def __init__(
        self, request: GenerateRequest, shown: Json | None = None, detokenize: Detokenize | None = None
    ) -> None:
        """`shown`: of a prompt with pictures (`media/for_vllm.py`). `detokenize`: for stop texts across pieces."""
        self.request, self._shown, self._detokenize = request, shown or {}, detokenize
        self.stop_reason = StopReason.ABORTED
        self._pieces: list[tuple[GeneratedPart, int]] = []
        """Each with the version of the weights that wrote it."""

    @property
    def written(self) -> int:
        return sum(len(piece.tokens) for piece, _ in self._pieces)

    def ask(self, order: ServerOrder) -> PieceRequest:
        """The request for the remaining tokens."""
        request = self.request
        seed = request.seed if order.seeded else None
        if self.written and order.seeded:
            # The server starts a new random stream for each piece, so each piece needs another seed.
            digest = blake2b(f"{request.seed}/{self.written}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little") >> 1
        tokens = np.concatenate([request.tokens, self._drawn])
        shown = dict(self._shown)
        if shown:
            shown["token_ids"] = shown["token_ids"] + self._drawn.tolist()
        left = request.sampling.max_new_tokens - self.written
        return PieceRequest(request, tokens, left, seed, salt=order.salt, model=order.model, shown=shown)

    @property
    def _drawn(self) -> np.ndarray:
        return np.concatenate([np.empty(0, np.int32), *(piece.tokens for piece, _ in self._pieces)])

    def add(self, piece: GeneratedPart, version: int) -> None:
        piece = self._cut_at_stop_text(piece)
        self._pieces.append((piece, version))
        self.stop_reason = piece.stop_reason
        if piece.stop_reason is StopReason.ABORTED and self.written == self.request.sampling.max_new_tokens:
            self.stop_reason = StopReason.LENGTH

    def _cut_at_stop_text(self, piece: GeneratedPart) -> GeneratedPart:
        """Ends the piece with the token that completes a stop text which began in an earlier piece."""
        stops, drawn, new = self.request.sampling.stop_strings, self._drawn, piece.tokens.tolist()
        if self._detokenize is None or not stops or not len(drawn):
            return piece
        # A character is at most four tokens, so this many on either side hold a stop text that lies across.
        reach = 4 * max(map(len, stops)) + 4
        before = drawn[-reach:].tolist()
        for count in range(1, min(reach, len(new)) + 1):
            text = self._detokenize(before + new[:count])
            if any(stop in text for stop in stops):
                ended = count == len(new) and piece.stop_reason is StopReason.EOS
                reason = StopReason.EOS if ended else StopReason.STOP_STRING
                return piece.first(count, reason)
        return piece

    def generation(self) -> Generation:
        pieces = [GeneratedPart.nothing(), *(piece for piece, _ in self._pieces)]
        wanted = self.request.sampling.candidates
        ids = [one for piece in pieces for one in piece.candidates]
        versions = [np.full(len(piece.tokens), version, np.int32) for piece, version in self._pieces]
        return Generation(
            np.concatenate([piece.tokens for piece in pieces]),
            np.concatenate([piece.logprobs for piece in pieces]),
            np.concatenate([np.empty(0, np.int32), *versions]),
            self.stop_reason,
            np.asarray(ids, dtype=np.int32).reshape(self.written, wanted) if wanted else None,
        )


class GenerationClient(ServerClient):
    """The client of one generation server."""

    gone, timeout = UnreachableError, EngineError

    def __init__(
        self, name: str, dialect: Dialect, endpoint: Endpoint, *, most: int, traffic: Traffic
    ) -> None:
        super().__init__(f"{name} ({dialect.name})", endpoint, most=most, connect_s=None)
        self._dialect, self._traffic = dialect, traffic

    async def fetch(self, order: ServerOrder, ask: PieceRequest) -> GeneratedPart:
        """Asks for one piece. Raises `RefusedError`, `UnreachableError` or another `EngineError`."""
        path, content = self._dialect.generate, msgspec.json.encode(self._dialect.body(ask))
        self._traffic.sent += len(content)
        reply = await self.request(path, content, timeout_s=order.timeout_s)
        self._traffic.received += len(reply.body)
        if reply.status == PAUSED:
            return GeneratedPart.nothing()
        if reply.status >= 400:
            raise self.refusal(path, reply)
        piece = self._dialect.read(reply.body, ask)
        if order.label and piece.labels and piece.labels != {order.label}:
            # A server that restarted with other weights than ours must not generate training rows.
            held = ", ".join(sorted(piece.labels))
            raise EngineError(
                f"{order.name} wrote with weights it calls {held}; expected {order.label}. Was it restarted?"
            )
        if ask.shown and len(piece.tokens) and (why := other_ids(piece.read, ask.tokens)):
            raise DataError(f"row {ask.request.key}: {why}")
        return piece

    async def post(self, path: str, body: Json, timeout_s: float) -> Json:
        reply = await self.ask(path, msgspec.json.encode(body), timeout_s=timeout_s)
        if not reply.body:
            return {}
        try:
            answer: Any = msgspec.json.decode(reply.body)
        except msgspec.DecodeError:
            answer = reply.text[:300]  # some servers confirm in plain text
        return answer if isinstance(answer, dict) else {"answer": answer}

    def refusal(self, path: str, reply: Reply) -> EngineError:
        kind = RefusedError if reply.status in _REFUSALS else EngineError
        kind = UnreachableError if reply.status == BAD_GATEWAY else kind
        message = f"{self.name} answered {path} with {reply.status}: {reply.text[:300]}"
        if reply.retry_after is None:
            return kind(message)
        busy = BusyError(message)
        busy.retry_after = reply.retry_after
        return busy


def check_candidates(dialect: Dialect, sampling: Sampling) -> None:
    """Refuses candidates with filters: servers rank the filtered distribution, not the model's own."""
    if not sampling.candidates:
        return
    filtered = sampling.top_k or sampling.top_p < 1 or sampling.min_p or sampling.repetition_penalty != 1
    if not dialect.candidates or filtered:
        why = "filters change what it ranks" if filtered else "its answers do not name them"
        raise RefusedError(
            f"a server that speaks {dialect.name} cannot report the model's own candidates: {why}; leave top_p, "
            "top_k, min_p and repetition_penalty alone and use hf, vllm or sglang"
        )
