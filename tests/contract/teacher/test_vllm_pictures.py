"""A real vLLM as a teacher of rows with pictures: its scores equal those of a plain transformers forward.

UNDERSTUDY_VLLM_PYTHON names the Python that can import vllm, and torchvision, without which vLLM reads no pictures.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from real_servers import serving, vllm_python
from transformers import AutoModelForImageTextToText, AutoTokenizer
from vision_models import make_model, picture, plain_inputs, reader_of

from understudy.engines.servers.vllm_servers import picture_options
from understudy.errors import TeacherError
from understudy.media.processor import QWEN, PictureReader
from understudy.media.store import MediaStore
from understudy.teacher.clients.completions import CompletionsClient
from understudy.teacher.manifest import Manifest
from understudy.teacher.pool.integrity import identify
from understudy.types.references import ScoresRef
from understudy.types.scores import ScoreItem, Signal, TeacherScores

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
K = 4
ATOL = 2e-4
"""Tolerance for vLLM's float32 kernels on a CPU. Differences of 6e-6 were measured."""
PICTURES = {
    "red": picture("red", (48, 32)),
    "blue": picture("blue", (48, 32), (5, 5)),
    "tall": picture("green", (32, 96), (9, 9)),
    "odd": picture("yellow", (50, 37), (20, 9)),
}
"""The last one has to be resized."""
ROWS = (("red",), ("blue",), (), ("tall", "red"), ("red", "tall"), ("red",), ("odd",))


class Served:
    """A vLLM server, the model that it serves, and a store with the pictures."""

    def __init__(self, url: str, folder: Path, store: MediaStore) -> None:
        self.url, self.folder, self.store = url, folder, store
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def client(self, reader: PictureReader | None = None) -> CompletionsClient:
        reader = reader or reader_of(self.folder, self.store)
        return CompletionsClient(
            self.url, teacher="see", replica="a", vocab_size=len(self.tokenizer), k=K, pictures=reader
        )

    def item(self, key: str, shown: tuple[str, ...]) -> ScoreItem:
        reader = reader_of(self.folder, self.store)
        names = tuple(self.store.put(PICTURES[one]) for one in shown)
        around = "<|vision_start|>{}<|vision_end|>" if reader.processor.family in QWEN else "{}"
        parts = [around.format(reader.processor.text_of(reader.size(n))) for n in names]
        asked, answer = (
            self.tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (f"look: {' then '.join(parts)}?", "an answer")
        )
        positions = np.arange(len(asked), len(asked) + len(answer), dtype=np.int32)
        return ScoreItem(key, np.array(asked + answer, np.int32), positions, Signal.TOPK, K, media=names)

    def check(self, item: ScoreItem, shown: tuple[str, ...], scores: TeacherScores) -> None:
        model = AutoModelForImageTextToText.from_pretrained(self.folder).eval()
        with torch.no_grad():
            given = plain_inputs(self.folder, item.tokens, [PICTURES[one] for one in shown])
            plain = model(**given, use_cache=False).logits[0].float().log_softmax(-1).numpy()
        plain = plain[item.positions - 1]
        own = np.take_along_axis(plain, item.tokens[item.positions][:, None], 1)[:, 0]
        np.testing.assert_allclose(scores.sampled_logprobs, own, atol=ATOL)
        hidden = list(reader_of(self.folder, self.store).processor.placeholder_ids)
        plain[:, hidden] = -np.inf
        assert scores.ids is not None and scores.logprobs is not None
        assert not np.isin(scores.ids, hidden).any(), "a picture placeholder is a candidate"
        np.testing.assert_allclose(scores.logprobs, np.sort(plain, 1)[:, ::-1][:, :K], atol=ATOL)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm"])
def vllm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    python = vllm_python()
    needed = "torchvision, num2words" if request.param == "smolvlm" else "torchvision"
    if subprocess.run([python, "-c", f"import {needed}"], capture_output=True, check=False).returncode:
        pytest.skip(f"{python} has no {needed}, without which vLLM reads no pictures of {request.param}")
    place = tmp_path_factory.mktemp(request.param)
    # A head size that vLLM's CPU attention supports.
    folder = make_model(place / "model", request.param, hidden=128, heads=(2, 1))
    options = ["--max-logprobs", "8", "--enable-scale-out", "--enable-prefix-caching"]
    options = picture_options(options, request.param)
    with serving(folder, place / "log.txt", options, {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}) as url:
        yield Served(url, folder, MediaStore(place / "media"))


async def scored(client: CompletionsClient, items: list[ScoreItem]) -> list[TeacherScores]:
    found: list[ScoresRef] = list(await client.score(items))
    return [await one.fetch() for one in found]


def test_scores_equal_a_plain_forward_and_pictures_are_not_mixed(vllm: Served) -> None:
    """Rows with equal ids and different pictures, together and one by one, with the prefix cache on."""
    items = [vllm.item(f"row-{i}", shown) for i, shown in enumerate(ROWS)]
    assert np.array_equal(items[0].tokens, items[1].tokens) and items[0].media != items[1].media

    async def run() -> list[list[TeacherScores]]:
        client = vllm.client()
        together = await scored(client, items)
        alone = [(await scored(client, [item]))[0] for item in items[::-1]][::-1]
        await client.close()
        return [together, alone]

    for found in asyncio.run(run()):
        for item, shown, scores in zip(items, ROWS, found, strict=True):
            vllm.check(item, shown, scores)
        assert np.abs(found[0].sampled_logprobs - found[1].sampled_logprobs).max() > 1e-3


def test_the_manifest_of_a_vllm_vision_teacher_reports_its_picture_patching(vllm: Served) -> None:
    async def run() -> Manifest:
        client = vllm.client()
        found = (await identify(client)).manifest
        await client.close()
        return found

    manifest = asyncio.run(run())
    assert manifest.backend == "vllm" and manifest.pictures is not None and manifest.limits.max_k == K
    assert manifest.pictures.patching == reader_of(vllm.folder, vllm.store).processor.patching


def test_a_vllm_server_that_gives_pictures_another_number_of_tokens_is_refused(vllm: Served) -> None:
    reader = reader_of(vllm.folder, vllm.store)
    if reader.processor.family in QWEN:
        # Larger pictures than the server takes, which it would shrink. It takes smaller ones unchanged.
        reader.processor.image_processor.size = {"shortest_edge": 8192, "longest_edge": 16384}
    reader.processor.tile_tokens = 5

    async def run() -> None:
        client = vllm.client(reader)
        try:
            await client.manifest()
        finally:
            await client.close()

    with pytest.raises(TeacherError, match=r"read \d+ ids for a row with pictures, which has \d+"):
        asyncio.run(run())
