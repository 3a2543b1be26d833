"""The teacher's binary protocol: frames survive a round trip, and invalid or damaged frames are refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from teacher_rig import random_items

from understudy.errors import TeacherError
from understudy.teacher import protocol
from understudy.teacher.head_frame import WireHead, decode_head, encode_head
from understudy.teacher.protocol import (
    ProtocolError,
    ScoreReply,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
    request_of,
)
from understudy.types.scores import ScoreItem, Signal


def mixed_items() -> list[ScoreItem]:
    return (
        random_items(2, 1, Signal.SAMPLED)
        + random_items(2, 2, Signal.TOPK, 4)
        + random_items(1, 3, Signal.AT_IDS, 3)
        + random_items(1, 4, Signal.HIDDEN)
        + random_items(1, 5, Signal.TOPK, 7)
    )


def reply_to(items: list[ScoreItem], hidden_size: int = 6) -> ScoreReply:
    request = request_of(items)
    rng = np.random.default_rng(0)
    counts = request.position_counts_N.tolist()
    candidates = sum(n * k for n, k in zip(counts, request.k_N, strict=True))
    states = sum(n for n, signal in zip(counts, request.signals, strict=True) if signal is Signal.HIDDEN)
    return ScoreReply(
        "math",
        request.keys,
        request.signals,
        request.k_N,
        request.position_counts_N,
        request.digests_N,
        request.tokens_T[request.flat_positions_P],
        -rng.random(sum(counts)).astype(np.float32),
        rng.integers(0, 60, candidates).astype(np.int32),
        -rng.random(candidates).astype(np.float32),
        rng.integers(0, 2**15, states * hidden_size).astype(np.uint16),
        hidden_size,
    )


def test_a_score_request_survives_encoding_and_decoding() -> None:
    items = mixed_items()
    sent = request_of(items)
    got = decode_request(encode_request(sent))
    assert got.keys == [item.key for item in items]
    assert got.signals == [item.signal for item in items]
    assert got.k_N == [0, 0, 4, 4, 3, 0, 7]
    for item, start, count in zip(items, got.starts_N, got.token_counts_N, strict=True):
        np.testing.assert_array_equal(got.tokens_T[start : start + count], item.tokens)
    np.testing.assert_array_equal(got.positions_P, np.concatenate([item.positions for item in items]))
    np.testing.assert_array_equal(
        got.tokens_T[got.flat_positions_P], np.concatenate([i.tokens[i.positions] for i in items])
    )
    assert items[4].ids is not None
    np.testing.assert_array_equal(got.ids, items[4].ids.reshape(-1))


def test_a_decoded_reply_splits_into_the_scores_of_each_row() -> None:
    items = mixed_items()
    sent = reply_to(items)
    scores = decode_reply(encode_reply(sent)).split()
    assert [score.key for score in scores] == [item.key for item in items]
    at = at_ids = at_hidden = 0
    for item, score, k in zip(items, scores, sent.k_N, strict=True):
        count = len(item.positions)
        assert score.teacher == "math" and score.signal is item.signal
        np.testing.assert_array_equal(score.sampled_logprobs, sent.sampled_P[at : at + count])
        at += count
        if k:
            assert score.ids is not None and score.logprobs is not None
            assert score.ids.shape == score.logprobs.shape == (count, k)
            np.testing.assert_array_equal(score.ids.reshape(-1), sent.ids[at_ids : at_ids + count * k])
            np.testing.assert_array_equal(
                score.logprobs.reshape(-1), sent.logprobs[at_ids : at_ids + count * k]
            )
            at_ids += count * k
        else:
            assert score.ids is None and score.logprobs is None
        if item.signal is Signal.HIDDEN:
            assert score.hidden is not None and score.hidden.shape == (count, 6)
            np.testing.assert_array_equal(
                score.hidden.reshape(-1), sent.hidden[at_hidden : at_hidden + count * 6]
            )
            at_hidden += count * 6


def test_a_row_without_positions_is_encoded_and_scored_as_empty() -> None:
    nothing = ScoreItem("empty", np.arange(3, dtype=np.int32), np.empty(0, np.int32), Signal.TOPK, 2)
    request = decode_request(encode_request(request_of([nothing, *mixed_items()])))
    assert request.position_counts_N[0] == 0
    scores = decode_reply(encode_reply(reply_to([nothing, *mixed_items()]))).split()
    assert scores[0].ids is not None and scores[0].ids.shape == (0, 2)


@pytest.mark.parametrize("weight", [np.ones((5, 3), np.float32), np.ones((5, 3), np.float16)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_head_survives_encoding_and_decoding(weight: np.ndarray, bias: bool) -> None:
    head = WireHead(weight, weight[:, 0].copy() if bias else None, weight.dtype.name, 0.5, 30.0)
    got = decode_head(encode_head(head))
    np.testing.assert_array_equal(got.weight_VH, weight)
    assert (got.bias_V is not None) == bias
    assert (got.dtype, got.scale, got.softcap) == (weight.dtype.name, 0.5, 30.0)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([0, 1], "position 0"),
        ([2, 2], "position 2"),
        ([3, 2], "position 2"),
        ([4], "position 4"),
        ([-1], "position -1"),
    ],
)
def test_positions_that_cannot_be_scored_are_refused_with_row_and_position(
    positions: list[int], message: str
) -> None:
    item = ScoreItem("row-9", np.arange(4, dtype=np.int32), np.array(positions, np.int32), Signal.SAMPLED)
    with pytest.raises(TeacherError, match=f"row-9.*{message}"):
        request_of([item])


def test_items_with_an_invalid_k_or_ids_are_refused_with_the_row() -> None:
    tokens, positions = np.arange(4, dtype=np.int32), np.array([1, 2], np.int32)
    with pytest.raises(TeacherError, match=r"row-k.*k ≥ 1"):
        request_of([ScoreItem("row-k", tokens, positions, Signal.TOPK, 0)])
    with pytest.raises(TeacherError, match=r"row-i.*\[2, K\], got None"):
        request_of([ScoreItem("row-i", tokens, positions, Signal.AT_IDS)])
    with pytest.raises(TeacherError, match=r"row-i.*got \(3, 2\)"):
        request_of([ScoreItem("row-i", tokens, positions, Signal.AT_IDS, ids=np.zeros((3, 2), np.int32))])


def with_prefix(frame: bytes, **changes: int | bytes) -> bytes:
    names = ("magic", "version", "kind", "header", "reserved", "body")
    fields = dict(zip(names, protocol.PREFIX.unpack_from(frame), strict=True)) | changes
    return protocol.PREFIX.pack(*fields.values()) + frame[protocol.PREFIX.size :]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": b"HTTP"}, "starts with"),
        ({"version": 2}, "version 2"),
        ({"kind": 2}, "kind"),
        ({"reserved": 1}, "reserved"),
        ({"header": 2**32 - 8}, "header of"),
        ({"body": 2**63}, "promises"),
        ({"body": 4}, "promises"),
    ],
)
def test_a_frame_with_a_wrong_prefix_is_refused_with_the_reason(
    changes: dict[str, int | bytes], message: str
) -> None:
    frame = encode_request(request_of(mixed_items()))
    with pytest.raises(ProtocolError, match=message):
        decode_request(with_prefix(frame, **changes))


def forged(header: bytes, body: bytes = b"") -> bytes:
    header += b" " * (-len(header) % 8)
    return (
        protocol.PREFIX.pack(protocol.MAGIC, protocol.VERSION, 1, len(header), 0, len(body)) + header + body
    )


@pytest.mark.parametrize(
    ("header", "body", "message"),
    [
        (b"not json", b"", "unreadable"),
        (b"[" * 100_000, b"", "unreadable"),
        (b'{"keys":["a"],"signals":["sampled"],"k":[0],"more":1}', b"", "unreadable"),
        (b'{"keys":["a"],"signals":[],"k":[0]}', b"", "one of each"),
        (b'{"keys":["a"],"signals":["logits"],"k":[0]}', b"", "unknown signal 'logits'"),
        (b'{"keys":["a"],"signals":["topk"],"k":[0]}', b"", "k = 0"),
        (b'{"keys":["a"],"signals":["sampled"],"k":[5]}', b"", "k = 5"),
        (b'{"keys":["a"],"signals":["topk"],"k":[-1]}', b"", "k = -1"),
        (b'{"keys":["a"],"signals":["topk"],"k":[99999999999]}', b"", "k = 99999999999"),
        (b'{"keys":["a"],"signals":["sampled"],"k":[0]}', b"", "token counts"),
        (b'{"keys":["a"],"signals":["sampled"],"k":[0]}', b"\xff" * 8, "'tokens' needs 17179869180 bytes"),
        (b'{"keys":[],"signals":[],"k":[]}', b"\0" * 4, "left over"),
    ],
)
def test_a_frame_with_a_forged_header_or_body_is_refused_with_the_reason(
    header: bytes, body: bytes, message: str
) -> None:
    with pytest.raises(ProtocolError, match=message):
        decode_request(forged(header, body))


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_refused_by_every_teacher_frame_decoder(data: bytes) -> None:
    for decode in (decode_request, decode_reply, decode_head):
        with pytest.raises(ProtocolError):
            decode(data)


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_damaged_frames_are_refused_or_decode_to_consistent_counts(data: st.DataObject) -> None:
    """Flips, cuts, inserts and repeats bytes of valid frames: the decoder refuses, or its counts are consistent."""
    items = mixed_items()
    frame = data.draw(st.sampled_from([encode_request(request_of(items)), encode_reply(reply_to(items))]))
    damaged = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(damaged) - 1)))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "repeat", "header"])):
            case "flip":
                damaged[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
            case "cut":
                del damaged[at : at + data.draw(st.integers(1, 16))]
            case "insert":
                damaged[at:at] = data.draw(st.binary(min_size=1, max_size=8))
            case "repeat":
                damaged += damaged[at : at + 64]
            case "header":
                at = data.draw(st.integers(0, min(400, len(damaged))))
                damaged[at : at + 1] = data.draw(st.sampled_from([b"0", b"9", b"-", b'"', b"]", b"}", b","]))
    try:
        request = decode_request(bytes(damaged))
    except ProtocolError:
        pass
    else:
        assert len(request.tokens_T) == request.token_counts_N.sum()
        assert len(request.tokens_T[request.flat_positions_P]) == request.position_counts_N.sum()
    try:
        reply = decode_reply(bytes(damaged))
    except ProtocolError:
        pass
    else:
        assert len(reply.split()) == len(reply)
