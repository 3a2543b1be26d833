"""Random sequences of calls: hypothesis compares the data plane with the simple model of `plane_model.py`."""

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plane_model import Model
from plane_rig import IMPLEMENTATIONS, HandClock

from understudy.dataplane.base import GroupPolicy, Lease, Order, RowStatus
from understudy.dataplane.ledger import Ledger, audit
from understudy.errors import DataPlaneError, LeaseLost
from understudy.types.batch import BatchMeta

PROMPTS = st.integers(0, 4)
KEYS = st.builds(lambda prompt, session: f"p{prompt}_{session}_0", PROMPTS, st.integers(0, 2))
POLICY = {0: GroupPolicy.DROP_GROUP, 1: GroupPolicy.TRAIN_REST}
COLUMNS = st.sampled_from(["tokens", "score"])
FIELDS = st.sampled_from([set(), {"tokens"}, {"tokens", "score"}])


class PlaneMachine(RuleBasedStateMachine):
    implementation = "embedded"

    @initialize(tight=st.booleans())
    def start(self, tight: bool) -> None:
        """With `tight`, most columns are spilled, and rows are issued first: unissued ones would wait for room."""
        self.tight = tight
        self.folder = Path(tempfile.mkdtemp(prefix="plane-machine-"))
        self.open_plane = IMPLEMENTATIONS[self.implementation]
        self.loop = asyncio.new_event_loop()
        self.clock = HandClock()
        self.model = Model(now=self.clock.now)
        self.leases: list[Lease] = []
        self.value = 0
        self.open()

    def open(self) -> None:
        self.plane: Any = self.open_plane(
            self.folder, clock=self.clock, max_rows=1000, max_bytes=self.limit, spill_bytes=10**6
        )

    @property
    def limit(self) -> int:
        return 50 if self.tight else 10**6

    def do(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 20))

    def lease_at(self, place: int) -> Lease:
        return self.leases[place % len(self.leases)]

    @rule(prompt=PROMPTS, sessions=st.integers(1, 3), ahead=st.integers(0, 2))
    def issue(self, prompt: int, sessions: int, ahead: int) -> None:
        keys = [f"p{prompt}_{session}_0" for session in range(sessions)]
        step = self.model.last_step + ahead
        policy = POLICY.get(prompt)
        new = self.do(self.plane.issue("train", keys, step=step, group=policy))
        assert list(new) == [key for key in keys if self.model.issue(key, step, policy)]

    @rule(key=KEYS, column=COLUMNS)
    def put(self, key: str, column: str) -> None:
        self._put(key, column, None)

    @precondition(lambda self: self.leases)
    @rule(place=st.integers(0, 9), which=st.integers(0, 9), column=COLUMNS)
    def put_with_lease(self, place: int, which: int, column: str) -> None:
        lease = self.lease_at(place)
        self._put(lease.meta.keys[which % len(lease.meta)], column, lease)

    def _put(self, key: str, column: str, lease: Lease | None) -> None:
        self.value += 1
        if self.tight and key not in self.model.rows and not self.model.settled(key):
            self.model.issue(key, self.model.last_step + 1, None)
            self.do(self.plane.issue("train", [key], step=self.model.last_step + 1))
        written = self.model.put(key, column, self.value, None if lease is None else lease.id)
        try:
            self.do(self.plane.put("train", {key: {column: self.value}}, lease=lease))
        except LeaseLost:
            assert not written
        else:
            assert written

    @rule(
        n=st.integers(1, 5),
        at_least=st.integers(1, 5),
        fields=FIELDS,
        order=st.sampled_from(Order),
        status=st.sampled_from([RowStatus.FINISHED, RowStatus.FINISHED, RowStatus.PENDING]),
        seconds=st.integers(5, 50),
    )
    def claim(
        self, n: int, at_least: int, fields: set[str], order: Order, status: RowStatus, seconds: float
    ) -> None:
        at_least = min(n, at_least)
        fields = set() if status is RowStatus.PENDING else fields
        expected = self.model.claim(n, at_least, fields, order, status)
        work = self.plane.claim(
            "train",
            n,
            at_least=at_least,
            fields=tuple(fields),
            order=order,
            status=status,
            timeout=0,
            lease_seconds=seconds,
        )
        try:
            lease = self.do(work)
        except TimeoutError:
            assert expected is None
        except DataPlaneError as error:
            assert expected is None and "group" in str(error)
        else:
            assert list(lease.meta.keys) == expected
            self.model.lease(lease.id, expected, seconds, status is RowStatus.PENDING)
            self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(place=st.integers(0, 9), ahead=st.integers(0, 1))
    def ack(self, place: int, ahead: int) -> None:
        lease = self.lease_at(place)
        step = self.model.last_step + ahead
        held = self.model.leases.get(lease.id)
        try:
            self.do(self.plane.ack(lease, step))
        except LeaseLost:
            assert held is None
        except DataPlaneError:
            assert held is not None and held.produces
        else:
            assert held is not None
            self.model.ack(lease.id, step)

    @precondition(lambda self: self.leases)
    @rule(place=st.integers(0, 9))
    def release(self, place: int) -> None:
        lease = self.lease_at(place)
        try:
            self.do(self.plane.release(lease))
        except LeaseLost:
            assert lease.id not in self.model.leases
        else:
            self.model.give_back(lease.id)

    @rule(seconds=st.integers(1, 30))
    def pass_time(self, seconds: int) -> None:
        self.clock.now += seconds
        self.model.pass_time(seconds)

    @rule(key=KEYS, kind=st.sampled_from(["dead", "evict"]))
    def take_out(self, key: str, kind: str) -> None:
        work = (
            self.plane.dead_letter("train", key, "poison")
            if kind == "dead"
            else self.plane.evict("train", [key], "stale")
        )
        try:
            self.do(work)
        except DataPlaneError:
            assert key not in self.model.rows
        else:
            (self.model.bury if kind == "dead" else self.model.evict)(key)

    @rule()
    def reopen(self) -> None:
        self.do(self.plane.close())
        self.open()
        self.model.restart()
        self.leases.clear()

    @rule(back=st.integers(0, 3), keep_rows=st.booleans())
    def rewind(self, back: int, keep_rows: bool) -> None:
        step = max(0, self.model.last_step - back)
        self.do(self.plane.rewind(step, keep_rows=keep_rows))
        self.model.rewind(step, keep_rows)
        self.leases.clear()

    @invariant()
    def rows_agree(self) -> None:
        if not hasattr(self, "plane"):
            return
        listed = self.do(self.plane.list("train"))
        assert {
            key: (row.status, set(row.columns), row.group, row.step, row.attempts, row.leased)
            for key, row in listed.items()
        } == {
            key: (row.status, set(row.columns), row.group, row.step, row.attempts, row.lease is not None)
            for key, row in self.model.rows.items()
        }
        depth = self.do(self.plane.depth("train"))
        assert depth.rows == len(self.model.rows)
        assert depth.leased == sum(row.lease is not None for row in self.model.rows.values())
        assert depth.resident_bytes <= self.limit
        for key, row in self.model.rows.items():
            if row.columns:
                found = self.do(self.plane.get(BatchMeta("train", (key,))))
                assert found == {name: [value] for name, value in row.columns.items()}

    def teardown(self) -> None:
        if not hasattr(self, "plane"):
            return
        self.do(self.plane.close())
        self.loop.close()
        report = audit(self.folder)
        model = self.model
        assert report.balanced, str(report)
        assert (report.trained, report.dead, report.evicted, report.in_flight) == (
            len(model.trained), len(model.dead), len(model.evicted), len(model.rows),
        )  # fmt: skip
        assert {key: step for step, key in Ledger.read(self.folder).trained_keys("train")} == {
            key: step for key, (step, _) in model.trained.items()
        }
        shutil.rmtree(self.folder)


PlaneMachine.TestCase.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestOrderings = PlaneMachine.TestCase


class QueuePlaneMachine(PlaneMachine):
    implementation = "transfer_queue_all"


@pytest.mark.ray
@pytest.mark.usefixtures("queue")
class TestQueueOrderings(QueuePlaneMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(
        max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )


@pytest.mark.faults
class TestManyOrderings(PlaneMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(
        max_examples=1000, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
    )
