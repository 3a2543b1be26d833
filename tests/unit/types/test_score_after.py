"""`ScoreItem.after` puts a row after another prompt: the same tokens at shifted positions, in one turn or several."""

import numpy as np
import pytest

from understudy.types.scores import ScoreItem, Signal
from understudy.types.trajectory import StopReason, Trajectory


def item(tokens: list[int], mask: list[int], ids: np.ndarray | None = None) -> ScoreItem:
    length = len(tokens)
    row = Trajectory(
        "00000-0000000_0_0",
        np.array(tokens, np.int32),
        np.array(mask, bool),
        np.zeros(length, np.float32),
        np.zeros(length, np.int32),
        StopReason.EOS,
        candidate_ids=ids,
    )
    return row.to_score(Signal.TOPK if ids is None else Signal.AT_IDS, 4)


@pytest.mark.parametrize("prompt", [[5], [5, 6], [5, 6, 7, 8]], ids=["shorter", "equal", "longer"])
@pytest.mark.parametrize(
    ("mask", "kept"),
    [([0, 0, 1, 1, 1, 1], [9, 8, 3, 2]), ([0, 0, 1, 0, 0, 1], [9, 8, 3, 2])],
    ids=["one turn", "a tool result between two turns"],
)
def test_after_keeps_the_scored_tokens_and_shifts_their_positions(
    prompt: list[int], mask: list[int], kept: list[int]
) -> None:
    own = item([1, 7, 9, 8, 3, 2], mask)
    other = own.after(np.array(prompt, np.int32))
    assert other.tokens.tolist() == prompt + kept and other.tokens.dtype == np.int32
    assert other.tokens[other.positions].tolist() == own.tokens[own.positions].tolist()
    assert other.positions[0] == len(prompt), "the first scored token does not follow the prompt directly"
    assert np.diff(other.positions).tolist() == np.diff(own.positions).tolist()
    assert other.positions.dtype == np.int32 and (other.key, other.k) == (own.key, own.k)
    assert own.tokens.tolist() == [1, 7, 9, 8, 3, 2], "the original row was changed"


def test_after_keeps_candidate_ids_at_their_tokens() -> None:
    ids = np.arange(6, dtype=np.int32).reshape(3, 2)
    other = item([1, 7, 9, 8, 2], [0, 0, 1, 1, 1], ids).after(np.array([5], np.int32))
    assert other.ids is ids and other.positions.tolist() == [1, 2, 3]


def test_after_on_a_row_without_generated_tokens_scores_nothing() -> None:
    other = item([1, 7], [0, 0]).after(np.array([5, 6, 7], np.int32))
    assert other.tokens.tolist() == [5, 6, 7] and len(other.positions) == 0
