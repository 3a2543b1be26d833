"""Restarts in a row: the back-off doubles, use resets it, and a process that stays useless is given up."""

from understudy.serving.supervisor import RestartCount, Restarts


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_back_off_doubles_up_to_its_limit_and_then_the_process_is_given_up() -> None:
    count = RestartCount(Restarts(most=4, first_wait_s=1.0, longest_wait_s=3.0), Clock())
    assert [count.restart() for _ in range(3)] == [1.0, 2.0, 3.0] and not count.spent
    assert count.restart() == 3.0 and count.spent
    count.was_useful()
    assert not count.spent and count.restart() == 1.0


def test_a_start_that_failed_is_repeated_after_the_back_off_of_the_next() -> None:
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


def test_a_process_that_served_long_enough_is_counted_from_the_start() -> None:
    clock = Clock()
    count = RestartCount(Restarts(most=2, steady_s=60.0), clock)
    count.restart()
    count.restart()
    count.serves()
    clock.now += 60.0
    count.lost("killed")
    assert count.spent, "60 s is not longer than 60 s"
    clock.now += 1.0
    count.lost("killed again")
    assert not count.spent and count.problem == "killed again"
