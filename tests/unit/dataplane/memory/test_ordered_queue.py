"""The queue that returns the smallest entry first, whatever order entries were pushed in."""

import heapq
import random

import pytest

from understudy.dataplane.memory.in_order import InOrder


@pytest.mark.parametrize("disorder", [0.0, 0.1, 1.0])
def test_the_queue_returns_entries_in_the_same_order_as_a_heap(disorder: float) -> None:
    rng = random.Random(7)
    order: InOrder[tuple[int, int]] = InOrder((place, 0) for place in rng.sample(range(100), 20))
    plain = sorted(order._rest)
    for number in range(1, 3000):
        if rng.random() < 0.55:
            place = rng.randrange(10_000) if rng.random() < disorder else 100 + number
            order.push((place, number))
            heapq.heappush(plain, (place, number))
        elif plain:
            first = order.first()
            assert first is not None and first == plain[0]
            order.take_out(first)
            heapq.heappop(plain)
        assert len(order) == len(plain)
    while plain:
        first = order.first()
        assert first is not None and first == heapq.heappop(plain)
        order.take_out(first)
    assert order.first() is None


def test_entries_pushed_in_order_are_not_put_on_the_heap() -> None:
    """So a claim costs the same with a thousand rows held and with a million."""
    order: InOrder[tuple[int, int]] = InOrder()
    for number in range(1000):
        order.push((number, number))
    assert not order._early and len(order._rest) == 1000
