"""Randomness drawn for many requests at once is that of each request alone."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from understudy.engines.local.sampling import uniforms_of

REQUESTS = st.lists(
    st.tuples(st.integers(0, 2**64 - 1) | st.integers(0, 2**33), st.integers(0, 40)), max_size=8
)


@given(REQUESTS)
@example([(0, 3), (1, 0), (2**32 - 1, 5), (2**32, 5), (2**63 - 1, 7), (2**64 - 1, 1)])
@settings(max_examples=300, deadline=None)
def test_every_request_draws_what_its_own_generator_would(requests: list[tuple[int, int]]) -> None:
    drawn = uniforms_of([seed for seed, _ in requests], [count for _, count in requests])
    assert len(drawn) == len(requests)
    for (seed, count), found in zip(requests, drawn, strict=True):
        assert found.tobytes() == np.random.default_rng(seed).random(count).tobytes()
