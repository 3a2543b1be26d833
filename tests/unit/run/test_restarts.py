"""When a lost rank sends a run back to its last checkpoint, and when it ends the run."""

import asyncio
from collections.abc import Callable

import pytest
from learning_rig import recipe_of

from understudy.errors import ChildDied, ConfigError, PolicyError, RankLost
from understudy.run.launch import _first_cause
from understudy.run.restarts import with_restarts
from understudy.trainers.stopping import Interrupts


class ScriptedRun:
    """Attempts that save checkpoints and end as scripted. Each entry is (the last saved step, the result or exception)."""

    def __init__(self, *script: tuple[int, Exception | int]) -> None:
        self.script = list(script)
        self.saved = 0
        self.notes: list[str] = []

    async def attempt(self) -> int:
        self.saved, end = self.script.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    def run(self, allowed: int, stop: Interrupts | None = None) -> int:
        quiet: Callable[[str], None] = lambda text: None  # noqa: E731
        return asyncio.run(
            with_restarts(
                self.attempt, allowed, lambda: self.saved, stop or Interrupts(quiet), self.notes.append
            )
        )


def lost() -> RankLost:
    return RankLost("rank 1 of 2 was killed")


def test_each_new_checkpoint_resets_the_number_of_restarts() -> None:
    scripted = ScriptedRun((0, lost()), (2, lost()), (4, lost()), (4, 9))
    assert scripted.run(allowed=1) == 9
    assert [text.rpartition("; ")[2] for text in scripted.notes] == [
        "going back to the start (restart 1 of 1)",
        "going back to step 2 (restart 1 of 1)",
        "going back to step 4 (restart 1 of 1)",
    ]


def test_a_process_that_is_killed_during_a_restart_counts_as_lost_again() -> None:
    """The second kill of a critic once ended the launch with the message of the process and no advice."""

    def killed(*, by_a_signal: bool = True) -> ChildDied:
        died = ChildDied("process critic was killed by SIGKILL")
        died.killed = by_a_signal
        return died

    assert ScriptedRun((2, lost()), (2, killed()), (2, 9)).run(allowed=2) == 9
    with pytest.raises(ChildDied, match=r"killed by SIGKILL; `understudy resume` continues"):
        ScriptedRun((2, lost()), (2, killed()), (2, 9)).run(allowed=1)
    for script in ([(2, killed()), (2, 9)], [(2, lost()), (2, killed(by_a_signal=False)), (2, 9)]):
        with pytest.raises(
            ChildDied, match=r"killed by SIGKILL$"
        ):  # during the first start, or with an error of its own
            ScriptedRun(*script).run(allowed=2)


def test_a_run_that_loses_ranks_without_a_new_checkpoint_ends_with_the_error_of_the_rank() -> None:
    scripted = ScriptedRun((2, lost()), (2, lost()), (2, lost()), (2, 9))
    with pytest.raises(RankLost, match=r"rank 1 of 2 was killed; `understudy resume` continues"):
        scripted.run(allowed=2)
    assert len(scripted.notes) == 2 and len(scripted.script) == 1
    with pytest.raises(RankLost):
        ScriptedRun((5, lost()), (5, 9)).run(allowed=0)


def test_errors_other_than_a_lost_rank_end_the_run() -> None:
    with pytest.raises(PolicyError):
        ScriptedRun((1, PolicyError("the loss is not finite")), (1, 9)).run(allowed=5)


@pytest.mark.parametrize("allowed", [0, 5])
def test_a_rank_lost_after_a_stop_request_ends_the_run_as_stopped(allowed: int) -> None:
    """This happens when a service manager sends SIGTERM to all processes of the run."""
    stop = Interrupts(lambda text: None)
    stop.requested = True
    scripted = ScriptedRun((4, lost()), (4, 9))
    assert scripted.run(allowed, stop) == 4
    assert scripted.notes == [
        "rank 1 of 2 was killed; without it nothing more can be saved: the run stays at step 4"
    ]
    with pytest.raises(PolicyError):
        ScriptedRun((0, PolicyError("the loss is not finite")), (1, 9)).run(allowed, stop)


def test_the_lost_rank_is_found_as_the_first_cause_in_a_group_of_errors() -> None:
    deep = ExceptionGroup("inner", [RuntimeError("gloo"), lost()])
    found = _first_cause(ExceptionGroup("outer", [PolicyError("rank 0 failed"), deep]))
    assert isinstance(found, RankLost)


def test_cluster_restarts_refuses_negative_numbers_and_unknown_roles() -> None:
    assert recipe_of(cluster={"restarts": {"student": 0}}).cluster.restarts.student == 0
    with pytest.raises(ConfigError, match=r"cluster\.restarts\.student"):
        recipe_of(cluster={"restarts": {"student": -1}})
    with pytest.raises(ConfigError, match=r"unknown key `cluster\.restarts\.ranks`"):
        recipe_of(cluster={"restarts": {"ranks": 1}})
