"""Which rows broke a step: each is run alone, under the weights that were not touched."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from understudy.errors import PolicyError
from understudy.policy.assemble import Assembler
from understudy.policy.forward import Objective
from understudy.policy.plan import Plan
from understudy.policy.refused import refused_rows

if TYPE_CHECKING:
    from understudy.policy.policy import Policy


def refusal(
    policy: Policy, assembler: Assembler, objective: Objective, rows: list[int], loss: float, grad_norm: float
) -> PolicyError:
    """The error, worded; its rows are handed to `policy.on_bad_rows`."""
    bad = _unsound_rows(policy, assembler, objective, rows)
    what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {grad_norm}"
    names = ", ".join(assembler.keys[row] for row in bad[:8]) + (" …" if len(bad) > 8 else "")
    where = f"{len(bad)} row(s): {names}" if bad else "no single row: only their sum overflows"
    reason = f"step {policy.step} stopped with {what}; {where}. The weights were not touched"
    if policy.on_bad_rows is not None:
        policy.on_bad_rows(refused_rows(assembler, bad or rows, reason, policy.step))
    return PolicyError(reason)


def _unsound_rows(policy: Policy, assembler: Assembler, objective: Objective, rows: list[int]) -> list[int]:
    """Rows whose own loss or gradient is not finite. With several ranks a gradient is everybody's, so a round in
    which no loss is broken but the gradient is accuses the row of every rank."""
    plan = policy.plan(assembler, rows, max_tokens=1)
    accused = torch.zeros(len(assembler.keys), dtype=torch.float64)
    for index, (group, counted) in enumerate(plan.passes()):
        policy.optimizer.zero_grad()
        outputs = policy.accumulate(assembler, Plan([group] if counted else [], 1, group), objective)
        broken = bool(outputs) and not bool(torch.isfinite(outputs[0].loss))
        losses_broken = policy.ranks.total(torch.tensor([float(broken)]))[0] > 0
        gradient_broken = not math.isfinite(policy.optimizer.grad_norm())
        if counted and (broken or (gradient_broken and not losses_broken)):
            accused[plan.mine[index]] = 1.0
    return policy.ranks.total(accused).nonzero().flatten().tolist()
