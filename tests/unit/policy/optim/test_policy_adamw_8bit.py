"""AdamW with 8-bit moments: steps close to AdamW's, a quarter of its memory, and a state that resumes bit for bit."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Literal

import pytest
import torch
from small_student import cross_entropy, qwen3, settings, token_mean, varied_batch

from understudy.errors import CheckpointError
from understudy.policy.checkpoints.state import PolicyState
from understudy.policy.optim.adamw import AdamWSettings
from understudy.policy.optim.adamw_8bit import BLOCK, AdamW8bit, _book, fresh_state
from understudy.policy.policy import Policy


@pytest.mark.parametrize("signed", [True, False])
def test_the_quantization_table_has_256_values_that_are_dense_near_1_and_reach_below_1e_6(
    signed: bool,
) -> None:
    book = _book(signed, torch.device("cpu"))
    assert len(book) == len(book.unique()) == 256 and bool((book.diff() > 0).all())
    assert float(book.max()) == 1.0 and 0.0 in book.tolist()
    positive = book[book > 0]
    assert float(positive.min()) < 1e-6
    gaps = positive[1:] / positive[:-1]
    top = positive[1:] > 0.5
    assert float(gaps[top].max()) < 1.03, "the largest entries of a block are rounded too much"


def test_8_bit_adamw_converges_like_adamw() -> None:
    """A noisy quadratic in 1,000 dimensions whose gradients span four decades: both optimizers end close together."""
    generator = torch.Generator().manual_seed(0)
    slopes = torch.logspace(-2, 2, 1000)
    target = torch.randn(1000, generator=generator)
    start = torch.randn(1000, generator=generator)
    ends = {}
    for name, make in {
        "exact": lambda w: torch.optim.AdamW([w], lr=1e-2, weight_decay=0.01),
        "packed": lambda w: AdamW8bit([{"params": [w], "weight_decay": 0.01}], lr=1e-2),
    }.items():
        weight = start.clone().requires_grad_()
        optimizer = make(weight)
        noise = torch.Generator().manual_seed(1)
        for _ in range(300):
            weight.grad = slopes * (weight.detach() - target + 0.1 * torch.randn(1000, generator=noise))
            optimizer.step()
        ends[name] = weight.detach()
    started = float((start - target).norm())
    exact, packed = (float((ends[name] - target).norm()) for name in ("exact", "packed"))
    assert exact < 0.2 * started and packed == pytest.approx(exact, rel=0.1)
    assert float((ends["exact"] - ends["packed"]).norm()) < 0.05 * started


def test_a_small_gradient_in_a_block_with_a_large_one_moves_by_at_most_the_learning_rate() -> None:
    """The denominator of the small one must not be rounded away: its step stays within lr."""
    weight = torch.zeros(BLOCK, requires_grad=True)
    optimizer = AdamW8bit([weight], lr=1e-3)
    for _ in range(20):
        before = weight.detach().clone()
        weight.grad = torch.full((BLOCK,), 1e-9)
        weight.grad[0] = 1.0
        optimizer.step()
        assert float((weight.detach() - before).abs().max()) < 1.1e-3


def measured_bytes(policy: Policy) -> int:
    states = policy.optimizer.adamw.state.values()
    return sum(t.numel() * t.element_size() for state in states for t in state.values())


def test_8_bit_moments_take_a_quarter_of_the_memory() -> None:
    batch = varied_batch()
    sizes = {}
    for kind in ("adamw", "adamw_8bit"):
        policy = Policy(qwen3(), settings(adamw=AdamWSettings(kind=kind)))
        first = policy.update(batch, cross_entropy, token_mean(batch)).loss
        assert policy.update(batch, cross_entropy, token_mean(batch)).loss < first
        sizes[kind] = measured_bytes(policy) / sum(p.numel() for p in policy.model.parameters())
    assert 8.0 <= sizes["adamw"] < 8.1 and sizes["adamw_8bit"] < 2.2
    matrix = fresh_state(torch.zeros(1000, 256))
    per_number = sum(t.numel() * t.element_size() for t in matrix.values()) / 256_000
    assert per_number == pytest.approx(2.03, abs=0.01)


@pytest.mark.parametrize("offload", [False, True])
def test_training_from_a_saved_8_bit_state_continues_bit_for_bit(offload: bool) -> None:
    wanted = settings(adamw=AdamWSettings(kind="adamw_8bit", offload=offload))
    batches = [varied_batch(seed=seed) for seed in range(4)]
    straight = Policy(qwen3(dtype=torch.bfloat16), wanted)
    for batch in batches[:2]:
        straight.update(batch, cross_entropy, token_mean(batch))
    saved = straight.state().detached()
    resumed = Policy(qwen3(seed=5, dtype=torch.bfloat16), wanted)
    resumed.load_state(saved)
    for batch in batches[2:]:
        straight.update(batch, cross_entropy, token_mean(batch))
        resumed.update(batch, cross_entropy, token_mean(batch))
    one, other = straight.state(), resumed.state()
    for mine, theirs in ((one.model, other.model), (one.optimizer, other.optimizer)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_8_bit_adamw_refuses_a_state_of_adamw() -> None:
    batch = varied_batch()
    plain = Policy(qwen3(), settings())
    plain.update(batch, cross_entropy, token_mean(batch))
    packed = Policy(qwen3(), settings(adamw=AdamWSettings(kind="adamw_8bit")))
    with pytest.raises(CheckpointError, match="adamw_8bit does not know"):
        packed.load_state(plain.state())


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_a_state_that_lacks_some_moments_of_a_weight_is_refused(kind: Literal["adamw", "adamw_8bit"]) -> None:
    """A weight without any moments has had no gradient yet; a weight with only some of them has lost data."""
    batch, wanted = varied_batch(), settings(adamw=AdamWSettings(kind=kind))
    policy = Policy(qwen3(), wanted)
    policy.update(batch, cross_entropy, token_mean(batch))
    saved = policy.state().detached()
    norm = "model.norm.weight"
    moments = sorted(name for name in saved.optimizer if name.endswith(f"/{norm}"))

    def without(names: Collection[str]) -> PolicyState:
        kept = {name: one for name, one in saved.optimizer.items() if name not in names}
        return replace(saved, optimizer=kept)

    Policy(qwen3(), wanted).load_state(without(moments))
    with pytest.raises(CheckpointError, match=f"missing .*{norm}"):
        Policy(qwen3(), wanted).load_state(without(moments[:1]))
    first = moments[0].partition("/")[0]
    with pytest.raises(CheckpointError, match=f"{first!r} does not fit the student: missing"):
        Policy(qwen3(), wanted).load_state(
            without([name for name in saved.optimizer if name.startswith(f"{first}/")])
        )
