"""The reward of the self-distillation recipe, which teaches a student to answer in one sentence."""

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
def test_the_reward_requires_a_single_sentence_with_words_and_a_full_stop(text: str, reward: float) -> None:
    """A full stop without words once counted, and a student that wrote nothing else was graded 100 %."""
    assert one_sentence({}, text) == reward
