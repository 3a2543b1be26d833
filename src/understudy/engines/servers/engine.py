"""`RemoteEngine`: generation by vLLM, SGLang or any server with one of their wire formats.

A generation may take several HTTP requests. When weights change, the server returns the tokens it has. The
engine then asks for the rest under the new weights, with prompt and generated tokens as the new prompt. The
caller sees a difference in the weight versions only:

    ask ──> server ──stop──> done
     ▲         └──abort, because weights changed──> keep the tokens, wait for the gate ─┐
     └──────────────────────────────────────────────────────────────────────────────────┘

A retry is always safe: the result of a request depends on (weights, tokens, sampling, seed) alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from understudy.engines.base import Detokenize, GenerateRequest, Generation
from understudy.engines.replicas import EngineReplica, Replicas
from understudy.engines.servers.continuation import (
    BusyError,
    Continuation,
    GenerationClient,
    RefusedError,
    ServerOrder,
    UnreachableError,
    check_candidates,
)
from understudy.engines.servers.dialects import Dialect, GeneratedPart, Json, PieceRequest
from understudy.engines.servers.gpu_handover import GpuHandover
from understudy.engines.servers.weights import ServerWeights
from understudy.errors import EngineError
from understudy.media.for_vllm import vllm_parts
from understudy.media.processor import PictureReader
from understudy.serving.endpoint import Endpoint, Traffic
from understudy.types.trajectory import StopReason

QUIET_S = 1.0
"""A paused server returns its requests one by one; this long after its last answer we expect no more."""

NOTHING_NEW_S = 0.05
"""A server that returned no token although nothing changed is asked again after this."""


class RemoteEngine:
    """An `Engine` over one or several servers that hold the same weights.

    Holds the replicas' load, the gate that is closed while weights change, and the number of requests in
    flight. The trainer calls it on one event loop.

    deadline_s    of one HTTP request: `deadline_s` plus `deadline_per_token_s` for each token asked for
    timeout_s     how long a request is retried before it fails. A failed attempt counts for a quarter of it at
                  most, however long it generated; waits for a server that is being restarted do not count. A server
                  that asks for a pause (`Retry-After`) gets it, up to half of this
    snapshots     folder for weights that servers read; in memory (/dev/shm) by default
    address       this machine's address as seen from remote servers, for broadcasts of weights
    seeded        whether requests carry their seeds: with a seed per request a server samples row by row,
                  and the batch changes the last bits all the same
    pictures      the student's way of reading pictures; None: prompts with pictures are refused
    detokenize    the student's, to find stop texts that lie across a change of weights; None: they are missed
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
        timeout_s: float = 300.0,
        snapshots: Path | None = None,
        handover: GpuHandover | None = None,
        seeded: bool = True,
        version: int = -1,
        address: str = "127.0.0.1",
        pictures: PictureReader | None = None,
        detokenize: Detokenize | None = None,
    ) -> None:
        self._dialect, self._model, self._max_length = dialect, model, max_length
        self._pictures = pictures if dialect.forget_pictures is not None else None
        self._replicas, self._connections, self.traffic = Replicas(endpoints), connections, Traffic()
        self._clients = {
            replica.name: self._client(replica.name, replica.endpoint) for replica in self._replicas.all
        }
        self._deadline_s, self._deadline_per_token_s = deadline_s, deadline_per_token_s
        self._timeout_s = timeout_s
        self._version, self._seeded, self._detokenize = version, seeded, detokenize
        self._resume_order = dialect.resume
        """Sent once, with the first weights (`_resume_left_paused`); then None."""
        self._open, self._changing = asyncio.Event(), asyncio.Lock()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._in_flight = 0
        self._fetching: set[asyncio.Future[GeneratedPart]] = set()
        self._answered_at = 0.0
        self._aborts = 0
        self._abort_signal = asyncio.Event()
        self._closed = False
        self._closing: set[asyncio.Future[None]] = set()
        """Connections to servers that are gone."""
        sees = self._pictures is not None
        self._delivery = ServerWeights(
            dialect, self._post, self._report_lost, snapshots, handover, address, pictures=sees
        )

    @property
    def version(self) -> int:
        return self._version

    def _client(self, name: str, endpoint: Endpoint) -> GenerationClient:
        return GenerationClient(name, self._dialect, endpoint, most=self._connections, traffic=self.traffic)

    # --- generation

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        for request in requests:
            length, new = len(request.tokens), request.sampling.max_new_tokens
            if length == 0 or length + new > self._max_length:
                raise EngineError(
                    f"request {request.key} has {length} tokens and asks for {new} new ones; together they must be "
                    f"within 1 … {self._max_length}. Shorten the prompt, or lower rollout.max_new_tokens"
                )
            check_candidates(self._dialect, request.sampling)
            if request.media and self._pictures is None:
                raise RefusedError(
                    f"request {request.key} has pictures; a server that speaks {self._dialect.name} gets text only"
                )
        writing = [asyncio.ensure_future(self._generate(request)) for request in requests]
        try:
            return list(await asyncio.gather(*writing))
        finally:
            for task in writing:  # after one failure the results of the others are not used
                task.cancel()

    async def _generate(self, request: GenerateRequest) -> Generation:
        aborts, shown = self._aborts, {}
        if request.media and self._pictures is not None:
            shown = await asyncio.to_thread(
                vllm_parts, self._pictures, request.key, request.tokens, request.media
            )
        writing = Continuation(request, shown, self._detokenize)
        while await self._gate_opens(aborts):
            before, version = writing.written, self._version
            await self._piece_unless_aborted(writing)
            if writing.stop_reason is not StopReason.ABORTED:
                break
            changed = self._version != version or self._aborts != aborts or not self._open.is_set()
            if writing.written == before and not changed:
                await asyncio.sleep(NOTHING_NEW_S)  # a paused server answers at once
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

    async def _piece_unless_aborted(self, writing: Continuation) -> None:
        """Fetches one piece. If the server has no abort route, an abort here just discards its answer."""
        if self._dialect.abort is not None:
            await self._piece(writing)
            return
        piece = asyncio.ensure_future(self._piece(writing))
        aborted = asyncio.ensure_future(self._abort_signal.wait())
        try:
            await asyncio.wait([piece, aborted], return_when=asyncio.FIRST_COMPLETED)
            if piece.done():
                piece.result()
        finally:
            piece.cancel()
            aborted.cancel()

    async def _piece(self, writing: Continuation) -> None:
        """Retries until a server gives a valid answer or weights change; counts failures per server."""
        request, version = writing.request, self._version
        left = request.sampling.max_new_tokens - writing.written
        size = len(request.tokens) + writing.written + left
        retried, problem = 0.0, "all of them are resting after failures"
        # Weights may change between two attempts: then return, and `_generate` asks under the new ones.
        while retried < self._timeout_s:
            if not self._open.is_set() or self._version != version or self._closed:
                return
            replica, began = self._replicas.pick(request.session, size), time.monotonic()
            if replica is None:
                counts = not self._is_restarting()
                await asyncio.sleep(min(self._replicas.next_awake() + 0.01, 1.0))
                retried += counts * (time.monotonic() - began)
                continue
            try:
                order = self._order(replica, left)
                with self._counted():
                    piece = await self._fetch(replica, order, writing.ask(order))
                writing.add(piece, order.version)
            except RefusedError:
                self._replicas.withdrawn(replica, size)
                raise
            except EngineError as error:
                problem = str(error)
                wait = error.retry_after if isinstance(error, BusyError) else 0.0
                # At most half of the time that it has, so that the request can still be tried again.
                self._replicas.failed(replica, size, min(wait, self._timeout_s / 2))
                await asyncio.sleep(0.05)
                # A server may die late in a long generation: then another one is still asked.
                retried += min(time.monotonic() - began, self._timeout_s / 4)
                continue
            except BaseException:
                self._replicas.withdrawn(replica, size)
                raise
            self._replicas.succeeded(replica, size)
            return
        raise EngineError(
            f"no server generated {request.key} within {self._timeout_s:g} s of retries; the last problem: {problem}"
        )

    async def _fetch(self, replica: EngineReplica, order: ServerOrder, ask: PieceRequest) -> GeneratedPart:
        """Asks for one piece; an empty one, aborted, if `_return_all` cancels the request."""
        fetching = asyncio.ensure_future(self._clients[replica.name].fetch(order, ask))
        self._fetching.add(fetching)
        try:
            return await fetching
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if fetching in self._fetching or (task is not None and task.cancelling()):
                raise
            return GeneratedPart.nothing()
        finally:
            self._fetching.discard(fetching)
            self._answered_at = time.monotonic()

    def _order(self, replica: EngineReplica, left: int) -> ServerOrder:
        return ServerOrder(
            self._dialect,
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

    async def _post(self, replica: EngineReplica, path: str, body: Json) -> Json:
        with self._counted():
            return await self._clients[replica.name].post(path, body, self._deadline_s)

    # --- control

    async def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        async with self._changing:
            was_open = self._open.is_set()
            was_idle = self._in_flight == 0
            await self._stop_all(tell=not was_idle)
            try:
                present = self._replicas.present
                absent = [one for one in self._replicas.all if one not in present]
                await self._delivery.bring(present, version, list(tensors), absent)
                self._version = version
            finally:
                if was_open:
                    await self._resume_left_paused()
                    await self._go_on(tell=not was_idle)

    async def replace(self, name: str, endpoint: Endpoint) -> None:
        """After a restart of a server, or when it answers again: gives it the newest weights before any request."""
        replica = self._replica(name)
        old, self._clients[name] = self._clients[name], self._client(name, endpoint)
        replica.endpoint = endpoint
        await old.close()
        async with self._changing:
            await self._delivery.catch_up(replica)
            if self._open.is_set() and self._dialect.resume is not None:
                # It may have been lost between a pause and the order to go on, and still be paused.
                await self._post(replica, *self._dialect.resume)
            self._replicas.back(replica)

    def _replica(self, name: str) -> EngineReplica:
        (replica,) = [replica for replica in self._replicas.all if replica.name == name]
        return replica

    def withdraw(self, name: str) -> None:
        """Marks a server as gone: its requests fail now, and it gets none until `replace`."""
        if self.is_withdrawn(name):
            return
        replica = self._replica(name)
        self._replicas.gone(replica)
        # A machine that lost power does not close its connections.
        old, self._clients[name] = self._clients[name], self._client(name, replica.endpoint)
        closing = asyncio.ensure_future(old.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

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
        """Closes the gate and waits until every request has returned, finished or not.

        `tell=False` skips the pause order: idle servers need none.
        """
        self._open.clear()
        if self._dialect.pause is not None and tell:
            await self._tell_all(self._dialect.pause)
            await self._return_all()
        await self._idle.wait()

    async def _return_all(self) -> None:
        """After a pause: waits for the answers. Requests that reached a server after it paused get none, or
        one by the new weights; they are cancelled, and asked again under the new weights."""
        paused_at = time.monotonic()
        while self._fetching:
            left = max(paused_at, self._answered_at) + QUIET_S - time.monotonic()
            if left <= 0:
                late, self._fetching = self._fetching, set()
                for request in late:
                    request.cancel()
                return
            await asyncio.wait(self._fetching, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    async def _go_on(self, tell: bool = True) -> None:
        if self._dialect.resume is not None and tell:
            await self._tell_all(self._dialect.resume)
        self._open.set()

    async def _resume_left_paused(self) -> None:
        """Once: a trainer that was killed while weights changed has left its servers paused."""
        order, self._resume_order = self._resume_order, None
        if order is not None:
            told = (self._clients[one.name].post(*order, self._deadline_s) for one in self._replicas.present)
            # A server without the route cannot be paused; one that is gone is met later.
            await asyncio.gather(*told, return_exceptions=True)

    async def _tell_all(self, message: tuple[str, Json]) -> None:
        path, body = message
        await asyncio.gather(*(self._control(replica, path, body) for replica in self._replicas.present))

    async def _control(self, replica: EngineReplica, path: str, body: Json) -> None:
        """Like `_post`, but not counted as in flight: control waits for the requests in flight."""
        try:
            await self._clients[replica.name].post(path, body, self._deadline_s)
        except UnreachableError:
            if not self._report_lost(replica):
                raise

    def _report_lost(self, replica: EngineReplica) -> bool:
        """Called when a server is unreachable. Whether it will be restarted: a subclass that owns its servers does
        that, and sends it no more requests until then."""
        return False

    def _is_restarting(self) -> bool:
        """Whether a server is being restarted; raises if none will ever serve again. Always false here: this class
        starts no server."""
        return False

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._abort_signal.set()
        self._open.set()
        for client in self._clients.values():
            await client.close()
        await asyncio.gather(*self._closing)
        await self._delivery.close()
