"""When a lost rank takes a run back to its checkpoint, and when it ends it."""

import asyncio
from collections.abc import Callable

import pytest
from learning_rig import recipe_of

from understudy.errors import ChildDied, ConfigError, PolicyError, RankLost
from understudy.run.launch import _first_cause
from understudy.run.restarts import with_restarts
from understudy.trainers.stopping import Interrupts


class Runs:
    """Attempts that save checkpoints and end as told; each entry is (steps saved by then, what it ends with)."""

    def __init__(self, *script: tuple[int, Exception | int]) -> None:
        self.script = list(script)
        self.saved = 0
        self.notes: list[str] = []

    async def attempt(self) -> int:
        self.saved, end = self.script.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    def go(self, allowed: int, stop: Interrupts | None = None) -> int:
        quiet: Callable[[str], None] = lambda text: None  # noqa: E731
        return asyncio.run(
            with_restarts(
                self.attempt, allowed, lambda: self.saved, stop or Interrupts(quiet), self.notes.append
            )
        )


def lost() -> RankLost:
    return RankLost("rank 1 of 2 was killed")


def test_a_run_is_taken_up_as_often_as_it_gets_further() -> None:
    runs = Runs((0, lost()), (2, lost()), (4, lost()), (4, 9))
    assert runs.go(allowed=1) == 9
    assert [text.rpartition("; ")[2] for text in runs.notes] == [
        "going back to the start (restart 1 of 1)",
        "going back to step 2 (restart 1 of 1)",
        "going back to step 4 (restart 1 of 1)",
    ]


def test_a_process_that_is_killed_while_it_is_started_again_is_lost_once_more() -> None:
    """The second kill of a critic used to end the launch with the process's words alone."""

    def killed(*, by_a_signal: bool = True) -> ChildDied:
        died = ChildDied("process critic was killed by SIGKILL")
        died.killed = by_a_signal
        return died

    assert Runs((2, lost()), (2, killed()), (2, 9)).go(allowed=2) == 9
    with pytest.raises(ChildDied, match=r"killed by SIGKILL; `understudy resume` continues"):
        Runs((2, lost()), (2, killed()), (2, 9)).go(allowed=1)
    for script in ([(2, killed()), (2, 9)], [(2, lost()), (2, killed(by_a_signal=False)), (2, 9)]):
        with pytest.raises(
            ChildDied, match=r"killed by SIGKILL$"
        ):  # at a launch's start, or by an error of its own
            Runs(*script).go(allowed=2)


def test_without_a_checkpoint_in_between_it_ends_with_the_ranks_words() -> None:
    runs = Runs((2, lost()), (2, lost()), (2, lost()), (2, 9))
    with pytest.raises(RankLost, match=r"rank 1 of 2 was killed; `understudy resume` continues"):
        runs.go(allowed=2)
    assert len(runs.notes) == 2 and len(runs.script) == 1
    with pytest.raises(RankLost):
        Runs((5, lost()), (5, 9)).go(allowed=0)


def test_other_errors_end_the_run() -> None:
    with pytest.raises(PolicyError):
        Runs((1, PolicyError("the loss is not finite")), (1, 9)).go(allowed=5)


@pytest.mark.parametrize("allowed", [0, 5])
def test_a_rank_lost_after_a_stop_request_ends_the_run_as_stopped(allowed: int) -> None:
    """As when a service manager sends SIGTERM to all processes of the run."""
    stop = Interrupts(lambda text: None)
    stop.requested = True
    runs = Runs((4, lost()), (4, 9))
    assert runs.go(allowed, stop) == 4
    assert runs.notes == [
        "rank 1 of 2 was killed; without it nothing more can be saved: the run stays at step 4"
    ]
    with pytest.raises(PolicyError):
        Runs((0, PolicyError("the loss is not finite")), (1, 9)).go(allowed, stop)


def test_of_many_errors_the_lost_rank_is_the_cause() -> None:
    deep = ExceptionGroup("inner", [RuntimeError("gloo"), lost()])
    found = _first_cause(ExceptionGroup("outer", [PolicyError("rank 0 failed"), deep]))
    assert isinstance(found, RankLost)


def test_the_keys_are_strict() -> None:
    assert recipe_of(cluster={"restarts": {"student": 0}}).cluster.restarts.student == 0
    with pytest.raises(ConfigError, match=r"cluster\.restarts\.student"):
        recipe_of(cluster={"restarts": {"student": -1}})
    with pytest.raises(ConfigError, match=r"unknown key `cluster\.restarts\.ranks`"):
        recipe_of(cluster={"restarts": {"ranks": 1}})
