"""The shapes task: answers are right, splits share no picture, and a constant answer is right in a quarter of cases."""

import sys
from itertools import islice
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "recipes" / "shapes"))
from shapes import (
    CORNERS,
    HOW_MANY,
    QUESTIONS,
    Shape,
    answers,
    best_constant,
    blank,
    cells,
    png,
    rows,
    swapped,
)


def test_answers_describe_the_scene_and_ambiguous_questions_are_left_out() -> None:
    scene = (
        Shape("circle", "red", (0, 0), (8, 8), 5),
        Shape("square", "blue", (1, 2), (24, 40), 5),
        Shape("square", "green", (2, 2), (40, 40), 5),
    )
    assert answers(scene) == {
        HOW_MANY: "three",
        "what colour is the circle ?": "red",
        "where is the circle ?": "top left",
    }, "there are two squares, so no question asks for a square"
    assert [bool(one) for one in cells(scene)] == [True, *[False] * 6, True, True]


def test_rows_are_balanced_and_their_pictures_differ() -> None:
    found = list(islice(rows("a test"), 1200))
    assert len({row.picture for row in found}) == 1200 and {row.question for row in found} == set(QUESTIONS)
    assert best_constant(found) < 0.32
    assert sum(row.answer in CORNERS.values() for row in found) == 400


def test_control_rows_keep_questions_and_answers_and_change_the_pictures() -> None:
    found = list(islice(rows("a test"), 300))
    for other in (swapped(found), blank(found)):
        assert [(row.question, row.answer) for row in other] == [(row.question, row.answer) for row in found]
        assert not any(one.picture == row.picture for one, row in zip(other, found, strict=True))
    assert {row.picture for row in blank(found)} == {png(())}


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_tokenizer_encodes_and_decodes_every_question(question: str) -> None:
    from vision_chat import IMAGE, build_tokenizer

    tokenizer = build_tokenizer()
    ids = tokenizer.encode(question, add_special_tokens=False)
    assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == question
    assert tokenizer.convert_tokens_to_ids(IMAGE) not in ids
