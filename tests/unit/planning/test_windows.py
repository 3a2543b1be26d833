"""The staleness bound under random event orders, the publish gate, the idle meter and the admission controller."""

import asyncio
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.planning.windows import Windows
from understudy.trainers.pacing.admission import AdmissionController
from understudy.trainers.pacing.idle_meter import BusyMeter
from understudy.trainers.pacing.publish_gate import PublishGate
from understudy.trainers.pacing.staleness_budget import StalenessBudget

WINDOWS = st.builds(
    Windows,
    batch_size=st.integers(1, 7),
    sync_every=st.integers(1, 4),
    max_staleness=st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0]),
    steps=st.integers(1, 20),
)


@given(WINDOWS, st.integers(0, 2**31))
@settings(deadline=None)
def test_random_orders_of_admission_and_training_keep_the_staleness_bound(
    windows: Windows, seed: int
) -> None:
    """Admission and training race in a random order; ages are computed as the trainer computes them."""
    rng = random.Random(seed)
    slots = StalenessBudget(windows, admitted=0, published=0)
    version_at_admission: list[int] = []
    version = step = 0
    while step < windows.steps:
        window = windows.of_step(step + 1)
        trainable = windows.prompts_of(window).stop <= slots.admitted
        if slots.room and (not trainable or rng.random() < 0.5):
            count = rng.randint(1, slots.room)
            slots.charge(count)
            version_at_admission += [version] * count
            continue
        assert trainable, "neither can move: the schedule stalls"
        step += 1
        for prompt in windows.prompts_of(window):
            age = windows.age(version_at_admission[prompt], step)
            assert 0 <= age <= windows.oldest <= math.ceil(windows.max_staleness)
        if step == windows.last_step(window):
            version = step
            slots.publish()
    assert slots.admitted <= windows.prompts
    assert len(version_at_admission) == windows.prompts


@given(WINDOWS)
def test_windows_divide_the_run_without_gap_or_overlap(windows: Windows) -> None:
    prompts = [prompt for window in range(windows.count) for prompt in windows.prompts_of(window)]
    assert prompts == list(range(windows.prompts))
    for step in range(1, windows.steps + 1):
        window = windows.of_step(step)
        assert windows.first_step(window) <= step <= windows.last_step(window)


def test_a_fractional_staleness_bounds_the_number_of_prompts_one_version_behind() -> None:
    windows = Windows(batch_size=8, sync_every=1, max_staleness=0.5, steps=10)
    ahead = windows.admissible(0, windows.slots) - windows.size
    assert ahead == 4 and windows.oldest == 1
    assert Windows(10, 1, 0.1, 5).slots == 11  # 1.1 · 10 in floating point lies below 11


@pytest.mark.parametrize(
    ("staleness", "every", "mode"),
    [(0.0, 1, "on-policy pipeline"), (0.0, 2, "streaming"), (0.5, 1, "async with stale samples")],
)
def test_modes_have_the_names_of_verl(staleness: float, every: int, mode: str) -> None:
    assert Windows(4, every, staleness, 4).mode == mode


def test_admission_waits_for_a_publish_when_no_slot_is_free() -> None:
    async def scenario() -> None:
        slots = StalenessBudget(Windows(batch_size=2, sync_every=1, max_staleness=0.0, steps=2), 0, 0)
        assert await slots.wait_for_room() == 2
        slots.charge(2)
        waiting = asyncio.create_task(slots.wait_for_room())
        await asyncio.sleep(0)
        assert not waiting.done() and slots.in_use == 2
        slots.publish()
        assert await waiting == 2
        slots.charge(2)
        assert slots.exhausted and await slots.wait_for_room() == 0
        with pytest.raises(AssertionError, match="slots were free"):
            slots.charge(1)

    asyncio.run(scenario())


def test_a_lower_ceiling_reduces_the_free_slots_but_not_below_one_window() -> None:
    slots = StalenessBudget(Windows(batch_size=4, sync_every=1, max_staleness=1.0, steps=9), 0, 0)
    slots.set_ceiling(5)
    assert slots.room == 5
    slots.set_ceiling(0)
    assert slots.room == 4
    slots.set_ceiling(99)
    assert slots.room == 8


def test_new_rollouts_wait_at_the_publish_gate_while_it_drains() -> None:
    async def scenario() -> None:
        publish_gate, order = PublishGate(), list[str]()
        may_finish = asyncio.Event()

        async def rollout(name: str) -> None:
            async with publish_gate.enter():
                order.append(name)
                await may_finish.wait()

        first = asyncio.create_task(rollout("first"))
        await asyncio.sleep(0)
        closing = asyncio.create_task(publish_gate.close())
        await asyncio.sleep(0)
        second = asyncio.create_task(rollout("second"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert order == ["first"] and not closing.done()
        may_finish.set()
        await closing
        order.append("published")
        publish_gate.open()
        await asyncio.gather(first, second)
        assert order == ["first", "published", "second"]

    asyncio.run(scenario())


def test_the_idle_share_is_the_time_with_nothing_in_flight() -> None:
    now = [0.0]
    meter = BusyMeter(clock=lambda: now[0])
    now[0] = 2.0
    meter.enter()
    meter.enter()
    now[0] = 3.0
    meter.leave()
    now[0] = 5.0
    meter.leave()
    now[0] = 10.0
    assert meter.take_idle() == pytest.approx(0.7)
    meter.enter()
    now[0] = 12.0
    assert meter.take_idle() == pytest.approx(0.0)
    now[0] = 13.0
    meter.leave()
    now[0] = 14.0
    assert meter.take_idle() == pytest.approx(0.5)


def test_the_admission_controller_changes_its_ceiling_after_the_same_observation_twice() -> None:
    windows = Windows(batch_size=8, sync_every=1, max_staleness=1.0, steps=100)
    controller = AdmissionController(windows)
    assert (
        controller.observe(0.5, 0.0) is None and controller.observe(0.5, 0.0) is None
    )  # at the bound already
    assert controller.observe(0.0, 1.0) is None
    assert controller.observe(0.05, 1.0) is None, "an observation between the thresholds restarts the count"
    assert controller.observe(0.0, 1.0) is None
    decision = controller.observe(0.0, 1.0)
    assert decision and "16 → 14 of 16 slots" in decision and controller.ceiling == 14
    for _ in range(20):
        controller.observe(0.0, 1.0)
    assert controller.ceiling == windows.size, "never below a window"
    controller.observe(0.2, 0.0)
    assert "waited 20%" in str(controller.observe(0.2, 0.0)) and controller.ceiling == 10
