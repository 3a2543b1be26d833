"""A simple model of a data plane: lists and scans, no journal. The real data planes must agree with it."""

from __future__ import annotations

from dataclasses import dataclass, field

from understudy.dataplane.base import GroupPolicy, Order, RowStatus
from understudy.types.prompt import split_key

PENDING, RUNNING, FINISHED = RowStatus.PENDING, RowStatus.RUNNING, RowStatus.FINISHED


@dataclass
class ModelRow:
    key: str
    step: int
    group: str | None
    policy: GroupPolicy | None
    number: int
    status: RowStatus = PENDING
    columns: dict[str, int] = field(default_factory=dict)
    arrival: int = 0
    lease: int | None = None
    attempts: int = 0

    @property
    def unit(self) -> str:
        return self.group or self.key


@dataclass
class ModelLease:
    keys: list[str]
    expires: float
    produces: bool


@dataclass
class Model:
    rows: dict[str, ModelRow] = field(default_factory=dict)
    leases: dict[int, ModelLease] = field(default_factory=dict)
    trained: dict[str, tuple[int, ModelRow]] = field(default_factory=dict)
    dead: dict[str, int] = field(default_factory=dict)
    evicted: dict[str, int] = field(default_factory=dict)
    now: float = 1000.0
    numbers: int = 0
    arrivals: int = 0
    last_step: int = 0
    """The last step trained."""

    def settled(self, key: str) -> bool:
        return key in self.trained or key in self.dead or key in self.evicted

    def issue(self, key: str, step: int, policy: GroupPolicy | None) -> bool:
        if key in self.rows or self.settled(key):
            return False
        self.numbers += 1
        group = split_key(key)[0] if policy else None
        if group is not None:  # a group keeps the policy it was opened with
            policy = next((row.policy for row in self.rows.values() if row.group == group), policy)
        self.rows[key] = ModelRow(key, step, group, policy, self.numbers)
        return True

    def put(self, key: str, column: str, value: int, lease: int | None) -> bool:
        """Returns False if the write is refused."""
        if lease is not None and (lease not in self.leases or key not in self.leases[lease].keys):
            return False
        row = self.rows.get(key)
        if row is None:
            if self.settled(key):
                return False
            self.issue(key, self.last_step + 1, None)
            row = self.rows[key]
        elif lease is None and row.lease is not None and self.leases[row.lease].produces:
            return False
        if row.lease is not None and self.leases[row.lease].produces:
            self.drop_lease(row)
        row.columns[column] = value
        row.status = FINISHED
        if not row.arrival:
            self.arrivals += 1
            row.arrival = self.arrivals
        return True

    def claim(
        self, n: int, at_least: int, fields: set[str], order: Order, status: RowStatus
    ) -> list[str] | None:
        """The keys that a claim gets, or None if it waits."""
        units: dict[str, list[ModelRow]] = {}
        for row in self.rows.values():
            units.setdefault(row.unit, []).append(row)

        def ready(unit: list[ModelRow]) -> bool:
            return all(
                row.lease is None and row.status is status and fields <= set(row.columns) for row in unit
            )

        def outstanding(unit: list[ModelRow]) -> bool:
            return all(row.lease is None or row.status is RUNNING for row in unit)

        def by_key(unit: list[ModelRow]) -> tuple[str, int, int]:
            first = min(split_key(row.key) for row in unit)
            return (first[0], -1, -1) if unit[0].group else first

        def by_arrival(unit: list[ModelRow]) -> tuple[int, int]:
            return max(row.arrival for row in unit), min(row.number for row in unit)

        strict = order is Order.KEY and status is FINISHED
        found = [unit for unit in units.values() if ready(unit) or (strict and outstanding(unit))]
        found.sort(key=by_key if order is Order.KEY else by_arrival)
        if sum(len(unit) for unit in found if ready(unit)) < at_least:
            return None
        taken: list[str] = []
        for unit in found:
            if not ready(unit):
                break
            if len(taken) + len(unit) > n:
                return taken or None
            taken += [row.key for row in sorted(unit, key=lambda row: split_key(row.key))]
            if len(taken) == n:
                break
        return taken if len(taken) >= at_least else None

    def lease(self, number: int, keys: list[str], seconds: float, produces: bool) -> None:
        self.leases[number] = ModelLease(list(keys), self.now + seconds, produces)
        for key in keys:
            self.rows[key].lease = number
            if produces:
                self.rows[key].status = RUNNING
                self.rows[key].attempts += 1

    def drop_lease(self, row: ModelRow) -> None:
        if row.lease is not None:
            held = self.leases[row.lease]
            held.keys.remove(row.key)
            if not held.keys:
                del self.leases[row.lease]
            row.lease = None

    def give_back(self, number: int) -> None:
        for key in list(self.leases[number].keys):
            row = self.rows[key]
            if row.status is RUNNING:
                row.status = PENDING
            self.drop_lease(row)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for number in [number for number, held in self.leases.items() if held.expires <= self.now]:
            self.give_back(number)

    def ack(self, number: int, step: int) -> None:
        for key in list(self.leases[number].keys):
            row = self.rows.pop(key)
            self.drop_lease(row)
            self.trained[key] = (step, row)
        self.last_step = max(self.last_step, step)

    def bury(self, key: str) -> None:
        row = self.rows.pop(key)
        self.drop_lease(row)
        self.dead[key] = row.step
        if row.policy is GroupPolicy.DROP_GROUP:
            for other in [other for other in self.rows.values() if other.group == row.group]:
                self.evict(other.key)

    def evict(self, key: str) -> None:
        row = self.rows.pop(key)
        self.drop_lease(row)
        self.evicted[key] = row.step

    def restart(self) -> None:
        for number in list(self.leases):
            self.give_back(number)

    def rewind(self, step: int, keep_rows: bool) -> None:
        self.restart()
        for key, (trained_at, row) in list(self.trained.items()):
            if trained_at > step:
                del self.trained[key]
                self.rows[key] = row
        if not keep_rows:
            for group in (self.dead, self.evicted):
                for key in [key for key, issued_for in group.items() if issued_for > step]:
                    del group[key]
            self.rows = {key: row for key, row in self.rows.items() if row.step <= step}
        self.last_step = max((trained_at for trained_at, _ in self.trained.values()), default=0)
