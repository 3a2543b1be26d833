"""The reward of the recipe in which a student teaches itself to be brief."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "recipes" / "self-distillation"))
from brief import one_sentence


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (" Bread is baked from flour and water. ", 1.0),
        ("Bread is baked. It is eaten.", 0.0),
        ("Bread is baked from flour and", 0.0),
        ("Bread is baked\nfrom flour and water.", 0.0),
        (".", 0.0),
        ("", 0.0),
    ],
)
def test_one_sentence_has_words_and_an_end(text: str, reward: float) -> None:
    """A mark without words once counted, and a student that wrote nothing else was graded 100 %."""
    assert one_sentence({}, text) == reward
