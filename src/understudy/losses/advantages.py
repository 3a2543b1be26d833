"""Task rewards → advantages, over the whole step, before it is split into micro-batches.

Group-based forms give one number per sequence, which `to_tokens` spreads over its tokens; token-level forms
work on the flat tokens of all sequences, in order. In a group of one the reward advantage is 0, and the row
still distils. (verl keeps the raw reward there, which is not an advantage.)

Shape legend: B sequences, N tokens (N = Σ lengths_B).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from understudy.errors import LossInputError

STD_FLOOR = 1e-6
"""Added to a group's standard deviation (verl's value), so that equal rewards give 0 and not 0/0."""

WHITEN_FLOOR = 1e-8


def grpo(rewards_B: Tensor, groups_B: Sequence[Hashable]) -> Tensor:
    """(reward − group mean) / group standard deviation."""
    return _by_group(rewards_B, groups_B, lambda group: (group - group.mean()) / (group.std() + STD_FLOOR))


def grpo_no_std(rewards_B: Tensor, groups_B: Sequence[Hashable]) -> Tensor:
    """reward − group mean: easy and hard prompts keep their own scale."""
    return _by_group(rewards_B, groups_B, lambda group: group - group.mean())


def rloo(rewards_B: Tensor, groups_B: Sequence[Hashable]) -> Tensor:
    """reward − mean of the other rewards of the group."""
    return _by_group(
        rewards_B, groups_B, lambda group: (group - group.mean()) * (len(group) / (len(group) - 1))
    )


def reinforce_plus_plus(rewards_N: Tensor, lengths_B: Sequence[int], gamma: float = 1.0) -> Tensor:
    """REINFORCE++: discounted return of each token, whitened over every token of the step."""
    return whiten(_scan_back(rewards_N, lengths_B, gamma))


def gae(
    rewards_N: Tensor, values_N: Tensor, lengths_B: Sequence[int], gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(advantages, returns) by generalised advantage estimation; advantages whitened, returns the critic's target."""
    if values_N.shape != rewards_N.shape:
        raise LossInputError(
            f"values_N has shape {list(values_N.shape)}, rewards_N {list(rewards_N.shape)}; they must agree."
        )
    values = values_N.detach().float()
    last_N = _last_of_sequence(rewards_N, lengths_B)
    next_values = torch.cat([values[1:], values.new_zeros(1)])[: len(values)]
    deltas = rewards_N.float() + gamma * torch.where(last_N, 0.0, next_values) - values
    advantages = _scan_back(deltas, lengths_B, gamma * lam)
    return whiten(advantages), advantages + values


def discounted_distillation(signal_N: Tensor, sequence_ids_N: Tensor, discount: float) -> Tensor:
    """A_t = −Σ_{s ≥ t} discount^(s−t) · signal_s within each sequence, whose tokens lie together and in order."""
    if discount == 0.0 or signal_N.numel() == 0:
        return -signal_N.detach().float()
    lengths = torch.unique_consecutive(sequence_ids_N, return_counts=True)[1]
    return -_scan_back(signal_N, lengths.tolist(), discount)


SEQUENCE_ADVANTAGES: dict[str, Callable[[Tensor, Sequence[Hashable]], Tensor]] = {
    "grpo": grpo,
    "grpo_no_std": grpo_no_std,
    "rloo": rloo,
}
"""Names as in a recipe's `loss.advantage`; each gives one number per sequence."""


def to_tokens(values_B: Tensor, lengths_B: Sequence[int]) -> Tensor:
    """One value per sequence → one per token [N]."""
    if len(lengths_B) != len(values_B):
        raise LossInputError(
            f"{len(values_B)} values for {len(lengths_B)} sequences; there must be one each."
        )
    return values_B.repeat_interleave(torch.as_tensor(lengths_B, device=values_B.device))


def reward_at_end(rewards_B: Tensor, lengths_B: Sequence[int]) -> Tensor:
    """Sequence rewards as token rewards [N], at the last token of each sequence; the reward of an empty
    sequence is lost."""
    rewards_N = to_tokens(rewards_B.float(), lengths_B)
    return torch.where(_last_of_sequence(rewards_N, lengths_B), rewards_N, 0.0)


def whiten(values_N: Tensor) -> Tensor:
    """Mean 0 and variance 1 over the tokens of the step (unbiased variance); fewer than two tokens give 0."""
    if values_N.numel() < 2:
        return torch.zeros_like(values_N, dtype=torch.float32)
    values = values_N.float()
    return (values - values.mean()) * torch.rsqrt(values.var() + WHITEN_FLOOR)


def _by_group(
    rewards_B: Tensor, groups_B: Sequence[Hashable], advantage: Callable[[Tensor], Tensor]
) -> Tensor:
    if rewards_B.ndim != 1 or len(groups_B) != len(rewards_B):
        raise LossInputError(
            f"{list(rewards_B.shape)} rewards for {len(groups_B)} group keys; there must be one each."
        )
    if not bool(torch.isfinite(rewards_B).all()):
        raise LossInputError(
            "rewards_B holds a value that is not finite; a failed reward must be dropped, not averaged."
        )
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups_B):
        members.setdefault(group, []).append(row)
    advantages = torch.zeros(len(rewards_B), dtype=torch.float32, device=rewards_B.device)
    for rows in members.values():
        if len(rows) > 1:
            index = torch.tensor(rows, device=rewards_B.device)
            advantages[index] = advantage(rewards_B[index].float())
    return advantages


def _scan_back(values_N: Tensor, lengths_B: Sequence[int], factor: float) -> Tensor:
    """out_t = value_t + factor · out_{t+1} within each sequence; runs on the host, in double precision."""
    last = _last_of_sequence(values_N, lengths_B).tolist()
    values = values_N.detach().double().tolist()
    for index in range(len(values) - 2, -1, -1):
        if not last[index]:
            values[index] += factor * values[index + 1]
    return torch.tensor(values, dtype=torch.float32, device=values_N.device)


def _last_of_sequence(values_N: Tensor, lengths_B: Sequence[int]) -> Tensor:
    """bool [N]: whether a token is the last of its sequence."""
    lengths = torch.as_tensor(lengths_B, dtype=torch.int64)
    if values_N.ndim != 1 or int(lengths.sum()) != values_N.shape[0]:
        raise LossInputError(
            f"lengths_B sum to {int(lengths.sum())} tokens, but the values have shape {list(values_N.shape)}."
        )
    last = torch.zeros(values_N.shape[0], dtype=torch.bool)
    ends = lengths.cumsum(0)[lengths > 0] - 1
    last[ends] = True
    return last.to(values_N.device)
