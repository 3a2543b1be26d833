"""The hf engine generates from pictures as transformers does, and its log-probabilities are the trainer's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from small_student import settings
from test_policy_pictures import PICTURES, ROWS, batch_with_pictures
from transformers import AutoModelForImageTextToText
from vision_models import FAMILIES, folder_of, picture, plain_inputs, plain_logprobs, reader_of

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.engines.local.engine import HFEngine
from understudy.engines.local.scheduler import Batching
from understudy.errors import EngineError
from understudy.media.store import MediaStore
from understudy.policy.load import load_student
from understudy.policy.policy import Policy
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged
from understudy.types.usable_ids import UsableIds

NEW = 12


def engine_of(folder: Path, store: MediaStore, batching: Batching = Batching.COMPOSED) -> HFEngine:
    student = load_student(str(folder))
    return HFEngine(
        student.model,
        max_batch=8,
        device="cpu",
        pad_id=0,
        max_length=300,
        batching=batching,
        pictures=reader_of(folder, store),
    )


def requests_of(
    folder: Path, store: MediaStore, temperature: float, stop_ids: tuple[int, ...] = ()
) -> list[GenerateRequest]:
    batch, processor = batch_with_pictures(folder, store), reader_of(folder, store).processor
    usable = UsableIds(len(processor_vocabulary(folder))).without(processor.placeholder_ids)
    sampling = Sampling(NEW, stop_ids=stop_ids, temperature=temperature, usable=usable)
    prompts = [
        tokens[~mask].numpy().astype(np.int32)
        for tokens, mask in zip(batch.tokens, batch.loss_mask, strict=True)
    ]
    return [
        GenerateRequest(f"row-{i}", ids, sampling, seed=100 + i, media=batch.media[i])
        for i, ids in enumerate(prompts)
    ]


def processor_vocabulary(folder: Path) -> range:
    return range(int(load_student(str(folder)).model.get_output_embeddings().weight.shape[0]))


def write(engine: HFEngine, requests: list[GenerateRequest], apart: bool = False) -> list[Generation]:
    async def run() -> list[Generation]:
        try:
            if not apart:
                return await engine.generate(requests)
            calls = []
            for request in requests:  # rows join a batch that is being decoded
                calls.append(asyncio.create_task(engine.generate([request])))
                await asyncio.sleep(0.02)
            return [one for call in calls for one in await call]
        finally:
            await engine.close()

    return asyncio.run(run())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("apart", [False, True], ids=["one batch", "rows join"])
def test_greedy_tokens_equal_those_of_transformers_generate(family: str, apart: bool, tmp_path: Path) -> None:
    folder, store = folder_of(family), MediaStore(tmp_path)
    requests = requests_of(folder, store, temperature=0.0)
    batching = Batching.CONTINUOUS if apart else Batching.COMPOSED
    written = write(engine_of(folder, store, batching), requests, apart)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    assert requests[0].sampling.usable is not None
    hidden = list(requests[0].sampling.usable.holes)
    for request, own, shown in zip(requests, written, ROWS, strict=True):
        model.base_model.rope_deltas = None
        inputs = plain_inputs(folder, request.tokens, [PICTURES[place] for place in shown])
        with torch.no_grad():
            reference = model.generate(
                **inputs,
                max_new_tokens=NEW,
                do_sample=False,
                suppress_tokens=hidden,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert own.tokens.tolist() == reference[0, len(request.tokens) :].tolist(), request.key
        assert not np.isin(own.tokens, hidden).any()


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_the_trainers_and_plain_transformers(family: str, tmp_path: Path) -> None:
    folder, store = folder_of(family), MediaStore(tmp_path)
    requests = requests_of(folder, store, temperature=1.0)
    written = write(engine_of(folder, store), requests)
    rows = [
        torch.from_numpy(np.concatenate([r.tokens, w.tokens]).astype(np.int64))
        for r, w in zip(requests, written, strict=True)
    ]
    masks = [
        torch.arange(len(row)) >= len(request.tokens) for row, request in zip(rows, requests, strict=True)
    ]
    batch = Batch(
        keys=tuple(request.key for request in requests),
        tokens=Jagged.from_rows(rows),
        loss_mask=Jagged.from_rows(masks),
        behaviour_logprobs=Jagged.from_rows([torch.where(mask, -1.0, float("nan")) for mask in masks]),
        media=tuple(request.media for request in requests),
    )
    usable = requests[0].sampling.usable
    policy = Policy(
        load_student(str(folder)).model, settings(usable=usable), pictures=reader_of(folder, store)
    )
    for own, trained in zip(written, policy.logprobs(batch, 10_000), strict=True):
        np.testing.assert_allclose(own.logprobs, trained.numpy(), atol=1e-5)


def test_image_placeholder_tokens_are_never_drawn(tmp_path: Path) -> None:
    """Even with an output head that strongly prefers them."""
    folder, store = folder_of("qwen3_vl"), MediaStore(tmp_path)
    student, reader = load_student(str(folder)), reader_of(folder, store)
    with torch.no_grad():
        head = student.model.get_output_embeddings().weight
        head[list(reader.processor.placeholder_ids)] = 100 * head.abs().max()
    engine = HFEngine(student.model, max_batch=8, device="cpu", pad_id=0, max_length=300, pictures=reader)
    for one in write(engine, requests_of(folder, store, temperature=2.0)):
        assert not np.isin(one.tokens, reader.processor.placeholder_ids).any()


def test_rows_with_equal_ids_get_the_logprobs_of_their_own_pictures(
    tmp_path: Path,
) -> None:
    folder, store = folder_of("qwen2_5_vl"), MediaStore(tmp_path)
    first = requests_of(folder, store, temperature=1.0)[0]
    other = store.put(picture("yellow", (40, 24), (20, 8)))
    second = GenerateRequest("other", first.tokens, first.sampling, seed=first.seed, media=(other,))
    written = write(engine_of(folder, store), [first, second])
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    assert first.sampling.usable is not None
    for request, own, shown in ((first, written[0], PICTURES[0]), (second, written[1], store.get(other))):
        ids = np.concatenate([request.tokens, own.tokens])
        with torch.no_grad():
            model.base_model.rope_deltas = None
            logits = model(**plain_inputs(folder, ids, [shown]), use_cache=False).logits[0]
        reference = first.sampling.usable.hide_(logits.clone()).log_softmax(-1)
        places = torch.arange(len(request.tokens) - 1, len(ids) - 1)
        expected = reference[places, torch.from_numpy(own.tokens.astype(np.int64))]
        np.testing.assert_allclose(own.logprobs, expected.numpy(), atol=1e-5)
    assert not np.allclose(written[0].logprobs[0], written[1].logprobs[0], atol=1e-4)
    assert plain_logprobs(model, folder, first.tokens, [PICTURES[0]]).shape[0] == len(first.tokens) - 1


def test_an_engine_without_a_picture_store_refuses_pictures(tmp_path: Path) -> None:
    folder, store = folder_of("qwen3_vl"), MediaStore(tmp_path)
    request = requests_of(folder, store, temperature=1.0)[0]
    engine = HFEngine(load_student(str(folder)).model, max_batch=8, device="cpu", pad_id=0, max_length=300)
    with pytest.raises(EngineError, match="this engine reads text only"):
        write(engine, [request])
