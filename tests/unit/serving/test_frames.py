"""Frames between our processes: values are unchanged by encoding and decoding, and damage is refused with a reason."""

import asyncio
import socket
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from understudy.engines.base import Generation, Sampling
from understudy.engines.hosted.messages import MessageError, decode_answer, decode_call, encode_answer
from understudy.policy.ranks.wire import pack, unpack
from understudy.rollout.workers import messages as workers
from understudy.serving.frames import MAGIC, PREFIX, Decoder, FrameError, encode, read
from understudy.types.prompt import Prompt
from understudy.types.trajectory import StopReason, Trajectory
from understudy.types.usable_ids import UsableIds

ANYTHING: Decoder[Any] = Decoder(Any)
DTYPES = ("?", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8")


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 2), (0, 4), (2, 3, 2)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_type_and_shape_are_unchanged_after_encoding_and_decoding(
    dtype: str, shape: tuple[int, ...]
) -> None:
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    between = {"before": np.arange(3, dtype=np.int8), "it": [array], "after": np.arange(2.0)}
    back = ANYTHING.decode(encode(between))
    assert back["it"][0].dtype == array.dtype and back["it"][0].shape == array.shape
    np.testing.assert_array_equal(back["it"][0], array)
    np.testing.assert_array_equal(back["before"], [0, 1, 2])
    np.testing.assert_array_equal(back["after"], [0.0, 1.0])


def test_strided_and_big_endian_arrays_keep_their_values() -> None:
    grid = np.arange(12, dtype=">i4").reshape(3, 4)
    back = ANYTHING.decode(encode([grid.T, grid[::2, 1:]]))
    np.testing.assert_array_equal(back[0], grid.T)
    np.testing.assert_array_equal(back[1], grid[::2, 1:])


def test_decoded_arrays_are_aligned_views_of_the_frame() -> None:
    frame = bytearray(encode({"odd": np.ones(3, bool), "ids": np.arange(4)}))
    back = ANYTHING.decode(frame)
    assert back["ids"].flags.aligned and not back["ids"].flags.owndata
    back["ids"][0] = 7
    assert ANYTHING.decode(frame)["ids"][0] == 7
    assert not ANYTHING.decode(bytes(frame))["ids"].flags.writeable


def test_encoding_refuses_objects_that_a_frame_cannot_hold() -> None:
    for value in (object(), np.array(["text"]), np.array([object()])):
        with pytest.raises(TypeError, match="a frame cannot hold"):
            encode({"x": value})
    assert ANYTHING.decode(encode({"x": 3j}, other=repr)) == {"x": "3j"}
    assert ANYTHING.decode(encode([np.float32(0.5), np.int64(3), np.bool_(True)])) == [0.5, 3, True]


def test_integers_of_any_size_are_unchanged_after_encoding_and_decoding() -> None:
    """JSON has integers of any size, so a column of a dataset may. msgpack has 64 bits at most."""
    wide = [1 << 64, -(1 << 63) - 1, 1 << 200, -(1 << 200), 10**400, (1 << 64) - 1, -(1 << 63), 0, True]
    columns = {"answer": wide[0], "nested": {"all": wide, "raw": b"\0", "half": np.float32(0.5)}}
    prompt = Prompt("00000-0000017", 17, 0, "add", text="…", columns=columns)
    sampling = Sampling(4, (1,), usable=UsableIds(9, (3,)))
    begin = workers.Begin(3, prompt, 0, sampling, 64)
    back = Decoder[workers.ToWorker](workers.ToWorker).decode(workers.frame(begin))
    assert isinstance(back, workers.Begin) and back.prompt.columns == columns and back.sampling == sampling
    assert [type(one) for one in back.prompt.columns["nested"]["all"]] == [type(one) for one in wide]
    mixed = ANYTHING.decode(encode({"before": np.arange(3), "wide": 1 << 99, "after": np.ones(2)}))
    np.testing.assert_array_equal(mixed["before"], [0, 1, 2])
    np.testing.assert_array_equal(mixed["after"], [1.0, 1.0])
    assert mixed["wide"] == 1 << 99


def test_damaged_generation_frames_raise_message_error() -> None:
    good = encode_answer(3, [Generation(*_streams(5), StopReason.EOS)])
    bad = [b"", b"x", good[:-1], good + b"\0", MAGIC + b"\xff" * 40, b"ABCD" + good[4:]]
    bad += [PREFIX.pack(MAGIC, 1 << 31, 0) + good[PREFIX.size :], good.replace(b"<i4", b"<x4")]
    bad += [good.replace(b"eos", b"EOS"), encode({"version": 1}), encode({"version": 1, "generations": [3]})]
    short = Generation(*_streams(5), StopReason.EOS)
    object.__setattr__(short, "logprobs", short.logprobs[:4])
    for frame in (*bad, encode({"version": 1, "generations": [short]})):
        with pytest.raises(MessageError):
            decode_answer(frame, 1)
    with pytest.raises(MessageError, match="1 generations came for 2 requests"):
        decode_answer(good, 2)


def test_decoding_randomly_damaged_frames_raises_only_frame_error() -> None:
    sound = encode({"a": np.arange(5), "b": [np.ones((2, 3), np.float32), "text"], "c": {"d": None}})
    rng = np.random.default_rng(0)
    for _ in range(3000):
        frame = bytearray(sound)
        for place in rng.integers(0, len(frame), rng.integers(1, 5)):
            frame[place] = rng.integers(256)
        try:
            ANYTHING.decode(frame)
        except FrameError as error:
            assert str(error)


def test_a_call_with_tokens_of_another_type_is_refused() -> None:
    request = ["k", "", 0, 0, np.zeros(3)]
    call = {"call": 1, "samplings": [Sampling(4)], "requests": [request]}
    with pytest.raises(MessageError, match="expected int32"):
        decode_call(encode(call))


def test_frames_are_read_from_a_stream_one_by_one_up_to_a_size_limit() -> None:
    first, second = encode({"a": np.arange(3)}), encode("b")

    async def body() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(first + second + first[:20])
        reader.feed_eof()
        assert await read(reader, 1000) == first
        assert await read(reader, 1000) == second
        assert await read(reader, 1000) is None, "the stream ends in the middle of a frame"
        large = asyncio.StreamReader()
        large.feed_data(PREFIX.pack(MAGIC, 8, 1 << 40))
        with pytest.raises(FrameError, match="at most 4096 are read"):
            await read(large, 4096)

    asyncio.run(body())


def test_a_broken_pipe_of_the_writer_is_read_as_the_end_of_the_stream() -> None:
    """A worker is killed while the trainer writes to it: the reader then raises the writer's EPIPE, not EOF."""

    async def body() -> None:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        theirs.close()
        writer.write(b"a message")
        assert await read(reader, 100) is None
        assert isinstance(reader.exception(), BrokenPipeError)
        writer.close()

    asyncio.run(body())


def test_messages_of_a_rollout_worker_keep_generations_and_trajectories_with_any_metric() -> None:
    generation = Generation(*_streams(4), StopReason.LENGTH, np.arange(8, dtype=np.int32).reshape(4, 2))
    sampling = Sampling(4, (2,), usable=UsableIds(9, (3,)))
    trajectory = Trajectory(
        "k", np.arange(4), np.ones(4, bool), np.zeros(4), np.zeros(4, np.int32), StopReason.EOS,
        metrics={"score": np.float64(0.5), "who": 3j}, candidate_ids=generation.candidate_ids,
    )  # fmt: skip

    async def body() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(workers.frame(workers.Generated(1, 2, generation)))
        message = await workers.read_from_run(reader)
        assert isinstance(message, workers.Generated)
        assert message.generation.stop_reason is StopReason.LENGTH
        assert message.generation.candidate_ids.tolist() == generation.candidate_ids.tolist()  # type: ignore[union-attr]
        message.generation.logprobs[0] = 1.0  # agent loops may write into their arrays
        reader.feed_data(workers.frame(workers.GenerateCall(1, 2, generation.tokens, sampling, 0)))
        asked = await workers.read_from_worker(reader)
        assert (
            asked is not None and isinstance(asked[0], workers.GenerateCall) and asked[0].sampling == sampling
        )
        frame = workers.frame(workers.Done(1, [workers.pack_output(trajectory)]))
        reader.feed_data(frame)
        done, size = await workers.read_from_worker(reader) or (None, 0)
        assert isinstance(done, workers.Done) and size == len(frame)
        back = workers.unpack_output(*done.outputs[0])
        assert isinstance(back, Trajectory)
        assert back.tokens.dtype == np.int32 and back.behaviour_logprobs.dtype == np.float32
        assert back.metrics == {"score": 0.5, "who": "3j"} and back.candidates == 2

    asyncio.run(body())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.bool])
def test_tensors_of_every_type_keep_their_bits(dtype: torch.dtype) -> None:
    tensors = {"w": torch.arange(6.0).view(2, 3).to(dtype), "one": torch.tensor(1.0).to(dtype)}
    head, back = unpack(pack({"do": "take", "nan": float("nan")}, tensors))
    assert head["do"] == "take" and head["nan"] != head["nan"]
    for name, tensor in tensors.items():
        assert back[name].dtype == dtype and back[name].shape == tensor.shape
        assert torch.equal(back[name].float(), tensor.float())


def test_a_frame_with_an_invalid_header_or_array_is_refused_with_the_reason() -> None:
    with pytest.raises(FrameError, match="cannot be read"):
        Decoder(workers.Hello).decode(PREFIX.pack(MAGIC, 8, 0) + b"\xff" * 8)
    with pytest.raises(FrameError, match="describes no array"):
        ANYTHING.decode(encode(msgspec.msgpack.Ext(1, b"short")))
    with pytest.raises(FrameError, match="describes no array"):
        ANYTHING.decode(encode(msgspec.msgpack.Ext(9, b"short")))


def _streams(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids = np.arange(size, dtype=np.int32)
    return ids, np.zeros(size, np.float32), ids
