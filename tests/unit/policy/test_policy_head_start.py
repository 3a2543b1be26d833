"""A head start (a forward pass before the loss is known) changes only the time of an update."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small_student import (
    batch_of,
    cross_entropy,
    gemma2,
    llama,
    poisoned,
    qwen3,
    settings,
    token_mean,
    varied_batch,
)
from transformers import PreTrainedModel

from understudy.errors import PolicyError
from understudy.policy.lora import LoraSettings
from understudy.policy.policy import Policy
from understudy.types.batch import Batch

WHOLE, PIECES = 8192, 60
"""Tokens of a micro-batch: all rows in one micro-batch, and rows in several."""
CASES: dict[str, tuple[Callable[[], PreTrainedModel], dict[str, object]]] = {
    "packed": (qwen3, {}),
    "untied": (llama, {}),
    "padded": (gemma2, {}),
    "checkpointed": (qwen3, {"gradient_checkpointing": True}),
    "adapters": (qwen3, {"lora": LoraSettings(rank=4, alpha=8.0, targets=("q_proj", "down_proj"), seed=3)}),
    "bfloat16": (lambda: qwen3(dtype=torch.bfloat16), {}),
    "average": (qwen3, {"ema_decay": 0.9}),
}


def weights_of(policy: Policy) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in policy.state().model.values()]


def count_passes(policy: Policy) -> list[int]:
    """The number of rows of every forward pass of the body."""
    passes: list[int] = []
    hidden = policy.forward.hidden

    def counted(micro):
        passes.append(len(micro.keys))
        return hidden(micro)

    policy.forward.hidden = counted  # type: ignore[method-assign]
    return passes


@pytest.mark.parametrize("max_tokens", [WHOLE, PIECES])
@pytest.mark.parametrize("name", CASES)
def test_an_update_with_a_head_start_gives_the_same_bits_as_one_without(name: str, max_tokens: int) -> None:
    model, changes = CASES[name]
    plain, ahead = (Policy(model(), settings(**changes)) for _ in range(2))
    passes = count_passes(ahead)
    for seed in range(3):
        batch = varied_batch(seed=seed)
        expected = plain.update(batch, cross_entropy, token_mean(batch), max_tokens)
        ahead.begin_head_start(lambda batch=batch: batch, max_tokens)
        found = ahead.update(batch, cross_entropy, token_mean(batch), max_tokens)
        assert (found.loss, found.grad_norm, found.row_losses) == (
            expected.loss,
            expected.grad_norm,
            expected.row_losses,
        )
        assert found.seconds["ahead"] > 0 and expected.seconds["ahead"] == 0
        assert len(passes) == found.micro_batches  # the head start was not repeated
        assert (found.micro_batches > 1) == (max_tokens == PIECES)
        passes.clear()
    for mine, theirs in zip(weights_of(ahead), weights_of(plain), strict=True):
        assert torch.equal(mine, theirs)


def test_a_head_start_serves_the_first_of_several_updates_of_a_step() -> None:
    """The head start is for the first update only; the second has other weights and the same rows."""
    batch = varied_batch()
    plain, ahead = (Policy(qwen3(), settings()) for _ in range(2))
    passes = count_passes(ahead)
    ahead.begin_head_start(lambda: batch)
    for policy in (plain, ahead):
        old = policy.logprobs(batch)
        for last in (False, True):
            policy.update(batch, cross_entropy, token_mean(batch), old_logprobs=old, ends_step=last)
    assert (ahead.step, ahead.updates) == (1, 2)
    assert len(passes) == 3  # the head start, old logprobs, the second update
    for mine, theirs in zip(weights_of(ahead), weights_of(plain), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("expected_rows", ["others", "fewer", "none", "trouble"])
def test_a_head_start_on_the_wrong_rows_is_discarded(expected_rows: str) -> None:
    batch = varied_batch(seed=1)

    def guess() -> Batch | None:
        if expected_rows == "trouble":
            raise ValueError("rows lost")
        return {"others": varied_batch(seed=2), "fewer": batch.select([0, 1]), "none": None}[expected_rows]

    plain, ahead = (Policy(qwen3(), settings()) for _ in range(2))
    ahead.begin_head_start(guess)
    expected = plain.update(batch, cross_entropy, token_mean(batch))
    found = ahead.update(batch, cross_entropy, token_mean(batch))
    assert (found.loss, found.grad_norm) == (expected.loss, expected.grad_norm)


def test_a_head_start_is_discarded_when_other_weights_are_loaded() -> None:
    """The hidden states of the old weights would give another loss."""
    batch = varied_batch()
    other = Policy(qwen3(seed=5), settings())
    ahead = Policy(qwen3(), settings())
    ahead.begin_head_start(lambda: batch)
    ahead.load_state(other.state())
    found = ahead.update(batch, cross_entropy, token_mean(batch))
    assert found.loss == other.update(batch, cross_entropy, token_mean(batch)).loss


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_rows_with_a_non_finite_loss_or_gradient_are_named_after_a_head_start(where: str) -> None:
    batch = batch_of([[0, 0, 1, 1], [0, 1, 1], [0, 0, 1]], seed=4)
    token = int(batch.tokens[1][2])
    rows = [
        key
        for key, ids, mask in zip(batch.keys, batch.tokens, batch.loss_mask, strict=True)
        if bool((ids[mask] == token).any())
    ]
    ahead = Policy(qwen3(), settings())
    before = weights_of(ahead)
    ahead.begin_head_start(lambda: batch)
    with pytest.raises(PolicyError, match=rf"{len(rows)} row\(s\): {', '.join(rows)}"):
        ahead.update(batch, poisoned(where, token), token_mean(batch))
    for mine, theirs in zip(weights_of(ahead), before, strict=True):
        assert torch.equal(mine, theirs)
    assert ahead.update(batch, cross_entropy, token_mean(batch)).seconds["ahead"] == 0
