"""Rows with more tokens than one answer of the server are divided into pages, and a page can be requested by token."""

import numpy as np
import pytest
from recorded_run import long_columns, token_columns

from understudy.viewer.token_text import TokenText
from understudy.viewer.token_view import MOST_TOKENS, token_view

TEXT = TokenText(None)
COLUMNS = long_columns()  # 3000 prompt tokens, 1800 generated, 500 of a tool result, 1800 generated


@pytest.mark.parametrize(
    ("first", "turns"), [(0, 0), (2999, 0), (3000, 0), (4000, 0), (4800, 1), (5000, 1), (5300, 1), (6000, 1)]
)
def test_a_page_says_how_many_turns_ended_before_it(first: int, turns: int) -> None:
    assert token_view(COLUMNS, TEXT, first)["turn"] == turns


def test_the_page_for_a_token_contains_that_token() -> None:
    last = int(COLUMNS["loss_mask"].sum()) - 1
    for at in (0, 1000, 1800, last):
        page = token_view(COLUMNS, TEXT, 0, at)
        assert at in page["written"] and len(page["tokens"]) <= MOST_TOKENS
    assert token_view(COLUMNS, TEXT, 0, 1000)["first"] == 0, "the first page already contains it"
    assert token_view(COLUMNS, TEXT, 0, last)["first"] == 7099 - MOST_TOKENS // 2
    assert token_view(COLUMNS, TEXT, 0, 10**9)["first"] == 0


def test_consecutive_pages_contain_every_token_once() -> None:
    pages = [token_view(COLUMNS, TEXT, first) for first in range(0, 7100, MOST_TOKENS)]
    assert [token for page in pages for token in page["tokens"]] == COLUMNS["tokens"].tolist()
    gaps = [value for page in pages for value in page["measures"]["gap"]]
    short = token_columns(tokens=3600, prompt=0, planted=3590)
    assert gaps == pytest.approx((short["behaviour_logprobs"] - short["teacher_logprobs"]).tolist(), abs=1e-4)
    assert int(np.argmax(gaps)) == 3590
