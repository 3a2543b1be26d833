"""`HostedEngine`: an `Engine` over engine processes ("hosts") on this machine or remote ones.

    generate ──batch──> host chosen by hash (composed) or by outstanding tokens (continuous) ──> answers, in order
                          │ dies
                          └──> restarted ──newest weights──> serves; batches in flight are sent again

States of a host:
    serving ──connection lost, or silent──> gone ──restart, newest weights, our pause state──> serving
                                              └──`Restarts.most` failures──> given up

A retry is safe: a generation is a pure function of (weights, tokens, sampling, seed). If the weights
changed in between, the tokens carry the newer version. All hosts hold the same weights. So under composed
batching the bits of a generation do not depend on which host computed it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b

from torch import Tensor

from understudy.engines.base import GenerateRequest, Generation
from understudy.engines.hosted.client import HostChannel, HostLost
from understudy.engines.hosted.messages import AbortOrder, decode_answer, encode_call
from understudy.engines.hosted.processes import HostProcesses
from understudy.engines.hosted.weights import WeightDelivery
from understudy.engines.local.scheduler import Batching
from understudy.engines.replicas import EngineReplica, Replicas
from understudy.errors import EngineError, UnderstudyError
from understudy.observability.report import many
from understudy.serving.endpoint import Endpoint, Traffic
from understudy.serving.supervisor import RestartCount, Restarts, StartedProcess

logger = logging.getLogger(__name__)

_HEALTH_EVERY_S = 5.0
"""How often every host is asked for /health."""
_TRIES = 5
"""Attempts per batch. A batch that loses its host this often probably crashes it, so the batch fails."""


class HostedEngine:
    """An `Engine` over one or several engine processes that hold the same weights.

    Holds the connections, the load and the restart count of each host. The trainer calls it on one event
    loop.

    timeout_s   how long a batch waits for a host that serves, before it fails
    silence_s   a host that does not answer /health for this long is restarted
    restarts    when a host that does not stay up is given up; with no host left, waiting batches fail
    notify      called with a message when a host is lost and when it is back
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        processes: HostProcesses,
        delivery: WeightDelivery,
        *,
        batching: Batching = Batching.COMPOSED,
        version: int = -1,
        timeout_s: float = 600.0,
        silence_s: float = 60.0,
        restarts: Restarts | None = None,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        self._replicas = Replicas(endpoints)
        self._processes, self._delivery, self._batching = processes, delivery, batching
        self.traffic = Traffic()
        self._channels = {
            host.name: HostChannel(host.name, host.endpoint, self.traffic) for host in self._replicas.all
        }
        self._timeout_s, self._silence_s = timeout_s, silence_s
        limits = restarts or Restarts()
        self._restarts = {host.name: RestartCount(limits) for host in self._replicas.all}
        self._notify = notify or (lambda message: None)
        self._version = version
        self._changing = asyncio.Lock()
        """Held while weights or the pause state change, so that a restarted host gets the newest of both."""
        self._hosts_changed = asyncio.Condition()
        """Notified when a host is back or given up, on abort and on close; `_wait_for_host` waits on it."""
        self._calls = self._aborts = 0
        self._aborting = asyncio.Lock()
        self._paused = self._closed = False
        self._restarting: dict[str, asyncio.Task[None]] = {}
        self._health_task = asyncio.create_task(self._check_health())

    @property
    def version(self) -> int:
        return self._version

    @property
    def _serving(self) -> list[EngineReplica]:
        return [host for host in self._replicas.all if not host.is_gone]

    @property
    def outstanding_tokens(self) -> Mapping[str, int]:
        """By host: prompt and new tokens of its requests in flight."""
        return {host.name: host.outstanding_tokens for host in self._replicas.all}

    # --- generation

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        if not requests:
            return []
        if self._batching is Batching.COMPOSED:
            return await self._generate_batch(requests, lambda size: self._pick_by_hash(requests, size))
        alone = [asyncio.ensure_future(self._generate_one(request)) for request in requests]
        try:
            return [generation for (generation,) in await asyncio.gather(*alone)]
        finally:
            for task in alone:  # after one failure the results of the others are not used
                task.cancel()

    async def _generate_one(self, request: GenerateRequest) -> list[Generation]:
        return await self._generate_batch([request], lambda size: self._replicas.pick(request.session, size))

    def _pick_by_hash(self, requests: Sequence[GenerateRequest], size: int) -> EngineReplica | None:
        """Picks the host of a batch by a hash of its keys, whatever the load; the next by hash if that host is gone.
        Counts the batch in the host's load. None while no host serves."""
        keys = "\n".join(request.key for request in requests)

        def rank_of(host: EngineReplica) -> bytes:
            return blake2b(f"{host.name}\n{keys}".encode(), digest_size=8).digest()

        if not self._serving:
            return None
        chosen = min(self._serving, key=rank_of)
        chosen.outstanding_tokens += size
        chosen.sent_tokens += size
        return chosen

    async def _generate_batch(
        self, requests: Sequence[GenerateRequest], choose: Callable[[int], EngineReplica | None]
    ) -> list[Generation]:
        """Sends the whole batch again each time its host was lost, until a host answers."""
        size = sum(len(request.tokens) + request.sampling.max_new_tokens for request in requests)
        aborts, problem = self._aborts, ""
        for _ in range(_TRIES):
            # A call sent while an abort is in flight would be aborted with the calls before it.
            async with self._aborting:
                pass
            host = await self._wait_for_host(lambda: choose(size), aborts)
            if host is None:
                return [Generation.aborted() for _ in requests]
            channel = self._channels[host.name]
            self._calls += 1
            try:
                answer = await channel.send("/v1/generate", encode_call(self._calls, requests))
                return decode_answer(answer, len(requests))[1]
            except HostLost as error:
                problem = str(error)
                self._lost(host, channel, problem)
            finally:
                self._replicas.withdrawn(host, size)
        raise EngineError(
            f"the batch of {requests[0].key} … lost its engine process {_TRIES} times; the last time: {problem}"
        )

    async def _wait_for_host(
        self, choose: Callable[[], EngineReplica | None], aborts: int
    ) -> EngineReplica | None:
        """Waits for a host that serves; None if the batch was aborted first."""
        deadline = time.monotonic() + self._timeout_s
        async with self._hosts_changed:
            while True:
                if self._closed:
                    raise EngineError("the engine is closed; it takes no more requests")
                if self._aborts != aborts:
                    return None
                if all(self._is_given_up(host) for host in self._replicas.all):
                    raise EngineError(f"no engine process is left. {self._last_problems()}")
                host = choose()
                if host is not None:
                    return host
                try:
                    await asyncio.wait_for(self._hosts_changed.wait(), deadline - time.monotonic())
                except TimeoutError:
                    raise EngineError(
                        f"no engine process served within {self._timeout_s:g} s. {self._last_problems()}"
                    ) from None

    def _last_problems(self) -> str:
        return "\n".join(sorted({count.problem for count in self._restarts.values()}))

    def _is_given_up(self, host: EngineReplica) -> bool:
        gone = host.is_gone and host.name not in self._restarting
        return gone and self._restarts[host.name].spent

    # --- for a teacher that sits in the same processes

    @property
    def hosts(self) -> list[str]:
        return self._processes.names

    def process_of(self, host: str) -> StartedProcess | None:
        """The newest process of a host; it may have ended, or not serve yet."""
        return self._processes.newest(host)

    async def serving(self, host: str) -> Endpoint:
        """The address of a host's process. Waits while it is started again, and starts it if it has died."""
        (replica,) = (one for one in self._replicas.all if one.name == host)
        if not replica.is_gone and not self._processes.alive(host):
            self._lost(replica, self._channels[host], f"the process of {host} is gone")
        async with self._hosts_changed:
            while replica.is_gone:
                if self._closed or self._is_given_up(replica):
                    raise EngineError(f"engine {host} does not serve. {self._restarts[host].problem}")
                await self._hosts_changed.wait()
        return replica.endpoint

    def replace(self, host: str, problem: str) -> None:
        """Starts a host's process again, although it lives. Its batches are sent to another one, or again."""
        (replica,) = (one for one in self._replicas.all if one.name == host)
        self._lost(replica, self._channels[host], problem)

    # --- control

    async def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        async with self._changing:
            self._version, before = version, self._version
            serving = {self._channels[host.name]: host for host in self._serving}
            try:
                lost = await self._delivery.publish(version, tensors, list(serving))
            except BaseException:
                self._version = before
                raise
            for channel, problem in lost.items():
                self._lost(serving[channel], channel, str(problem))

    async def pause(self) -> None:
        async with self._changing:
            self._paused = True
            await self._tell_all("/v1/pause")

    async def resume(self) -> None:
        async with self._changing:
            self._paused = False
            await self._tell_all("/v1/resume")

    async def abort(self) -> None:
        async with self._aborting:
            self._aborts += 1
            async with self._hosts_changed:
                self._hosts_changed.notify_all()
            await self._tell_all("/v1/abort", AbortOrder(self._calls))

    async def _tell_all(self, path: str, order: AbortOrder | None = None) -> None:
        """Sends an order to every serving host. A lost host gets the current state after its restart."""

        async def tell(host: EngineReplica) -> None:
            channel = self._channels[host.name]
            try:
                await channel.order(path, order)
            except HostLost as error:
                self._lost(host, channel, str(error))

        if self._closed:
            raise EngineError("the engine is closed")
        await asyncio.gather(*(tell(host) for host in self._serving))

    # --- loss and restart of hosts

    def _lost(self, host: EngineReplica, channel: HostChannel, problem: str) -> None:
        """Marks a host as gone and restarts it, unless the process behind `channel` was already replaced."""
        if self._closed or host.name in self._restarting or self._channels[host.name] is not channel:
            return
        self._restarts[host.name].lost(problem)
        self._replicas.gone(host)
        channel.give_up(problem)
        waits = "" if self._serving else "; none serves now, so the run waits until one is back"
        logger.warning("engine process lost: %s; it is started again%s", problem, waits)
        self._notify(f"engine {host.name} was lost and is started again ({problem}){waits}")
        self._restarting[host.name] = asyncio.create_task(self._restart_lost(host))

    async def _restart_lost(self, host: EngineReplica) -> None:
        count = self._restarts[host.name]
        try:
            while not count.spent:
                wait = count.restart()
                try:
                    await self._bring_back(host)
                    return
                except (UnderstudyError, OSError) as error:
                    count.failed(f"{host.name} could not be started again: {error}")
                    logger.warning("%s", count.problem)
                if not count.spent:
                    await asyncio.sleep(wait)
        finally:
            del self._restarting[host.name]
        logger.error("engine %s is given up after %d restarts", host.name, count.in_vain)
        self._notify(
            f"engine {host.name} is given up after {many(count.in_vain, 'restart')}: {count.problem}"
        )
        async with self._hosts_changed:
            self._hosts_changed.notify_all()

    async def _bring_back(self, host: EngineReplica) -> None:
        """Starts a new process; it serves once it has the newest weights and our pause state."""
        endpoint = await self._processes.restart(host.name)
        old, fresh = self._channels[host.name], HostChannel(host.name, endpoint, self.traffic)
        host.endpoint, self._channels[host.name] = endpoint, fresh
        await old.close()
        async with self._changing:
            await self._delivery.give(self._version, fresh)
            if self._paused:
                await fresh.order("/v1/pause")
            self._replicas.back(host)
        self._restarts[host.name].serves()
        logger.warning("engine %s is back, with weights of version %d", host.name, self._version)
        self._notify(f"engine {host.name} is back, with weights of version {self._version}")
        async with self._hosts_changed:
            self._hosts_changed.notify_all()

    async def _check_health(self) -> None:
        """Finds hosts that died while idle and hosts that hang; requests have no timeout of their own."""

        async def check(host: EngineReplica) -> None:
            channel = self._channels[host.name]
            if host.is_gone:
                return
            if not self._processes.alive(host.name):
                self._lost(host, channel, f"the process of {host.name} is gone")
            elif not await channel.answers(self._silence_s):
                self._lost(host, channel, f"{host.name} does not answer /health")

        while True:
            await asyncio.sleep(_HEALTH_EVERY_S)
            await asyncio.gather(*(check(host) for host in self._replicas.all))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        tasks = [self._health_task, *self._restarting.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with self._hosts_changed:
            self._hosts_changed.notify_all()
        # Stop the processes first: requests in flight then fail by themselves.
        await asyncio.gather(*(self._processes.stop(host.name) for host in self._replicas.all))
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))
        self._delivery.close()
