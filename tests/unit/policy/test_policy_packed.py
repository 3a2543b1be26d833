"""What packed rows leave out on a CPU changes no state and no gradient."""

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


def related_rows(beginning: int) -> Batch:
    """Four groups of three answers to one question each; all questions share their first `beginning` tokens."""
    generator = torch.Generator().manual_seed(9)

    def draw(count: int) -> torch.Tensor:
        return torch.randint(0, VOCAB, (count,), generator=generator)

    common, rows, masks = draw(beginning), [], []
    for group in range(4):
        question = torch.cat([common, draw(3 + group)]) if beginning else draw(12)
        for answer in range(3):
            written = draw(2 + answer)
            rows.append(torch.cat([question, written]))
            masks.append(torch.arange(len(rows[-1])) >= len(question))
        if not beginning:  # nothing in common at all
            rows, masks = rows[: group + 1], masks[: group + 1]
    logprobs = [torch.where(mask, -1.0, float("nan")) for mask in masks]
    return Batch(
        keys=tuple(f"row-{i:02d}" for i in range(len(rows))),
        tokens=Jagged.from_rows(rows),
        loss_mask=Jagged.from_rows(masks),
        behaviour_logprobs=Jagged.from_rows(logprobs),
    )


class Watched:
    """A model that counts the positions its embedding and its last feed-forward part see."""

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


def trained(model: Any, batch: Batch) -> list[torch.Tensor]:
    """Loss and gradients of all rows in one packed pass."""
    micro = Assembler(batch, token_mean(batch)).hold().cut(list(range(len(batch))), Layout.PACKED)
    with attention_for(model, Layout.PACKED):
        loss, _ = StudentForward(model)(micro, cross_entropy)
        loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def expected(name: str, batch: Batch) -> list[torch.Tensor]:
    model = MODELS[name]()
    switch_off_dropout(model)
    loss = plain_loss(model.train(), batch)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("beginning", [0, 4, 11])
@pytest.mark.parametrize("name", MODELS)
def test_rows_that_begin_alike_are_trained_as_if_each_were_alone(name: str, beginning: int) -> None:
    batch, watched = related_rows(beginning), Watched(name)
    for mine, theirs in zip(trained(watched.model, batch), expected(name, batch), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)
    rows = [row.tolist()[:-1] for row in batch.tokens]  # a row's last token predicts nothing
    beginnings = {tuple(row[: t + 1]) for row in rows for t in range(len(row))}
    assert watched.read == (len(beginnings) if beginning else sum(map(len, rows)))
    assert watched.fed == int(batch.loss_mask.values.sum())


@pytest.mark.parametrize("reason", ["hook", "checkpointing", "other class"])
def test_a_last_layer_that_somebody_waits_for_is_called_whole(reason: str) -> None:
    batch, watched, seen = related_rows(4), Watched("qwen3"), []
    last = watched.model.model.layers[-1]
    if reason == "hook":
        last.register_forward_hook(lambda module, given, states: seen.append(states))
    elif reason == "checkpointing":
        watched.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        last.__class__ = type("ShardedLayer", (type(last),), {})
    for mine, theirs in zip(trained(watched.model, batch), expected("qwen3", batch), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)
    assert bool(seen) == (reason == "hook")
    assert watched.fed > int(batch.loss_mask.values.sum())


@pytest.fixture
def grouping(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on a GPU whose attention is fastest over rows of one length. How many groups each pass had."""
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
def test_rows_filled_up_to_one_length_are_trained_as_if_each_were_alone(
    name: str, checkpointing: bool, worth: float, grouping: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_attention, "WORTH_ROUNDING", worth)
    batch, watched = related_rows(4), Watched(name)
    if checkpointing:
        watched.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for mine, theirs in zip(trained(watched.model, batch), expected(name, batch), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)
    assert len(grouping) == (4 if checkpointing else 2)
    assert min(grouping) > 1 if worth > 1 else max(grouping) == 0
    wanted = sum(len(row) - 1 for row in batch.tokens)
    assert watched.read > wanted if worth > 1 else watched.read < wanted  # filling; or beginnings read once


def test_a_windowed_layer_among_filled_rows_sees_its_row(grouping: list[int]) -> None:
    batch = related_rows(6)
    found = trained(windowed(), batch)[0]
    assert found.item() == pytest.approx(plain_loss(windowed(), batch).item(), abs=1e-5)
    assert len(grouping) == 1  # the other layer


def test_a_windowed_layer_sees_the_row_and_not_the_tree() -> None:
    batch = related_rows(6)
    found = trained(windowed(), batch)[0]
    assert found.item() == pytest.approx(plain_loss(windowed(), batch).item(), abs=1e-5)
