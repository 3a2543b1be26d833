"""The replica supervisor of a pool: starts, probes, ejects, restarts and stops replicas.

The rules are in health.py; here are the calls and tasks that carry them out. A replica gets traffic only
after the identity probe: its manifest and its scores of the fixed tokens must equal those of the first
replica.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from understudy.errors import ChildDied, ClusterError, TeacherError, TeacherUnavailable
from understudy.media.store import MediaStore
from understudy.observability.report import many
from understudy.serving.endpoint import Endpoint
from understudy.serving.start_wait import KEY, StartWait, is_lasting
from understudy.serving.supervisor import RestartCount
from understudy.teacher.clients.native import ReplicaClient, ScoringClient
from understudy.teacher.pool.clock import Clock
from understudy.teacher.pool.events import EventKind, PoolEvent
from understudy.teacher.pool.gather import gather_or_cancel
from understudy.teacher.pool.health import Failure, HealthRules, ReplicaHealth, State
from understudy.teacher.pool.integrity import Identity, check_same, identify
from understudy.teacher.pool.launch import Launcher, ReplicaSpec
from understudy.teacher.pool.replica_record import Replica
from understudy.types.usable_ids import UsableIds

Connect = Callable[[str, str, Endpoint], ScoringClient]
"""(teacher, replica, endpoint) → a client."""


def connect_native(
    teacher: str,
    replica: str,
    endpoint: Endpoint,
    usable: UsableIds | None = None,
    media: MediaStore | None = None,
) -> ScoringClient:
    return ReplicaClient(
        endpoint.url, endpoint.token, teacher=teacher, replica=replica, usable=usable, media=media
    )


Deliver = Callable[[Sequence[str]], Awaitable[Mapping[str, str]]]
"""Sends new weights to the replicas named. Returns those that did not take them, each with the reason."""


@dataclass(frozen=True, slots=True)
class SupervisorOptions:
    """Deadlines and limits of a `ReplicaSupervisor`; times in seconds."""

    probe_deadline: float = 15.0
    """For scoring the fixed tokens, in addition to the time for tokens already outstanding at the replica."""
    first_probe_deadline: float = 60.0
    """The same for a process that has just started and may still be warming up."""
    slowest_tokens_per_second: float = 500.0
    start_deadline: float = 600.0
    external_wait: float = 0.0
    """How long the start of a run waits for an external server that refuses connections or cannot serve yet."""
    starts_again: int = 3
    """How often a replica is started again whose process is killed while the run starts."""
    watch_every: float = 0.25
    """Between checks of processes and backoffs."""
    max_in_flight: int = 32
    """Requests one replica may hold."""
    health: HealthRules = field(default_factory=HealthRules)


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
        self._launcher = launcher
        self._connect = connect
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
            found = await gather_or_cancel(self._first_start(self.replicas[spec.name]) for spec in specs)
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
        if self._asked_to_rest(replica, error):
            replica.turned_away(failure, tokens, str(error), now)
            return
        replica.failed(failure, tokens, str(error), now)
        if replica.health.deserves_ejection and self._spare(replica):
            self._eject(replica)
        elif replica.health.state is State.SUSPECT and replica.probing is None:
            replica.probing = asyncio.create_task(self._prove(replica), name=f"probe-{replica.name}")

    def _asked_to_rest(self, replica: Replica, error: TeacherError) -> bool:
        """Whether the server's answer says how long to leave it alone."""
        if not isinstance(error, TeacherUnavailable) or not error.retry_after:
            return False
        until = self._clock.now() + min(error.retry_after, self._longest_rest)
        replica.resting_until = max(replica.resting_until, until)
        return True

    @property
    def given_up_reason(self) -> str | None:
        """The reason, if every replica was given up: starts with the last one's own error. None otherwise."""
        problems = [replica.given_up for replica in self.replicas.values()]
        return problems[-1] if problems and all(problems) else None

    async def wait_for_change(self, most: float) -> None:
        """Return when a replica is admitted or given up, or after `most` seconds."""
        waits = [asyncio.create_task(self._changed.wait()), asyncio.create_task(self.wait(most))]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()

    def tell(self, kind: EventKind, replica: str | None, message: str) -> None:
        self._emit(PoolEvent(kind, self.teacher, replica, message, self._clock.now()))

    async def wait(self, seconds: float) -> bool:
        await self._clock.sleep(seconds)
        return True

    def _add(self, spec: ReplicaSpec) -> Replica:
        if spec.name in self.replicas:
            raise TeacherError(f"teacher {self.teacher} already has a replica {spec.name!r}")
        if not spec.external and self._launcher is None:
            raise TeacherError(
                f"teacher {self.teacher}, replica {spec.name}: neither an address nor a launcher"
            )
        rules = self._options.health
        replica = Replica(
            spec,
            ReplicaHealth(rules),
            RestartCount(rules.restarts, self._clock.now),
            asyncio.Semaphore(self._options.max_in_flight),
        )
        self.replicas[spec.name] = replica
        return replica

    def _spare(self, replica: Replica) -> bool:
        return any(other.health.usable for other in self.replicas.values() if other is not replica)

    def _eject(self, replica: Replica) -> None:
        replica.ejections += 1
        replica.health.eject(self._clock.now())
        self.tell(EventKind.EJECTED, replica.name, replica.health.last_reason)

    async def _prove(self, replica: Replica) -> None:
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
        self._check_identity(replica, await self._identify(replica, self._options.probe_deadline + waiting))

    async def _identify(self, replica: Replica, deadline: float) -> Identity:
        assert replica.client is not None
        try:
            async with asyncio.timeout(deadline):
                return await identify(replica.client, deadline)
        except TeacherUnavailable as error:
            self._asked_to_rest(replica, error)
            raise
        except TimeoutError as error:
            raise TeacherError(
                f"teacher {self.teacher}, replica {replica.name} did not score the fixed tokens within {deadline:.1f} s"
            ) from error

    def _check_identity(self, replica: Replica, found: Identity) -> None:
        if found.manifest.version != self.version:
            raise TeacherError(
                f"teacher {self.teacher}, replica {replica.name}: its weights are of version {found.manifest.version}, "
                f"not {self.version}"
            )
        if self.identity is None:
            self.identity = found
        check_same(self.identity, found, replica.name)

    async def _first_start(self, replica: Replica) -> Identity:
        """Brings the replica up, and starts its process again if a signal kills it meanwhile. Any other error ends
        the start at once."""
        if replica.spec.external:
            return await self._first_answer(replica)
        assert self._launcher is not None
        for _ in range(self._options.starts_again):
            try:
                return await self._bring_up(replica)
            except (ChildDied, TeacherUnavailable) as error:
                lost = not self._launcher.alive(replica.name)
                if not (error.killed if isinstance(error, ChildDied) else lost):
                    raise
                self.tell(EventKind.EJECTED, replica.name, "its process was killed while it started")
        return await self._bring_up(replica)

    async def _first_answer(self, replica: Replica) -> Identity:
        """Waits for an external server that refuses connections, loads its model or is overloaded. An error that waiting
        does not mend ends the start at once."""
        most = self._options.external_wait
        wait = StartWait(most, self._clock.now)
        told = False
        while True:
            try:
                found = await self._bring_up(replica)
            except TeacherUnavailable as error:
                pause = None if is_lasting(error) else wait.pause(error.retry_after)
                if pause is None:
                    if not told:
                        raise
                    raise TeacherUnavailable(
                        f"{error}. Waited {wait.waited:.0f} s for it ({KEY} = {most:g}); raise that if it takes longer"
                    ) from error
                if not told:
                    told = True
                    message = f"{error}. Waiting up to {most:g} s ({KEY}); Ctrl-C ends the wait"
                    self.tell(EventKind.PAUSED, replica.name, message)
                await self._clock.sleep(pause)
            else:
                replica.resting_until = 0.0  # it answers sooner than it asked for
                if told:
                    self.tell(EventKind.RESUMED, replica.name, f"answers after {wait.waited:.0f} s")
                return found

    async def _join(self, replica: Replica) -> None:
        """Brings the replica up and checks its identity. If new weights were delivered meanwhile, it is identified
        again while no delivery is under way."""
        self._joining.add(replica.name)
        try:
            found = await self._bring_up(replica)
            if found.manifest.version != self.version:
                async with self._delivering:
                    found = await self._identify(replica, self._options.probe_deadline)
            self._check_identity(replica, found)
        finally:
            self._joining.discard(replica.name)

    async def _bring_up(self, replica: Replica) -> Identity:
        """Launch (unless external), connect, identify."""
        endpoint = replica.spec.endpoint
        if endpoint is None:
            assert self._launcher is not None
            try:
                async with asyncio.timeout(self._options.start_deadline):
                    endpoint = await self._launcher.start(replica.name)
            except TimeoutError as error:
                raise TeacherError(
                    f"teacher {self.teacher}, replica {replica.name}: not ready after {self._options.start_deadline:.0f} s"
                ) from error
        if replica.client is not None:
            await replica.client.close()
        replica.client = self._connect(self.teacher, replica.name, endpoint)
        replica.health.started()
        return await self._first_contact(replica)

    async def _first_contact(self, replica: Replica) -> Identity:
        """The first identity probe. Retried for our own processes, which may be slow to accept connections on
        a busy machine.

        An external server that cannot be reached is an error at once; `_first_answer` waits for it.
        """
        latest = self._clock.now() + self._options.first_probe_deadline
        while True:
            try:
                return await self._identify(replica, max(1.0, latest - self._clock.now()))
            except TeacherUnavailable as error:
                if replica.spec.endpoint is not None:
                    unserved = TeacherUnavailable(
                        f"{error}; start its server at {replica.spec.endpoint.url}, or name another one in teachers.{self.teacher}.urls"
                    )
                    unserved.retry_after = error.retry_after
                    raise unserved from error
                living = self._launcher is not None and self._launcher.alive(replica.name)
                if not living or self._clock.now() >= latest:
                    raise
                await self._clock.sleep(self._options.watch_every)

    async def _watch(self) -> None:
        """Finds dead processes, and revives ejected replicas whose backoff is over."""
        while True:
            await self._clock.sleep(self._options.watch_every)
            for replica in list(self.replicas.values()):
                if (
                    self._launcher is not None
                    and not replica.spec.external
                    and not self._launcher.alive(replica.name)
                ):
                    was_usable = replica.health.usable
                    replica.health.died(self._clock.now(), "its process died")
                    if was_usable:
                        replica.ejections += 1
                        self.tell(EventKind.EJECTED, replica.name, "its process died")
                due = replica.health.restart_due(self._clock.now()) and not replica.rests(self._clock.now())
                if due and replica.restarting is None:
                    replica.restarting = asyncio.create_task(
                        self._restart_lost(replica), name=f"revive-{replica.name}"
                    )

    async def _restart_lost(self, replica: Replica) -> None:
        """Probe the replica if it still runs; restart it if it does not run or fails the probe."""
        try:
            if await self._still_sound(replica):
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
        if self._launcher is not None and (end_of_log := self._launcher.end_of_log(replica.name)):
            reason = reason if end_of_log in reason else f"{end_of_log}\n{reason}"
        times = f"given up after {many(replica.restart_count.in_vain, 'restart')} in a row (cluster.restarts.teacher)"
        replica.given_up = f"{reason}\n(teacher {self.teacher}, replica {replica.name}: {times})"
        replica.health.retire()
        self.tell(EventKind.EJECTED, replica.name, f"{times}: {replica.health.last_reason}")
        self._notify()

    async def _still_sound(self, replica: Replica) -> bool:
        alive = replica.spec.external or (self._launcher is not None and self._launcher.alive(replica.name))
        if not alive or replica.client is None:
            return False
        replica.health.started()
        try:
            await self._probe(replica)
        except Exception as error:
            replica.health.probe_failed(self._clock.now(), str(error))
            return False
        return True

    async def _restart(self, replica: Replica) -> None:
        assert self._launcher is not None
        replica.health.restarting()
        try:
            await self._launcher.stop(replica.name)
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
        self._changed.set()
        self._changed = asyncio.Event()

    async def _stop(self, replica: Replica) -> None:
        await _cancelled(replica.probing)
        await _cancelled(replica.restarting)
        if replica.client is not None:
            await replica.client.close()
        if self._launcher is not None and not replica.spec.external:
            await self._launcher.stop(replica.name)


async def _cancelled(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
