"""The work that packed rows save (shared prefixes, positions without loss) changes no loss and no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_student import VOCAB, cross_entropy, llama, plain_loss, qwen3, token_mean, windowed

from understudy.nn import grouped_attention
from understudy.policy.assemble import Assembler
from understudy.policy.forward import attention, packed
from understudy.policy.forward.forward import StudentForward, attention_for
from understudy.policy.load import switch_off_dropout
from understudy.policy.microbatch import Layout
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged

MODELS = {"qwen3": qwen3, "llama": llama}


def related_rows(prefix: int) -> Batch:
    """Four questions with three answers each. All questions share their first `prefix` tokens."""
    generator = torch.Generator().manual_seed(9)

    def draw(count: int) -> torch.Tensor:
        return torch.randint(0, VOCAB, (count,), generator=generator)

    common, rows, masks = draw(prefix), [], []
    for group in range(4):
        question = torch.cat([common, draw(3 + group)]) if prefix else draw(12)
        for answer in range(3):
            written = draw(2 + answer)
            rows.append(torch.cat([question, written]))
            masks.append(torch.arange(len(rows[-1])) >= len(question))
        if not prefix:  # rows without a shared prefix
            rows, masks = rows[: group + 1], masks[: group + 1]
    logprobs = [torch.where(mask, -1.0, float("nan")) for mask in masks]
    return Batch(
        keys=tuple(f"row-{i:02d}" for i in range(len(rows))),
        tokens=Jagged.from_rows(rows),
        loss_mask=Jagged.from_rows(masks),
        behaviour_logprobs=Jagged.from_rows(logprobs),
    )


class CountingModel:
    """A model that counts the positions that its embedding and its last feed-forward layer process."""

    def __init__(self, name: str) -> None:
        self.model: Any = MODELS[name]()
        switch_off_dropout(self.model)
        self.model.train()
        self.read = self.fed = 0
        self.model.model.embed_tokens.register_forward_hook(self._read)
        self.model.model.layers[-1].mlp.register_forward_hook(self._fed)

    def _read(self, module: Any, given: Any, states: torch.Tensor) -> None:
        self.read += states.shape[:-1].numel()

    def _fed(self, module: Any, given: Any, states: torch.Tensor) -> None:
        self.fed += states.shape[:-1].numel()


def packed_loss_and_gradients(model: Any, batch: Batch) -> list[torch.Tensor]:
    """Loss and gradients of all rows in one packed pass."""
    micro = Assembler(batch, token_mean(batch)).hold().cut(list(range(len(batch))), Layout.PACKED)
    with attention_for(model, Layout.PACKED):
        loss, _ = StudentForward(model)(micro, cross_entropy)
        loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def plain_loss_and_gradients(name: str, batch: Batch) -> list[torch.Tensor]:
    model = MODELS[name]()
    switch_off_dropout(model)
    loss = plain_loss(model.train(), batch)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("prefix", [0, 4, 11])
@pytest.mark.parametrize("name", MODELS)
def test_rows_with_a_shared_prefix_give_the_loss_and_gradients_of_separate_rows(
    name: str, prefix: int
) -> None:
    batch, counting = related_rows(prefix), CountingModel(name)
    for mine, theirs in zip(
        packed_loss_and_gradients(counting.model, batch), plain_loss_and_gradients(name, batch), strict=True
    ):
        assert torch.allclose(mine, theirs, atol=1e-5)
    rows = [row.tolist()[:-1] for row in batch.tokens]  # a row's last token predicts nothing
    prefixes = {tuple(row[: t + 1]) for row in rows for t in range(len(row))}
    assert counting.read == (len(prefixes) if prefix else sum(map(len, rows)))
    assert counting.fed == int(batch.loss_mask.values.sum())


@pytest.mark.parametrize("reason", ["hook", "checkpointing", "other class"])
def test_the_last_layer_runs_on_all_positions_if_it_has_a_hook_checkpointing_or_another_class(
    reason: str,
) -> None:
    batch, counting, seen = related_rows(4), CountingModel("qwen3"), []
    last = counting.model.model.layers[-1]
    if reason == "hook":
        last.register_forward_hook(lambda module, given, states: seen.append(states))
    elif reason == "checkpointing":
        counting.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        last.__class__ = type("ShardedLayer", (type(last),), {})
    for mine, theirs in zip(
        packed_loss_and_gradients(counting.model, batch),
        plain_loss_and_gradients("qwen3", batch),
        strict=True,
    ):
        assert torch.allclose(mine, theirs, atol=1e-5)
    assert bool(seen) == (reason == "hook")
    assert counting.fed > int(batch.loss_mask.values.sum())


@pytest.fixture
def grouping(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Simulates a GPU whose attention is fastest on rows of equal length; records the number of groups of each pass."""
    seen: list[int] = []

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> Any:
        seen.append(int((rest[0][:, 1] > 0).sum()))
        return grouped_attention.grouped_attention(query, key, value, *rest)

    monkeypatch.setattr(packed, "takes_groups", lambda *_, **__: True)
    monkeypatch.setattr(grouped_attention, "ROUND", 4)
    monkeypatch.setattr(grouped_attention, "WORTH_ROUNDING", 2.0)
    monkeypatch.setattr(attention, "grouped_attention", attend)
    return seen


@pytest.mark.parametrize("worth", [2.0, 1.0])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_rows_padded_to_equal_lengths_give_the_loss_and_gradients_of_separate_rows(
    name: str, checkpointing: bool, worth: float, grouping: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_attention, "WORTH_ROUNDING", worth)
    batch, counting = related_rows(4), CountingModel(name)
    if checkpointing:
        counting.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for mine, theirs in zip(
        packed_loss_and_gradients(counting.model, batch), plain_loss_and_gradients(name, batch), strict=True
    ):
        assert torch.allclose(mine, theirs, atol=1e-5)
    assert len(grouping) == (4 if checkpointing else 2)
    assert min(grouping) > 1 if worth > 1 else max(grouping) == 0
    wanted = sum(len(row) - 1 for row in batch.tokens)
    assert (
        counting.read > wanted if worth > 1 else counting.read < wanted
    )  # padding is read too; or shared prefixes are read once


def test_a_sliding_window_layer_gives_the_plain_loss_on_rows_padded_to_equal_lengths(
    grouping: list[int],
) -> None:
    batch = related_rows(6)
    found = packed_loss_and_gradients(windowed(), batch)[0]
    assert found.item() == pytest.approx(plain_loss(windowed(), batch).item(), abs=1e-5)
    assert len(grouping) == 1  # the layer without a window


def test_a_sliding_window_layer_gives_the_plain_loss_on_rows_with_a_shared_prefix() -> None:
    batch = related_rows(6)
    found = packed_loss_and_gradients(windowed(), batch)[0]
    assert found.item() == pytest.approx(plain_loss(windowed(), batch).item(), abs=1e-5)
