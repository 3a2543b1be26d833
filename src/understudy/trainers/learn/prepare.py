"""Computes what a batch needs before the first update of its step, under the weights before the step.

    old logprobs ──> importance weights
    reference logprobs ──> penalty ─┐
    rewards ──over-long penalty─────┴──> advantages <──> values of the critic

Computed once for the whole batch, before it is split into mini-batches, micro-batches and ranks. Everything here runs
on the update thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from understudy.config import LossConfig
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
from understudy.types.batch_ref import BatchRef, student_rows
from understudy.types.jagged import Jagged
from understudy.types.prompt import split_key
from understudy.types.trajectory import StopReason

NOTE_AFTER_STEPS = 3
"""Steps without any advantage after which the user gets a note."""


@dataclass
class Prepared:
    """A batch ready to be split into updates."""

    batch: BatchRef
    old_logprobs: Jagged | None = None
    anchor: Jagged | None = None
    """`old_logprobs` if ratios are taken to them."""
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started


def prepare(learner: Learner, batch: BatchRef, updates: int) -> Prepared:
    """Adds to a batch what its updates need: importance weights, reference logprobs, values, advantages.
    `updates`: how many optimizer steps it is split into."""
    loss, rollout = learner.settings.loss, learner.settings.rollout
    ready = Prepared(batch)
    values = None
    if loss.task_coef > 0 and learner.critic is not None:
        # Functions, because a critic in this process reads them only when `values` is called below.
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
        # Not for a measurement alone, which must leave the objective as it is.
        ready.anchor = ready.old_logprobs if anchors_on_old(loss, updates) else None
    max_tokens = learner.micro_batches.tokens  # `within_memory` may just have lowered it
    if learner.reference is not None:
        with ready.timed("reference"):
            known = learner.reference.logprobs(batch.streams(), max_tokens, loss.student_temperature)
        ready.batch = ready.batch.with_columns(reference_logprobs=known)
    if loss.task_coef > 0:
        if values is not None:
            with ready.timed("values"):
                ready.batch = ready.batch.with_columns(values=values())
        rewards = penalised(ready.batch, rollout.trajectory_budget, rollout.overlong_buffer,
                            rollout.overlong_penalty)  # fmt: skip
        ready.batch = ready.batch.with_rewards(rewards)
        penalty = _reference_penalty(ready, loss.kl_coef, loss.kl_kind) if loss.kl_in == "reward" else None
        ready.batch = with_advantages(
            ready.batch, loss.advantage, penalty_N=penalty, gamma=loss.gamma, lam=loss.lam
        )
        _reward_metrics(ready, penalty)
        _note_missing_advantage(learner, ready)
    return ready


def correction_settings(loss: LossConfig) -> CorrectionSettings:
    chosen = loss.correction
    return CorrectionSettings(chosen.weigh, chosen.cap, chosen.drop, chosen.low, chosen.high)


def anchors_on_old(loss: LossConfig, updates: int) -> bool:
    """Whether ratios are taken to the trainer's logprobs from before the step. Otherwise they are taken to those the
    tokens were sampled with. A divergence has no ratio."""
    if correction_settings(loss).active:
        return True
    return updates > 1 and (loss.task_coef > 0 or (loss.policy_gradient and loss.distill_coef > 0))


def needs_old_logprobs(loss: LossConfig, updates: int) -> bool:
    """Whether the trainer's logprobs from before the step are computed: as the anchor, to measure the mismatch, or for
    a penalty in the reward."""
    penalty = loss.kl_coef > 0 and loss.kl_in == "reward"
    return anchors_on_old(loss, updates) or loss.correction.measure or penalty


def corrected(batch: BatchRef, old: Jagged, loss: LossConfig) -> tuple[BatchRef, dict[str, float]]:
    """The batch with importance weights, if the recipe has a correction, and metrics of the mismatch. Given
    answers have no behaviour policy: their weights are 1 and no loss reads them."""
    drawn = StudentTokens(batch)
    old_N, behaviour_N = old.values[drawn.tokens], behaviour_of(batch)[drawn.tokens]
    metrics = mismatch_metrics(old_N, behaviour_N, drawn.lengths)
    settings = correction_settings(loss)
    if not settings.active:
        return batch, metrics
    weights_N = importance_weights(old_N, behaviour_N, drawn.lengths, settings)
    metrics |= correction_metrics(weights_N, old_N, behaviour_N, drawn.lengths, settings)
    return batch.with_columns(importance=drawn.as_column(weights_N, elsewhere=1.0)), metrics


def behaviour_of(batch: BatchRef) -> torch.Tensor:
    """[N]: the engine's logprobs of the loss-bearing tokens, rows concatenated; NaN in given answers."""
    here = batch.streams()
    return here.behaviour_logprobs.values[here.loss_mask.values]


class StudentTokens:
    """The rows of a batch that the student wrote, and their loss-bearing tokens."""

    def __init__(self, batch: BatchRef) -> None:
        self.rows = student_rows(batch)
        self.lengths = [batch.loss_lengths[row] for row in self.rows]
        lengths = torch.tensor(batch.loss_lengths, dtype=torch.int64)
        self._offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        drawn_B = torch.zeros(len(batch), dtype=torch.bool)
        drawn_B[self.rows] = True
        self.tokens = drawn_B.repeat_interleave(lengths)
        """bool [N]: among the loss-bearing tokens of the whole batch."""

    def as_column(self, values: torch.Tensor, elsewhere: float = 0.0) -> Jagged:
        """Values of these tokens as a column of the whole batch, with `elsewhere` at all other tokens."""
        whole_N = values.new_full((len(self.tokens),), elsewhere)
        whole_N[self.tokens] = values
        return Jagged(whole_N, self._offsets)


def _note_missing_advantage(learner: Learner, ready: Prepared) -> None:
    """Notes once that the first steps of a launch had no advantage, so that the task term changes no
    weight."""
    so_far, advantages = learner.state.tally.steps_without_advantage, ready.batch.advantages
    if so_far is None or advantages is None:
        return
    if bool(advantages.values.any()):
        learner.state.tally.steps_without_advantage = None
        return
    learner.state.tally.steps_without_advantage = so_far + 1
    if so_far + 1 == NOTE_AFTER_STEPS:
        learner.state.tally.steps_without_advantage = None
        rewards = sorted(set(ready.batch.rewards))
        found = (
            f"all are {rewards[0]:g}"
            if len(rewards) == 1
            else "all sessions of each prompt have the same one"
        )
        learner.state.view.note(
            f"rewards gave no advantage in {NOTE_AFTER_STEPS} steps ({found}): loss.task_coef changes nothing so far; is data.reward right "
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
    prompt's group. Given answers belong to no group and have advantage 0.

    `penalty_N` (KL to a reference) is subtracted from the reward of each token. `gae` also sets `returns`.
    """
    drawn = StudentTokens(batch)
    if not drawn.rows:
        return batch.with_columns(advantages=drawn.as_column(torch.empty(0)))
    rewards_B = torch.tensor([batch.rewards[row] for row in drawn.rows])
    lengths_B = drawn.lengths
    penalty_N = None if penalty_N is None else penalty_N[drawn.tokens]
    if kind in SEQUENCE_ADVANTAGES:
        if penalty_N is not None:
            rewards_B = rewards_B - torch.stack([part.sum() for part in penalty_N.split(lengths_B)])
        groups_B = [split_key(batch.keys[row])[0] for row in drawn.rows]
        advantages_N = to_tokens(SEQUENCE_ADVANTAGES[kind](rewards_B, groups_B), lengths_B)
        return batch.with_columns(advantages=drawn.as_column(advantages_N))
    if not bool(torch.isfinite(rewards_B).all()):
        raise LossInputError("a row has no finite reward; a failed reward must be dropped, not averaged.")
    rewards_N = reward_at_end(rewards_B, lengths_B)
    if penalty_N is not None:
        rewards_N = rewards_N - penalty_N
    if kind == "reinforce++":
        return batch.with_columns(
            advantages=drawn.as_column(reinforce_plus_plus(rewards_N, lengths_B, gamma))
        )
    if batch.values is None:
        raise LossInputError("advantage = 'gae' needs the critic's values, which are missing.")
    advantages_N, returns_N = gae(rewards_N, batch.values.values[drawn.tokens], lengths_B, gamma, lam)
    return batch.with_columns(advantages=drawn.as_column(advantages_N), returns=drawn.as_column(returns_N))


def penalised(
    batch: BatchRef, max_length: int | None, buffer: int | None, penalty: float
) -> tuple[float, ...]:
    """The rewards after the soft over-long penalty."""
    if buffer is None or max_length is None:
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
    drawn_N = StudentTokens(ready.batch).tokens
    ready.metrics["actor/reward_kl_penalty"] = float(estimate_N[drawn_N].mean()) if drawn_N.any() else 0.0
    ready.metrics["actor/reward_kl_penalty_coeff"] = coef
    return coef * estimate_N


def _reward_metrics(ready: Prepared, penalty_N: torch.Tensor | None) -> None:
    """verl's names: `critic/rewards` after penalties (`critic/score` is before them), `critic/advantages` per
    token; of the rows that the student wrote."""
    batch, drawn = ready.batch, StudentTokens(ready.batch)
    if not drawn.rows:
        return
    assert batch.advantages is not None
    rewards = torch.tensor([batch.rewards[row] for row in drawn.rows], dtype=torch.float64)
    if penalty_N is not None:
        parts = penalty_N[drawn.tokens].double().split(drawn.lengths)
        rewards = rewards - torch.stack([part.sum() for part in parts])
    ready.metrics["critic/rewards/mean"] = float(rewards.mean())
    advantages = batch.advantages.values[drawn.tokens]
    if len(advantages):
        ready.metrics["critic/advantages/mean"] = float(advantages.double().mean())
        ready.metrics["critic/advantages/max"] = float(advantages.max())
        ready.metrics["critic/advantages/min"] = float(advantages.min())
