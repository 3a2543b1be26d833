"""Features of pictures are computed once, equal the model's, and are dropped when the vision tower changes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_student import cross_entropy, token_mean
from test_engine_pictures import engine_of, requests_of
from test_policy_pictures import batch_with_pictures, policy_of
from test_teacher_pictures import items_of
from vision_models import FAMILIES, folder_of, picture, reader_of

from understudy.engines.local.scheduler import Batching
from understudy.errors import EngineError
from understudy.media.store import MediaStore
from understudy.nn import vision_features
from understudy.nn.determinism import keep_to_repeatable
from understudy.nn.vision import freeze_vision
from understudy.nn.vision_features import VisionFeatures, features_for
from understudy.policy.load import load_student
from understudy.teacher.protocol import request_of
from understudy.teacher.scoring.model import load_frozen
from understudy.teacher.scoring.scorer import Scorer, ScorerOptions


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_vision_tower_computes_each_picture_once_for_all_rows_and_steps(
    family: str, tmp_path: Path
) -> None:
    folder, store = folder_of(family), MediaStore(tmp_path)
    batch = batch_with_pictures(folder, store)
    frozen, learning = (policy_of(folder, store, freeze_vision=one) for one in (True, False))
    assert learning.forward.features is None
    features = frozen.forward.features
    assert features is not None
    for _ in range(2):
        ours, theirs = (policy.logprobs(batch, 10_000) for policy in (frozen, learning))
        for own, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(own, other, atol=1e-6, rtol=1e-6)
        alone = frozen.logprobs(batch, 1)
        for own, other in zip(ours, alone, strict=True):
            torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-5)
    before = features.computed
    frozen.update(batch, cross_entropy, token_mean(batch))
    assert before == features.computed == 3, "four rows show three pictures"


@pytest.fixture
def full_determinism() -> Iterator[None]:
    keep_to_repeatable(True, "cpu")
    yield
    keep_to_repeatable(False, "cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_computed_together_get_the_same_features_as_each_alone(family: str, tmp_path: Path) -> None:
    """Whatever their sizes and their order."""
    folder, store = folder_of(family), MediaStore(tmp_path)
    model, reader = load_student(str(folder)).model, reader_of(folder, store)
    sizes = [(40, 24), (70, 30), (33, 60), (40, 24), (24, 24)]
    names = [store.put(picture("red", size, dot=(3 * i, i))) for i, size in enumerate(sizes)]
    alone = VisionFeatures(reader).of(model, names)
    features = VisionFeatures(reader, together=True)
    features.of(model, names[3:4])
    for order in (names, names[::-1], [names[2], *names]):
        together = features.of(model, order)
        assert together.keys() == alone.keys()
        for name, one in together.items():
            assert len(one.pooled) == reader.count(name)
            torch.testing.assert_close(one.pooled, alone[name].pooled, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(one.deepstack, alone[name].deepstack, atol=1e-5, rtol=1e-5)
            np.testing.assert_equal(one.grid, alone[name].grid)
    assert (features.forwards, features.computed) == (2, 5)
    first, fourth = together[names[0]].pooled, together[names[3]].pooled
    assert (first - fourth).abs().max() > 1e-3, "two different pictures of one size"


def test_the_tokens_of_one_vision_tower_forward_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, store = folder_of("qwen3_vl"), MediaStore(tmp_path)
    model, reader = load_student(str(folder)).model, reader_of(folder, store)
    names = [store.put(picture("red", dot=(i, i))) for i in range(7)]
    monkeypatch.setattr(vision_features, "TOKENS_TOGETHER", 3 * reader.count(names[0]) + 1)
    features = VisionFeatures(reader, together=True)
    assert list(features.of(model, names)) == names and features.forwards == 3
    monkeypatch.setattr(vision_features, "TOKENS_TOGETHER", 1)
    features.clear()
    assert list(features.of(model, names[:2])) == names[:2] and features.forwards == 5


def test_an_all_zero_tile_does_not_shift_the_features_of_other_pictures(tmp_path: Path) -> None:
    """transformers takes all-zero tiles for padding and leaves them out."""
    folder, store = folder_of("smolvlm"), MediaStore(tmp_path)
    model, reader = load_student(str(folder)).model, reader_of(folder, store)
    reader.processor.image_processor.image_mean = [0.0, 0.0, 0.0]
    reader.processor.image_processor.do_image_splitting = False
    names = [store.put(picture(colour)) for colour in ("red", "black", "blue")]
    alone = VisionFeatures(reader).of(model, names)
    together = VisionFeatures(reader, together=True).of(model, names)
    for name in names:
        assert torch.equal(together[name].pooled, alone[name].pooled)


def test_policy_engine_and_scorer_of_fast_runs_compute_new_pictures_together(tmp_path: Path) -> None:
    folder, store = folder_of("qwen3_vl"), MediaStore(tmp_path)
    policy = policy_of(folder, store)
    policy.logprobs(batch_with_pictures(folder, store), 10_000)
    assert policy.forward.features is not None and policy.forward.features.forwards == 1
    engine = engine_of(folder, store, batching=Batching.CONTINUOUS)
    requests = requests_of(folder, store, temperature=1.0)

    async def run() -> None:
        await engine.generate(requests)
        await engine.close()

    asyncio.run(run())
    assert engine._features is not None and engine._features.forwards < engine._features.computed
    frozen = replace(load_frozen(str(folder)), pictures=reader_of(folder, store))
    scorer = Scorer("t", frozen, ScorerOptions(pictures_together=True))
    scorer.score(request_of(items_of(folder, store)))
    features = scorer.body._features
    assert features is not None and features.forwards == 1 < features.computed


@pytest.mark.usefixtures("full_determinism")
def test_cached_features_give_the_same_bits_as_an_empty_cache(tmp_path: Path) -> None:
    """A resumed run starts with an empty cache."""
    folder, store = folder_of("qwen3_vl"), MediaStore(tmp_path)
    batch = batch_with_pictures(folder, store)
    warm, cold = policy_of(folder, store), policy_of(folder, store)
    warm.logprobs(batch.select([3, 1]), 10_000)
    for own, other in zip(warm.logprobs(batch, 10_000), cold.logprobs(batch, 10_000), strict=True):
        assert torch.equal(own, other)


def test_cached_features_stay_within_their_byte_limit(tmp_path: Path) -> None:
    folder, store = folder_of("qwen3_vl"), MediaStore(tmp_path)
    model, names = (
        load_student(str(folder)).model,
        [store.put(picture("red", dot=(i, i))) for i in range(5)],
    )
    one = VisionFeatures(reader_of(folder, store)).of(model, names[:1])[names[0]]
    features = VisionFeatures(reader_of(folder, store), most_bytes=2 * one.bytes)
    for name in names:
        features.of(model, [name])
    assert features.held_bytes == 2 * one.bytes and features.computed == 5
    features.of(model, names[4:])
    assert features.computed == 5
    assert torch.equal(features.of(model, names[:1])[names[0]].pooled, one.pooled) and features.computed == 6


def test_a_model_without_a_picture_reader_has_no_feature_cache(tmp_path: Path) -> None:
    assert features_for(load_student(str(folder_of("qwen3_vl"))).model, None, together=True) is None


def test_sessions_of_a_prompt_share_cached_features_and_new_weights_drop_them(tmp_path: Path) -> None:
    folder, store = folder_of("qwen3_vl"), MediaStore(tmp_path)
    engine, other = engine_of(folder, store), engine_of(folder_of("qwen3_vl", seed=8), store)
    request = requests_of(folder, store, temperature=1.0)[1]
    sessions = [replace(request, key=f"session-{i}", seed=i) for i in range(4)]

    async def run() -> tuple[list[np.ndarray], list[np.ndarray]]:
        await engine.generate(sessions)
        assert engine._features is not None and engine._features.computed == 2
        weights = other._model.state_dict()
        await engine.update_weights(
            2, ((name, weights[name]) for name in dict(engine._model.named_parameters()))
        )
        ours, theirs = [await one.generate(sessions[:1]) for one in (engine, other)]
        assert engine._features.computed == 4
        await engine.close()
        await other.close()
        return [one.logprobs for one in ours], [one.logprobs for one in theirs]

    ours, theirs = asyncio.run(run())
    np.testing.assert_array_equal(ours[0], theirs[0])


def test_a_frozen_vision_tower_keeps_cached_features_over_new_weights(tmp_path: Path) -> None:
    folder, store = folder_of("qwen3_vl"), MediaStore(tmp_path)
    engine = engine_of(folder, store)
    freeze_vision(engine._model)
    request = requests_of(folder, store, temperature=1.0)[0]

    async def run() -> int:
        for version in (1, 2):
            await engine.generate([request])
            await engine.update_weights(version, engine._model.state_dict().items())
        await engine.close()
        assert engine._features is not None
        return engine._features.computed

    assert asyncio.run(run()) == 1


def test_cached_features_are_kept_if_copied_weights_have_the_same_vision_tower(tmp_path: Path) -> None:
    """An engine process does not know whether the tower is frozen; it compares the weights it gets. If a copy that
    failed half-way brought another tower, the next copy, which brings the same tower, still drops the features."""
    folder, store = folder_of("qwen3_vl"), MediaStore(tmp_path)
    engine = engine_of(folder, store)
    request = requests_of(folder, store, temperature=1.0)[0]
    start = {name: one.clone() for name, one in engine._model.state_dict().items()}
    language = {name: one if "visual" in name else one * 1.1 for name, one in start.items()}
    tower = {name: one * 1.1 if "visual" in name else one for name, one in start.items()}

    async def computed() -> int:
        await engine.generate([request])
        assert engine._features is not None
        return engine._features.computed

    async def run() -> list[int]:
        found = [await computed()]
        await engine.update_weights(1, language.items())
        found.append(await computed())
        broken = [(name, one) for name, one in tower.items() if "visual" in name]
        with pytest.raises(EngineError, match="new weights lack"):
            await engine.update_weights(2, broken)
        await engine.update_weights(2, tower.items())
        found.append(await computed())
        await engine.update_weights(3, start.items())
        found.append(await computed())
        await engine.close()
        return found

    assert asyncio.run(run()) == [1, 1, 2, 3]


def test_a_teacher_computes_a_picture_once_until_its_weights_change(tmp_path: Path) -> None:
    folder, store = folder_of("qwen3_vl", seed=3), MediaStore(tmp_path)
    scorer = Scorer("t", replace(load_frozen(str(folder)), pictures=reader_of(folder, store)))
    items = items_of(folder, store)
    first = scorer.score(request_of([items[0], replace(items[0], key="again")])).split()
    np.testing.assert_allclose(first[0].sampled_logprobs, first[1].sampled_logprobs, atol=1e-6)
    features = scorer.body._features
    assert features is not None and features.computed == 1
    with torch.no_grad():
        for name, parameter in scorer.frozen.model.named_parameters():
            if "visual" in name:
                parameter.mul_(1.5)
    scorer.body.weights_changed()
    second = scorer.score(request_of([items[0]])).split()
    assert np.abs(first[0].sampled_logprobs - second[0].sampled_logprobs).max() > 1e-4
