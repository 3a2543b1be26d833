"""The checker accepts a correct history and reports each kind of error in one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from checker import (
    AT_START,
    DISK,
    GIVEN_UP_ON,
    NO_MEMORY,
    UNREACHED,
    Event,
    History,
    Launch,
    Promise,
    violations,
)

PROMISE = Promise(steps=2, to_the_bit=True, same_rows=True, staleness=1)


def good() -> History:
    events = [
        Event("issued", "a", 1, 0), Event("issued", "b", 1, 0), Event("issued", "c", 1, 0),
        Event("trained", "a", 1, 1),
        Event("trained", "a", -1, 1), Event("trained", "a", 1, 1),  # rewound and trained again
        Event("dead", "c", 1, 1), Event("trained", "b", 1, 2),
    ]  # fmt: skip
    metrics = [{"step": 1, "actor/loss": 1.0, "async/staleness/max": 1}, {"step": 2, "actor/loss": 0.5}]
    kept = [{"step": 2, "key": "b", "source": "add", "teacher": "add", "oldest": 0, "newest": 1}]
    launches = [Launch(-9, ("kill",)), Launch(0, ())]
    spans = [
        span(1, "rollout", 0.0, 1.0, key="b"), span(1, "score", 1.0, 2.0, key="b"),
        span(2, "rollout", 0.0, 1.0, key="b"), span(2, "score", 1.0, 2.0, key="b"),
        span(2, "update", 2.0, 3.0, step=2), span(2, "publish", 3.0, 4.0, step=2), span(2, "checkpoint", 3.0, 5.0, step=2),
    ]  # fmt: skip
    letters = {"c": "row c is too long"}
    return History(launches, events, frozenset(), metrics, letters, kept, {"model": "1"}, spans=spans)


def span(launch: int, name: str, start: float, end: float, **about: Any) -> dict[str, Any]:
    return {"launch": launch, "name": name, "start": start, "end": end, **about}


def with_span(name: str, start: float, **about: Any) -> dict[str, Any]:
    """A good history in which the second launch's span of this name began at another time."""
    kept = [one for one in good().spans if (one["launch"], one["name"]) != (2, name)]
    return {"spans": [*kept, span(2, name, start, start + 1.5, **about)]}


def test_a_correct_history_has_no_violations() -> None:
    assert violations(good(), good(), PROMISE) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"events": [*good().events, Event("trained", "b", 1, 2)]}, "settled 2 times"),
        ({"events": [*good().events, Event("issued", "a", 1, 2)]}, "issued 2 times"),
        ({"events": [*good().events, Event("dead", "b", 1, 2)]}, "settled 2 times"),
        ({"events": [*good().events, Event("trained", "z", 1, 2)]}, "issued 0 times"),
        ({"events": [*good().events, Event("issued", "z", 1, 2)]}, "row z is issued 1 times, settled 0"),
        ({"events": [*good().events, Event("issued", "z", -1, 2)]}, "row z is issued -1"),
        ({"in_flight": frozenset({"a"})}, "in flight: True"),
        ({"metrics": good().metrics[:1]}, "lines of the steps [1]"),
        ({"metrics": [*good().metrics, good().metrics[1]]}, "lines of the steps [1, 2, 2]"),
        ({"metrics": [{**good().metrics[0], "async/staleness/max": 2}, good().metrics[1]]}, "of age 2"),
        ({"metrics": [{**good().metrics[0], "actor/loss": 2.0}, good().metrics[1]]}, "first at step 1"),
        ({"letters": {}}, "dead_letters.jsonl has []"),
        ({"letters": {"c": "row c is too long", "b": "row c is too long"}}, "has the reason of c"),
        ({"kept": [{**good().kept[0], "teacher": "sort"}]}, "was scored by sort"),
        (with_span("score", 0.5, key="b"), "score of b began before the first rollout"),
        (
            {"launches": [Launch(0, ())], **with_span("score", 1.0, key="b")},
            "row b was trained before it was scored",
        ),
        (with_span("publish", 2.5, step=2), "publish of 2 began before the first update"),
        (with_span("checkpoint", 2.5, step=2), "checkpoint of 2 began before the first update"),
        ({"kept": [{**good().kept[0], "apart": 0.02}]}, "its scores are 0.02 nats from those of its teacher add"),
        ({"kept": [{**good().kept[0], "newest": 2}]}, "was written by the weights 0 to 2"),
        ({"files": {"model": "2"}}, "differs in ['model']"),
        ({"left_behind": ["python -m replica"]}, "left behind: python -m replica"),
        ({"finished": False}, "did not end"),
        ({"unreadable": ["read_letters: half a line"]}, "a file is damaged: read_letters: half a line"),
        ({"launches": [Launch(1, ("kill",)), Launch(0, ())]}, "launch 1 ended with 1"),
        ({"launches": [Launch(-9, ()), Launch(0, ())]}, "launch 1 ended with -9"),
        ({"launches": [Launch(-9, ("kill replica",)), Launch(0, ())]}, "launch 1 ended with -9"),
        ({"launches": [Launch(2, (AT_START,), "error: bad recipe"), Launch(0, ())]}, "launch 1 ended with 2"),
        ({"launches": [Launch(2, (AT_START,), "teacher add: refused"), Launch(0, ())]}, "launch 1 ended with 2"),
        ({"launches": [Launch(2, (UNREACHED,), "error: bad recipe"), Launch(0, ())]}, "launch 1 ended with 2"),
    ],
)  # fmt: skip
def test_each_kind_of_wrong_history_is_reported(change: dict[str, Any], message: str) -> None:
    found = violations(replace(good(), **change), good(), PROMISE)
    assert any(message in one for one in found), found


def test_other_trained_rows_are_reported_when_the_mode_promises_the_same_rows_but_not_bits() -> None:
    other = replace(
        good(),
        events=[Event(one.kind, one.key.replace("b", "d"), one.sign, one.step) for one in good().events],
    )
    promise = replace(PROMISE, to_the_bit=False)
    assert any(
        "other rows were trained: more ['d'], fewer ['b']" in one
        for one in violations(other, good(), promise)
    )


def test_a_launch_whose_disk_fails_may_end_only_with_an_error_about_writing() -> None:
    message = "could not save the checkpoint of step 4: … cannot be flushed: [Errno 5] Input/output error"
    launches = [Launch(2, (DISK,), message), Launch(0, ())]
    assert violations(replace(good(), launches=launches), good(), PROMISE) == []
    launches = [Launch(2, (DISK,), "error: no such teacher"), Launch(0, ())]
    assert any(
        "ended with 2" in one for one in violations(replace(good(), launches=launches), good(), PROMISE)
    )


def test_a_launch_without_memory_may_end_only_with_an_error_about_memory() -> None:
    for message, wrong in (("the trainer is out of memory", False), ("error: unexpected", True)):
        launches = [Launch(2, (NO_MEMORY,), message), Launch(0, ())]
        found = violations(replace(good(), launches=launches), good(), PROMISE)
        assert bool(found) is wrong, found


def test_a_launch_may_end_without_a_traceback_when_one_of_its_processes_gets_no_memory() -> None:
    message = "error: out of memory on this machine; stop other programs (process teacher-add-0 ended with code 2; log: …)"
    for faults, output, wrong in (
        (("no memory replica",), message, False),
        (("no memory replica",), f"Traceback (most recent call last)\n{message}", True),
        (("no memory replica",), "error: unexpected", True), (("kill replica",), message, True),
    ):  # fmt: skip
        launches = [Launch(2, faults, output), Launch(0, ())]
        assert bool(violations(replace(good(), launches=launches), good(), PROMISE)) is wrong, output
    letters = {"c": "reward slow got no memory: MemoryError"}
    for faults, wrong in ((("no memory worker",), False), (("kill worker",), True)):
        found = replace(good(), letters=letters, launches=[Launch(0, faults)])
        assert bool(violations(found, replace(good(), letters={}), PROMISE)) is wrong


def test_a_launch_may_end_when_a_second_rank_is_lost_between_two_checkpoints() -> None:
    message = "rank 1 was killed by SIGKILL; `understudy resume` continues from the last checkpoint"
    for faults, wrong in (
        (("kill rank", "kill rank"), False), ((AT_START, "terminate critic"), False),
        (("kill rank",), True), (("kill rank", "kill replica"), True),
    ):  # fmt: skip
        launches = [Launch(2, faults, message), Launch(0, ())]
        assert bool(violations(replace(good(), launches=launches), good(), PROMISE)) is wrong, faults


def test_a_session_whose_worker_is_lost_three_times_may_be_a_dead_letter() -> None:
    letters = {"c": "session c: its worker process died 3 times"}
    for kills, wrong in ((3, False), (2, True)):
        launches = [Launch(0, ("kill worker",) * kills)]
        found = replace(good(), letters=letters, launches=launches)
        assert bool(violations(found, replace(good(), letters={}), PROMISE)) is wrong


def test_a_launch_may_end_with_the_name_of_a_process_that_is_lost_at_its_start() -> None:
    for message in (
        "process teacher-add-0 ended with code 2",
        "process teacher-add-0 was killed by SIGKILL",
        "Ray (on this machine) cannot be used: timed out",
    ):
        launches = [Launch(2, (AT_START,), message), Launch(0, ())]
        assert violations(replace(good(), launches=launches), good(), PROMISE) == []


def test_a_launch_that_loses_the_machine_of_its_own_ray_may_end_but_not_hang() -> None:
    message = "error: machine 127.0.0.1/b850c1, the only one of the run's own Ray, is lost: its raylet ended with code -9"
    for launch, found in (
        (Launch(2, ("kill node",), message), 0), (Launch(2, (AT_START,), message), 0), (Launch(2, ("kill node",), "error: lost"), 1),
        (Launch(2, ("kill replica",), message), 1), (Launch(-9, ("kill node", GIVEN_UP_ON)), 1),
        (Launch(-9, ("kill", GIVEN_UP_ON)), 1),
    ):  # fmt: skip
        launches = [launch, Launch(0, ())]
        assert len(violations(replace(good(), launches=launches), good(), PROMISE)) == found, launch
