"""The prompt cursor: a position in a seeded order of prompts that can be saved and restored.

The order of an epoch is a hash of (seed, epoch, row): no generator state, no clock. A saved position is a few
numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from understudy.errors import DataError
from understudy.rollout.dataset import Dataset
from understudy.rollout.seeds import hash63
from understudy.types.prompt import Prompt


class PromptCursor:
    """Issues prompts epoch after epoch, without end. Used by the trainer.

    >>> from understudy.rollout.dataset import load_dataset
    >>> cursor = PromptCursor(load_dataset([{"prompt": "a"}, {"prompt": "b"}]), seed=0, shuffle=False)
    >>> [prompt.key for prompt in cursor.take(3)]
    ['00000-0000000', '00000-0000001', '00001-0000000']
    """

    def __init__(self, dataset: Dataset, seed: int, shuffle: bool) -> None:
        self._dataset, self._seed, self._shuffle = dataset, seed, shuffle
        self._epoch = self._place = 0
        self._order = self._order_of(0)

    def _order_of(self, epoch: int) -> list[int]:
        ordinals = list(range(len(self._dataset)))
        if self._shuffle:
            ordinals.sort(key=lambda ordinal: (hash63("order", self._seed, epoch, ordinal), ordinal))
        return ordinals

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts; a batch may span the end of an epoch."""
        prompts = []
        for _ in range(count):
            if self._place == len(self._order):
                self._epoch, self._place = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            key = f"{self._epoch:05d}-{self._place:07d}"
            prompts.append(self._dataset.prompt(self._order[self._place], key=key, epoch=self._epoch))
            self._place += 1
        return prompts

    def prompt(self, key: str) -> Prompt:
        """The prompt that `take` issues, or has issued, under this key."""
        epoch, place = map(int, key.split("-"))
        order = self._order if epoch == self._epoch else self._order_of(epoch)
        return self._dataset.prompt(order[place], key=key, epoch=epoch)

    def state(self) -> dict[str, Any]:
        """The position as JSON. A cursor over the same dataset that restores it issues the same prompts from
        here on."""
        return {"epoch": self._epoch, "place": self._place, **self._identity()}

    def _identity(self) -> dict[str, Any]:
        return {"seed": self._seed, "shuffle": self._shuffle, "dataset": self._dataset.fingerprint}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, own in self._identity().items():
            if state.get(name) != own:
                raise DataError(
                    f"cannot resume: the saved data position was made with {name} = {state.get(name)}, this run has "
                    f"{own} (dataset: {self._dataset.source}). Restore the old value, or start a new run"
                )
        if not 0 <= state["place"] <= len(self._dataset):
            raise DataError(
                f"cannot resume: saved place {state['place']} is outside a dataset of {len(self._dataset)} rows"
            )
        self._epoch, self._place = state["epoch"], state["place"]
        self._order = self._order_of(self._epoch)
