"""Windows whose filtered prompts are replaced: the staleness bound holds, and every prompt is trained or filtered once."""

import random
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.planning.windows import Windows
from understudy.rollout.cursor import PromptCursor
from understudy.rollout.dataset import load_dataset
from understudy.trainers.pacing.staleness_budget import StalenessBudget
from understudy.trainers.pacing.window_cursor import WindowCursor

WINDOWS = st.builds(
    Windows,
    batch_size=st.integers(1, 5),
    sync_every=st.just(1),
    max_staleness=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    steps=st.integers(1, 8),
)
DATASET = load_dataset([{"prompt": str(index)} for index in range(17)])


class SimulatedRun:
    """A run reduced to its bookkeeping: the state of the journal, of the newest checkpoint and of the weights."""

    def __init__(self, windows: Windows, seed: int) -> None:
        self.windows, self.rng = windows, random.Random(seed)
        self.in_flight: dict[str, tuple[int, int]] = {}
        """Journal: prompt → its window, and the weights' version when its rollout began."""
        self.finished: set[str] = set()
        """Journal: prompts that passed the filter."""
        self.filtered: Counter[str] = Counter()
        """Journal: prompts filtered."""
        self.trained: dict[str, tuple[int, int]] = {}
        """Journal: prompt → the step it was trained in, and the weights' version when its rollout began."""
        fresh = PromptCursor(DATASET, 0, True)
        self.saved: tuple[int, dict[str, Any]] = (0, fresh.state())
        self.launch()

    def launch(self) -> None:
        """Starts from the newest checkpoint, as `resume` does: later acknowledgements are undone, all else is kept."""
        self.step, place = self.saved
        for key, (step, version) in list(self.trained.items()):
            if step > self.step:
                self.in_flight[key] = (step - 1, version)
                del self.trained[key]
        cursor = PromptCursor(DATASET, 0, True)
        cursor.restore(place)
        assigned = {key: window for key, (window, _) in self.in_flight.items()}
        self.cursor = WindowCursor(cursor, self.windows, self.step, assigned)
        self.slots = StalenessBudget(self.windows, self.step * self.windows.size, self.step)
        self.awaiting_filter: dict[int, list[str]] = {}
        """Prompts of this launch, by window, that the filter has not seen yet."""
        self.kept: dict[int, int] = Counter()

    def begin(self, window: int, prompts: list[Any]) -> None:
        for prompt in prompts:
            key = prompt.key
            known = key in self.trained or key in self.filtered
            if not known and key not in self.in_flight:
                self.in_flight[key] = (window, self.step)
            assert known or self.in_flight[key][0] == window, "a prompt changed its window"
            self.awaiting_filter.setdefault(window, []).append(key)

    def filter_one(self, window: int) -> None:
        """One prompt reaches the filter: it is kept, or filtered and replaced."""
        key = self.awaiting_filter[window].pop(self.rng.randrange(len(self.awaiting_filter[window])))
        if key in self.in_flight and (key in self.finished or self.rng.random() < 0.6):
            self.finished.add(key)
            self.kept[window] += 1
            return
        if key in self.in_flight:
            del self.in_flight[key]
            self.filtered[key] += 1
        self.begin(window, self.cursor.refill(window, 1))

    def train(self) -> None:
        window = self.step
        self.step += 1
        mine = {key: version for key, (own, version) in self.in_flight.items() if own == window}
        assert len(mine) == self.kept.pop(window) == len(self.windows.prompts_of(window))
        for key, version in mine.items():
            age = max(0, self.windows.age(version, self.step))
            assert age <= self.windows.oldest
            self.trained[key] = (self.step, version)
            del self.in_flight[key]
        self.cursor.window_trained()
        self.slots.publish()
        if self.rng.random() < 0.5:
            self.saved = (self.step, self.cursor.state())

    def advance(self) -> None:
        moves = [("filter_one", window) for window, keys in self.awaiting_filter.items() if keys]
        if self.slots.room:
            moves.append(("admit", 0))
        if self.kept[self.step] == len(self.windows.prompts_of(self.step)):
            moves.append(("train", 0))
        assert moves, "no prompt can move: the schedule stalls"
        move, window = self.rng.choice(moves)
        if move == "filter_one":
            self.filter_one(window)
        elif move == "train":
            self.train()
        else:
            window = self.windows.of_prompt(self.slots.admitted)
            left = self.windows.prompts_of(window).stop - self.slots.admitted
            count = self.rng.randint(1, min(self.slots.room, left))
            self.slots.charge(count)
            self.begin(window, self.cursor.take(count))


@given(WINDOWS, st.integers(0, 2**31), st.integers(0, 6))
@settings(deadline=None, max_examples=150)
def test_random_filtering_and_crashes_keep_the_staleness_bound_and_settle_each_prompt_once(
    windows: Windows, seed: int, crashes: int
) -> None:
    run = SimulatedRun(windows, seed)
    for _ in range(20_000):
        if run.step == windows.steps:
            break
        if crashes and run.rng.random() < 0.1:
            crashes -= 1
            run.launch()
        run.advance()
    assert run.step == windows.steps
    # Exactly once: every prompt ever taken was trained or filtered, never both, never twice.
    assert not run.in_flight and not run.trained.keys() & run.filtered.keys()
    assert max(run.filtered.values(), default=1) == 1
    assert len(run.trained) == windows.prompts


def test_a_saved_cursor_does_not_lose_a_prompt_of_a_later_window_that_a_refill_passed() -> None:
    """Window 0 passes a prompt of window 1 while it looks for a replacement. A checkpoint saved then must start at that prompt."""
    windows = Windows(batch_size=2, sync_every=1, max_staleness=1.0, steps=4)
    order = [prompt.key for prompt in PromptCursor(DATASET, 0, False).take(8)]
    cursor = WindowCursor(PromptCursor(DATASET, 0, False), windows, 0, {order[0]: 1, order[3]: 0})
    assert [prompt.key for prompt in cursor.take(2)] == [order[1], order[2]]
    assert cursor.has_unfilled(1) and cursor.has_unfilled(0)
    cursor.window_trained()
    again = PromptCursor(DATASET, 0, False)
    again.restore(cursor.state())
    assert again.take(1)[0].key == order[0]


def test_a_resumed_window_begins_after_the_replacements_of_the_previous_window() -> None:
    """At staleness 0 the next window begins after all replacements; a resume must not give it the same prompts again."""
    windows = Windows(batch_size=2, sync_every=1, max_staleness=0.0, steps=4)
    order = [prompt.key for prompt in PromptCursor(DATASET, 0, False).take(8)]
    cursor = WindowCursor(PromptCursor(DATASET, 0, False), windows, 0)
    assert [prompt.key for prompt in (*cursor.take(2), *cursor.refill(0, 1))] == order[:3]
    cursor.window_trained()
    resumed = PromptCursor(DATASET, 0, False)
    resumed.restore(cursor.state())
    assert [prompt.key for prompt in resumed.take(2)] == order[3:5]
