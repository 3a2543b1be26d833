"""Accuracy, avg@k and pass@k of a set of rewards. Pure arithmetic, no models."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence


def pass_at(samples: int, solved: int, k: int) -> float:
    """The unbiased estimate of the probability that at least one of `k` samples solves a problem.

    From n = `samples` of which c = `solved` did: 1 − C(n−c, k) / C(n, k), one minus the share of k-subsets
    without a solution."""
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {samples} samples")
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def mean_by_source(sources: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """The mean over all problems (name "") and per data source (name "/source")."""
    groups: dict[str, list[float]] = defaultdict(list)
    for source, value in zip(sources, values, strict=True):
        groups[source or "all"].append(value)
    every = [value for group in groups.values() for value in group]
    return {
        "": sum(every) / len(every),
        **{f"/{source}": sum(groups[source]) / len(groups[source]) for source in sorted(groups)},
    }


def sampled_measures(
    sources: Sequence[str], rewards: Sequence[Sequence[float]], solved_at: float
) -> dict[str, float]:
    """`avg@k` (mean reward) and `pass@1`, `pass@2`, `pass@4` … `pass@k` over problems with k rewards each."""
    k = len(rewards[0])
    solved = [sum(reward >= solved_at for reward in samples) for samples in rewards]

    def measure(value: Callable[[int], float]) -> dict[str, float]:
        return mean_by_source(sources, [value(index) for index in range(len(rewards))])

    found = {f"avg@{k}{name}": value for name, value in measure(lambda i: sum(rewards[i]) / k).items()}
    for size in sorted({*(1 << power for power in range(k.bit_length())), k}):
        chances = measure(lambda i, size=size: pass_at(k, solved[i], size))  # type: ignore[misc]
        found |= {f"pass@{size}{name}": value for name, value in chances.items()}
    return found
