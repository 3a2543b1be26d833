"""Lanes compute micro-batches in parallel on a CPU and give the same bits as one after another."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from small_student import batch_of, cross_entropy, poisoned, qwen3, settings, token_mean
from test_policy_head_start import CASES, weights_of

from understudy.errors import PolicyError
from understudy.policy.cpu import lanes
from understudy.policy.cpu.lanes import CpuLanes, balanced
from understudy.policy.forward.forward import sampled_logprobs
from understudy.policy.microbatch import Layout, plan_microbatches
from understudy.policy.policy import Policy
from understudy.policy.reference import ReferenceModel
from understudy.types.batch import Batch


@pytest.fixture(autouse=True)
def lanes_for_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "TOKENS_WORTH_A_LANE", 32)


def rows(seed: int, count: int = 24) -> Batch:
    chance = torch.Generator().manual_seed(seed)
    sizes = torch.randint(2, 9, (count, 2), generator=chance).tolist()
    return batch_of([[0] * before + [1] * after for before, after in sizes], seed)


class SequentialLanes(CpuLanes):
    """The same number of lanes on one thread."""

    def run(self, work, items):
        return [work(item) for item in items]


def sequential(policy: Policy) -> Policy:
    policy.lanes = SequentialLanes(policy.lanes.count)
    return policy


def plain_loop_over_the_plan_of_lanes(policy: Policy) -> Policy:
    """Plans for three lanes and runs the plain loop over that plan."""
    plan = policy.plan
    policy.plan = lambda *a: (
        setattr(policy, "lanes", CpuLanes(3)),
        plan(*a),
        setattr(policy, "lanes", CpuLanes()),
    )[1]  # type: ignore
    return policy


@pytest.mark.parametrize("max_tokens", [8192, 150])
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("name", CASES)
def test_lanes_give_the_same_bits_as_their_micro_batches_one_after_another(
    name: str, ahead: bool, max_tokens: int
) -> None:
    model, changes = CASES[name]
    three = Policy(model(), settings(lanes=3, **changes))
    one_thread = sequential(Policy(model(), settings(lanes=3, **changes)))
    loop = plain_loop_over_the_plan_of_lanes(Policy(model(), settings(**changes)))
    for seed in range(3):
        batch = rows(seed)
        if ahead:
            three.begin_head_start(lambda batch=batch: batch, max_tokens)
        results = [
            p.update(batch, cross_entropy, token_mean(batch), max_tokens) for p in (three, one_thread, loop)
        ]
        assert results[0].micro_batches % 3 == 0
        assert len({(r.loss, r.grad_norm, r.row_losses, r.micro_batches) for r in results}) == 1
    for own, *others in zip(*map(weights_of, (three, one_thread, loop)), strict=True):
        assert all(torch.equal(own, other) for other in others)


def test_lanes_give_the_gradient_of_one_micro_batch() -> None:
    batch = rows(0)
    whole, three = Policy(qwen3(), settings()), Policy(qwen3(), settings(lanes=3))
    expected = whole.update(batch, cross_entropy, token_mean(batch))
    found = three.update(batch, cross_entropy, token_mean(batch))
    assert (expected.micro_batches, found.micro_batches) == (1, 3)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert found.row_losses == pytest.approx(expected.row_losses, rel=1e-5)


def test_lanes_run_in_parallel_threads_and_old_logprobs_equal_those_of_the_update() -> None:
    batch = rows(1)
    policy = Policy(qwen3(), settings(lanes=3))
    names, barrier = set(), threading.Barrier(3, timeout=20)
    old = policy.logprobs(batch)
    assert torch.equal(ReferenceModel(qwen3(), lanes=3).logprobs(batch).values, old.values)

    def objective(head, inputs):
        names.add(threading.current_thread().name)
        barrier.wait()  # all three are here at once
        assert torch.equal(sampled_logprobs(head, inputs).detach(), inputs.old_logprobs_N)
        return cross_entropy(head, inputs)

    policy.update(batch, objective, token_mean(batch), old_logprobs=old)
    assert len(names) == 3


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_rows_with_a_non_finite_loss_or_gradient_are_named_and_no_weight_is_changed(where: str) -> None:
    batch = rows(2)
    token = int(batch.tokens[5][-1])
    bad = [
        key
        for key, ids, mask in zip(batch.keys, batch.tokens, batch.loss_mask, strict=True)
        if bool((ids[mask] == token).any())
    ]
    seen: list[tuple[str, ...]] = []
    policy = Policy(qwen3(), settings(lanes=3), on_bad_rows=lambda bad: seen.append(bad.rows.keys))
    before = weights_of(policy)
    with pytest.raises(PolicyError, match="weights were not touched"):
        policy.update(batch, poisoned(where, token), token_mean(batch))
    assert [sorted(keys) for keys in seen] == [sorted(bad)]
    assert all(torch.equal(a, b) for a, b in zip(weights_of(policy), before, strict=True))


def test_an_error_in_one_lane_stops_the_update() -> None:
    batch = rows(3)
    policy = Policy(qwen3(), settings(lanes=3))

    def objective(head, inputs):
        if len(inputs.token_ids_N) and threading.current_thread().name.endswith("_1"):
            raise ValueError("one of three")
        return cross_entropy(head, inputs)

    with pytest.raises(ValueError, match="one of three"):
        policy.update(batch, objective, token_mean(batch))
    assert all(weight.grad is None for weight in policy.optimizer.weights.values())
    assert policy.update(batch, cross_entropy, token_mean(batch)).step == 0


def test_lanes_give_the_same_bits_over_several_updates_and_steps() -> None:
    batch, part = rows(4), rows(4).select(range(16))
    three, one_thread = Policy(qwen3(), settings(lanes=3)), sequential(Policy(qwen3(), settings(lanes=3)))
    for policy in (three, one_thread):
        for _ in range(2):
            policy.update(batch, cross_entropy, token_mean(batch), ends_step=False)
            policy.update(part, cross_entropy, token_mean(part))
    assert all(torch.equal(a, b) for a, b in zip(weights_of(three), weights_of(one_thread), strict=True))


def test_the_plan_gives_every_lane_about_as_many_tokens() -> None:
    lengths = [int(n) for n in torch.randint(5, 60, (100,), generator=torch.Generator().manual_seed(0))]
    keys = [f"{n:03d}" for n in range(100)]
    for layout in Layout:
        plan = plan_microbatches(lengths, keys, 8192, layout, lanes=4)
        assert sorted(row for group in plan for row in group) == list(range(100))
        sizes = [sum(lengths[row] for row in group) for group in plan]
        assert len(plan) == 4 and max(sizes) - min(sizes) <= 60
        many = plan_microbatches(lengths, keys, 1600, layout, lanes=4)
        assert len(many) % 4 == 0
        assert all(
            (sum if layout is Layout.PACKED else lambda own: max(own) * len(own))([lengths[r] for r in g])
            <= 400
            for g in many
        )
    shuffled = list(reversed(range(100)))
    other = plan_microbatches([lengths[i] for i in shuffled], [keys[i] for i in shuffled], 8192, lanes=4)
    first = plan_microbatches(lengths, keys, 8192, lanes=4)
    assert [[shuffled[i] for i in group] for group in other] == first


def test_the_plan_uses_fewer_lanes_for_few_tokens() -> None:
    assert len(plan_microbatches([10] * 9, list("abcdefghi"), 8192, Layout.PACKED, lanes=3)) == 2
    assert len(plan_microbatches([10] * 6, list("abcdef"), 8192, Layout.PACKED, lanes=3)) == 1
    assert balanced([0, 1, 2], [5, 5, 5], 3) == [[0], [1], [2]]
    assert balanced([0], [5], 3) == [[0]]


def test_lanes_are_refused_for_a_compiled_student() -> None:
    with pytest.raises(PolicyError, match="one rank"):
        Policy(qwen3(), replace(settings(lanes=2), compile=True))
