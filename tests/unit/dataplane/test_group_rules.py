"""Group filters and the overlong penalty, compared with the definitions in the DAPO paper."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.dataplane.groups import no_signal, overlong_penalty
from understudy.types.prompt import split_key


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("00000-0000017_3_0", ("00000-0000017", 3, 0)),
        ("a_b_c_10_2", ("a_b_c", 10, 2)),
        ("_0_0", ("", 0, 0)),
        ("5_3", ("5_3", -1, -1)),
        ("a_x_0", ("a_x_0", -1, -1)),
        ("a_0_-1", ("a_0_-1", -1, -1)),
        ("plain", ("plain", -1, -1)),
    ],
)
def test_a_key_without_session_and_turn_numbers_is_its_own_prompt(
    key: str, parts: tuple[str, int, int]
) -> None:
    assert split_key(key) == parts


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([1.0, 1.0, 1.0], "no signal: all 3 rewards are 1"),
        ([0.0, 0.0], "no signal: all 2 rewards are 0"),
        ([0.5, 0.5 + 1e-9], "no signal: all 2 rewards are 0.5"),
        ([0.0, 1.0], None),
        ([1.0], None),
        ([], None),
        ([math.nan, 1.0, 1.0], None),
    ],
)
def test_a_group_whose_rewards_are_all_equal_has_no_signal(rewards: list[float], reason: str | None) -> None:
    assert no_signal(rewards) == reason


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 12_000))
def test_the_overlong_penalty_follows_the_formula_of_the_dapo_paper(
    buffer: int, more: int, length: int
) -> None:
    longest = buffer + more
    if length <= longest - buffer:
        expected = 0.0
    elif length <= longest:
        expected = ((longest - buffer) - length) / buffer
    else:
        expected = -1.0
    assert overlong_penalty(length, longest, buffer) == pytest.approx(expected, abs=1e-12)


def test_an_overlong_buffer_of_zero_or_beyond_the_maximum_length_is_refused() -> None:
    for buffer in (0, 11):
        with pytest.raises(ValueError, match="max_length=10"):
            overlong_penalty(5, 10, buffer)
