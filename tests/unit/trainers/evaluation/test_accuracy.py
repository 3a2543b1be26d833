"""pass@k against plain enumeration, means per source, and the best checkpoint."""

import random
from itertools import combinations

import pytest

from understudy.trainers.evaluation.accuracy import mean_by_source, pass_at, sampled_measures
from understudy.trainers.evaluation.best_checkpoint import BestSoFar


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_equals_the_share_of_subsets_with_a_solution(samples: int) -> None:
    for solved in range(samples + 1):
        outcomes = [True] * solved + [False] * (samples - solved)
        for k in range(1, samples + 1):
            subsets = [any(subset) for subset in combinations(outcomes, k)]
            assert pass_at(samples, solved, k) == pytest.approx(sum(subsets) / len(subsets))


def test_the_pass_at_k_estimator_is_unbiased() -> None:
    """Over many draws of 6 samples the mean estimate of pass@3 is 1 − (1 − p)³."""
    chance, rate = random.Random(0), 0.3
    draws = [pass_at(6, sum(chance.random() < rate for _ in range(6)), 3) for _ in range(20_000)]
    assert sum(draws) / len(draws) == pytest.approx(1 - (1 - rate) ** 3, abs=0.01)


def test_sampled_measures_are_given_overall_and_per_source() -> None:
    rewards = [[1.0, 0.0, 0.0, 0.0, 0.0], [1.0] * 5, [0.5] * 5]
    found = sampled_measures(["a", "a", "b"], rewards, solved_at=1.0)
    assert found["avg@5"] == pytest.approx((0.2 + 1.0 + 0.5) / 3)
    assert found["pass@1/a"] == pytest.approx(0.6) and found["pass@1/b"] == 0.0
    assert found["pass@5/a"] == 1.0 and found["pass@5"] == pytest.approx(2 / 3)
    assert found["pass@2/a"] == pytest.approx((0.4 + 1.0) / 2)
    assert {name.split("/")[0] for name in found} == {"avg@5", "pass@1", "pass@2", "pass@4", "pass@5"}
    assert sampled_measures(["b"], [[0.5]], solved_at=0.5)["pass@1"] == 1.0


def test_pass_at_k_refuses_k_above_the_number_of_samples() -> None:
    with pytest.raises(ValueError, match="pass@5"):
        pass_at(4, 2, 5)


def test_mean_by_source_reports_unnamed_sources_without_a_suffix_of_their_own() -> None:
    assert mean_by_source(["", "x"], [1.0, 0.0]) == {"": 0.5, "/all": 1.0, "/x": 0.0}


def test_the_best_checkpoint_is_the_earliest_of_equals_and_never_step_0() -> None:
    lines = [{"step": 0, "val/accuracy": 0.9}, {"step": 2, "val/accuracy": 0.4}, {"step": 3}]
    best = BestSoFar([*lines, {"step": 4, "val/accuracy": 0.6}, {"step": 6, "val/accuracy": 0.6}])
    assert (best.step, best.value) == (4, 0.6)
    assert not best.consider(8, {"val/accuracy": 0.6}) and best.consider(10, {"val/accuracy": 0.7})
