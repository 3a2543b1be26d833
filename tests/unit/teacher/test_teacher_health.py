"""The health and load of a replica, with times given by the test."""

import pytest

from understudy.serving.supervisor import Restarts
from understudy.teacher.pool.balance import DEBT_HALF_LIFE, Load, least_loaded
from understudy.teacher.pool.health import Failure, HealthRules, ReplicaHealth, State

RULES = HealthRules(
    eject_after=3,
    eject_after_bad_replies=2,
    restarts=Restarts(None, first_wait_s=1.0, longest_wait_s=8.0, steady_s=60.0),
)


def healthy(now: float = 0.0) -> ReplicaHealth:
    health = ReplicaHealth(RULES)
    health.started()
    health.probe_passed(now)
    return health


def test_a_replica_serves_only_after_its_probe() -> None:
    health = ReplicaHealth(RULES)
    assert health.state is State.STARTING and not health.usable
    health.started()
    assert health.state is State.PROBING and not health.usable
    health.probe_passed(0.0)
    assert health.state is State.HEALTHY and health.usable


def test_one_failure_makes_a_replica_suspect_and_a_success_makes_it_healthy_again() -> None:
    health = healthy()
    health.request_failed(Failure.TIMEOUT, "slow")
    assert health.state is State.SUSPECT and health.usable and not health.deserves_ejection
    health.request_ok(1.0)
    assert health.state is State.HEALTHY and health.streak == 0


def test_three_consecutive_failures_deserve_ejection_and_a_success_resets_the_count() -> None:
    health = healthy()
    for _ in range(2):
        health.request_failed(Failure.CONNECTION, "refused")
    health.request_ok(0.0)
    for _ in range(2):
        health.request_failed(Failure.CONNECTION, "refused")
    assert not health.deserves_ejection
    health.request_failed(Failure.SERVER, "503")
    assert health.deserves_ejection
    health.eject(10.0)
    assert health.state is State.EJECTED and not health.usable and health.last_reason == "503"


def test_a_success_does_not_reset_the_count_of_bad_replies() -> None:
    health = healthy()
    health.request_failed(Failure.BAD_REPLY, "NaN")
    health.request_ok(0.0)
    assert not health.deserves_ejection
    health.request_failed(Failure.BAD_REPLY, "NaN")
    assert health.deserves_ejection


def test_a_passed_probe_does_not_reset_the_count_of_failed_requests() -> None:
    """A replica that hangs on real requests may still score the twelve tokens of the probe."""
    health = healthy()
    for _ in range(3):
        health.request_failed(Failure.TIMEOUT, "slow")
        health.probe_passed(0.0)
    assert health.state is State.HEALTHY and health.deserves_ejection


def test_restart_backoff_doubles_up_to_its_limit() -> None:
    health = healthy()
    waits = []
    now = 100.0
    for _ in range(6):
        health.request_failed(Failure.TIMEOUT, "slow")
        health.eject(now)
        waits.append(health.retry_at - now)
        now = health.retry_at
        assert not health.restart_due(now - 0.01) and health.restart_due(now)
        health.restarting()
        assert health.state is State.RESTARTING
        health.started()
        health.probe_passed(now)
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_a_replica_that_was_healthy_for_a_minute_starts_again_with_no_setbacks_counted() -> None:
    health = healthy()
    health.eject(0.0)
    health.started()
    health.probe_passed(1.0)
    assert health.setbacks == 1
    health.request_ok(30.0)
    assert health.setbacks == 1
    health.request_ok(61.0)
    assert health.setbacks == 0


def test_the_first_restart_after_a_death_is_immediate_and_later_ones_wait() -> None:
    health = healthy()
    health.died(5.0, "killed")
    assert health.state is State.EJECTED and health.restart_due(5.0)
    health.restarting()
    health.started()
    health.probe_passed(6.0)
    health.died(7.0, "killed again")
    assert not health.restart_due(7.0) and health.restart_due(9.0)


def test_a_failed_restart_or_probe_keeps_the_replica_ejected_and_lengthens_the_wait() -> None:
    health = healthy()
    health.died(0.0, "killed")
    health.restarting()
    health.restart_failed(1.0, "port in use")
    assert health.state is State.EJECTED and health.retry_at == 3.0
    health.restarting()
    health.started()
    health.probe_failed(4.0, "other weights")
    assert health.state is State.EJECTED and health.retry_at == 8.0 and health.last_reason == "other weights"


@pytest.mark.parametrize(
    "event", ["request_ok", "request_failed", "died", "probe_passed", "started", "eject"]
)
def test_no_event_changes_the_state_of_a_retired_replica(event: str) -> None:
    health = healthy()
    health.retire()
    {
        "request_ok": lambda: health.request_ok(1.0),
        "request_failed": lambda: health.request_failed(Failure.TIMEOUT, ""),
        "died": lambda: health.died(1.0, ""),
        "probe_passed": lambda: health.probe_passed(1.0),
        "started": health.started,
        "eject": lambda: health.eject(1.0),
    }[event]()
    assert health.state is State.RETIRED


def test_late_results_of_an_ejected_replica_do_not_change_its_state() -> None:
    health = healthy()
    health.eject(0.0)
    health.request_ok(1.0)
    health.request_failed(Failure.TIMEOUT, "late")
    assert health.state is State.EJECTED and health.streak == 0


def test_load_balancing_counts_outstanding_tokens_and_not_requests() -> None:
    long, many = Load(), Load()
    long.begin(5000)
    for _ in range(10):
        many.begin(20)
    assert least_loaded([("long", long), ("many", many)], 0.0) == "many"
    long.end(5000)
    assert least_loaded([("long", long), ("many", many)], 0.0) == "long"
    assert least_loaded([], 0.0) is None


def test_idle_replicas_take_turns() -> None:
    loads = {"a": Load(), "b": Load(), "c": Load()}
    order = []
    for _ in range(6):
        name = least_loaded(loads.items(), 0.0)
        assert name is not None
        order.append(name)
        loads[name].begin(100)
        loads[name].end(100)
    assert order == ["a", "b", "c"] * 2


def test_failed_tokens_count_as_load_that_decays_so_that_a_failing_replica_is_not_preferred() -> None:
    quick_to_fail, busy = Load(), Load()
    busy.begin(1000)
    for _ in range(2):
        quick_to_fail.begin(1000)
        quick_to_fail.end(1000)
        quick_to_fail.failed(1000, 0.0)
    assert least_loaded([("fails", quick_to_fail), ("busy", busy)], 0.0) == "busy"
    later = 10 * DEBT_HALF_LIFE
    assert least_loaded([("fails", quick_to_fail), ("busy", busy)], later) == "fails"
    busy.end(1000)
    busy.begin(5000)
    busy.end(5000)
    assert least_loaded([("fails", quick_to_fail), ("idle", busy)], 20 * DEBT_HALF_LIFE) == "fails"
    quick_to_fail.failed(10**9, later)
    quick_to_fail.clear_debt()
    assert quick_to_fail.debt(later) == 0
