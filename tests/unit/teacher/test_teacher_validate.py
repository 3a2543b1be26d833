"""Every kind of wrong reply is detected, and the error names teacher, replica, row and position."""

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from teacher_rig import VOCAB, random_items

from understudy.errors import TeacherReplyError
from understudy.teacher.clients.prompt_logprobs import from_echo
from understudy.teacher.clients.validate import Sender, check_reply
from understudy.teacher.protocol import ScoreReply, ScoreRequest, request_of
from understudy.teacher.scoring.model import load_frozen
from understudy.teacher.scoring.scorer import Scorer
from understudy.types.scores import ScoreItem, Signal

K = 5
ORIGIN = Sender("math", "replica-7", VOCAB)


@pytest.fixture(scope="module")
def asked() -> ScoreRequest:
    items = (
        random_items(3, 1, Signal.TOPK, K)
        + random_items(2, 2, Signal.SAMPLED)
        + random_items(2, 3, Signal.AT_IDS, 3)
        + random_items(1, 4, Signal.TOPK, 3)
        + random_items(2, 5, Signal.HIDDEN)
    )
    return request_of(items)


@pytest.fixture(scope="module")
def valid_reply(asked: ScoreRequest, qwen3: object) -> ScoreReply:
    return Scorer("math", load_frozen(str(qwen3))).score(asked)


def test_a_valid_reply_passes_the_checks(asked: ScoreRequest, valid_reply: ScoreReply) -> None:
    check_reply(asked, valid_reply, ORIGIN)


def altered(array: np.ndarray, at: int | slice, value: object) -> np.ndarray:
    array = array.copy()
    array[at] = value
    return array


def position_of(asked: ScoreRequest, row: int, nth: int) -> int:
    return int(asked.positions_P[int(asked.position_counts_N[:row].sum()) + nth])


def swapped(array: np.ndarray, a: int, b: int) -> np.ndarray:
    array = array.copy()
    array[[a, b]] = array[[b, a]]
    return array


def shifted(reply: ScoreReply, asked: ScoreRequest) -> ScoreReply:
    """Row 0 gives each position the scores of the next one; everything else is unchanged."""
    count = int(asked.position_counts_N[0])
    sampled, ids, logprobs = reply.sampled_P.copy(), reply.ids.copy(), reply.logprobs.copy()
    sampled[: count - 1] = reply.sampled_P[1:count]
    ids[: (count - 1) * K] = reply.ids[K : count * K]
    logprobs[: (count - 1) * K] = reply.logprobs[K : count * K]
    return replace(reply, sampled_P=sampled, ids=ids, logprobs=logprobs)


CORRUPTIONS: dict[str, tuple[Callable[[ScoreReply, ScoreRequest], ScoreReply], str]] = {
    "NaN for the scored token": (
        lambda r, a: replace(r, sampled_P=altered(r.sampled_P, 1, np.nan)),
        "finite number ≤ 0",
    ),
    "infinite": (lambda r, a: replace(r, sampled_P=altered(r.sampled_P, 1, -np.inf)), "finite number ≤ 0"),
    "positive": (lambda r, a: replace(r, sampled_P=altered(r.sampled_P, 1, 0.01)), "finite number ≤ 0"),
    "NaN candidate": (
        lambda r, a: replace(r, logprobs=altered(r.logprobs, K + 2, np.nan)),
        "finite number ≤ 0",
    ),
    "positive candidate": (
        lambda r, a: replace(r, logprobs=altered(r.logprobs, K, 0.5)),
        "finite number ≤ 0",
    ),
    "unsorted": (lambda r, a: replace(r, logprobs=swapped(r.logprobs, K, K + 4)), "not sorted"),
    "too much mass": (
        lambda r, a: replace(r, logprobs=altered(r.logprobs, slice(K, 2 * K), -0.5)),
        "more than all",
    ),
    "an id beyond the vocabulary": (
        lambda r, a: replace(r, ids=altered(r.ids, K + 1, VOCAB)),
        "outside the vocabulary",
    ),
    "a negative id": (lambda r, a: replace(r, ids=altered(r.ids, K + 1, -1)), "negative"),
    "an id twice": (lambda r, a: replace(r, ids=altered(r.ids, K + 1, r.ids[K])), "twice"),
    "shifted by one": (shifted, "shifted|likelier"),
    "scores other tokens": (
        lambda r, a: replace(r, scored_P=altered(r.scored_P, 1, (r.scored_P[1] + 1) % VOCAB)),
        "shifted",
    ),
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_a_corrupted_first_row_is_detected_with_row_and_position(
    corruption: str, asked: ScoreRequest, valid_reply: ScoreReply
) -> None:
    corrupt, expected = CORRUPTIONS[corruption]
    with pytest.raises(TeacherReplyError, match=expected) as caught:
        check_reply(asked, corrupt(valid_reply, asked), ORIGIN)
    message = str(caught.value)
    assert message.startswith("teacher math, replica replica-7, row 'row-1-0', position ")
    if corruption != "shifted by one":
        assert f"position {position_of(asked, 0, 1)}:" in message


def test_a_reply_with_missing_rows_or_positions_is_detected(
    asked: ScoreRequest, valid_reply: ScoreReply
) -> None:
    with pytest.raises(TeacherReplyError, match=r"row 'row-2-1'.*positions"):
        check_reply(
            asked,
            replace(valid_reply, position_counts_N=altered(valid_reply.position_counts_N, 4, 1)),
            ORIGIN,
        )
    with pytest.raises(TeacherReplyError, match="rows"):
        check_reply(asked, replace(valid_reply, keys=valid_reply.keys[:-1]), ORIGIN)


def test_a_reply_to_another_request_is_detected(asked: ScoreRequest, valid_reply: ScoreReply) -> None:
    with pytest.raises(TeacherReplyError, match=r"row 'row-2-0'.*other tokens"):
        check_reply(asked, replace(valid_reply, digests_N=altered(valid_reply.digests_N, 3, 1)), ORIGIN)
    with pytest.raises(TeacherReplyError, match="rows"):
        check_reply(asked, replace(valid_reply, keys=valid_reply.keys[::-1]), ORIGIN)
    with pytest.raises(TeacherReplyError, match="asked for topk with k = 5"):
        check_reply(asked, replace(valid_reply, k_N=[4, *valid_reply.k_N[1:]]), ORIGIN)


def test_corrupted_ids_logprobs_and_hidden_states_of_later_rows_are_detected_with_their_position(
    asked: ScoreRequest, valid_reply: ScoreReply
) -> None:
    """Row 5 is `at_ids` with K = 3, row 7 `topk` with K = 3, row 8 `hidden`: other rules, at later offsets."""
    counts = asked.position_counts_N.tolist()
    start_5 = sum(n * k for n, k in zip(counts[:5], asked.k_N[:5], strict=True))
    start_7 = sum(n * k for n, k in zip(counts[:7], asked.k_N[:7], strict=True))
    with pytest.raises(TeacherReplyError, match=f"'row-3-0', position {position_of(asked, 5, 1)}: other ids"):
        check_reply(
            asked,
            replace(
                valid_reply,
                ids=altered(valid_reply.ids, start_5 + 3, (valid_reply.ids[start_5 + 3] + 1) % VOCAB),
            ),
            ORIGIN,
        )
    with pytest.raises(TeacherReplyError, match=f"'row-4-0', position {position_of(asked, 7, 0)}: .*sorted"):
        check_reply(
            asked, replace(valid_reply, logprobs=swapped(valid_reply.logprobs, start_7, start_7 + 2)), ORIGIN
        )
    size = valid_reply.hidden_size
    with pytest.raises(
        TeacherReplyError, match=f"'row-5-0', position {position_of(asked, 8, 1)}: a hidden state"
    ):
        check_reply(asked, replace(valid_reply, hidden=altered(valid_reply.hidden, size + 3, 0x7FC0)), ORIGIN)


def echoed(tokens: list[str], logprobs: list[float | None], usage: tuple[int, int] | None = (4, 1)) -> bytes:
    counted = None if usage is None else {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    choice = {"logprobs": {"tokens": tokens, "token_logprobs": logprobs}}
    return json.dumps({"choices": [choice], "usage": counted}).encode()


ECHOED = ScoreItem("row", np.array([1, 5, 6, 7], np.int32), np.array([2, 3], np.int32), Signal.SAMPLED)
PIECES, LOGPROBS = ["<s>", "a", "b", "c", "d"], [None, -1.0, -2.0, -3.0, -4.0]


@pytest.mark.parametrize(
    "body",
    [
        echoed(PIECES, LOGPROBS),
        echoed(PIECES, LOGPROBS, None),
        echoed(PIECES[:4], LOGPROBS[:4]),
        echoed(PIECES[:4], LOGPROBS[:4], (4, 0)),
    ],
)
def test_a_complete_text_echo_is_read(body: bytes) -> None:
    assert from_echo(body, ECHOED).sampled_P.tolist() == [-2.0, -3.0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (echoed(["<s>", *PIECES], [None, -9.0, *LOGPROBS[1:]], (5, 1)), "counts 5 tokens in a prompt of 4"),
        (
            echoed(["<s>", *PIECES], [None, -9.0, *LOGPROBS[1:]]),
            "6 echoed tokens and 6 logprobs for a prompt of 4",
        ),
        (echoed(["<s>", *PIECES], [None, -9.0, *LOGPROBS[1:]], None), "6 echoed tokens"),
        (echoed(PIECES[1:], [None, *LOGPROBS[2:]], (3, 1)), "counts 3 tokens in a prompt of 4"),
        (echoed(PIECES[1:], [None, *LOGPROBS[2:]], None), "4 echoed tokens and 4 logprobs for a prompt of 4"),
        (echoed(PIECES[1:], LOGPROBS[1:]), r"null at positions \[\] of the prompt"),
        (echoed(PIECES, [None, None, -2.0, -3.0, -4.0]), r"null at positions \[0, 1\]"),
        (echoed(PIECES[1:], LOGPROBS), "4 echoed tokens and 5 logprobs"),
    ],
)
def test_a_text_echo_shifted_by_one_token_is_refused(body: bytes, message: str) -> None:
    """Its numbers look valid, and the echoed text does not show to which token a number belongs."""
    with pytest.raises(ValueError, match=message):
        from_echo(body, ECHOED)
