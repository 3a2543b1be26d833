"""Ask for scores: every item goes to the teacher its row names, one request per teacher."""

from __future__ import annotations

from collections.abc import Sequence

from understudy.teacher.mixture import Ask, mix, opinions_of
from understudy.teacher.pool.together import together
from understudy.teacher.route import Mixture, TeacherRouter
from understudy.types.scores import ScoreItem, TeacherScores


async def score(router: TeacherRouter, items: Sequence[tuple[ScoreItem, str]]) -> list[TeacherScores]:
    """Scores of (item, value of its routing field), in the order given.

    Items of one teacher travel in one request, in their order here: with `determinism = "full"` whoever calls
    composes requests by key, and so composes the batches that are scored.
    """
    by_teacher: dict[str, list[int]] = {}
    for i, (_, value) in enumerate(items):
        by_teacher.setdefault(router.route(value), []).append(i)
    return await _ask_all(router, by_teacher, [item for item, _ in items])


async def score_mixture(
    router: TeacherRouter, item: ScoreItem, weights: Mixture, ask: Ask | None = None
) -> TeacherScores:
    """The verdict of several teachers on one item, weighed (see `mixture.py`).

    `ask` sends one item to one teacher; by default straight to its pool. Questions follow one another, so that a caller
    that composes batches sees one at a time.
    """

    async def straight(teacher: str, wanted: ScoreItem) -> TeacherScores:
        return (await router.pools[teacher].score([wanted]))[0]

    return mix(await opinions_of(item, router.mixture(weights), ask or straight), item)


async def _ask_all(
    router: TeacherRouter, by_teacher: dict[str, list[int]], items: Sequence[ScoreItem]
) -> list[TeacherScores]:
    names = list(by_teacher)
    answers = await together(router.pools[name].score([items[i] for i in by_teacher[name]]) for name in names)
    scores: list[TeacherScores | None] = [None] * len(items)
    for name, answer in zip(names, answers, strict=True):
        for i, one in zip(by_teacher[name], answer, strict=True):
            scores[i] = one
    return [one for one in scores if one is not None]
