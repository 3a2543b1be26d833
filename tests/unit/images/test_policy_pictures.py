"""A vision-language student trains as plain transformers does: log-probabilities and gradients, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from small_student import cross_entropy, settings, token_mean
from transformers import AutoModelForImageTextToText, AutoTokenizer
from vision_models import FAMILIES, folder_of, picture, plain_logprobs, reader_of

from understudy.errors import PolicyError
from understudy.media.store import MediaStore
from understudy.nn.vision import language_part
from understudy.policy.assemble import Assembler
from understudy.policy.load import load_student
from understudy.policy.lora import LoraSettings, adapted_weights, add_lora
from understudy.policy.microbatch import Layout
from understudy.policy.optim.adamw import AdamWSettings
from understudy.policy.policy import Policy
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged

PICTURES = [picture("red"), picture("blue", (70, 30), (5, 5)), picture("green", (33, 60), (9, 9))]
ROWS = ((0,), (1, 2), (), (2,))
"""Which pictures each row has; one row has none."""


def batch_with_pictures(folder: Path, store: MediaStore) -> Batch:
    reader, tokenizer = reader_of(folder, store), AutoTokenizer.from_pretrained(folder)
    hashes = [store.put(data) for data in PICTURES]
    tokens, masks = [], []
    for i, own in enumerate(ROWS):
        shown = " then ".join(
            f"<|vision_start|>{reader.processor.text_of(reader.size(hashes[place]))}<|vision_end|>"
            for place in own
        )
        asked = tokenizer(f"row {i}: {shown}?", add_special_tokens=False)["input_ids"]
        answer = tokenizer("an answer"[: 4 + i], add_special_tokens=False)["input_ids"]
        tokens.append(torch.tensor(asked + answer))
        masks.append(torch.tensor([False] * len(asked) + [True] * len(answer)))
    return Batch(
        keys=tuple(f"row-{i}" for i in range(len(ROWS))),
        tokens=Jagged.from_rows(tokens),
        loss_mask=Jagged.from_rows(masks),
        behaviour_logprobs=Jagged.from_rows([torch.where(mask, -1.0, float("nan")) for mask in masks]),
        media=tuple(tuple(hashes[place] for place in own) for own in ROWS),
    )


def expected(folder: Path, batch: Batch) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probabilities of the loss-bearing tokens and gradients of their mean, one row at a time."""
    model = AutoModelForImageTextToText.from_pretrained(folder).train()
    found, loss = [], torch.zeros(())
    weights = token_mean(batch)
    for tokens, mask, own, weight in zip(batch.tokens, batch.loss_mask, ROWS, weights, strict=True):
        every = plain_logprobs(model, folder, tokens.numpy(), [PICTURES[place] for place in own])
        logprobs = every[mask[1:]]
        found.append(logprobs.detach())
        loss = loss - (weight * logprobs).sum()
    loss.backward()
    return found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def policy_of(folder: Path, store: MediaStore, **changes: Any) -> Policy:
    return Policy(load_student(str(folder)).model, settings(**changes), pictures=reader_of(folder, store))


def test_averaged_weights_include_the_frozen_weights(tmp_path: Path) -> None:
    """A teacher that takes the averaged weights needs all weights."""
    policy = policy_of(folder_of(FAMILIES[0]), MediaStore(tmp_path), freeze_vision=True, ema_decay=0.9)
    averaged, named = policy.averaged_weights(), policy.named_weights()
    assert [name for name, _ in averaged] == [name for name, _ in named]
    assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in zip(averaged, named, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("frozen", [True, False])
def test_logprobs_and_gradients_equal_plain_transformers(family: str, frozen: bool, tmp_path: Path) -> None:
    folder, store = folder_of(family), MediaStore(tmp_path)
    batch = batch_with_pictures(folder, store)
    policy = policy_of(folder, store, freeze_vision=frozen)
    theirs, gradients = expected(folder, batch)
    for max_tokens in (10_000, 1):  # all rows in one padded pass, and each alone
        ours = policy.logprobs(batch, max_tokens)
        for own, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-5)
    micro = Assembler(batch, token_mean(batch)).hold().cut(list(range(len(batch))), Layout.PADDED)
    loss, _ = policy.forward(micro, cross_entropy)
    assert loss is not None
    loss.backward()
    trained = {id(p) for p in (*language_part(policy.model).parameters(), *policy.model.lm_head.parameters())}
    reached = 0
    for name, parameter in policy.model.named_parameters():
        if frozen and id(parameter) not in trained:
            assert parameter.grad is None, f"{name} is frozen"
        elif name in gradients:
            reached += 1
            scale = max(1.0, float(gradients[name].abs().max()))
            assert float((parameter.grad - gradients[name]).abs().max()) <= 1e-5 * scale, name
    assert reached > 5


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_equal_ids_and_different_pictures_get_different_logprobs(
    family: str, tmp_path: Path
) -> None:
    """The rows are in one batch."""
    folder, store = folder_of(family), MediaStore(tmp_path)
    batch = batch_with_pictures(folder, store).select([0, 0])
    other = store.put(picture("yellow", (40, 24), (20, 8)))
    batch = Batch(
        keys=("a", "b"),
        tokens=batch.tokens,
        loss_mask=batch.loss_mask,
        behaviour_logprobs=batch.behaviour_logprobs,
        media=(batch.media[0], (other,)),
    )
    first, second = policy_of(folder, store).logprobs(batch, 10_000)
    assert float((first - second).abs().max()) > 1e-3
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    ids = batch.tokens[1].numpy()
    alone = plain_logprobs(model, folder, ids, [store.get(other)])[batch.loss_mask[1][1:]]
    torch.testing.assert_close(second, alone.detach(), atol=1e-5, rtol=1e-5)


def test_a_step_with_a_frozen_vision_tower_changes_only_the_language_part(tmp_path: Path) -> None:
    folder, store = folder_of("qwen3_vl"), MediaStore(tmp_path)
    batch = batch_with_pictures(folder, store)
    policy = policy_of(folder, store)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    result = policy.update(batch, cross_entropy, token_mean(batch))
    assert np.isfinite(result.loss)
    moved = {name for name, p in policy.model.named_parameters() if not torch.equal(p, before[name])}
    assert any("language_model" in name for name in moved)
    assert not any("visual" in name for name in moved)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_a_run_resumed_before_the_first_picture_continues_with_the_same_bits(
    family: str, kind: Literal["adamw", "adamw_8bit"], tmp_path: Path
) -> None:
    """The first updates have no pictures, so the vision tower, which may hold most of the weights, gets no gradient and
    has no moments in the saved state."""
    folder, store = folder_of(family, layers=1), MediaStore(tmp_path)
    batch = batch_with_pictures(folder, store)
    updates = [batch.select([2]), batch.select([2, 2]), batch]

    def fresh() -> Policy:
        return policy_of(folder, store, freeze_vision=False, adamw=AdamWSettings(kind=kind))

    straight, first, resumed = fresh(), fresh(), fresh()
    for one in updates:
        straight.update(one, cross_entropy, token_mean(one))
    first.update(updates[0], cross_entropy, token_mean(updates[0]))
    resumed.load_state(first.state().detached())
    for one in updates[1:]:
        resumed.update(one, cross_entropy, token_mean(one))
    ours, theirs = straight.state(), resumed.state()
    for one, other in ((ours.model, theirs.model), (ours.optimizer, theirs.optimizer)):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_update_with_pictures_is_refused_if_the_vision_tower_gets_no_gradient(tmp_path: Path) -> None:
    folder, store = folder_of("qwen3_vl", layers=1), MediaStore(tmp_path)
    batch = batch_with_pictures(folder, store)
    policy = policy_of(folder, store, freeze_vision=False)
    assert 2 * len(policy._vision) > len(policy.optimizer.weights)
    tower = policy.model.base_model.visual
    plain = tower.forward
    tower.forward = torch.no_grad()(plain)
    with pytest.raises(PolicyError, match="the gradient reached only"):
        policy.update(batch, cross_entropy, token_mean(batch))


def test_a_policy_that_reads_pictures_refuses_packed_rows(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="reads pictures and trains on padded rows"):
        policy_of(folder_of("qwen3_vl"), MediaStore(tmp_path), layout=Layout.PACKED)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("language_only", [True, False])
def test_adapted_weights_names_the_layers_to_which_add_lora_adds_adapters(
    family: str, language_only: bool
) -> None:
    pytest.importorskip("peft")
    model = load_student(str(folder_of(family))).model
    targets = ("q_proj", "down_proj", "fc1", "qkv")
    named = adapted_weights(model, targets, language_only=language_only)
    add_lora(model, LoraSettings(rank=1, targets=targets, language_only=language_only))
    adapted = {name for name, _ in model.named_parameters() if name.endswith(".base_layer.weight")}
    assert named == {name.replace(".base_layer", "") for name in adapted}
