"""One step of the trainer compared with the same step written by hand with only transformers and torch."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import mean, stdev

import pytest
import torch
from learning_rig import (
    adamw,
    assert_same_weights,
    batch_of,
    learner_of,
    model,
    plain_logprobs,
    recipe_of,
)
from torch import nn

from understudy.losses.reduce import token_weights
from understudy.policy.critic import give_value_head
from understudy.trainers.learn.minibatches import split_rows
from understudy.trainers.learn.prepare import with_advantages
from understudy.trainers.learn.update import learn, step_metrics
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged

CLIP = (0.2, 0.28)


def group_advantages(batch: Batch, kind: str) -> list[float]:
    """GRPO or RLOO advantages by hand. The two rows of each prompt are adjacent."""
    found = []
    for start in range(0, len(batch), 2):
        rewards = batch.rewards[start : start + 2]
        if kind == "grpo":
            found += [(r - mean(rewards)) / (stdev(rewards) + 1e-6) for r in rewards]
        else:
            found += [rewards[0] - rewards[1], rewards[1] - rewards[0]]
    return found


def clipped(ratio: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    bounded = ratio.clamp(1 - CLIP[0], 1 + CLIP[1])
    return -torch.minimum(ratio * advantage, bounded * advantage)


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_epochs_of_uneven_mini_batches_equal_ppo_by_hand(kind: str) -> None:
    """7 prompts in mini-batches of at most 3, twice: six updates, all clipped against the logprobs before the first."""
    recipe = recipe_of(trainer={"epochs": 2, "mini_batch_size": 3}, loss={"advantage": kind})
    batch, learner, student = batch_of(), learner_of(recipe), model()
    optimizer = adamw(student)
    with torch.no_grad():
        old = [plain_logprobs(student, batch, row) for row in range(len(batch))]
    advantages = group_advantages(batch, kind)
    losses, drift = [], 0.0
    parts = split_rows(batch.keys, range(len(batch)), 3, 2, seed=0, step=0)
    assert [len(part) for part in parts] == [6, 4, 4] * 2
    for rows in parts:
        terms = []
        for row in rows:
            ratio = (plain_logprobs(student, batch, row) - old[row]).exp()
            drift = max(drift, float((ratio.detach() - 1).abs().max()))
            terms.append(clipped(ratio, torch.full_like(ratio, advantages[row])))
        loss = torch.cat(terms).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    result = learn(learner, batch)
    assert drift > 0.3, "the ratios must differ from 1, or the clipping is not tested"
    assert result.updates == 6 and (learner.policy.step, learner.policy.updates) == (1, 6)
    assert result.loss == pytest.approx(mean(losses), abs=1e-5)
    assert_same_weights(learner.policy.model, student)
    metrics = step_metrics(result, batch)
    assert metrics["actor/updates"] == 6 and metrics["actor/pg_clipfrac"] > 0
    assert metrics["rollout_corr/abs_diff_mean"] == pytest.approx(
        mean(
            abs(float(o - b))
            for row in range(len(batch))
            for o, b in zip(old[row], batch.behaviour_logprobs[row][batch.loss_mask[row]], strict=True)
        ),
        rel=1e-4,
    )


def test_the_learning_rate_schedule_counts_steps_and_not_updates() -> None:
    recipe = recipe_of(
        trainer={"epochs": 2, "mini_batch_size": 4, "schedule": "linear", "steps": 4, "learning_rate": 1e-3}
    )
    learner = learner_of(recipe)
    rates = [learn(learner, batch_of(seed=seed)).learning_rate for seed in range(3)]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3])
    assert (learner.policy.step, learner.policy.updates) == (3, 12)


def test_a_step_of_one_update_equals_a_bare_policy_update_to_the_bit() -> None:
    """It also computes no old logprobs beforehand."""
    recipe = recipe_of()
    learner, other = learner_of(recipe), learner_of(recipe)
    batch = batch_of()
    result = learn(learner, batch)
    ready = with_advantages(batch, "grpo")
    weights = Jagged(token_weights(ready.advantages.lengths, "token-mean"), ready.advantages.offsets)
    bare = other.policy.update(ready, other.objective, weights, 8192, teacher_heads={})
    assert (result.loss, result.grad_norm) == (bare.loss, bare.grad_norm)
    assert "old_logprobs" not in result.seconds
    for mine, theirs in zip(learner.policy.model.parameters(), other.policy.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_measuring_the_mismatch_does_not_change_the_update() -> None:
    batch, plain, measured = (
        batch_of(),
        learner_of(recipe_of()),
        learner_of(recipe_of(loss={"correction": {"measure": True}})),
    )
    without, result = learn(plain, batch), learn(measured, batch)
    assert "old_logprobs" in result.seconds
    assert (result.loss, result.grad_norm) == (without.loss, without.grad_norm)
    assert result.metrics["actor/pg_clipfrac"] == without.metrics["actor/pg_clipfrac"]
    assert_same_weights(measured.policy.model, plain.policy.model)


def with_given(batch: Batch, given: set[int]) -> Batch:
    """The batch with these rows as given answers: without logprobs, and with rewards that no student's row has."""
    origins = tuple("data" if row in given else "student" for row in range(len(batch)))
    logprobs = [
        torch.full_like(values, float("nan")) if row in given else values
        for row, values in enumerate(batch.behaviour_logprobs)
    ]
    rewards = tuple(100.0 if row in given else reward for row, reward in enumerate(batch.rewards))
    return replace(batch, origins=origins, rewards=rewards, behaviour_logprobs=Jagged.from_rows(logprobs))


@pytest.mark.parametrize("kind", ["grpo", "reinforce++"])
def test_given_answers_have_no_ratio_group_or_policy_gradient(kind: str) -> None:
    """Two updates with a correction. Groups have one given row, one student row, or only given rows."""
    given = {0, 4, 5, 6, 7, 8}
    recipe = recipe_of(
        rollout={"n": 3, "off_policy": 0.3},
        trainer={"epochs": 2, "mini_batch_size": 7},
        loss={"advantage": kind, "sft_coef": 0.5, "correction": {"weigh": "token", "cap": 1.5}},
    )
    batch, learner, student = with_given(batch_of(sessions=3), given), learner_of(recipe), model()
    drawn = [row for row in range(len(batch)) if row not in given]
    with torch.no_grad():
        old = [plain_logprobs(student, batch, row) for row in range(len(batch))]
    advantages = torch.zeros(len(batch))
    for row in drawn:
        group = [batch.rewards[other] for other in drawn if other // 3 == row // 3]
        if kind == "grpo" and len(group) > 1:
            advantages[row] = (batch.rewards[row] - mean(group)) / (stdev(group) + 1e-6)
    if kind == "reinforce++":  # a token's return is its row's reward, whitened over the drawn tokens
        returns = torch.cat([torch.full((len(old[row]),), batch.rewards[row]) for row in drawn])
        spread = (returns.var() + 1e-8).rsqrt()
        advantages[drawn] = (torch.tensor([batch.rewards[row] for row in drawn]) - returns.mean()) * spread
    optimizer, losses = adamw(student), []
    for _ in range(2):
        terms = []
        for row in range(len(batch)):
            logp = plain_logprobs(student, batch, row)
            if row in given:
                terms.append(-0.5 * logp)
                continue
            behaviour = batch.behaviour_logprobs[row][batch.loss_mask[row]]
            weight = (old[row] - behaviour).exp().clamp(max=1.5)
            ratio = (logp - old[row]).exp()
            terms.append(weight * clipped(ratio, advantages[row].expand_as(ratio)))
        loss = torch.cat(terms).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    result = learn(learner, batch)
    assert result.loss == pytest.approx(mean(losses), abs=1e-5)
    assert_same_weights(learner.policy.model, student)
    metrics = step_metrics(result, batch)
    assert metrics["critic/rewards/mean"] == pytest.approx(mean(batch.rewards[row] for row in drawn))
    gaps = [
        abs(float(o - b))
        for row in drawn
        for o, b in zip(old[row], batch.behaviour_logprobs[row][batch.loss_mask[row]], strict=True)
    ]
    assert metrics["rollout_corr/abs_diff_mean"] == pytest.approx(mean(gaps), rel=1e-4)


def test_a_step_of_given_answers_alone_is_plain_cross_entropy() -> None:
    recipe = recipe_of(rollout={"off_policy": 0.9}, loss={"sft_coef": 1.0, "correction": {"measure": True}})
    batch = with_given(batch_of(prompts=2), {0, 1, 2, 3})
    learner, student = learner_of(recipe), model()
    loss = torch.cat([-plain_logprobs(student, batch, row) for row in range(4)]).mean()
    found = step_metrics(learn(learner, batch), batch)
    assert found["actor/loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert found["actor/sft_loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert found["actor/pg_loss"] == 0 and "actor/ppo_kl" not in found and "rollout_corr/kl" not in found


def test_correction_weights_are_the_ratio_of_old_to_behaviour_probabilities() -> None:
    recipe = recipe_of(loss={"correction": {"weigh": "token", "cap": 1.5, "drop": "geometric", "low": 0.3}})
    batch, learner, student = batch_of(), learner_of(recipe), model()
    optimizer = adamw(student)
    advantages = group_advantages(batch, "grpo")
    terms, dropped = [], 0
    for row in range(len(batch)):
        behaviour = batch.behaviour_logprobs[row][batch.loss_mask[row]]
        logp = plain_logprobs(student, batch, row)
        delta = (logp - behaviour).detach()
        weight = delta.exp().clamp(max=1.5)
        if not 0.3 <= math.exp(float(delta.mean())) <= 2.0:
            weight, dropped = torch.zeros_like(weight), dropped + 1
        ratio = (logp - logp.detach()).exp()
        terms.append(weight * clipped(ratio, torch.full_like(ratio, advantages[row])))
    assert 0 < dropped < len(batch)
    loss = torch.cat(terms).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    optimizer.step()
    result = learn(learner, batch)
    assert result.loss == pytest.approx(loss.item(), abs=1e-5)
    assert_same_weights(learner.policy.model, student)
    metrics = step_metrics(result, batch)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(dropped / len(batch))


def enumerated_gae(
    rewards: list[float], values: list[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """(advantages before whitening, returns) as the double sum of the definition."""
    deltas = [
        r + gamma * (values[t + 1] if t + 1 < len(values) else 0.0) - values[t] for t, r in enumerate(rewards)
    ]
    found = [
        sum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, len(deltas))) for t in range(len(deltas))
    ]
    return found, [a + v for a, v in zip(found, values, strict=True)]


def plain_values(critic: nn.Module, batch: Batch, row: int) -> torch.Tensor:
    states = critic.model(input_ids=batch.tokens[row][None], use_cache=False).last_hidden_state[0]
    places = [t - 1 for t in range(1, len(states)) if batch.loss_mask[row][t]]
    return critic.lm_head(states[places])[:, 0]


def test_ppo_with_a_critic_equals_ppo_by_hand() -> None:
    """Two mini-batches, twice: values before the first update, GAE enumerated, value clip, policy clip."""
    recipe = recipe_of(
        trainer={"epochs": 2, "mini_batch_size": 4},
        loss={"advantage": "gae", "gamma": 0.9, "lam": 0.8},
        critic={"learning_rate": 1e-2, "value_clip": 0.05},
    )
    batch, learner = batch_of(), learner_of(recipe)
    student, critic = model(0), give_value_head(model(1))
    optimizers = adamw(student), adamw(critic)
    with torch.no_grad():
        old = [plain_logprobs(student, batch, row) for row in range(len(batch))]
        values = [plain_values(critic, batch, row) for row in range(len(batch))]
    raw, returns = [], []
    for row, value in enumerate(values):
        rewards = [0.0] * (len(value) - 1) + [batch.rewards[row]]
        advantage, target = enumerated_gae(rewards, value.tolist(), 0.9, 0.8)
        raw.append(torch.tensor(advantage))
        returns.append(torch.tensor(target))
    every = torch.cat(raw)
    advantages = [(part - every.mean()) / (every.var() + 1e-8).sqrt() for part in raw]
    parts = split_rows(batch.keys, range(len(batch)), 4, 2, seed=0, step=0)
    for rows in parts:
        errors = []
        for row in rows:
            value = plain_values(critic, batch, row)
            bounded = torch.clamp(value, values[row] - 0.05, values[row] + 0.05)
            errors.append(0.5 * torch.maximum((value - returns[row]) ** 2, (bounded - returns[row]) ** 2))
        take_step(torch.cat(errors).mean(), critic, optimizers[1])
    for rows in parts:
        terms = [
            clipped((plain_logprobs(student, batch, row) - old[row]).exp(), advantages[row]) for row in rows
        ]
        take_step(torch.cat(terms).mean(), student, optimizers[0])
    result = learn(learner, batch)
    assert_same_weights(learner.critic.policy.model, critic)
    assert_same_weights(learner.policy.model, student)
    metrics = step_metrics(result, batch)
    assert metrics["critic/returns/mean"] == pytest.approx(float(torch.cat(returns).mean()), rel=1e-4)
    assert metrics["critic/vf_clipfrac"] > 0 and metrics["critic/grad_norm"] > 0


def take_step(loss: torch.Tensor, trained: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
    optimizer.step()


def test_only_the_critic_is_trained_during_only_steps() -> None:
    recipe = recipe_of(loss={"advantage": "gae"}, critic={"only_steps": 2, "learning_rate": 1e-2})
    learner = learner_of(recipe)
    before = [parameter.clone() for parameter in learner.policy.model.parameters()]
    errors = []
    for number in range(3):
        metrics = step_metrics(learn(learner, batch_of()), batch_of())
        errors.append(metrics["critic/vf_loss"])
        same = all(torch.equal(a, b) for a, b in zip(before, learner.policy.model.parameters(), strict=True))
        assert same == (number < 2) and ("actor/loss" in metrics) == (number >= 2)
    assert errors[2] < errors[0] and learner.policy.step == learner.critic.policy.step == 3
    assert (learner.policy.updates, learner.critic.policy.updates) == (1, 3)


@pytest.mark.parametrize("where", ["reward", "loss"])
def test_the_reference_kl_penalty_equals_the_step_by_hand(where: str) -> None:
    recipe = recipe_of(
        loss={
            "advantage": "rloo",
            "kl_coef": 0.1,
            "kl_kind": "k1" if where == "reward" else "k2",
            "kl_in": where,
        }
    )
    batch, learner, student, reference = batch_of(), learner_of(recipe), model(0), model(2)
    rewards, leashes = list(batch.rewards), []
    with torch.no_grad():
        known = [plain_logprobs(reference, batch, row) for row in range(len(batch))]
    logps = [plain_logprobs(student, batch, row) for row in range(len(batch))]
    for row, logp in enumerate(logps):
        if where == "reward":
            rewards[row] -= 0.1 * float((logp.detach() - known[row]).sum())
        else:
            leashes.append(0.1 * (logp - known[row]) ** 2 / 2)
    terms = []
    for row, logp in enumerate(logps):
        sibling = rewards[row + 1 if row % 2 == 0 else row - 1]
        # With one update the anchor is the engine's logprob.
        ratio = (logp - batch.behaviour_logprobs[row][batch.loss_mask[row]]).exp()
        terms.append(clipped(ratio, torch.full_like(ratio, rewards[row] - sibling)))
    loss = torch.cat(terms).mean() + (torch.cat(leashes).mean() if leashes else 0.0)
    take_step(loss, student, adamw(student))
    assert learn(learner, batch).loss == pytest.approx(loss.item(), abs=1e-5)
    assert_same_weights(learner.policy.model, student)


def test_overlong_rows_are_dropped_or_penalized_in_proportion_to_their_length() -> None:
    batch = batch_of()
    cut = [row for row, reason in enumerate(batch.stop_reasons) if reason == "length"]
    assert 0 < len(cut) < len(batch)
    learner = learner_of(recipe_of(rollout={"overlong": "drop"}))
    result = learn(learner, batch)
    assert [result.row_tokens[row] for row in cut] == [0] * len(cut)
    kept = [
        len(batch.loss_mask[row]) and int(batch.loss_mask[row].sum())
        for row in range(len(batch))
        if row not in cut
    ]
    assert result.loss_tokens == sum(kept)
    metrics = step_metrics(
        learn(learner_of(recipe_of(rollout={"overlong_buffer": 4, "overlong_penalty": 2.0})), batch), batch
    )
    lengths = [int(mask.sum()) for mask in batch.loss_mask]
    expected = mean(
        reward - 2.0 * min(1.0, max(0.0, (length - 2) / 4))
        for reward, length in zip(batch.rewards, lengths, strict=True)
    )
    assert metrics["critic/rewards/mean"] == pytest.approx(expected, abs=1e-6)


def test_the_overlong_penalty_of_multi_turn_rows_uses_max_trajectory_tokens() -> None:
    """Rows of at most 6 tokens in turns of at most 2: only the budget of all turns counts."""
    batch = batch_of()
    rollout = {"agent": "tool", "max_new_tokens": 2, "overlong_buffer": 4}
    for budget, changed in ((1000, False), (6, True)):
        learner = learner_of(recipe_of(rollout={**rollout, "max_trajectory_tokens": budget}))
        rewarded = learn(learner, batch).metrics["critic/rewards/mean"].total
        assert (rewarded != pytest.approx(mean(batch.rewards))) == changed


def test_a_batch_without_remaining_rows_makes_a_step_without_an_update() -> None:
    batch = batch_of()
    all_cut = Batch(
        batch.keys,
        batch.tokens,
        batch.loss_mask,
        batch.behaviour_logprobs,
        batch.rewards,
        ("length",) * len(batch),
    )
    learner = learner_of(recipe_of(rollout={"overlong": "drop"}))
    result = learn(learner, all_cut)
    assert (result.updates, learner.policy.step, learner.policy.updates) == (0, 1, 0)
    assert "actor/loss" not in step_metrics(result, all_cut)


@pytest.mark.parametrize(
    ("rewards", "message"), [((1.0, 1.0), "all are 1"), ((0.0, 1.0), "all sessions of each prompt")]
)
def test_a_run_without_any_advantage_in_its_first_three_steps_is_warned_once(
    rewards: tuple[float, float], message: str
) -> None:
    """All sessions of a prompt have the same reward, with or without differences between prompts."""
    notes: list[str] = []
    flat = [rewards[row // 2 % 2] for row in range(14)]
    batch = replace(batch_of(), rewards=tuple(flat))
    learner = learner_of(recipe_of())
    learner.state.view.note = notes.append
    for _ in range(5):
        learn(learner, batch)
    assert len(notes) == 1 and message in notes[0] and "no advantage in 3 steps" in notes[0]
    later = learner_of(recipe_of())
    later.state.view.note = notes.append
    for made in (batch_of(), batch, batch, batch, batch):
        learn(later, made)
    assert len(notes) == 1, "one step with an advantage must prevent the note"
