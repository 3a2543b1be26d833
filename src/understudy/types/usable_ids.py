"""Which token ids a run may produce: those that the student and every other model of the run have.

A head often has more rows than its tokenizer has tokens (rows are padded to a round number), and one model
of a pair may have tokens that the other lacks. Such ids are never sampled, never a teacher's candidates, and
no part of a softmax. Engines, teachers and losses all leave out the same ids, so their log-probabilities
compare.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from understudy.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

HIDDEN_LOGIT = -1e30
"""The logit of an id that is left out: its exponential is an exact 0 in float32 and bfloat16, and unlike
−inf it can be subtracted and multiplied without becoming NaN."""


@dataclass(frozen=True, slots=True)
class UsableIds:
    limit: int
    """Ids from here on are left out."""
    holes: tuple[int, ...] = ()
    """Ids below `limit` that are left out as well; usually none."""
    placeholders: tuple[int, ...] = ()
    """Those of `holes` that prompts may hold: they stand for pictures, or are special tokens that a teacher with
    another tokenizer lacks. No token is ever drawn as one."""
    models: tuple[tuple[str, UsableIds], ...] = field(default=(), compare=False)
    """The ids of each model of the run, by its place in the recipe (`teachers.math`), for errors."""

    @property
    def count(self) -> int:
        return self.limit - len(self.holes)

    def within(self, rows: int) -> UsableIds | None:
        """The same for a head with this many rows; None if every row is usable."""
        if rows <= self.limit and not self.holes:
            return None
        holes = tuple(one for one in self.holes if one < rows)
        return UsableIds(min(self.limit, rows), holes, self.placeholders, self.models)

    def without(self, placeholders: tuple[int, ...]) -> UsableIds:
        """The same ids less those that prompts may hold and that are never drawn."""
        limit = max(self.limit, *(one + 1 for one in placeholders), 0)
        holes = {*self.holes, *range(self.limit, limit), *placeholders}
        return UsableIds(limit, tuple(sorted(holes)), placeholders, self.models)

    def hide_(self, logits: Tensor) -> Tensor:
        """The logits [..., V] with those of unusable ids hidden, in place."""
        logits[..., self.limit :] = HIDDEN_LOGIT
        if self.holes:
            logits[..., list(self.holes)] = HIDDEN_LOGIT
        return logits

    def first_unusable(self, ids: np.ndarray) -> int | None:
        """Index of the first id that no row may hold; None if all are usable or placeholders."""
        outside = (ids < 0) | (ids >= self.limit)
        if self.holes:
            outside |= np.isin(ids, [one for one in self.holes if one not in self.placeholders])
        return int(outside.argmax()) if outside.any() else None

    def check(self, ids: np.ndarray, what: str) -> None:
        """Raises `DataError` if ids cannot be used, with the models that have no token for the first such id."""
        at = self.first_unusable(ids)
        if at is None:
            return
        lacking = [place for place, own in self.models if own.first_unusable(ids[at : at + 1]) is not None]
        raise DataError(
            f"{what}: token id {ids[at]} at position {at} is no token of {', '.join(lacking) or 'the models of this run'}; leave it "
            "out of the row and of the student's chat template, or choose models that have it"
        )
