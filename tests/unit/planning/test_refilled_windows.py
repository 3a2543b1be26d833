"""Windows whose filtered prompts are replaced: the bound, and every prompt settled once, whatever happens when."""

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


class Story:
    """A run reduced to its bookkeeping: what the journal, the newest checkpoint and the weights would know."""

    def __init__(self, windows: Windows, seed: int) -> None:
        self.windows, self.chance = windows, random.Random(seed)
        self.flying: dict[str, tuple[int, int]] = {}
        """Journal: prompt → its window, and the version that began to write it."""
        self.finished: set[str] = set()
        """Journal: prompts through the filter."""
        self.gone: Counter[str] = Counter()
        """Journal: prompts filtered."""
        self.trained: dict[str, tuple[int, int]] = {}
        """Journal: prompt → the step it was trained in, and what it was written by."""
        fresh = PromptCursor(DATASET, 0, True)
        self.saved: tuple[int, dict[str, Any]] = (0, fresh.state())
        self.launch()

    def launch(self) -> None:
        """From the newest checkpoint, as `resume` does: acks after it are taken back, everything else is kept."""
        self.step, place = self.saved
        for key, (step, version) in list(self.trained.items()):
            if step > self.step:
                self.flying[key] = (step - 1, version)
                del self.trained[key]
        cursor = PromptCursor(DATASET, 0, True)
        cursor.restore(place)
        assigned = {key: window for key, (window, _) in self.flying.items()}
        self.cursor = WindowCursor(cursor, self.windows, self.step, assigned)
        self.slots = StalenessBudget(self.windows, self.step * self.windows.size, self.step)
        self.making: dict[int, list[str]] = {}
        """Prompts by window that this launch has begun and that are not through the filter yet."""
        self.kept: dict[int, int] = Counter()

    def begin(self, window: int, prompts: list[Any]) -> None:
        for prompt in prompts:
            key = prompt.key
            known = key in self.trained or key in self.gone
            if not known and key not in self.flying:
                self.flying[key] = (window, self.step)
            assert known or self.flying[key][0] == window, "a prompt changed its window"
            self.making.setdefault(window, []).append(key)

    def look(self, window: int) -> None:
        """One prompt is through: kept, or filtered and replaced."""
        key = self.making[window].pop(self.chance.randrange(len(self.making[window])))
        if key in self.flying and (key in self.finished or self.chance.random() < 0.6):
            self.finished.add(key)
            self.kept[window] += 1
            return
        if key in self.flying:
            del self.flying[key]
            self.gone[key] += 1
        self.begin(window, self.cursor.refill(window, 1))

    def train(self) -> None:
        window = self.step
        self.step += 1
        mine = {key: version for key, (own, version) in self.flying.items() if own == window}
        assert len(mine) == self.kept.pop(window) == len(self.windows.prompts_of(window))
        for key, version in mine.items():
            age = max(0, self.windows.age(version, self.step))
            assert age <= self.windows.oldest
            self.trained[key] = (self.step, version)
            del self.flying[key]
        self.cursor.window_trained()
        self.slots.publish()
        if self.chance.random() < 0.5:
            self.saved = (self.step, self.cursor.state())

    def go_on(self) -> None:
        moves = [("look", window) for window, keys in self.making.items() if keys]
        if self.slots.room:
            moves.append(("admit", 0))
        if self.kept[self.step] == len(self.windows.prompts_of(self.step)):
            moves.append(("train", 0))
        assert moves, "no prompt can move: the schedule stalls"
        move, window = self.chance.choice(moves)
        if move == "look":
            self.look(window)
        elif move == "train":
            self.train()
        else:
            window = self.windows.of_prompt(self.slots.admitted)
            left = self.windows.prompts_of(window).stop - self.slots.admitted
            count = self.chance.randint(1, min(self.slots.room, left))
            self.slots.charge(count)
            self.begin(window, self.cursor.take(count))


@given(WINDOWS, st.integers(0, 2**31), st.integers(0, 6))
@settings(deadline=None, max_examples=150)
def test_no_order_of_filters_and_crashes_breaks_the_bound_or_loses_a_prompt(
    windows: Windows, seed: int, crashes: int
) -> None:
    story = Story(windows, seed)
    for _ in range(20_000):
        if story.step == windows.steps:
            break
        if crashes and story.chance.random() < 0.1:
            crashes -= 1
            story.launch()
        story.go_on()
    assert story.step == windows.steps
    # Exactly once: every prompt ever taken was trained or filtered, never both, never twice.
    assert not story.flying and not story.trained.keys() & story.gone.keys()
    assert max(story.gone.values(), default=1) == 1
    assert len(story.trained) == windows.prompts


def test_a_second_crash_still_finds_what_was_passed_on_the_way() -> None:
    """Window 0 passes a prompt of window 1 on its way to a replacement; a checkpoint then must not lie behind that prompt."""
    windows = Windows(batch_size=2, sync_every=1, max_staleness=1.0, steps=4)
    order = [prompt.key for prompt in PromptCursor(DATASET, 0, False).take(8)]
    cursor = WindowCursor(PromptCursor(DATASET, 0, False), windows, 0, {order[0]: 1, order[3]: 0})
    assert [prompt.key for prompt in cursor.take(2)] == [order[1], order[2]]
    assert cursor.has_unfilled(1) and cursor.has_unfilled(0)
    cursor.window_trained()
    again = PromptCursor(DATASET, 0, False)
    again.restore(cursor.state())
    assert again.take(1)[0].key == order[0]


def test_a_resume_begins_a_window_after_the_replacements_of_the_one_before() -> None:
    """At staleness 0 the next window begins when all replacements were taken; a resume must not take them for it again."""
    windows = Windows(batch_size=2, sync_every=1, max_staleness=0.0, steps=4)
    order = [prompt.key for prompt in PromptCursor(DATASET, 0, False).take(8)]
    cursor = WindowCursor(PromptCursor(DATASET, 0, False), windows, 0)
    assert [prompt.key for prompt in (*cursor.take(2), *cursor.refill(0, 1))] == order[:3]
    cursor.window_trained()
    resumed = PromptCursor(DATASET, 0, False)
    resumed.restore(cursor.state())
    assert [prompt.key for prompt in resumed.take(2)] == order[3:5]
