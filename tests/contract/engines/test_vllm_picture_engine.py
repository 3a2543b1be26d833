"""A real vLLM as the engine of rows with pictures: log-probabilities equal those of a plain transformers forward.

UNDERSTUDY_VLLM_PYTHON names the Python that can import vllm, and torchvision, without which vLLM reads no pictures.
"""

from __future__ import annotations

import asyncio
import copy
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_contract import widening_pauses
from engines_under_contract import VLLM_PYTHON
from hosted_rig import RemoteProcesses
from transformers import AutoModelForImageTextToText, AutoTokenizer
from vision_models import make_model, picture, plain_inputs, reader_of

from understudy.cluster.local import LocalProcesses
from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.engines.servers.vllm import VLLMEngine, VLLMSettings, start_vllm
from understudy.engines.servers.vllm_servers import picture_options
from understudy.errors import DataError
from understudy.media.processor import QWEN, PictureReader
from understudy.media.store import MediaStore
from understudy.types.usable_ids import UsableIds

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
ATOL = 2e-4
"""Tolerance for vLLM's float32 kernels on a CPU."""
PICTURES = {
    "red": picture("red", (48, 32)),
    "blue": picture("blue", (48, 32), (5, 5)),
    "odd": picture("green", (50, 37), (9, 9)),
}
"""The last one has to be resized."""
ROWS = (("red",), ("blue",), (), ("odd", "red"), ("red", "odd"), ("red",))
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


class Rows:
    """Requests with pictures, and the log-probabilities of a plain forward at the generated tokens."""

    def __init__(self, folder: Path, reader: PictureReader) -> None:
        self.folder, self.reader = folder, reader
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForImageTextToText.from_pretrained(folder).eval()
        own = reader.processor.placeholder_ids
        rows = self.model.get_output_embeddings().weight.shape[0]
        self.usable = UsableIds(rows, own, own)
        self.vision = "visual" if reader.processor.family in QWEN else "vision_model"
        self.sampling = Sampling(24, candidates=3, usable=self.usable, head_rows=rows)

    def requests(self, new: int = 24) -> list[GenerateRequest]:
        return [self._request(f"row-{i}", shown, new) for i, shown in enumerate(ROWS)]

    def _request(self, key: str, shown: tuple[str, ...], new: int) -> GenerateRequest:
        names = tuple(self.reader.store.put(PICTURES[one]) for one in shown)
        texts = [self.reader.processor.text_of(self.reader.size(name)) for name in names]
        around = "<|vision_start|>{}<|vision_end|>" if self.vision == "visual" else "{}"
        text = f"look: {' then '.join(around.format(one) for one in texts)}?"
        ids = np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        return GenerateRequest(key, ids, replace(self.sampling, max_new_tokens=new), 7, media=names)

    def plain(self, model: Any, request: GenerateRequest, generation: Generation) -> np.ndarray:
        """Log-probabilities [N, V] at the generated tokens."""
        ids = np.concatenate([request.tokens, generation.tokens])
        model.base_model.rope_deltas = None
        with torch.no_grad():
            given = plain_inputs(self.folder, ids, [self.reader.store.get(name) for name in request.media])
            logits = model(**given, use_cache=False).logits[0, len(request.tokens) - 1 : -1].float()
        return np.asarray(self.usable.hide_(logits).log_softmax(-1))

    def check(self, model: Any, request: GenerateRequest, generation: Generation) -> None:
        plain = self.plain(model, request, generation)
        drawn = generation.tokens[:, None]
        np.testing.assert_allclose(generation.logprobs, np.take_along_axis(plain, drawn, 1)[:, 0], atol=ATOL)
        assert not np.isin(generation.tokens, self.usable.holes).any(), "a picture placeholder was generated"
        assert generation.candidate_ids is not None
        best = np.take_along_axis(plain, generation.candidate_ids, 1)
        np.testing.assert_allclose(best, np.sort(plain, 1)[:, ::-1][:, :3], atol=ATOL)


def weights_of(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.detach()) for name, tensor in model.named_parameters()]


def moved(model: Any, part: str) -> Any:
    """A copy with other weights in the parameters whose names hold `part`."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in other.named_parameters():
            if part in name:
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.2 * tensor.std())
    return other


async def check_pictures_of_equal_token_ids_are_not_mixed_up(engine: VLLMEngine, rows: Rows) -> None:
    """Rows with equal ids and different pictures, together and one by one, with vLLM's prefix cache."""
    asked = rows.requests()
    assert np.array_equal(asked[0].tokens, asked[1].tokens) and asked[0].media != asked[1].media
    together = await engine.generate(asked)
    alone = [(await engine.generate([one]))[0] for one in asked[::-1]][::-1]
    for found in (together, alone):
        for request, generation in zip(asked, found, strict=True):
            rows.check(rows.model, request, generation)
        swapped = rows.plain(rows.model, asked[1], found[0])
        own = np.take_along_axis(swapped, found[0].tokens[:, None], 1)[:, 0]
        assert np.abs(own - found[0].logprobs).max() > 1e-2


async def check_new_weights_reach_the_language_and_the_vision_part(engine: VLLMEngine, rows: Rows) -> None:
    """The server is idle during the updates. Cached features computed by the old weights must not be used again."""
    for version, part in ((1, "layers.0.self_attn"), (2, rows.vision), (3, "lm_head")):
        new = moved(rows.model, part)
        await engine.update_weights(version, weights_of(new))
        asked = rows.requests()
        for request, generation in zip(asked, await engine.generate(asked), strict=True):
            assert set(generation.weight_versions.tolist()) == {version}
            rows.check(new, request, generation)
            if request.media or part != rows.vision:
                old = rows.plain(rows.model, request, generation)
                drawn = np.take_along_axis(old, generation.tokens[:, None], 1)[:, 0]
                assert np.abs(drawn - generation.logprobs).max() > 1e-3, part


async def check_a_live_update_splits_rows_with_pictures_by_version(engine: VLLMEngine, rows: Rows) -> None:
    """A generation with pictures continues under new weights. Odd versions have other weights in all parts."""
    models = [rows.model, moved(rows.model, "")]
    asked, version, split = rows.requests(100), 10, False
    await engine.update_weights(version, weights_of(models[0]))
    while not split:
        task = asyncio.create_task(engine.generate(asked))
        for pause in widening_pauses():
            await asyncio.wait([task], timeout=pause)
            if task.done():
                break
            version += 1
            await engine.update_weights(version, weights_of(models[version % 2]))
        for request, generation in zip(asked, await task, strict=True):
            versions = generation.weight_versions
            split = split or versions[0] < versions[-1]
            of_each = [
                np.take_along_axis(rows.plain(one, request, generation), generation.tokens[:, None], 1)[:, 0]
                for one in models
            ]
            np.testing.assert_allclose(
                generation.logprobs, np.where(versions % 2, of_each[1], of_each[0]), atol=ATOL
            )


async def check_a_picture_with_another_number_of_tokens_fails_its_row(engine: VLLMEngine, rows: Rows) -> None:
    """The student's processor gives a picture fewer tokens than vLLM's."""
    if rows.reader.processor.family in QWEN:
        rows.reader.processor.image_processor.size = {"shortest_edge": 256, "longest_edge": 512}
    rows.reader.processor.tile_tokens = 1
    asked = rows.requests()[0]
    with pytest.raises(DataError, match=r"row-0: the server read .* ids for a row with pictures, which has"):
        await engine.generate([asked])


@pytest.mark.skipif(not VLLM_PYTHON, reason="set UNDERSTUDY_VLLM_PYTHON to an interpreter that has vLLM")
@pytest.mark.parametrize(
    ("family", "launcher"),
    [
        ("qwen2_5_vl", LocalProcesses),
        ("qwen3_vl", RemoteProcesses),
        ("smolvlm", LocalProcesses),
        ("idefics3", LocalProcesses),
    ],
    ids=["qwen2_5_vl", "qwen3_vl-proxy", "smolvlm", "idefics3"],
)
def test_vllm_generates_from_pictures(tmp_path: Path, family: str, launcher: type[LocalProcesses]) -> None:
    """Over vLLM's Unix socket, and over the proxy through which a server on another machine is reached."""
    needed = "torchvision, num2words" if family == "smolvlm" else "torchvision"
    if subprocess.run([VLLM_PYTHON, "-c", f"import {needed}"], capture_output=True, check=False).returncode:
        pytest.skip(f"{VLLM_PYTHON} has no {needed}, without which vLLM reads no pictures of {family}")
    # A head size that vLLM's CPU attention supports.
    folder = make_model(tmp_path / "model", family, hidden=128, heads=(2, 1))
    reader = reader_of(folder, MediaStore(tmp_path / "media"))
    options = ["--enforce-eager", "--max-logprobs", "8", "--enable-prefix-caching"]
    options = picture_options(options, family)
    settings = VLLMSettings(VLLM_PYTHON, str(folder), 320, 16, "float32", tuple(options), (ENVIRONMENT,))

    async def body() -> None:
        rows, processes = Rows(folder, reader), launcher(tmp_path / "logs", start_timeout=400)
        try:
            engine = await start_vllm(
                settings, processes, version=0, snapshots=tmp_path, timeout_s=60, pictures=reader
            )
            try:
                await check_pictures_of_equal_token_ids_are_not_mixed_up(engine, rows)
                await check_new_weights_reach_the_language_and_the_vision_part(engine, rows)
                await check_a_live_update_splits_rows_with_pictures_by_version(engine, rows)
                await check_a_picture_with_another_number_of_tokens_fails_its_row(engine, rows)
            finally:
                await engine.close()
        finally:
            await processes.close()

    asyncio.run(body())
