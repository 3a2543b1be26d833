"""The random numbers of a request are those of its own seed, whatever else is in its batch."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from understudy.engines.base import Sampling
from understudy.engines.local.sampling import SamplingBatch

REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 2**64 - 1) | st.integers(0, 2**33), st.integers(1, 40), st.integers(0, 40), st.booleans()
    ),
    min_size=1,
    max_size=8,
)  # fmt: skip


@given(REQUESTS)
@example([(0, 3, 0, False), (1, 1, 1, False), (2**32, 5, 2, True), (2**63 - 1, 7, 3, False), (2**64 - 1, 1, 0, False)])  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_every_request_draws_the_random_numbers_of_its_own_seed(
    requests: list[tuple[int, int, int, bool]],
) -> None:
    """Also a request that continues after some of its tokens; a greedy request draws nothing."""
    sampling = [Sampling(count, temperature=0.0 if greedy else 1.0) for _, count, _, greedy in requests]
    written = [min(done, count) for _, count, done, _ in requests]
    seeds = [seed for seed, _, _, _ in requests]
    batch = SamplingBatch.build(sampling, seeds, written, 8, torch.device("cpu"))
    for i, (seed, count, _, greedy) in enumerate(requests):
        own_N = np.zeros(0) if greedy else np.random.default_rng(seed).random(count)[written[i] :]
        found_N = batch.uniforms_NB[:, i].numpy()
        assert found_N[: len(own_N)].tobytes() == own_N.tobytes() and not found_N[len(own_N) :].any()


def test_a_smaller_max_new_tokens_draws_a_prefix_of_the_same_random_numbers() -> None:
    batch = SamplingBatch.build([Sampling(20), Sampling(5)], [7, 7], [0, 0], 8, torch.device("cpu"))
    assert batch.uniforms_NB[:5, 0].tolist() == batch.uniforms_NB[:5, 1].tolist()
