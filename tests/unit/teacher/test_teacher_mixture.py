"""Weighted mixtures of teachers against the mixture computed from whole distributions."""

import asyncio
from typing import Any

import numpy as np
import pytest

from understudy.errors import TeacherError
from understudy.teacher.route import TeacherRouter, score_mixture
from understudy.types.scores import ScoreItem, Signal, TeacherScores

V, P, K = 17, 6, 4
WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}
TOKENS = np.random.default_rng(1).integers(0, V, P + 1).astype(np.int32)
POSITIONS = np.arange(1, P + 1, dtype=np.int32)


class KnownPool:
    """A teacher pool with a known distribution at every position."""

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.asked: list[Signal] = []
        self.logprobs_PV = np.log(np.random.default_rng(seed).dirichlet(np.full(V, 0.5), P))

    async def score(self, items: list[ScoreItem]) -> list[TeacherScores]:
        (item,) = items
        self.asked.append(item.signal)
        own_P = np.take_along_axis(self.logprobs_PV, TOKENS[1:, None], 1)[:, 0].astype(np.float32)
        ids = item.ids
        if item.signal is Signal.TOPK:
            ids = np.argsort(-self.logprobs_PV, axis=1)[:, : item.k].astype(np.int32)
        picked = None if ids is None else np.take_along_axis(self.logprobs_PV, ids, 1).astype(np.float32)
        return [TeacherScores(item.key, self.name, item.signal, own_P, ids, picked)]


@pytest.fixture
def pools() -> dict[str, Any]:
    return {name: KnownPool(name, seed) for seed, name in enumerate("abc")}


def asked(pools: dict[str, Any], item: ScoreItem, weights: dict[str, float] = WEIGHTS) -> TeacherScores:
    router = TeacherRouter(pools, {name: name for name in pools})
    return asyncio.run(score_mixture(router, item, weights))


def whole(pools: dict[str, Any], weights: dict[str, float] = WEIGHTS) -> np.ndarray:
    return np.log(sum(w * np.exp(pools[name].logprobs_PV) for name, w in weights.items()))


def test_a_mixtures_sampled_logprobs_are_those_of_the_mixed_distribution(pools: dict[str, Any]) -> None:
    scores = asked(pools, ScoreItem("row", TOKENS, POSITIONS, Signal.SAMPLED))
    expected = np.take_along_axis(whole(pools), TOKENS[1:, None], 1)[:, 0]
    np.testing.assert_allclose(scores.sampled_logprobs, expected, atol=1e-6)
    assert (scores.key, scores.teacher) == ("row", "a+b+c")
    assert scores.sampled_logprobs.dtype == np.float32


def test_a_mixtures_logprobs_at_given_ids_are_those_of_the_mixed_distribution(pools: dict[str, Any]) -> None:
    ids = np.random.default_rng(3).integers(0, V, (P, 5)).astype(np.int32)
    scores = asked(pools, ScoreItem("row", TOKENS, POSITIONS, Signal.AT_IDS, ids=ids))
    np.testing.assert_array_equal(scores.ids, ids)
    np.testing.assert_allclose(scores.logprobs, np.take_along_axis(whole(pools), ids, 1), atol=1e-6)


def test_a_mixtures_topk_is_the_best_of_all_teachers_candidates(pools: dict[str, Any]) -> None:
    scores = asked(pools, ScoreItem("row", TOKENS, POSITIONS, Signal.TOPK, K))
    assert scores.ids is not None and scores.logprobs is not None and scores.ids.shape == (P, K)
    mixture_PV = whole(pools)
    np.testing.assert_allclose(scores.logprobs, np.take_along_axis(mixture_PV, scores.ids, 1), atol=1e-6)
    assert (np.diff(scores.logprobs, axis=1) <= 0).all(), "best first"
    assert all(len(set(ids.tolist())) == K for ids in scores.ids), "no id twice"
    for position in range(P):  # the best among everything that is in some teacher's K best
        known = {int(i) for pool in pools.values() for i in np.argsort(-pool.logprobs_PV[position])[:K]}
        best = sorted(known, key=lambda i: -mixture_PV[position, i])[:K]
        assert scores.ids[position].tolist() == best
    assert pools["a"].asked == [Signal.TOPK, Signal.AT_IDS]


def test_a_mixture_with_one_positive_weight_asks_only_that_teacher(pools: dict[str, Any]) -> None:
    item = ScoreItem("row", TOKENS, POSITIONS, Signal.TOPK, K)
    scores = asked(pools, item, {"a": 0.0, "b": 2.0})
    alone = asyncio.run(pools["b"].score([item]))[0]
    np.testing.assert_array_equal(scores.logprobs, alone.logprobs)
    assert scores.teacher == "b" and pools["a"].asked == []


def test_a_mixture_refuses_the_hidden_signal(pools: dict[str, Any]) -> None:
    with pytest.raises(TeacherError, match="not the softmax of one head"):
        asked(pools, ScoreItem("row", TOKENS, POSITIONS, Signal.HIDDEN))
    assert pools["a"].asked == []


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"aa": 1.0}, "names 'aa'; teachers are 'a', 'b', 'c'; the nearest is 'a'"),
        ({"a": 0.0}, "positive sum"),
        ({"a": -1.0, "b": 3.0}, "≥ 0"),
        ({"a": float("nan")}, "≥ 0"),
        ({"a": float("inf")}, "≥ 0"),
        ({"a": "much"}, "≥ 0"),
        ({}, "positive sum"),
        ("a", "is written"),
    ],
)
def test_invalid_mixture_weights_are_refused(pools: dict[str, Any], weights: Any, message: str) -> None:
    with pytest.raises(TeacherError, match=message):
        asked(pools, ScoreItem("row", TOKENS, POSITIONS, Signal.SAMPLED), weights)


def test_a_null_mixture_weight_counts_as_zero(pools: dict[str, Any]) -> None:
    item = ScoreItem("row", TOKENS, POSITIONS, Signal.SAMPLED)
    assert asked(pools, item, {"a": 1.0, "b": None}).teacher == "a"  # type: ignore[dict-item]
