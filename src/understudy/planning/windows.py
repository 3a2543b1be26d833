"""The arithmetic of staleness: which prompts may be in flight, and which are trained when.

Prompts are numbered 0, 1, 2, … in the order the cursor gives them. R = batch_size · sync_every prompts make a
**window**; window w holds prompts w·R … (w+1)·R − 1 and is trained by the `sync_every` updates between publish
w and publish w + 1. A prompt takes a **slot** when it is admitted and frees it when weights that include its
training are published. There are C = ⌊(1 + max_staleness) · R⌋ slots, or as many as the data plane has room for
if that is less (R ≤ C always). Publishes free whole windows, so

    prompt i may be admitted after publish k   ⟺   i < k · R + C                                    (admission)

**Bound.** Every token of prompt i is written by weights of publish k or later, for the k at which it was
admitted. It is trained in window w = ⌊i / R⌋, under weights of publish w. By (admission) i ≤ k·R + C − 1, so

    w − k = ⌊(i − k·R) / R⌋ ≤ ⌊(C − 1) / R⌋ ≤ ⌈max_staleness⌉.

No trained row is older than ⌈max_staleness⌉ publishes. With a fraction f = max_staleness < 1, at most the
share f of a window can have been admitted before the publish it is trained under; the rest is on-policy. With
0 all of it is.

**Replaced prompts.** Read "prompt i" as "place i": if a prompt is filtered and another takes its place, the
place keeps its slot and its window, and the new prompt is admitted at some publish k' ≥ k, so w − k' ≤ w − k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Windows:
    batch_size: int
    """Prompts per update."""
    sync_every: int
    """Updates per publish."""
    max_staleness: float
    steps: int
    """Updates of the whole run."""
    max_prompts: int | None = None
    """Limit of prompts in flight, for any staleness (from `dataplane.max_rows`); at least a window."""

    @property
    def size(self) -> int:
        """R: prompts of a whole window."""
        return self.batch_size * self.sync_every

    @property
    def slots(self) -> int:
        """C: the limit of prompts admitted and not yet published. At least a window, or the run would
        deadlock."""
        # Products like 1.1 · 10 must not lose a slot to rounding.
        slots = math.floor((1 + self.max_staleness) * self.size + 1e-9)
        return slots if self.max_prompts is None else max(self.size, min(slots, self.max_prompts))

    @property
    def oldest(self) -> int:
        """The most publishes a trained row can be behind."""
        return (self.slots - 1) // self.size

    @property
    def prompts(self) -> int:
        """Prompts of the whole run."""
        return self.steps * self.batch_size

    @property
    def count(self) -> int:
        return -(-self.steps // self.sync_every)

    def of_prompt(self, index: int) -> int:
        return index // self.size

    def of_step(self, step: int) -> int:
        """The window that update `step` (counted from 1) trains from."""
        return (step - 1) // self.sync_every

    def first_step(self, window: int) -> int:
        return window * self.sync_every + 1

    def last_step(self, window: int) -> int:
        return min((window + 1) * self.sync_every, self.steps)

    def prompts_of(self, window: int) -> range:
        return range(window * self.size, min((window + 1) * self.size, self.prompts))

    def admissible(self, published: int, slots: int) -> int:
        """How many prompts may be admitted in total after this many publishes, at most `slots` of them
        unpublished."""
        return min(published * self.size + slots, self.prompts)

    def published_at(self, version: int) -> int:
        """Whole windows in the weights of `version` (a number of updates; after a resume it may be inside a
        window)."""
        return version // self.sync_every

    def age(self, version: int, step: int) -> int:
        """Publishes between the weights that wrote a token and the weights that update `step` starts from."""
        return self.of_step(step) - self.published_at(version)

    @property
    def mode(self) -> str:
        """verl's name for these settings, regardless of partial rollouts."""
        if self.max_staleness == 0:
            return "on-policy pipeline" if self.sync_every == 1 else "streaming"
        return "async with stale samples"
