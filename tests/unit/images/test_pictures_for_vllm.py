"""Rows with pictures as sent to vLLM: one placeholder per picture, pixels as the student has them, ids compared."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_remote import Server, complete_answer, run
from vision_models import folder_of, picture, reader_of

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.engines.servers.continuation import RefusedError
from understudy.engines.servers.engine import RemoteEngine
from understudy.errors import DataError
from understudy.media.processor import PictureReader
from understudy.media.store import MediaStore

SIZES = ((48, 32), (50, 37), (20, 9), (300, 200), (3, 300), (1024, 8))


@pytest.fixture
def reader(tmp_path: Path) -> PictureReader:
    return reader_of(folder_of("qwen3_vl"), MediaStore(tmp_path / "media"))


@pytest.mark.parametrize("size", SIZES)
def test_a_picture_is_sent_to_vllm_in_the_size_in_which_it_is_cut_into_patches(
    reader: PictureReader, size: tuple[int, int]
) -> None:
    """So a server that resizes differently has nothing to resize, and gets the same pixels."""
    noise = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), np.uint8)
    data = _png(noise)
    sent = base64.b64decode(reader.url(reader.store.put(data)).partition(",")[2])
    own, theirs = reader.processor.process(data), reader.processor.process(sent)
    assert all(np.array_equal(own[name], theirs[name]) for name in own)
    if size == (48, 32):
        assert sent == data, "a picture of that size is sent unchanged"


def test_the_engine_sends_vllm_one_placeholder_per_picture_and_compares_the_ids_it_read(
    reader: PictureReader,
) -> None:
    request = _request(reader)

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        """Two tokens and an abort, as in a pause; then the rest."""
        drawn = body["token_ids"][4:]
        body["sampling_params"]["max_tokens"] = 2
        reason = "length" if drawn else "abort"
        return {
            **complete_answer(body, finish_reason=reason),
            "prompt_token_ids": [*request.tokens.tolist(), *drawn],
        }

    server = Server(answer)

    async def body(engine: RemoteEngine) -> list[Generation]:
        return await engine.generate([request])

    (generation,) = run([server], body, pictures=reader)
    pad, (one, two) = reader.processor.image_token_id, server.bodies
    assert generation.tokens.tolist() == [7] * 4
    assert one["token_ids"] == [50, pad, 51, pad] and two["token_ids"] == [50, pad, 51, pad, 7, 7]
    urls = [{"type": "image_url", "url": reader.url(name)} for name in request.media]
    assert one["content_parts"] == two["content_parts"] == urls and one["return_token_ids"]


@pytest.mark.parametrize(
    ("read", "message"), [([50, 51], "the server read 2 ids"), (None, "the server does not say which ids")]
)
def test_a_row_fails_if_the_server_read_other_ids_or_does_not_say_which(
    reader: PictureReader, read: Any, message: str
) -> None:
    server = Server(lambda body: {**complete_answer(body), "prompt_token_ids": read})

    async def body(engine: RemoteEngine) -> None:
        with pytest.raises(DataError, match=f"row seen: {message}"):
            await engine.generate([_request(reader)])
        assert len(server.bodies) == 1, "the request is not repeated"

    run([server], body, pictures=reader)


def test_a_remote_engine_without_a_picture_reader_refuses_pictures(reader: PictureReader) -> None:
    async def body(engine: RemoteEngine) -> None:
        with pytest.raises(RefusedError, match="has pictures"):
            await engine.generate([_request(reader)])

    run([Server()], body)


def test_new_weights_reset_the_encoder_cache_of_a_server_that_reads_pictures(reader: PictureReader) -> None:
    """vLLM's worker drops them when it loads weights; its scheduler would believe that they are still there."""
    for pictures in (reader, None):
        server = Server()
        run([server], lambda engine: engine.update_weights(1, [("a", torch.zeros(1))]), pictures=pictures)
        assert ("/reset_encoder_cache" in server.calls) == (pictures is not None)
        assert "/reset_prefix_cache" in server.calls


def _request(reader: PictureReader) -> GenerateRequest:
    names = tuple(reader.store.put(picture(colour, (48, 32))) for colour in ("red", "blue"))
    pad = [reader.processor.image_token_id] * reader.count(names[0])
    return GenerateRequest("seen", np.array([50, *pad, 51, *pad], np.int32), Sampling(4), 11, media=names)


def _png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()
