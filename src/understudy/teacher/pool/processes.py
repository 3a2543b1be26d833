"""The processes and connections of a pool's replicas: started, connected, identified, stopped.

    start the process (not of an external server) ─> connect ─> identify: manifest and scores of the fixed tokens

`ReplicaSupervisor` decides when; `Launcher` starts and stops the processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from understudy.errors import ChildDied, TeacherError, TeacherUnavailable
from understudy.serving.endpoint import Endpoint
from understudy.serving.start_wait import KEY, StartWait, is_lasting
from understudy.teacher.clients.native import Connect
from understudy.teacher.pool.clock import Clock
from understudy.teacher.pool.events import EventKind
from understudy.teacher.pool.integrity import Identity, identify
from understudy.teacher.pool.launch import Launcher, ReplicaSpec
from understudy.teacher.pool.options import SupervisorOptions
from understudy.teacher.pool.replica_record import Replica


class ReplicaProcesses:
    """Holds the launcher and the way to connect; what is known of a replica is in its `Replica`.

    `ReplicaSupervisor` calls it on the pool's event loop.
    """

    def __init__(
        self,
        teacher: str,
        launcher: Launcher | None,
        connect: Connect,
        clock: Clock,
        options: SupervisorOptions,
        tell: Callable[[EventKind, str | None, str], None],
    ) -> None:
        self._teacher = teacher
        self._launcher = launcher
        self._connect = connect
        self._clock = clock
        self._options = options
        self._tell = tell

    def can_start(self, spec: ReplicaSpec) -> bool:
        return spec.external or self._launcher is not None

    def alive(self, replica: Replica) -> bool:
        """Whether its process runs. An external server counts as running: only a request can show that it is gone."""
        return replica.spec.external or (self._launcher is not None and self._launcher.alive(replica.name))

    def end_of_log(self, replica: Replica) -> str:
        return self._launcher.end_of_log(replica.name) if self._launcher is not None else ""

    async def stop(self, replica: Replica) -> None:
        """Stops its process. Does nothing to an external server."""
        if self._launcher is not None and not replica.spec.external:
            await self._launcher.stop(replica.name)

    async def first_start(self, replica: Replica) -> Identity:
        """Brings the replica up when the run starts. Starts its process again if a signal kills it meanwhile; any
        other error ends the start at once."""
        if replica.spec.external:
            return await self._first_answer(replica)
        for _ in range(self._options.starts_again):
            try:
                return await self.bring_up(replica)
            except (ChildDied, TeacherUnavailable) as error:
                killed = error.killed if isinstance(error, ChildDied) else not self.alive(replica)
                if not killed:
                    raise
                self._tell(EventKind.EJECTED, replica.name, "its process was killed while it started")
        return await self.bring_up(replica)

    async def bring_up(self, replica: Replica) -> Identity:
        """Start the process (not of an external server), connect, identify."""
        endpoint = replica.spec.endpoint or await self._start(replica)
        if replica.client is not None:
            await replica.client.close()
        replica.client = self._connect(self._teacher, replica.name, endpoint)
        replica.health.started()
        return await self._first_contact(replica)

    async def identify(self, replica: Replica, deadline: float) -> Identity:
        """Its manifest and its scores of the fixed tokens."""
        assert replica.client is not None
        try:
            async with asyncio.timeout(deadline):
                return await identify(replica.client, deadline)
        except TeacherUnavailable as error:
            replica.rest_as_asked(error, self._clock.now())
            raise
        except TimeoutError as error:
            raise TeacherError(
                f"teacher {self._teacher}, replica {replica.name} did not score the fixed tokens within {deadline:.1f} s"
            ) from error

    async def _start(self, replica: Replica) -> Endpoint:
        assert self._launcher is not None
        try:
            async with asyncio.timeout(self._options.start_deadline):
                return await self._launcher.start(replica.name)
        except TimeoutError as error:
            raise TeacherError(
                f"teacher {self._teacher}, replica {replica.name}: not ready after {self._options.start_deadline:.0f} s"
            ) from error

    async def _first_contact(self, replica: Replica) -> Identity:
        """The first identity probe. Retried for our own processes, which may be slow to accept connections on
        a busy machine.

        An external server that cannot be reached is an error at once; `_first_answer` waits for it.
        """
        latest = self._clock.now() + self._options.first_probe_deadline
        while True:
            try:
                return await self.identify(replica, max(1.0, latest - self._clock.now()))
            except TeacherUnavailable as error:
                if replica.spec.endpoint is not None:
                    unserved = TeacherUnavailable(
                        f"{error}; start its server at {replica.spec.endpoint.url}, or name another one in teachers.{self._teacher}.urls"
                    )
                    unserved.retry_after = error.retry_after
                    raise unserved from error
                if not self.alive(replica) or self._clock.now() >= latest:
                    raise
                await self._clock.sleep(self._options.watch_every)

    async def _first_answer(self, replica: Replica) -> Identity:
        """Waits for an external server that refuses connections, loads its model or is overloaded. An error that
        waiting cannot fix ends the start at once."""
        most = self._options.external_wait
        wait = StartWait(most, self._clock.now)
        told = False
        while True:
            try:
                found = await self.bring_up(replica)
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
                    self._tell(EventKind.PAUSED, replica.name, message)
                await self._clock.sleep(pause)
            else:
                replica.resting_until = 0.0  # it answers sooner than it asked for
                if told:
                    self._tell(EventKind.RESUMED, replica.name, f"answers after {wait.waited:.0f} s")
                return found
