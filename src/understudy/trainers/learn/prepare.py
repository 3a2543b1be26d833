"""Computes what a batch needs before the first update of its step, under the weights before the step.

    old logprobs ──> importance weights
    reference logprobs ──> penalty ─┐
    rewards ──over-long penalty─────┴──> advantages <──> values of the critic

Computed once for the whole batch, before it is split into mini-batches, micro-batches and ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from understudy.config import LossConfig
from understudy.dataplane.base import split_key
from understudy.dataplane.groups import overlong_penalty
from understudy.errors import LossInputError
from understudy.losses.advantages import (
    SEQUENCE_ADVANTAGES,
    gae,
    reinforce_plus_plus,
    reward_at_end,
    to_tokens,
)
from understudy.losses.correction import (
    CorrectionSettings,
    correction_metrics,
    importance_weights,
    mismatch_metrics,
)
from understudy.losses.estimators import estimate
from understudy.planning.resolved import LearnSettings
from understudy.trainers.learn.minibatches import split_rows
from understudy.trainers.learn.out_of_memory import within_memory
from understudy.trainers.system import Learner
from understudy.types.batch_ref import BatchRef
from understudy.types.jagged import Jagged
from understudy.types.trajectory import StopReason


def correction_settings(loss: LossConfig) -> CorrectionSettings:
    chosen = loss.correction
    return CorrectionSettings(chosen.weigh, chosen.cap, chosen.drop, chosen.low, chosen.high)


def needs_old_logprobs(loss: LossConfig, updates: int) -> bool:
    """Whether the loss needs the trainer's logprobs from before the step.

    With one update they equal those of the update's own forward pass, so the ratio is 1. A divergence has no
    ratio.
    """
    if loss.correction.measure or correction_settings(loss).active:
        return True
    if loss.kl_coef > 0 and loss.kl_in == "reward":
        return True
    return updates > 1 and (loss.task_coef > 0 or (loss.policy_gradient and loss.distill_coef > 0))


def corrected(batch: BatchRef, old: Jagged, loss: LossConfig) -> tuple[BatchRef, dict[str, float]]:
    """The batch with importance weights, if the recipe has a correction, and metrics of the mismatch."""
    lengths = old.lengths.tolist()
    behaviour_N = behaviour_of(batch)
    metrics = mismatch_metrics(old.values, behaviour_N, lengths)
    settings = correction_settings(loss)
    if not settings.active:
        return batch, metrics
    weights_N = importance_weights(old.values, behaviour_N, lengths, settings)
    metrics |= correction_metrics(weights_N, old.values, behaviour_N, lengths, settings)
    return batch.with_columns(importance=Jagged(weights_N, old.offsets)), metrics


def behaviour_of(batch: BatchRef) -> torch.Tensor:
    """[N]: the engine's logprobs of the loss-bearing tokens, rows concatenated."""
    here = batch.streams()
    return here.behaviour_logprobs.values[here.loss_mask.values]


TOLD_AFTER = 3
"""Steps without any advantage after which the user is told."""


@dataclass
class Prepared:
    """A batch ready to be split into updates."""

    batch: BatchRef
    old_logprobs: Jagged | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started


def prepare(learner: Learner, batch: BatchRef, updates: int) -> Prepared:
    loss, rollout = learner.settings.loss, learner.settings.rollout
    ready = Prepared(batch)
    values = None
    if loss.task_coef > 0 and learner.critic is not None:
        values = learner.critic.begin_values(batch.streams, lambda: learner.micro_batches.tokens)
    if needs_old_logprobs(loss, updates):
        with ready.timed("old_logprobs"):
            ready.old_logprobs = within_memory(
                learner,
                learner.policy,
                batch,
                lambda tokens: learner.policy.logprobs(batch, tokens, loss.student_temperature),
            )
        ready.batch, ready.metrics = corrected(ready.batch, ready.old_logprobs, loss)
    max_tokens = learner.micro_batches.tokens
    if learner.reference is not None:
        with ready.timed("reference"):
            known = learner.reference.logprobs(batch.streams(), max_tokens, loss.student_temperature)
        ready.batch = ready.batch.with_columns(reference_logprobs=known)
    if loss.task_coef > 0:
        if values is not None:
            with ready.timed("values"):
                ready.batch = ready.batch.with_columns(values=values())
        rewards = penalised(ready.batch, rollout.max_new_tokens, rollout.overlong_buffer,
                            rollout.overlong_penalty)  # fmt: skip
        ready.batch = ready.batch.with_rewards(rewards)
        penalty = _reference_penalty(ready, loss.kl_coef, loss.kl_kind) if loss.kl_in == "reward" else None
        ready.batch = with_advantages(
            ready.batch, loss.advantage, penalty_N=penalty, gamma=loss.gamma, lam=loss.lam
        )
        _reward_metrics(ready, penalty)
        _tell_of_no_advantage(learner, ready)
    return ready


def _tell_of_no_advantage(learner: Learner, ready: Prepared) -> None:
    """Notes once that the first steps of a launch had no advantage, so that the task term changes no
    weight."""
    so_far, advantages = learner.state.tally.steps_without_advantage, ready.batch.advantages
    if so_far is None or advantages is None:
        return
    if bool(advantages.values.any()):
        learner.state.tally.steps_without_advantage = None
        return
    learner.state.tally.steps_without_advantage = so_far + 1
    if so_far + 1 == TOLD_AFTER:
        learner.state.tally.steps_without_advantage = None
        rewards = sorted(set(ready.batch.rewards))
        found = (
            f"all are {rewards[0]:g}"
            if len(rewards) == 1
            else "all sessions of each prompt have the same one"
        )
        learner.state.view.note(
            f"rewards gave no advantage in {TOLD_AFTER} steps ({found}): loss.task_coef changes nothing so far; is data.reward right "
            "for these rows?"
        )


def with_advantages(
    batch: BatchRef,
    kind: str,
    *,
    penalty_N: torch.Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> BatchRef:
    """Task rewards as one advantage per loss-bearing token. Group-based kinds are normalised within each
    prompt's group.

    `penalty_N` (KL to a reference) is subtracted from the reward of each token. `gae` also sets `returns`.
    """
    rewards_B = torch.tensor(batch.rewards)
    lengths_B = batch.loss_lengths
    offsets = torch.tensor([0, *lengths_B], dtype=torch.int64).cumsum(0)
    if kind in SEQUENCE_ADVANTAGES:
        if penalty_N is not None:
            rewards_B = rewards_B - torch.stack([part.sum() for part in penalty_N.split(list(lengths_B))])
        groups_B = [split_key(key)[0] for key in batch.keys]
        advantages_N = to_tokens(SEQUENCE_ADVANTAGES[kind](rewards_B, groups_B), lengths_B)
        return batch.with_columns(advantages=Jagged(advantages_N, offsets))
    if not bool(torch.isfinite(rewards_B).all()):
        raise LossInputError("a row has no finite reward; a failed reward must be dropped, not averaged.")
    rewards_N = reward_at_end(rewards_B, lengths_B)
    if penalty_N is not None:
        rewards_N = rewards_N - penalty_N
    if kind == "reinforce++":
        return batch.with_columns(
            advantages=Jagged(reinforce_plus_plus(rewards_N, lengths_B, gamma), offsets)
        )
    if batch.values is None:
        raise LossInputError("advantage = 'gae' needs the critic's values, which are missing.")
    advantages_N, returns_N = gae(rewards_N, batch.values.values, lengths_B, gamma, lam)
    return batch.with_columns(advantages=Jagged(advantages_N, offsets), returns=Jagged(returns_N, offsets))


def penalised(batch: BatchRef, max_length: int, buffer: int | None, penalty: float) -> tuple[float, ...]:
    """The rewards after the soft over-long penalty."""
    if buffer is None:
        return batch.rewards
    return tuple(
        reward + penalty * overlong_penalty(length, max_length, buffer)
        for reward, length in zip(batch.rewards, batch.loss_lengths, strict=True)
    )


def rows_to_train(batch: BatchRef, overlong: str) -> list[int]:
    """Rows with loss-bearing tokens, without those cut at the length limit if the recipe drops them."""
    cut = [overlong == "drop" and reason == StopReason.LENGTH for reason in batch.stop_reasons]
    cut = cut or [False] * len(batch)
    return [row for row, length in enumerate(batch.loss_lengths) if not cut[row] and length]


def rows_of_updates(settings: LearnSettings, batch: BatchRef, step: int) -> list[list[int]]:
    """The rows of each optimizer step of this batch, in order."""
    rows, trainer = rows_to_train(batch, settings.rollout.overlong), settings.trainer
    return split_rows(batch.keys, rows, trainer.mini_batch_size, trainer.epochs, settings.seed, step)


def _reference_penalty(ready: Prepared, coef: float, kind: str) -> torch.Tensor | None:
    """float32 [N]: `kl_coef` times the KL estimate under the weights before the step, without gradients."""
    known = ready.batch.reference_logprobs
    if coef == 0 or known is None:
        return None
    own_N = behaviour_of(ready.batch) if ready.old_logprobs is None else ready.old_logprobs.values
    estimate_N = estimate(kind.removesuffix("+"), own_N, known.values)
    ready.metrics["actor/reward_kl_penalty"] = float(estimate_N.mean())
    ready.metrics["actor/reward_kl_penalty_coeff"] = coef
    return coef * estimate_N


def _reward_metrics(ready: Prepared, penalty_N: torch.Tensor | None) -> None:
    """verl's names: `critic/rewards` after penalties (`critic/score` is before them), `critic/advantages` per
    token."""
    batch = ready.batch
    assert batch.advantages is not None
    rewards = torch.tensor(batch.rewards, dtype=torch.float64)
    if penalty_N is not None:
        rewards = rewards - torch.stack(
            [part.sum() for part in penalty_N.double().split(batch.advantages.lengths.tolist())]
        )
    ready.metrics["critic/rewards/mean"] = float(rewards.mean())
    if len(batch.advantages.values):
        ready.metrics["critic/advantages/mean"] = float(batch.advantages.values.double().mean())
        ready.metrics["critic/advantages/max"] = float(batch.advantages.values.max())
        ready.metrics["critic/advantages/min"] = float(batch.advantages.values.min())
