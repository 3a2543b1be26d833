"""Alignment of two tokenizations of one completion by bytes, and the teacher's scores at the student's tokens."""

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from other_tokenizers import byte_level, pieces_of_text, sentencepiece, word_pieces

from understudy.errors import DataError, TeacherError
from understudy.teacher.alignment import TokenAligner, TurnEnds, sampled_of
from understudy.teacher.token_bytes import TokenBytes
from understudy.types.scores import NO_CANDIDATE, ScoreItem, Signal, TeacherScores
from understudy.types.usable_ids import UsableIds

TEXTS = ["hello world", "the café is open", "naïve 你好 🙂 end", "a  b\n\tc"]


@cache
def _known(definition: str) -> TokenBytes:
    return TokenBytes(definition, "teachers.t")


def tokens_of(tokenizer: Any) -> TokenBytes:
    return _known(tokenizer.to_str())


def aligner(student: Any, teacher: Any, **more: Any) -> TokenAligner:
    ends = TurnEnds(
        [student.token_to_id("<eos>")], student.token_to_id("<eos>"), teacher.token_to_id("<eos>")
    )
    return TokenAligner(tokens_of(student), tokens_of(teacher), ends, **more)


FINE, COARSE = byte_level([]), byte_level(["hello", " world", "he", "llo", " wor", "ld", "café"])
PIECES = sentencepiece(["hello", "\u2581world", "\u2581", "he", "llo", "h", "e", "l", "o", "w", "r", "d"])


@pytest.mark.parametrize("tokenizer", [FINE, COARSE, PIECES], ids=["bytes", "byte-level", "sentencepiece"])
@pytest.mark.parametrize("text", TEXTS)
def test_token_bytes_join_to_the_encoded_text(tokenizer: Any, text: str) -> None:
    known = tokens_of(tokenizer)
    ids = known.encode(text)
    assert b"".join(known.bytes_of(ids)) == text.encode()
    by_bytes = known.by_bytes()
    assert all(by_bytes[piece] == number for number, piece in zip(ids, known.bytes_of(ids), strict=True))


def test_sentencepiece_text_is_encoded_without_the_leading_space_prefix() -> None:
    known = tokens_of(PIECES)
    assert PIECES.encode("hello", add_special_tokens=False).tokens == ["\u2581", "hello"]
    assert known.bytes_of(known.encode("hello")) == [b"hello"]
    assert known.bytes_of(known.encode(" hello")) == [b" ", b"hello"]
    assert known.bytes_of(known.encode("é")) == [b"\xc3", b"\xa9"]


def test_a_special_tokens_name_inside_text_is_encoded_as_text() -> None:
    known = tokens_of(COARSE)
    ids = known.encode("a<eos>b")
    assert b"".join(known.bytes_of(ids)) == b"a<eos>b" and not known.special.keys() & set(ids)


def test_a_tokenizer_that_drops_spaces_is_refused() -> None:
    with pytest.raises(TeacherError, match=r"teachers.t: .* needs tokens that are pieces of the text"):
        tokens_of(word_pieces(["a", "1", "b", "c"]))
    assert tokens_of(pieces_of_text("abc12")).encode("a1") == [3, 6]


def ids(known: Any, *texts: str) -> np.ndarray:
    """The ids of the tokens with these texts."""
    named = known.by_bytes()
    return np.array([named[one.encode()] for one in texts], np.int32)


def test_a_completion_is_aligned_in_chunks_at_common_byte_boundaries() -> None:
    """The example drawn in the module: chunks of several tokens, of one token each, and the end of the turn."""
    student = byte_level(["hel", "lo", " wor", "ld"])
    ours, found = tokens_of(student), aligner(student, COARSE)
    eos = student.token_to_id("<eos>")
    completion = np.append(ids(ours, "hel", "lo", " wor", "ld", "!"), eos)
    one = found.align(completion)
    theirs = tokens_of(COARSE)
    assert theirs.bytes_of(one.tokens.tolist()) == [b"hello", b" world", b"!", b""]
    assert one.tokens[-1] == COARSE.token_to_id("<eos>")
    assert one.bounds.tolist() == [[0, 0], [2, 1], [4, 2], [5, 3], [6, 4]]
    assert one.counts == (2, 4, 0)


def test_tokens_of_one_character_form_one_chunk_and_an_unfinished_character_is_left_out() -> None:
    found = aligner(FINE, PIECES)
    ours = tokens_of(FINE)
    whole = found.align(np.array(ours.encode("hé"), np.int32))
    assert whole.counts == (3, 0, 0), "both tokenizers have one token for each of the two bytes of é"
    coarse = aligner(FINE, COARSE)
    chained = coarse.align(np.array(ours.encode("café!"), np.int32))
    assert chained.bounds.tolist() == [[0, 0], [5, 1], [6, 2]] and chained.counts == (1, 5, 0)
    for text, kept in (("ab🙂", 2), ("🙂", 0)):
        cut = np.array(ours.encode(text)[:-1], np.int32)
        if not kept:
            with pytest.raises(DataError, match="row r: no token of it ends where"):
                coarse.align(cut, "r")
            continue
        one = coarse.align(cut)
        assert one.counts == (kept, 0, 3) and len(one.tokens) == kept


def test_tokens_after_invalid_utf8_are_left_out_including_the_end_of_the_turn() -> None:
    ours = tokens_of(FINE)
    broken = [*ours.encode("ab"), *ours.encode("é")[:1], *ours.encode("cd"), FINE.token_to_id("<eos>")]
    one = aligner(FINE, COARSE).align(np.array(broken, np.int32))
    assert one.counts == (2, 0, 4) and len(one.tokens) == 2


def test_text_that_the_teacher_cannot_encode_is_left_out_with_what_follows() -> None:
    """One teacher has no byte fallback; the other, SentencePiece, reads its space mark as a space."""
    letters = pieces_of_text("ab")
    ours = tokens_of(FINE)
    one = aligner(FINE, letters).align(np.array(ours.encode("abxab"), np.int32))
    assert one.counts == (2, 0, 3) and len(one.tokens) == 2
    marked = aligner(FINE, PIECES).align(np.array(ours.encode("he\u2581he"), np.int32))
    assert marked.counts == (0, 2, 5)


def test_special_tokens_are_aligned_by_name_and_refused_if_the_teacher_lacks_them() -> None:
    student = byte_level(["hel"], special=("<eos>", "<think>", "<x>"))
    teacher = byte_level([], special=("<think>", "<eos>"))
    found, ours = aligner(student, teacher), tokens_of(student)
    think, strange, eos = (student.token_to_id(name) for name in ("<think>", "<x>", "<eos>"))
    one = found.align(np.array([think, *ours.encode("hel"), eos], np.int32))
    assert one.tokens.tolist()[0] == teacher.token_to_id("<think>")
    assert one.bounds.tolist() == [[0, 0], [1, 1], [2, 4], [3, 5]] and one.counts == (2, 1, 0)
    with pytest.raises(DataError, match=r"row r holds the special token '<x>', which its teacher lacks"):
        found.align(np.array([*ours.encode("a"), strange, *ours.encode("b")], np.int32), "r")
    middle = found.align(np.array([eos, *ours.encode("b")], np.int32))
    assert middle.tokens.tolist()[0] == teacher.token_to_id("<eos>"), (
        "inside a completion it is aligned by name, not as the end of the turn"
    )


def test_every_end_of_turn_token_of_the_student_maps_to_the_teachers() -> None:
    student = byte_level([], special=("<eos>", "<end>"))
    teacher = byte_level([], special=("<stop>",))
    ends = TurnEnds(
        [student.token_to_id("<eos>"), student.token_to_id("<end>")],
        student.token_to_id("<end>"),
        teacher.token_to_id("<stop>"),
    )
    found = TokenAligner(tokens_of(student), tokens_of(teacher), ends)
    for name in ("<eos>", "<end>"):
        one = found.align(np.array([student.token_to_id(name)], np.int32))
        assert one.tokens.tolist() == [teacher.token_to_id("<stop>")] and one.counts == (1, 0, 0)


@given(st.text(max_size=12), st.integers(0, 3))
def test_aligned_chunks_hold_the_same_bytes_for_student_and_teacher(text: str, drop: int) -> None:
    """For any text and any truncation; the counts add up to the completion's length."""
    for student, teacher in ((FINE, COARSE), (COARSE, FINE), (COARSE, PIECES), (PIECES, COARSE)):
        ours, theirs, between = tokens_of(student), tokens_of(teacher), aligner(student, teacher)
        completion = ours.encode(text)
        completion = completion[: len(completion) - drop]
        try:
            one = between.align(np.array(completion, np.int32))
        except DataError:
            continue
        assert sum(one.counts) == len(completion)
        for (a, b), (c, d) in zip(one.bounds, one.bounds[1:], strict=False):
            written = b"".join(ours.bytes_of(completion[a:c]))
            assert written == b"".join(theirs.bytes_of(one.tokens[b:d].tolist())) != b""
        assert one.bounds[-1, 1] == len(one.tokens)


def reply_of(count: int, **more: Any) -> TeacherScores:
    return TeacherScores("r", "t", Signal.TOPK, np.linspace(-0.5, -2, count, dtype=np.float32), **more)


def test_each_token_of_a_chunk_gets_the_logprob_difference_of_the_whole_chunk() -> None:
    student = byte_level(["hel", "lo", " wor", "ld"])
    completion = ids(tokens_of(student), "hel", "lo", " wor", "ld", "!")
    one = aligner(student, COARSE).align(completion)
    behaviour = np.array([-0.3, -1.2, -0.1, -2.5, -0.7], np.float32)
    logprobs = np.array([-0.5, -4.0, -0.25], np.float32)
    found = sampled_of(logprobs, one, behaviour)
    gap = behaviour - found
    expected = [behaviour[:2].sum() - logprobs[0]] * 2 + [behaviour[2:4].sum() - logprobs[1]] * 2
    assert np.allclose(gap[:4], expected, atol=1e-6)
    assert found[4] == logprobs[2], "a chunk of one token each must keep the teacher's number to the bit"
    without_behaviour = sampled_of(logprobs, one, np.full(5, np.nan, np.float32))
    assert np.allclose(without_behaviour, [-0.25, -0.25, -2.0, -2.0, -0.25])


def test_a_token_left_out_of_the_alignment_gets_its_own_behaviour_logprob() -> None:
    ours = tokens_of(FINE)
    one = aligner(FINE, COARSE).align(np.array(ours.encode("ab🙂")[:-1], np.int32))
    behaviour = np.array([-1.0, -2.0, -3.0, -4.0, -5.0], np.float32)
    found = sampled_of(np.array([-0.5, -0.6], np.float32), one, behaviour)
    assert found.tolist() == np.array([-0.5, -0.6, -3.0, -4.0, -5.0], np.float32).tolist()


def test_teacher_candidates_map_to_the_student_token_with_the_same_or_the_first_bytes() -> None:
    student = byte_level(["hel", "lo", "he"])
    ours, theirs = tokens_of(student), tokens_of(COARSE)
    found = aligner(student, COARSE)
    eos, their_eos = student.token_to_id("<eos>"), COARSE.token_to_id("<eos>")
    completion = np.append(ids(ours, "hel", "lo", "!"), eos)
    one = found.align(completion)
    assert one.bounds.tolist() == [[0, 0], [2, 1], [3, 2], [4, 3]]
    best = np.stack(
        [
            ids(theirs, "hello", "he", "a"),
            ids(theirs, "b", "!", "llo"),
            np.array([their_eos, *ids(theirs, "!", "c")]),
        ]
    ).astype(np.int32)
    logprobs = np.array([[-0.1, -2.0, -3.0]] * 3, np.float32)
    scores = found.scores(reply_of(3, ids=best, logprobs=logprobs), one, np.full(4, -1.0, np.float32))
    assert scores.ids is not None and scores.logprobs is not None and scores.aligned == (2, 2, 0)
    used = scores.logprobs > NO_CANDIDATE / 2
    assert used.tolist() == [[True] * 3, [False] * 3, [True] * 3, [True] * 3]
    assert scores.ids[0].tolist() == ids(ours, "hel", "he", "a").tolist(), (
        "`hello` must map to its first token `hel`"
    )
    assert scores.ids[2].tolist() == ids(ours, "b", "!", "l").tolist()
    assert scores.logprobs[0].tolist() == logprobs[0].tolist(), (
        "the teacher's numbers must be kept to the bit"
    )
    assert scores.ids[3].tolist() == [eos, *ids(ours, "!", "c").tolist()]
    assert all(len(set(row)) == 3 and min(row) >= 0 for row in scores.ids.tolist())
    request = found.request(ScoreItem("r", completion, np.arange(4), Signal.TOPK, 3), np.array([7, 8]), one)
    assert request.tokens.tolist() == [7, 8, *one.tokens.tolist()] and request.positions.tolist() == [2, 3, 4]


def test_candidates_that_map_to_one_student_token_are_merged_with_summed_probability() -> None:
    """The student has single bytes: `hello`, `he` and `h` map to `h`, and `b` was likelier than each of them."""
    ours, theirs = tokens_of(FINE), tokens_of(COARSE)
    found = aligner(FINE, COARSE)
    one = found.align(ids(ours, "h"))
    best = ids(theirs, "b", "hello", "he", "h", "llo")[None].astype(np.int32)
    mass = np.array([[0.3, 0.2, 0.15, 0.1, 0.05]])
    scores = found.scores(
        reply_of(1, ids=best, logprobs=np.log(mass).astype(np.float32)), one, np.full(1, -1.0)
    )
    assert scores.ids is not None and scores.logprobs is not None
    assert scores.ids[0, :3].tolist() == ids(ours, "h", "b", "l").tolist()
    assert np.allclose(np.exp(scores.logprobs[0, :3]), [0.45, 0.3, 0.05], atol=1e-6)
    assert (scores.logprobs[0, 3:] == np.float32(NO_CANDIDATE)).all() and len(
        set(scores.ids[0].tolist())
    ) == 5


def test_unusable_ids_are_excluded_from_the_shared_tokens() -> None:
    first = min(tokens_of(FINE).pieces)
    every, fewer = aligner(FINE, COARSE), aligner(FINE, COARSE, usable=UsableIds(300, (first,)))
    assert every.shared - fewer.shared == 1


def test_a_folder_without_a_readable_tokenizer_is_refused(tmp_path: Any) -> None:
    with pytest.raises(
        TeacherError, match=r"teachers.t: vocabulary = 'align' reads tokens as bytes from .*json"
    ):
        TokenBytes.load(tmp_path, "teachers.t")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 1}))
    with pytest.raises(TeacherError, match="cannot be read"):
        TokenBytes.load(tmp_path, "teachers.t")
