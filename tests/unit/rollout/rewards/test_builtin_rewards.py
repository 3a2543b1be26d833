"""The built-in rewards: which answers count as equal, and how datasets without answers are refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.errors import DataError
from understudy.rollout.rewards.builtin import boxed_number, exact_match, gsm8k
from understudy.rollout.rewards.rewards import load_reward

WORKED = "He sold 48/2 = <<48/2=24>>24 clips.\nSo #### 24 is half, and altogether 24+48.\n#### 1,072"


@pytest.mark.parametrize(
    ("text", "reward"),
    [("64", 1.0), (" 64\n", 1.0), ("46", 0.0), ("640", 0.0), ("6 4", 0.0), ("", 0.0)],
)
def test_exact_match_ignores_only_surrounding_whitespace(text: str, reward: float) -> None:
    assert exact_match({"answer": "64"}, text) == reward
    assert exact_match({"answer": " 64 "}, text) == reward


def test_exact_match_accepts_numeric_reference_answers() -> None:
    assert exact_match({"answer": 64}, "64") == 1.0
    # pandas turns a column of integers with a missing value into floats.
    assert [exact_match({"answer": 64.0}, text) for text in ("64", "64.0", "6")] == [1.0, 1.0, 0.0]
    assert [exact_match({"answer": 0.5}, text) for text in ("0.5", "0")] == [1.0, 0.0]


@pytest.mark.parametrize(
    "text",
    [
        "#### 1072",
        "#### 1,072",
        "####1072.",
        "#### $1,072.",
        "#### 1072.00 dollars",
        "#### +1072, because",
        "first #### 5, no: #### 1072",
        "#### 1072\n#### ...\n#### unsure",
    ],
)
def test_gsm8k_accepts_common_ways_to_write_the_number(text: str) -> None:
    assert gsm8k({"answer": WORKED}, text)["score"] == 1.0
    assert gsm8k({"answer": "1,072"}, text)["score"] == 1.0
    assert gsm8k({"answer": 1072}, text)["score"] == 1.0


@pytest.mark.parametrize(
    "text", ["", "1072", "#### 1072 #### 5", "#### -1072", "#### 24", "#### 10 72", "#### 1072-1", "####"]
)
def test_gsm8k_scores_zero_for_a_missing_or_wrong_final_number(text: str) -> None:
    assert gsm8k({"answer": WORKED}, text)["score"] == 0.0


def test_gsm8k_distinguishes_signs_and_reads_decimals() -> None:
    assert gsm8k({"answer": "#### -0.5"}, "#### -.50")["score"] == 1.0
    assert gsm8k({"answer": "#### -0.5"}, "#### 0.5")["score"] == 0.0


def test_builtin_rewards_accept_any_answer_of_a_list() -> None:
    row = {"reward_model": {"ground_truth": ["42", "forty-two", 43]}}
    assert [exact_match(row, text) for text in ("42", "forty-two", "43", "44", str(["42"]))] == [
        1,
        1,
        1,
        0,
        0,
    ]
    row = {"answer": ["forty-two", "so #### 42", "0"]}
    for text, score in (("#### 42", 1.0), ("#### 0", 1.0), ("#### 1", 0.0), ("forty-two", 0.0)):
        assert gsm8k(row, text)["score"] == score
    assert boxed_number(row, "\\boxed{42}") == {"score": 1.0, "parsed": 1.0}
    assert boxed_number(row, "none") == {"score": 0.0, "parsed": 0.0}
    with pytest.raises(DataError, match="column 'answer' holds 'a', 'b'"):
        gsm8k({"answer": ["a", "b"]}, "#### 1")


@pytest.mark.parametrize("reward", [exact_match, gsm8k])
@pytest.mark.parametrize(
    "row",
    [
        {"question": "1+1", "data_source": "math"},
        {"question": "1+1", "answer": None},
        {"question": "1+1", "answer": []},
        {"question": "1+1", "answer": float("nan")},
    ],
)
def test_builtin_rewards_raise_a_data_error_for_a_row_without_an_answer(reward, row: dict) -> None:
    with pytest.raises(DataError, match=r"nothing in column 'answer'.*'question'"):
        reward(row, "2")


def test_gsm8k_raises_a_data_error_for_a_reference_without_a_number() -> None:
    with pytest.raises(DataError, match=r"column 'answer' holds 'many'.*#### number"):
        gsm8k({"answer": "many"}, "#### 2")


@given(st.text())
def test_no_generated_text_makes_a_builtin_reward_raise(text: str) -> None:
    for written in (text, f"#### {text}"):
        assert gsm8k({"answer": "7"}, written)["score"] in (0.0, 1.0)
        assert exact_match({"answer": "7"}, written) in (0.0, 1.0)


def test_load_reward_finds_builtin_rewards_by_name() -> None:
    assert load_reward("understudy.rollout.rewards.builtin:gsm8k").function is gsm8k
    assert not load_reward("understudy.rollout.rewards.builtin:exact_match").wants_trajectory


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (r"so \boxed{1,234}", 1.0),
        (r"\boxed{\$1234.00} dollars for 7 days", 1.0),
        ("In all she has 1234 apples.", 1.0),
        (r"\boxed{7} and 1234", 0.0),
        (r"\boxed{} 1234", 1.0),
        (r"\boxed{-1234}", 0.0),
        ("no number at all", 0.0),
        ("", 0.0),
    ],
)
def test_boxed_number_reads_the_boxed_number_or_else_the_last_number(text: str, reward: float) -> None:
    assert boxed_number({"answer": "6*200+34=1234\n#### 1,234"}, text)["score"] == reward


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("0.5", r"so \boxed{.5}"),
        ("-0.5", r"so \boxed{-.5}"),
        ("0.5", "it is $.5"),
        ("5", "the answer is...5"),
        ("3", "section 1.2.3"),
        ("1000", r"\boxed{1{,}000}"),
        ("1000000", r"\boxed{\$1{,}000{,}000}"),
        ("-5", "the answer is \u22125"),
        ("-0.5", "\\boxed{\u2212.5}"),
        ("-1234", "\\boxed{\u22121{,}234}"),
        ("5", "7\u22125"),
        ("5", "7 \u2212 5"),
        ("-5", "#### \u22125"),
        ("\u22125", "-5"),
    ],
)
def test_boxed_number_reads_decimals_tex_commas_and_unicode_minus_signs(answer: str, text: str) -> None:
    assert boxed_number({"answer": answer}, text)["score"] == 1.0


def test_gsm8k_reads_a_unicode_minus_sign_and_a_tex_comma() -> None:
    assert gsm8k({"answer": "-1000"}, "#### \u22121{,}000")["score"] == 1.0
    assert gsm8k({"answer": "5"}, "#### \u22125")["score"] == 0.0


def test_boxed_number_treats_a_boxed_zero_as_an_answer() -> None:
    assert boxed_number({"answer": "0"}, r"\boxed{0} of 5")["score"] == 1.0


@pytest.mark.parametrize(
    ("reward", "text", "parsed"),
    [
        (gsm8k, "so #### 7", 1.0),
        (gsm8k, "so #### 8", 1.0),
        (gsm8k, "the answer is 7", 0.0),
        (gsm8k, "#### seven", 0.0),
        (boxed_number, "the answer is 8", 1.0),
        (boxed_number, r"\boxed{seven}", 0.0),
    ],
)
def test_builtin_rewards_report_whether_a_result_was_parsed(reward: Any, text: str, parsed: float) -> None:
    assert reward({"answer": "7"}, text)["parsed"] == parsed
