"""The count of restarts in a row: its backoff doubles, useful work resets it, and after too many it is spent."""

from understudy.serving.supervisor import RestartCount, Restarts


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_backoff_doubles_up_to_its_limit_and_most_restarts_in_a_row_spend_the_count() -> None:
    count = RestartCount(Restarts(most=4, first_wait_s=1.0, longest_wait_s=3.0), Clock())
    assert [count.restart() for _ in range(3)] == [1.0, 2.0, 3.0] and not count.spent
    assert count.restart() == 3.0 and count.spent
    count.was_useful()
    assert not count.spent and count.restart() == 1.0


def test_a_failed_start_is_repeated_after_the_backoff() -> None:
    clock = Clock()
    count = RestartCount(Restarts(first_wait_s=1.0), clock)
    assert count.left_s() == 0.0
    count.failed("no port")
    assert (count.left_s(), count.problem) == (1.0, "no port")
    clock.now += 0.75
    assert count.left_s() == 0.25
    clock.now += 5.0
    count.restart()
    count.failed("no memory")
    assert (count.left_s(), count.problem) == (2.0, "no memory")


def test_a_process_that_served_longer_than_steady_s_starts_again_with_no_restarts_counted() -> None:
    clock = Clock()
    count = RestartCount(Restarts(most=2, steady_s=60.0), clock)
    count.restart()
    count.restart()
    count.serves()
    clock.now += 60.0
    count.lost("killed")
    assert count.spent, "exactly 60 s must not reset the count"
    clock.now += 1.0
    count.lost("killed again")
    assert not count.spent and count.problem == "killed again"
