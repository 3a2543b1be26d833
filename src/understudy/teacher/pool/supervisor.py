"""The replica supervisor of a pool: decides when a replica is started, probed, ejected, restarted and stopped.

health.py has the rules, processes.py starts and stops. A replica gets traffic only after the identity probe: its
manifest and its scores of the fixed tokens must equal those of the first replica.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from understudy.errors import ClusterError, TeacherError
from understudy.observability.report import many
from understudy.serving.supervisor import RestartCount
from understudy.teacher.clients.native import Connect
from understudy.teacher.pool.clock import Clock
from understudy.teacher.pool.events import EventKind, PoolEvent
from understudy.teacher.pool.gather import gather_or_cancel
from understudy.teacher.pool.health import Failure, ReplicaHealth, State
from understudy.teacher.pool.integrity import Identity, check_same
from understudy.teacher.pool.launch import Launcher, ReplicaSpec
from understudy.teacher.pool.options import SupervisorOptions
from understudy.teacher.pool.processes import ReplicaProcesses
from understudy.teacher.pool.replica_record import Replica

Deliver = Callable[[Sequence[str]], Awaitable[Mapping[str, str]]]
"""Sends new weights to the replicas named. Returns those that did not take them, each with the reason."""


class ReplicaSupervisor:
    """Holds the replicas of one pool by name, their common identity and the watch task.

    `TeacherPool` calls it; everything runs on the pool's event loop.
    """

    def __init__(
        self,
        teacher: str,
        launcher: Launcher | None,
        connect: Connect,
        clock: Clock,
        options: SupervisorOptions,
        emit: Callable[[PoolEvent], None],
        longest_rest: float = 30.0,
    ) -> None:
        """`longest_rest`: most seconds that a server is left alone at its own request (`Retry-After`)."""
        self.teacher = teacher
        self.replicas: dict[str, Replica] = {}
        self.identity: Identity | None = None
        self.version = -1
        """The version of the weights that replicas must have; −1: those they were loaded with."""
        self._processes = ReplicaProcesses(teacher, launcher, connect, clock, options, self.tell)
        self._clock = clock
        self._options = options
        self._longest_rest = longest_rest
        self._emit = emit
        self._changed = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._joining: set[str] = set()
        """Replicas that are being started. They get new weights too."""
        self._delivering = asyncio.Lock()

    async def start(self, specs: Sequence[ReplicaSpec]) -> None:
        """Start all replicas and check that they agree. If one cannot start, all are stopped."""
        for spec in specs:
            self._add(spec)
        try:
            found = await gather_or_cancel(
                self._processes.first_start(self.replicas[spec.name]) for spec in specs
            )
            self.identity = found[0]
            for spec, identity in zip(specs, found, strict=True):
                check_same(self.identity, identity, spec.name)
        except BaseException:
            await self.close()
            raise
        for spec in specs:
            self.replicas[spec.name].health.probe_passed(self._clock.now())
        self._watching = asyncio.create_task(self._watch(), name=f"watch-{self.teacher}")

    async def add(self, spec: ReplicaSpec) -> None:
        """Start a further replica; it gets traffic once the identity probe has passed."""
        replica = self._add(spec)
        try:
            await self._join(replica)
        except BaseException:
            del self.replicas[spec.name]
            await self._stop(replica)
            raise
        replica.health.probe_passed(self._clock.now())
        self.tell(EventKind.ADDED, replica.name, "joined")
        self._notify()

    async def remove(self, name: str, drain: float) -> None:
        """Stop sending to it, wait up to `drain` seconds for its requests in flight, stop it."""
        replica = self.replicas.get(name)
        if replica is None:
            raise TeacherError(
                f"teacher {self.teacher} has no replica {name!r}; it has {', '.join(self.replicas)}"
            )
        if replica.health.usable and sum(other.health.usable for other in self.replicas.values()) == 1:
            raise TeacherError(
                f"teacher {self.teacher}: {name!r} is the last usable replica; add another one first"
            )
        replica.health.retire()
        until = self._clock.now() + drain
        while replica.load.outstanding_requests and self._clock.now() < until:
            await self._clock.sleep(min(0.05, drain))
        await self._stop(replica)
        del self.replicas[name]
        self.tell(EventKind.REMOVED, name, "left")

    async def close(self) -> None:
        await _cancelled(self._watching)
        await asyncio.gather(*(self._stop(replica) for replica in self.replicas.values()))
        for replica in self.replicas.values():
            replica.health.retire()

    async def change_version(self, version: int, deliver: Deliver) -> None:
        """Delivers weights of `version` to all replicas in use. Returns when one replica has passed a probe with
        them: it defines the new identity. Replicas that fail are restarted. No request may be under way. After an
        error or a cancellation the pool keeps its earlier identity, for the checkpoint that a stopping run saves."""
        before = self.identity, self.version
        try:
            await self._change_version(version, deliver)
        except BaseException:
            if self.identity is None:
                self.identity, self.version = before
            raise

    async def _change_version(self, version: int, deliver: Deliver) -> None:
        async with self._delivering:
            for replica in self.replicas.values():  # a probe under way would find the old version
                await _cancelled(replica.probing)
            self.identity, self.version = None, version
            asked = [replica for replica in self.replicas.values() if replica.health.usable]
            lost = await deliver([*(replica.name for replica in asked), *self._joining])
        for replica in asked:
            try:
                if replica.name in lost:
                    raise TeacherError(lost[replica.name])
                await self._probe(replica)
            except Exception as error:
                replica.health.probe_failed(self._clock.now(), str(error))
                if replica.health.usable:
                    self._eject(replica)
            else:
                replica.health.probe_passed(self._clock.now())
        while self.identity is None:
            if self.given_up_reason is not None:
                raise ClusterError(
                    f"{self.given_up_reason}\nno replica of teacher {self.teacher} is left to take weights of version {version}"
                )
            await self.wait_for_change(1.0)

    def usable(self) -> list[Replica]:
        """The healthy replicas; if there are none, the suspect ones. None whose server asked to be left alone."""
        now = self._clock.now()
        awake = [replica for replica in self.replicas.values() if not replica.rests(now)]
        healthy = [replica for replica in awake if replica.health.state is State.HEALTHY]
        return healthy or [replica for replica in awake if replica.health.state is State.SUSPECT]

    def request_failed(self, replica: Replica, failure: Failure, tokens: int, error: TeacherError) -> None:
        """Record the failure.

        Leave the replica alone if its server asks for that. Eject it if its record is bad and another can serve;
        otherwise probe it.
        """
        now = self._clock.now()
        if replica.rest_as_asked(error, now):
            replica.turned_away(failure, tokens, str(error), now)
            return
        replica.failed(failure, tokens, str(error), now)
        if replica.health.deserves_ejection and self._spare(replica):
            self._eject(replica)
        elif replica.health.state is State.SUSPECT and replica.probing is None:
            replica.probing = asyncio.create_task(self._probe_suspect(replica), name=f"probe-{replica.name}")

    @property
    def given_up_reason(self) -> str | None:
        """The reason, if every replica was given up: starts with the last one's own error. None otherwise."""
        problems = [replica.given_up for replica in self.replicas.values()]
        return problems[-1] if problems and all(problems) else None

    async def wait_for_change(self, most: float) -> None:
        """Return when a replica is admitted or given up, or after `most` seconds."""
        waits: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._changed.wait()),
            asyncio.create_task(self._clock.sleep(most)),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()

    def tell(self, kind: EventKind, replica: str | None, message: str) -> None:
        self._emit(PoolEvent(kind, self.teacher, replica, message, self._clock.now()))

    def _add(self, spec: ReplicaSpec) -> Replica:
        if spec.name in self.replicas:
            raise TeacherError(f"teacher {self.teacher} already has a replica {spec.name!r}")
        if not self._processes.can_start(spec):
            raise TeacherError(
                f"teacher {self.teacher}, replica {spec.name}: neither an address nor a launcher"
            )
        rules = self._options.health
        replica = Replica(
            spec,
            ReplicaHealth(rules),
            RestartCount(rules.restarts, self._clock.now),
            asyncio.Semaphore(self._options.max_in_flight),
            self._longest_rest,
        )
        self.replicas[spec.name] = replica
        return replica

    def _spare(self, replica: Replica) -> bool:
        return any(other.health.usable for other in self.replicas.values() if other is not replica)

    def _eject(self, replica: Replica) -> None:
        replica.ejections += 1
        replica.health.eject(self._clock.now())
        self.tell(EventKind.EJECTED, replica.name, replica.health.last_reason)

    async def _probe_suspect(self, replica: Replica) -> None:
        """Probe a suspect by scoring the fixed tokens; /health would prove nothing."""
        try:
            await self._probe(replica)
        except Exception as error:
            replica.health.probe_failed(self._clock.now(), str(error))
            # A lone external replica is kept: we cannot restart it, so all we can do is try it again.
            if replica.health.usable and (self._spare(replica) or not replica.spec.external):
                self._eject(replica)
        else:
            replica.health.probe_passed(self._clock.now())
        finally:
            replica.probing = None

    async def _probe(self, replica: Replica) -> None:
        waiting = replica.load.outstanding_tokens / self._options.slowest_tokens_per_second
        deadline = self._options.probe_deadline + waiting
        self._check_identity(replica, await self._processes.identify(replica, deadline))

    def _check_identity(self, replica: Replica, found: Identity) -> None:
        if found.manifest.version != self.version:
            raise TeacherError(
                f"teacher {self.teacher}, replica {replica.name}: its weights are of version {found.manifest.version}, "
                f"not {self.version}"
            )
        if self.identity is None:
            self.identity = found
        check_same(self.identity, found, replica.name)

    async def _join(self, replica: Replica) -> None:
        """Brings the replica up and checks its identity. If new weights were delivered meanwhile, it is identified
        again while no delivery is under way."""
        self._joining.add(replica.name)
        try:
            found = await self._processes.bring_up(replica)
            if found.manifest.version != self.version:
                async with self._delivering:
                    found = await self._processes.identify(replica, self._options.probe_deadline)
            self._check_identity(replica, found)
        finally:
            self._joining.discard(replica.name)

    async def _watch(self) -> None:
        """Finds dead processes, and revives ejected replicas whose backoff is over."""
        while True:
            await self._clock.sleep(self._options.watch_every)
            for replica in list(self.replicas.values()):
                if not self._processes.alive(replica):
                    was_usable = replica.health.usable
                    replica.health.died(self._clock.now(), "its process died")
                    if was_usable:
                        replica.ejections += 1
                        self.tell(EventKind.EJECTED, replica.name, "its process died")
                due = replica.health.restart_due(self._clock.now()) and not replica.rests(self._clock.now())
                if due and replica.restarting is None:
                    replica.restarting = asyncio.create_task(
                        self._revive(replica), name=f"revive-{replica.name}"
                    )

    async def _revive(self, replica: Replica) -> None:
        """Probe the replica if it still runs; restart it if it does not run or fails the probe."""
        try:
            if await self._passes_probe(replica):
                self._readmit(replica, EventKind.READMITTED, "proved itself again")
            elif not replica.spec.external:
                if replica.health.setbacks <= 1:
                    replica.restart_count.was_useful()
                if replica.restart_count.spent:
                    self._abandon(replica)
                else:
                    await self._restart(replica)
        finally:
            replica.restarting = None

    def _abandon(self, replica: Replica) -> None:
        """Give the replica up: it does not stay up, and is not restarted again."""
        reason = replica.health.last_reason
        if end_of_log := self._processes.end_of_log(replica):
            reason = reason if end_of_log in reason else f"{end_of_log}\n{reason}"
        times = f"given up after {many(replica.restart_count.in_vain, 'restart')} in a row (cluster.restarts.teacher)"
        replica.given_up = f"{reason}\n(teacher {self.teacher}, replica {replica.name}: {times})"
        replica.health.retire()
        self.tell(EventKind.EJECTED, replica.name, f"{times}: {replica.health.last_reason}")
        self._notify()

    async def _passes_probe(self, replica: Replica) -> bool:
        if replica.client is None or not self._processes.alive(replica):
            return False
        replica.health.started()
        try:
            await self._probe(replica)
        except Exception as error:
            replica.health.probe_failed(self._clock.now(), str(error))
            return False
        return True

    async def _restart(self, replica: Replica) -> None:
        replica.health.restarting()
        try:
            await self._processes.stop(replica)
            replica.restarts += 1
            replica.restart_count.restart()
            await self._join(replica)
        except Exception as error:
            replica.health.restart_failed(self._clock.now(), str(error))
            replica.health.probe_failed(self._clock.now(), str(error))
            self.tell(EventKind.EJECTED, replica.name, f"restart failed: {error}")
        else:
            self._readmit(replica, EventKind.RESTARTED, "back after a restart")

    def _readmit(self, replica: Replica, kind: EventKind, message: str) -> None:
        replica.health.probe_passed(self._clock.now())
        if replica.health.usable:
            self.tell(kind, replica.name, message)
            self._notify()

    def _notify(self) -> None:
        """Wakes the tasks that wait in `wait_for_change` now. Later ones wait for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _stop(self, replica: Replica) -> None:
        await _cancelled(replica.probing)
        await _cancelled(replica.restarting)
        if replica.client is not None:
            await replica.client.close()
        await self._processes.stop(replica)


async def _cancelled(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
