"""An outage of a teacher: no replica answers, scoring waits. It is reported, reported again, and becomes an error when it lasts too long."""

from __future__ import annotations

from understudy.errors import ClusterError
from understudy.teacher.pool.clock import Clock
from understudy.teacher.pool.events import EventKind
from understudy.teacher.pool.supervisor import ReplicaSupervisor

_REPORT_AGAIN_S = 15.0
"""When an outage is reported for the second time."""


class Outage:
    """The current outage of a pool, if there is one. `TeacherPool` calls it on its event loop."""

    def __init__(self, supervisor: ReplicaSupervisor, clock: Clock, most: float | None) -> None:
        """`most`: seconds after which an outage is an error; None: it may last."""
        self._supervisor, self._clock, self._most = supervisor, clock, most
        self._began: float | None = None
        self._reported_at = 0.0

    @property
    def lasts(self) -> bool:
        return self._began is not None

    def begin(self) -> bool:
        """Returns whether a new outage begins."""
        if self._began is not None:
            return False
        self._began = self._reported_at = self._clock.now()
        self._report("no replica answers, scoring waits and nothing is dropped")
        return True

    def check(self) -> None:
        """Reports a lasting outage again, each time after twice as long. Raises `ClusterError` if it is too long."""
        if self._began is None or self._most is None:
            return
        now, teacher = self._clock.now(), self._supervisor.teacher
        seconds = now - self._began
        if seconds >= self._most:
            raise ClusterError(
                f"no replica of teacher {teacher} has answered for {seconds:.0f} s (teachers.{teacher}.outage_seconds = "
                f"{self._most:g}): {self._states()}\nstart its servers again, or name others in teachers.{teacher}.urls, and resume "
                "the run; no row is lost"
            )
        if seconds >= max(2 * (self._reported_at - self._began), _REPORT_AGAIN_S):
            self._reported_at = now
            self._report(f"still no answer after {seconds:.0f} s")

    def end(self) -> float:
        """Returns the seconds that it lasted; 0 if there was none."""
        if self._began is None:
            return 0.0
        seconds, self._began = self._clock.now() - self._began, None
        self._supervisor.tell(EventKind.RESUMED, None, f"scoring continues after {seconds:.1f} s")
        return seconds

    def _report(self, what: str) -> None:
        end = (
            ""
            if self._most is None
            else f"; the run ends after {self._most:g} s of it (teachers.{self._supervisor.teacher}.outage_seconds)"
        )
        self._supervisor.tell(EventKind.PAUSED, None, f"{what}: {self._states()}{end}")

    def _states(self) -> str:
        """Of every replica: its name, the address of an external one, its state and the last reason."""
        states = []
        for replica in self._supervisor.replicas.values():
            where = f" at {replica.spec.endpoint.url}" if replica.spec.endpoint else ""
            state = "resting" if replica.rests(self._clock.now()) else replica.health.state.value
            states.append(f"{replica.name}{where} {state} ({replica.health.last_reason})")
        return "; ".join(states)
