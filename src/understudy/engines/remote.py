"""Generation by servers: vLLM, SGLang, or anything that speaks their wire formats.

A generation may take several HTTP requests. When weights change, the server hands back what it has; the rest is asked
for again under the new weights, prompt and written tokens together, and the caller notices nothing but the versions:

    ask ──> server ──stop──> done
     ▲         └──abort, because weights changed──> keep the tokens, wait for the gate ─┐
     └──────────────────────────────────────────────────────────────────────────────────┘

Asking again is safe at any time: what a request may give depends on (weights, tokens, sampling, seed) alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from torch import Tensor

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.engines.delivery import RefusedError, UnreachableError, WeightDelivery
from understudy.engines.dialects import Ask, Dialect, Json, Piece
from understudy.engines.gpu_handover import GpuHandover
from understudy.engines.replicas import Endpoint, Replica, Replicas
from understudy.errors import EngineError
from understudy.types.trajectory import StopReason


class RemoteEngine:
    """An `Engine` over one or several servers that hold the same weights.

    deadline      for one HTTP request: `deadline_s` plus `deadline_per_token_s` for each token asked for
    patience_s    how long a request looks for a server that answers before the engine is given up
    snapshots     where weights are written for the servers to read; memory (/dev/shm) by default
    address       where servers on other machines reach this one, for weights that are broadcast to them
    seeded        whether requests carry their seeds: a server that keeps a stream of random numbers for each request
                  samples row by row, and batches change the last bits all the same
    """

    def __init__(
        self,
        dialect: Dialect,
        endpoints: Sequence[Endpoint],
        *,
        model: str,
        max_length: int,
        connections: int = 1024,
        deadline_s: float = 120.0,
        deadline_per_token_s: float = 0.5,
        patience_s: float = 300.0,
        snapshots: Path | None = None,
        handover: GpuHandover | None = None,
        seeded: bool = True,
        version: int = -1,
        address: str = "127.0.0.1",
    ) -> None:
        self._dialect, self._model, self._max_length = dialect, model, max_length
        self._replicas = Replicas(endpoints)
        self._clients = {
            replica.name: _client(replica.endpoint, connections) for replica in self._replicas.all
        }
        self._deadline_s, self._deadline_per_token_s, self._patience_s = (
            deadline_s,
            deadline_per_token_s,
            patience_s,
        )
        self._version, self._seeded = version, seeded
        self._open, self._changing = asyncio.Event(), asyncio.Lock()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._in_flight = 0
        self._aborts = 0
        self._abort_signal = asyncio.Event()
        self._closed = False
        self._connections = connections

        async def post(replica: Replica, path: str, body: Json) -> Json:
            return await self._post(replica, path, body, self._deadline_s)

        self._delivery = WeightDelivery(dialect, post, self._give_up, snapshots, handover, address)

    @property
    def version(self) -> int:
        return self._version

    # --- generation -------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        for request in requests:
            length, new = len(request.tokens), request.sampling.max_new_tokens
            if length == 0 or length + new > self._max_length:
                raise EngineError(
                    f"request {request.key} has {length} tokens and asks for {new} new ones; together they must be "
                    f"within 1 … {self._max_length}. Shorten the prompt, or lower rollout.max_new_tokens"
                )
            if request.sampling.candidates:
                self._check_candidates(request.sampling)
        return list(await asyncio.gather(*map(self._generate, requests)))

    def _check_candidates(self, sampling: Sampling) -> None:
        """Servers name candidates of the distribution they sample from, so it must rank ids as the model does."""
        filtered = sampling.top_k or sampling.top_p < 1 or sampling.min_p or sampling.repetition_penalty != 1
        if not self._dialect.candidates or filtered:
            why = "filters change what it ranks" if filtered else "its answers do not name them"
            raise EngineError(
                f"a server that speaks {self._dialect.name} cannot report the model's own candidates: {why}; leave top_p, "
                "top_k, min_p and repetition_penalty alone and use hf, vllm or sglang"
            )

    async def _generate(self, request: GenerateRequest) -> Generation:
        tokens: list[int] = []
        candidates: list[list[int]] = []
        logprobs: list[float] = []
        versions: list[int] = []
        reason = StopReason.ABORTED
        wanted = request.sampling.candidates
        aborts = self._aborts
        while await self._gate_opens(aborts):
            version = self._version
            piece = await self._piece_unless_aborted(self._ask(request, tokens))
            tokens += piece.tokens
            logprobs += piece.logprobs
            versions += [version] * len(piece.tokens)
            candidates += piece.candidates
            reason = piece.stop_reason
            if reason is not StopReason.ABORTED:
                break
            if len(tokens) == request.sampling.max_new_tokens:
                reason = StopReason.LENGTH
                break
        return Generation(
            np.asarray(tokens, dtype=np.int32),
            np.asarray(logprobs, dtype=np.float32),
            np.asarray(versions, dtype=np.int32),
            reason,
            np.asarray(candidates, dtype=np.int32).reshape(len(tokens), wanted) if wanted else None,
        )

    async def _gate_opens(self, aborts: int) -> bool:
        """Waits while weights change; False when the generation was aborted since it began."""
        while not self._closed and self._aborts == aborts:
            if self._open.is_set():
                return True
            waits = [asyncio.ensure_future(event.wait()) for event in (self._open, self._abort_signal)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        if self._closed:
            raise EngineError("the engine is closed; it takes no more requests")
        return False

    def _ask(self, request: GenerateRequest, written: Sequence[int]) -> Ask:
        seed = request.seed if self._seeded else None
        if (
            written and self._seeded
        ):  # the server starts a new stream of random numbers: it must not be the old one again
            digest = blake2b(f"{request.seed}/{len(written)}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little") >> 1
        tokens = np.concatenate([request.tokens, np.asarray(written, dtype=np.int32)])
        left = request.sampling.max_new_tokens - len(written)
        return Ask(request, tokens, left, seed, salt=self._salt, model=self._model)

    @property
    def _salt(self) -> str:
        """Keeps a server from reading what the weights of another version left in its prefix cache."""
        return f"weights-{self._version}"

    async def _piece_unless_aborted(self, ask: Ask) -> Piece:
        """A server that knows no abort is left to finish on its own; what it would have said is lost."""
        if self._dialect.abort is not None:
            return await self._piece(ask)
        piece, aborted = (
            asyncio.ensure_future(self._piece(ask)),
            asyncio.ensure_future(self._abort_signal.wait()),
        )
        try:
            await asyncio.wait([piece, aborted], return_when=asyncio.FIRST_COMPLETED)
            return piece.result() if piece.done() else Piece([], [], StopReason.ABORTED)
        finally:
            piece.cancel()
            aborted.cancel()

    async def _piece(self, ask: Ask) -> Piece:
        """Asks until a server answers well; each failure is held against the server that failed."""
        size = len(ask.tokens) + ask.max_new_tokens
        deadline = time.monotonic() + self._patience_s
        body = self._dialect.body(ask)
        problem = "all of them are resting after failures"
        while time.monotonic() < deadline:
            # While it waited to ask again, weights began to change, or have changed already: it asks for the new ones.
            if not self._open.is_set() or ask.salt != self._salt:
                return Piece([], [], StopReason.ABORTED)
            replica = self._replicas.pick(ask.request.session, size)
            if replica is None:
                await asyncio.sleep(min(self._replicas.next_awake() + 0.01, 1.0))
                continue
            try:
                timeout = self._deadline_s + self._deadline_per_token_s * ask.max_new_tokens
                reply = await self._post(replica, self._dialect.generate, body, timeout)
                piece = self._dialect.read(reply, ask)
                _check_label(replica, piece)
            except RefusedError:
                self._replicas.withdrawn(replica, size)
                raise
            except EngineError as error:
                problem = str(error)
                self._replicas.failed(replica, size, problem)
                await asyncio.sleep(0.05)
                continue
            except BaseException:
                self._replicas.withdrawn(replica, size)
                raise
            self._replicas.succeeded(replica, size)
            return piece
        raise EngineError(
            f"no server generated {ask.request.key} within {self._patience_s:g} s; the last problem: {problem}"
        )

    async def _post(self, replica: Replica, path: str, body: Json, timeout: float) -> Json:
        self._in_flight += 1
        self._idle.clear()
        try:
            response = await self._clients[replica.name].post(
                path, json=body, timeout=httpx.Timeout(timeout, pool=None)
            )
        except httpx.HTTPError as error:
            raise self._failure(replica, path, error) from error
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()
        if response.status_code >= 400:
            text = f"{replica.name} ({self._dialect.name}) answered {path} with {response.status_code}: {response.text[:300]}"
            raise (
                RefusedError(text) if response.status_code in (400, 401, 403, 404, 422) else EngineError(text)
            )
        if not response.content:
            return {}
        try:
            reply: Any = msgspec.json.decode(
                response.content
            )  # a long row's logprobs: several times quicker than json
        except msgspec.DecodeError as error:
            raise EngineError(
                f"{replica.name} answered {path} with something that is not JSON: {response.text[:100]!r}"
            ) from error
        return reply if isinstance(reply, dict) else {"answer": reply}

    # --- control ----------------------------------------------------------------------------------------------

    async def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        async with self._changing:
            was_open = self._open.is_set()
            was_idle = self._in_flight == 0
            await self._stop_all(tell=not was_idle)
            try:
                await self._delivery.bring(self._replicas.present, version, list(tensors))
                self._version = version
            finally:
                if was_open:
                    await self._go_on(tell=not was_idle)

    async def replace(self, name: str, endpoint: Endpoint) -> None:
        """A server was started anew: gives it the newest weights before it gets any request."""
        (replica,) = [replica for replica in self._replicas.all if replica.name == name]
        old, self._clients[name] = self._clients[name], _client(endpoint, self._connections)
        replica.endpoint = endpoint
        await old.aclose()
        async with self._changing:
            await self._delivery.catch_up(replica)
            self._replicas.back(replica)

    def withdraw(self, name: str) -> None:
        """A server is known to be gone: it gets nothing until `replace`."""
        (replica,) = [replica for replica in self._replicas.all if replica.name == name]
        self._replicas.gone(replica)

    def is_withdrawn(self, name: str) -> bool:
        return all(replica.name != name for replica in self._replicas.present)

    async def pause(self) -> None:
        async with self._changing:
            await self._stop_all()

    async def resume(self) -> None:
        async with self._changing:
            await self._go_on()

    async def abort(self) -> None:
        self._aborts += 1
        self._abort_signal.set()
        self._abort_signal = asyncio.Event()
        if self._dialect.abort is not None:
            await self._tell_all(self._dialect.abort)

    async def _stop_all(self, tell: bool = True) -> None:
        """Closes the gate and brings every request home, finished or not. Servers that have none need not be told."""
        self._open.clear()
        if self._dialect.pause is not None and tell:
            await self._tell_all(self._dialect.pause)
        await self._idle.wait()

    async def _go_on(self, tell: bool = True) -> None:
        if self._dialect.resume is not None and tell:
            await self._tell_all(self._dialect.resume)
        self._open.set()

    async def _tell_all(self, message: tuple[str, Json]) -> None:
        path, body = message
        await asyncio.gather(*(self._control(replica, path, body) for replica in self._replicas.present))

    async def _control(self, replica: Replica, path: str, body: Json) -> None:
        """Like `_post`, but not counted as a generation in flight: those are what control waits for."""
        try:
            response = await self._clients[replica.name].post(path, json=body, timeout=self._deadline_s)
        except httpx.HTTPError as error:
            failure = self._failure(replica, path, error)
            if isinstance(failure, UnreachableError) and self._give_up(replica):
                return
            raise failure from error
        if response.status_code >= 400:
            raise EngineError(
                f"{replica.name} ({self._dialect.name}) answered {path} with {response.status_code}: {response.text[:300]}"
            )

    def _failure(self, replica: Replica, path: str, error: httpx.HTTPError) -> EngineError:
        gone = isinstance(error, (httpx.NetworkError, httpx.RemoteProtocolError))
        text = f"{replica.name} ({self._dialect.name}) at {path}: {type(error).__name__} {error}"
        return UnreachableError(text) if gone else EngineError(text)

    def _give_up(self, replica: Replica) -> bool:
        """Whether somebody brings this unreachable server back; nobody does, unless we started it."""
        return False

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._abort_signal.set()
        self._open.set()
        for client in self._clients.values():
            await client.aclose()
        await self._delivery.close()


def _check_label(replica: Replica, piece: Piece) -> None:
    """A server that came back with other weights than we gave it must not write a row."""
    if replica.label and piece.labels and piece.labels != {replica.label}:
        held = ", ".join(sorted(piece.labels))
        raise EngineError(
            f"{replica.name} wrote with weights it calls {held}; expected {replica.label}. Was it restarted?"
        )


def _client(endpoint: Endpoint, connections: int) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    transport = httpx.AsyncHTTPTransport(uds=endpoint.socket, limits=limits, retries=0)
    return httpx.AsyncClient(base_url=endpoint.url, headers=headers, transport=transport)
