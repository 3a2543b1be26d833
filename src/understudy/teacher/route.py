"""Routing: which teacher scores which row.

A single teacher scores every row. With several teachers, a field of the row (`teacher_key`, by default
`data_source`) is matched with the teachers' `key`. A value without a teacher goes to the default teacher;
without a default it is an error that lists the keys.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from understudy.errors import TeacherError
from understudy.teacher.mixture import Ask, mix, needed_signals, partial_scores_of
from understudy.teacher.pool.gather import gather_or_cancel
from understudy.types.references import ScoreRef, ScoresRef

if TYPE_CHECKING:
    from understudy.teacher.pool.pool import TeacherPool


Mixture = Mapping[str, float]
"""Teacher name → weight, for a row that several teachers score; weights sum to 1."""


class TeacherRouter:
    """Maps a row's routing value to the pool of its teacher.

    Used by the trainer; immutable after construction.
    """

    def __init__(
        self,
        pools: Mapping[str, TeacherPool],
        keys: Mapping[str, str] | None = None,
        default: str | None = None,
    ) -> None:
        """`keys` maps a row's value to a teacher name; with a single teacher it may be left out."""
        if not pools:
            raise TeacherError("a run needs at least one teacher")
        self.pools = dict(pools)
        self.keys = dict(keys or {})
        self.default = (
            default if default is not None or len(self.pools) > 1 or self.keys else next(iter(self.pools))
        )
        for value, name in [*self.keys.items(), *([("default", default)] if default is not None else [])]:
            if name not in self.pools:
                raise TeacherError(
                    f"{value!r} is routed to teacher {name!r}; teachers are {_listed(self.pools)}"
                )
        unreachable = set(self.pools) - set(self.keys.values()) - {self.default}
        if unreachable:
            raise TeacherError(
                f"no row can reach teacher {_listed(sorted(unreachable))}: with several teachers each needs a `key`"
            )

    def route(self, value: str) -> str:
        """The name of the teacher for a row whose routing field is `value`."""
        name = self.keys.get(value, self.default)
        if name is not None:
            return name
        near = difflib.get_close_matches(value, self.keys, n=1, cutoff=0.0)
        nearest = f"; the nearest is {near[0]!r}" if near else ""
        raise TeacherError(
            f"no teacher for {value!r}; keys are {_listed(self.keys)}{nearest}. "
            "Give a teacher this key, or name a default teacher"
        )

    def pool(self, value: str) -> TeacherPool:
        return self.pools[self.route(value)]

    def mixture(self, weights: Mixture) -> dict[str, float]:
        """Check a row's own weights and scale them to sum to 1. A null weight (as in parquet) is 0."""
        if not isinstance(weights, Mapping):
            raise TeacherError(f"a mixture is written {{teacher: weight}}, got {weights!r}")
        given = {name: weight for name, weight in weights.items() if weight is not None}
        unknown = [name for name in given if name not in self.pools]
        if unknown:
            near = difflib.get_close_matches(str(unknown[0]), self.pools, n=1, cutoff=0.0)
            raise TeacherError(
                f"a mixture names {_listed(unknown)}; teachers are {_listed(self.pools)}; the nearest is {near[0]!r}"
            )
        numbers = all(isinstance(weight, int | float) and 0 <= weight < math.inf for weight in given.values())
        if not numbers or not sum(given.values()) > 0:
            raise TeacherError(f"a mixture needs weights ≥ 0 with a positive sum, got {dict(weights)}")
        total = sum(given.values())
        return {name: weight / total for name, weight in given.items() if weight > 0}


def _listed(names: object) -> str:
    return ", ".join(repr(name) for name in names)  # type: ignore[attr-defined]


async def score(router: TeacherRouter, items: Sequence[tuple[ScoreRef, str]]) -> list[ScoresRef]:
    """Scores of (item, value of its routing field), in the order given.

    Items of one teacher are sent in one request, in the order given. With `determinism = "full"` the caller
    orders items by key and so determines the batches that are scored.
    """
    by_teacher: dict[str, list[int]] = {}
    for i, (_, value) in enumerate(items):
        by_teacher.setdefault(router.route(value), []).append(i)
    return await _ask_all(router, by_teacher, [item for item, _ in items])


async def score_mixture(
    router: TeacherRouter, item: ScoreRef, weights: Mixture, ask: Ask | None = None
) -> ScoresRef:
    """The weighted scores of several teachers for one item (see `mixture.py`).

    `ask` sends one item to one teacher; by default directly to its pool. Requests are sent one after another,
    so that a caller that composes batches sees one at a time. Scores are mixed in this process, so an item
    with several teachers is fetched.
    """

    async def straight(teacher: str, wanted: ScoreRef) -> ScoresRef:
        return (await router.pools[teacher].score([wanted]))[0]

    needed_signals(item.signal)
    shares, ask = router.mixture(weights), ask or straight
    if len(shares) == 1:
        return await ask(next(iter(shares)), item)
    here = await item.fetch()
    return mix(await partial_scores_of(here, shares, ask), here)


async def _ask_all(
    router: TeacherRouter, by_teacher: dict[str, list[int]], items: Sequence[ScoreRef]
) -> list[ScoresRef]:
    names = list(by_teacher)
    answers = await gather_or_cancel(
        router.pools[name].score([items[i] for i in by_teacher[name]]) for name in names
    )
    scores: list[ScoresRef | None] = [None] * len(items)
    for name, answer in zip(names, answers, strict=True):
        for i, one in zip(by_teacher[name], answer, strict=True):
            scores[i] = one
    return [one for one in scores if one is not None]
