"""The shipped rewards: what counts as the same answer, and what a dataset without answers is told."""

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
def test_exact_match_ignores_only_the_white_space_around(text: str, reward: float) -> None:
    assert exact_match({"answer": "64"}, text) == reward
    assert exact_match({"answer": " 64 "}, text) == reward


def test_exact_match_reads_an_answer_that_is_not_text() -> None:
    assert exact_match({"answer": 64}, "64") == 1.0
    # A column of whole numbers of which one is missing is one of floats in pandas.
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
def test_gsm8k_accepts_every_way_to_write_the_number(text: str) -> None:
    assert gsm8k({"answer": WORKED}, text)["score"] == 1.0
    assert gsm8k({"answer": "1,072"}, text)["score"] == 1.0
    assert gsm8k({"answer": 1072}, text)["score"] == 1.0


@pytest.mark.parametrize(
    "text", ["", "1072", "#### 1072 #### 5", "#### -1072", "#### 24", "#### 10 72", "#### 1072-1", "####"]
)
def test_gsm8k_pays_nothing_for_anything_else(text: str) -> None:
    assert gsm8k({"answer": WORKED}, text)["score"] == 0.0


def test_gsm8k_tells_signs_and_decimals_apart() -> None:
    assert gsm8k({"answer": "#### -0.5"}, "#### -.50")["score"] == 1.0
    assert gsm8k({"answer": "#### -0.5"}, "#### 0.5")["score"] == 0.0


def test_any_answer_of_a_list_counts() -> None:
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
def test_a_row_without_an_answer_is_the_datasets_fault(reward, row: dict) -> None:
    with pytest.raises(DataError, match=r"nothing in column 'answer'.*'question'"):
        reward(row, "2")


def test_gsm8k_refuses_an_answer_without_a_number() -> None:
    with pytest.raises(DataError, match=r"column 'answer' holds 'many'.*#### number"):
        gsm8k({"answer": "many"}, "#### 2")


@given(st.text())
def test_no_writing_makes_a_reward_raise(text: str) -> None:
    for written in (text, f"#### {text}"):
        assert gsm8k({"answer": "7"}, written)["score"] in (0.0, 1.0)
        assert exact_match({"answer": "7"}, written) in (0.0, 1.0)


def test_recipes_find_them_by_name() -> None:
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
def test_the_boxed_number_counts_or_else_the_last_one(text: str, reward: float) -> None:
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
def test_numbers_as_models_write_them(answer: str, text: str) -> None:
    assert boxed_number({"answer": answer}, text)["score"] == 1.0


def test_gsm8k_reads_a_minus_sign_and_tex_s_comma() -> None:
    assert gsm8k({"answer": "-1000"}, "#### \u22121{,}000")["score"] == 1.0
    assert gsm8k({"answer": "5"}, "#### \u22125")["score"] == 0.0


def test_a_boxed_zero_is_an_answer() -> None:
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
def test_a_reward_says_whether_it_found_a_result(reward: Any, text: str, parsed: float) -> None:
    assert reward({"answer": "7"}, text)["parsed"] == parsed
