"""One generation by a server in pieces: builds each request, checks each answer, joins the pieces.

    prompt ──ask──> server ──piece──> prompt and piece ──ask──> server ──piece──> …

It ends with the first piece that was not aborted. The process that holds the tokens asks: the trainer
(`servers/engine.py`) or a rollout worker (`servers/worker_client.py`). The module needs no torch: rollout
workers import it.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import httpx
import msgspec
import numpy as np

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.engines.replicas import Endpoint, Traffic
from understudy.engines.servers.dialects import DIALECTS, Ask, Dialect, Json, Piece
from understudy.errors import EngineError
from understudy.serving.connections import Connections
from understudy.types.trajectory import StopReason

PAUSED = 423
"""Status of our proxy (`vllm_proxy.py`) while weights change: ask again afterwards."""
BAD_GATEWAY = 502
"""Status of our proxy when vLLM behind it does not answer."""
_REFUSALS = (400, 401, 403, 404, 422)


class RefusedError(EngineError):
    """The server understood and rejected the request: a retry, there or on another server, is no use."""


class UnreachableError(EngineError):
    """The address no longer answers: the server or its machine has died."""


class ServerOrder(msgspec.Struct, frozen=True, array_like=True):
    """How to ask a server for one piece. The holder of the tokens adds the request itself."""

    dialect: str
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

    @property
    def language(self) -> Dialect:
        return DIALECTS[self.dialect]


class Pieces:
    """The tokens generated for one request so far; `before` holds those of earlier pieces."""

    def __init__(self, request: GenerateRequest, before: Generation | None = None) -> None:
        self.request = request
        self.stop_reason = StopReason.ABORTED
        self._tokens: list[int] = [] if before is None else before.tokens.tolist()
        self._logprobs: list[float] = [] if before is None else before.logprobs.tolist()
        self._versions: list[int] = [] if before is None else before.weight_versions.tolist()
        self._candidates: list[list[int]] = []
        if before is not None and before.candidate_ids is not None:
            self._candidates = before.candidate_ids.tolist()

    @property
    def written(self) -> int:
        return len(self._tokens)

    def ask(self, order: ServerOrder) -> Ask:
        """The request for the remaining tokens."""
        request = self.request
        seed = request.seed if order.seeded else None
        if self._tokens and order.seeded:
            # The server starts a new random stream for each piece, so each piece needs another seed.
            digest = blake2b(f"{request.seed}/{self.written}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little") >> 1
        tokens = np.concatenate([request.tokens, np.asarray(self._tokens, dtype=np.int32)])
        left = request.sampling.max_new_tokens - self.written
        return Ask(request, tokens, left, seed, salt=order.salt, model=order.model)

    def add(self, piece: Piece, version: int) -> None:
        self._tokens += piece.tokens
        self._logprobs += piece.logprobs
        self._versions += [version] * len(piece.tokens)
        self._candidates += piece.candidates
        self.stop_reason = piece.stop_reason
        if piece.stop_reason is StopReason.ABORTED and self.written == self.request.sampling.max_new_tokens:
            self.stop_reason = StopReason.LENGTH

    def generation(self) -> Generation:
        wanted = self.request.sampling.candidates
        ids = np.asarray(self._candidates, dtype=np.int32).reshape(self.written, wanted) if wanted else None
        return Generation(
            np.asarray(self._tokens, dtype=np.int32),
            np.asarray(self._logprobs, dtype=np.float32),
            np.asarray(self._versions, dtype=np.int32),
            self.stop_reason,
            ids,
        )


async def fetch(
    client: httpx.AsyncClient,
    order: ServerOrder,
    ask: Ask,
    traffic: Traffic | None = None,
    connect_s: float | None = None,
) -> Piece:
    """Asks for one piece. Raises `RefusedError`, `UnreachableError` or another `EngineError`."""
    dialect = order.language
    timeout = httpx.Timeout(order.timeout_s, connect=connect_s or order.timeout_s, pool=None)
    body = dialect.body(ask)
    response = await post(client, order.name, dialect, dialect.generate, body, timeout, traffic)
    if response is None:
        return Piece([], [], StopReason.ABORTED)
    piece = dialect.read(reply_of(response, order.name, dialect.generate), ask)
    if order.label and piece.labels and piece.labels != {order.label}:
        # A server that restarted with other weights than ours must not generate training rows.
        held = ", ".join(sorted(piece.labels))
        raise EngineError(
            f"{order.name} wrote with weights it calls {held}; expected {order.label}. Was it restarted?"
        )
    return piece


async def post(
    client: httpx.AsyncClient,
    name: str,
    dialect: Dialect,
    path: str,
    body: Json,
    timeout: httpx.Timeout | float,
    traffic: Traffic | None = None,
) -> httpx.Response | None:
    """Posts and returns a successful response; None if the server's proxy is paused."""
    content = msgspec.json.encode(body)
    if traffic is not None:
        traffic.sent += len(content)
    try:
        response = await client.post(
            path, content=content, headers={"Content-Type": "application/json"}, timeout=timeout
        )
    except httpx.HTTPError as error:
        raise failure(name, dialect, path, error) from error
    if traffic is not None:
        traffic.received += len(response.content)
    if response.status_code == PAUSED:
        return None
    if response.status_code >= 400:
        text = f"{name} ({dialect.name}) answered {path} with {response.status_code}: {response.text[:300]}"
        raise problem_of(response.status_code)(text)
    return response


def reply_of(response: httpx.Response, name: str, path: str) -> Json:
    if not response.content:
        return {}
    try:
        # msgspec decodes a long row's logprobs several times faster than json.
        reply: Any = msgspec.json.decode(response.content)
    except msgspec.DecodeError as error:
        raise EngineError(
            f"{name} answered {path} with something that is not JSON: {response.text[:100]!r}"
        ) from error
    return reply if isinstance(reply, dict) else {"answer": reply}


def problem_of(status: int) -> type[EngineError]:
    if status == BAD_GATEWAY:
        return UnreachableError
    return RefusedError if status in _REFUSALS else EngineError


def failure(name: str, dialect: Dialect, path: str, error: httpx.HTTPError) -> EngineError:
    gone = isinstance(error, (httpx.NetworkError, httpx.RemoteProtocolError))
    text = f"{name} ({dialect.name}) at {path}: {type(error).__name__} {error}"
    return UnreachableError(text) if gone else EngineError(text)


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


def client_of(endpoint: Endpoint, connections: int | None) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    transport = Connections(uds=endpoint.socket, most=connections)
    return httpx.AsyncClient(base_url=endpoint.url, headers=headers, transport=transport)
