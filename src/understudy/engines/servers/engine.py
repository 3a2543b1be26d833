"""`RemoteEngine`: generation by vLLM, SGLang or any server with one of their wire formats.

A generation may take several HTTP requests. When weights change, the server returns the tokens it has. The
engine then asks for the rest under the new weights, with prompt and generated tokens as the new prompt. The
caller sees a difference in the weight versions only:

    ask ──> server ──stop──> done
     ▲         └──abort, because weights changed──> keep the tokens, wait for the gate ─┐
     └──────────────────────────────────────────────────────────────────────────────────┘

A retry is always safe: the result of a request depends on (weights, tokens, sampling, seed) alone. The
process that holds the tokens asks: this one, or a rollout worker that is told which server to ask
(`servers/remote_calls.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from torch import Tensor

from understudy.engines.base import GenerateRequest, Generation
from understudy.engines.remote_tokens import BearerGone, FarRequest
from understudy.engines.replicas import Endpoint, Replica, Replicas, Traffic
from understudy.engines.servers.continuation import (
    Pieces,
    RefusedError,
    ServerOrder,
    UnreachableError,
    check_candidates,
    client_of,
    fetch,
    post,
    reply_of,
)
from understudy.engines.servers.dialects import Dialect, Json
from understudy.engines.servers.gpu_handover import GpuHandover
from understudy.engines.servers.remote_calls import CallVoid, FarCalls, FarWriting, WayCut
from understudy.engines.servers.weights import WeightDelivery
from understudy.errors import EngineError
from understudy.types.trajectory import StopReason

logger = logging.getLogger(__name__)

_SIGN_OF_LIFE_S = 5.0
_WAY_CUT_PAUSE_S = 0.5


class RemoteEngine:
    """An `Engine` over one or several servers that hold the same weights.

    Holds the replicas' load, the gate that is closed while weights change, and the number of requests in
    flight. The trainer calls it on one event loop.

    deadline      of one HTTP request: `deadline_s` plus `deadline_per_token_s` for each token asked for
    patience_s    how long a request is retried before it fails
    snapshots     folder for weights that servers read; in memory (/dev/shm) by default
    address       this machine's address as seen from remote servers, for broadcasts of weights
    seeded        whether requests carry their seeds: with a seed per request a server samples row by row,
                  and the batch changes the last bits all the same
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
            replica.name: client_of(replica.endpoint, connections) for replica in self._replicas.all
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
        self.traffic = Traffic()
        self._far = FarCalls(self._answers)
        self._delivery = WeightDelivery(dialect, self._post, self._give_up, snapshots, handover, address)

    @property
    def version(self) -> int:
        return self._version

    # --- generation -------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Generates. For remote requests (`FarRequest`) the generations hold lengths only."""
        for request in requests:
            length, new = len(request.tokens), request.sampling.max_new_tokens
            if length == 0 or length + new > self._max_length:
                raise EngineError(
                    f"request {request.key} has {length} tokens and asks for {new} new ones; together they must be "
                    f"within 1 … {self._max_length}. Shorten the prompt, or lower rollout.max_new_tokens"
                )
            check_candidates(self._dialect, request.sampling)
        writing = [asyncio.ensure_future(self._generate(request)) for request in requests]
        try:
            return list(await asyncio.gather(*writing))
        finally:
            for task in writing:  # the first failure is the batch's
                task.cancel()

    async def _generate(self, request: GenerateRequest) -> Generation:
        writing: _Near | FarWriting
        if isinstance(request, FarRequest):
            writing = FarWriting(request, self._far)
        else:
            writing = _Near(request, self._clients, self.traffic)
        aborts = self._aborts
        while await self._gate_opens(aborts):
            await self._piece_unless_aborted(writing)
            if writing.stop_reason is not StopReason.ABORTED:
                break
        return writing.generation()

    async def _gate_opens(self, aborts: int) -> bool:
        """Waits while weights change; False if the generation was aborted since it began."""
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

    async def _piece_unless_aborted(self, writing: _Near | FarWriting) -> None:
        """Fetches one piece. If the server has no abort route, an abort here just discards its answer."""
        if self._dialect.abort is not None:
            await self._piece(writing)
            return
        piece, aborted = (
            asyncio.ensure_future(self._piece(writing)),
            asyncio.ensure_future(self._abort_signal.wait()),
        )
        try:
            await asyncio.wait([piece, aborted], return_when=asyncio.FIRST_COMPLETED)
            if piece.done():
                piece.result()
        finally:
            piece.cancel()
            aborted.cancel()

    async def _piece(self, writing: _Near | FarWriting) -> None:
        """Retries until a server gives a valid answer or weights change; counts failures per server."""
        request, version = writing.request, self._version
        left = request.sampling.max_new_tokens - writing.written
        size = len(request.tokens) + writing.written + left
        deadline = time.monotonic() + self._patience_s
        problem = "all of them are resting after failures"
        out_of_reach: set[str] = set()
        # Weights may change between two attempts: then return, and `_generate` asks under the new ones.
        while time.monotonic() < deadline:
            if not self._open.is_set() or self._version != version or self._closed:
                return
            replica = self._replicas.pick(request.session, size, out_of_reach)
            if replica is None:
                self._check_hope()
                await asyncio.sleep(min(self._replicas.next_awake() + 0.01, 1.0))
                continue
            try:
                with self._counted():
                    await writing.fetch(replica, self._order(replica, left))
            except (RefusedError, BearerGone):
                self._replicas.withdrawn(replica, size)
                raise
            except CallVoid:
                self._replicas.withdrawn(replica, size)
                continue
            except WayCut as error:
                problem = str(error)
                self._replicas.withdrawn(replica, size)
                out_of_reach.add(replica.name)
                logger.warning("%s is asked for again: %s", request.key, problem)
                await asyncio.sleep(_WAY_CUT_PAUSE_S)
                continue
            except EngineError as error:
                problem = str(error)
                self._replicas.failed(replica, size, problem)
                await asyncio.sleep(0.05)
                continue
            except BaseException:
                self._replicas.withdrawn(replica, size)
                raise
            self._replicas.succeeded(replica, size)
            return
        raise EngineError(
            f"no server generated {request.key} within {self._patience_s:g} s; the last problem: {problem}"
        )

    def _order(self, replica: Replica, left: int) -> ServerOrder:
        return ServerOrder(
            self._dialect.name,
            replica.name,
            self._model,
            self._version,
            replica.label,
            self._seeded,
            self._deadline_s + self._deadline_per_token_s * left,
        )

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Counts a request in flight; `_stop_all` waits until there is none."""
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    async def _post(self, replica: Replica, path: str, body: Json) -> Json:
        with self._counted():
            client = self._clients[replica.name]
            response = await post(client, replica.name, self._dialect, path, body, self._deadline_s)
        if response is None:
            raise EngineError(f"{replica.name} answers {path} only when weights have changed")
        if not response.headers.get("content-type", "application/json").startswith("application/json"):
            return {"answer": response.text[:300]}  # some servers confirm in plain text
        return reply_of(response, replica.name, path)

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
        """After a restart of a server: gives it the newest weights before it gets any request."""
        replica = self._replica(name)
        old, self._clients[name] = self._clients[name], client_of(endpoint, self._connections)
        replica.endpoint = endpoint
        await old.aclose()
        async with self._changing:
            await self._delivery.catch_up(replica)
            self._replicas.back(replica)

    def _replica(self, name: str) -> Replica:
        (replica,) = [replica for replica in self._replicas.all if replica.name == name]
        return replica

    def withdraw(self, name: str) -> None:
        """Marks a server as gone: it gets no requests until `replace`."""
        self._replicas.gone(self._replica(name))
        self._far.void(CallVoid(f"{name} is gone"), name)

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
            await self._far.cut()

    async def _stop_all(self, tell: bool = True) -> None:
        """Closes the gate and waits until every request has returned, finished or not.

        `tell=False` skips the pause order: idle servers need none.
        """
        self._open.clear()
        if self._dialect.pause is not None and tell:
            await self._tell_all(self._dialect.pause)
            await self._far.come_home()
        await self._idle.wait()

    async def _go_on(self, tell: bool = True) -> None:
        if self._dialect.resume is not None and tell:
            await self._tell_all(self._dialect.resume)
        self._open.set()

    async def _tell_all(self, message: tuple[str, Json]) -> None:
        path, body = message
        await asyncio.gather(*(self._control(replica, path, body) for replica in self._replicas.present))

    async def _control(self, replica: Replica, path: str, body: Json) -> None:
        """Like `_post`, but not counted as in flight: control waits for the requests in flight."""
        try:
            await post(self._clients[replica.name], replica.name, self._dialect, path, body, self._deadline_s)
        except UnreachableError:
            if not self._give_up(replica):
                raise

    async def _answers(self, replica: Replica) -> bool:
        """Whether the server answers this process's health check now."""
        try:
            client = self._clients[replica.name]
            return (await client.get(self._dialect.health, timeout=_SIGN_OF_LIFE_S)).status_code < 500
        except (httpx.HTTPError, RuntimeError):  # RuntimeError: closed meanwhile
            return False

    def _give_up(self, replica: Replica) -> bool:
        """Whether an unreachable server will be restarted: only subclasses that own their servers do that."""
        return False

    def _check_hope(self) -> None:
        """Raises if no server will ever serve again; only subclasses that own their servers can know."""

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._abort_signal.set()
        self._open.set()
        self._far.void(CallVoid("the engine is closed"))
        for client in self._clients.values():
            await client.aclose()
        await self._delivery.close()


class _Near:
    """The progress of one request whose tokens are in this process."""

    def __init__(
        self, request: GenerateRequest, clients: Mapping[str, httpx.AsyncClient], traffic: Traffic
    ) -> None:
        self.request = request
        self._pieces, self._clients, self._traffic = Pieces(request), clients, traffic

    @property
    def written(self) -> int:
        return self._pieces.written

    @property
    def stop_reason(self) -> StopReason:
        return self._pieces.stop_reason

    async def fetch(self, replica: Replica, order: ServerOrder) -> None:
        ask = self._pieces.ask(order)
        piece = await fetch(self._clients[replica.name], order, ask, self._traffic)
        self._pieces.add(piece, order.version)

    def generation(self) -> Generation:
        return self._pieces.generation()
