"""Finds the rows that break a step: each row is run alone, and the weights do not change.

`refusal` searches during the refused step, on every rank. `replay` searches afterwards, on one rank, in rows
read from disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from understudy.errors import PolicyError
from understudy.policy.assemble import Assembler
from understudy.policy.forward.forward import Objective, StudentForward, attention_for
from understudy.policy.microbatch import Layout
from understudy.policy.optim.adamw import MasterAdamW
from understudy.policy.plan import Plan
from understudy.policy.ranks.shard import Ranks
from understudy.policy.refused import COLUMNS, RefusedRows, refused_rows
from understudy.types.batch_ref import student_rows
from understudy.types.loss import LossOutput, TeacherHead


class Trained(Protocol):
    """The part of `Policy` that is needed here; `Policy` itself imports this module."""

    step: int
    model: PreTrainedModel
    optimizer: MasterAdamW
    ranks: Ranks
    forward: StudentForward
    layout: Layout
    on_bad_rows: Callable[[RefusedRows], None] | None

    @property
    def device(self) -> torch.device: ...
    def plan(self, assembler: Assembler, rows: Sequence[int], max_tokens: int) -> Plan: ...
    def accumulate(self, assembler: Assembler, plan: Plan, objective: Objective) -> list[LossOutput]: ...


def refusal(
    policy: Trained,
    assembler: Assembler,
    objective: Objective,
    rows: list[int],
    loss: float,
    grad_norm: float,
) -> PolicyError:
    """Builds the error message; hands the bad rows to `policy.on_bad_rows`."""
    bad = _unsound_rows(policy, assembler, objective, rows)
    what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {grad_norm}"
    names = ", ".join(assembler.keys[row] for row in bad[:8]) + (" …" if len(bad) > 8 else "")
    where = f"{len(bad)} row(s): {names}" if bad else "no single row: only their sum overflows"
    reason = f"step {policy.step} stopped with {what}; {where}. The weights were not touched"
    if policy.on_bad_rows is not None:
        policy.on_bad_rows(refused_rows(assembler, bad or rows, reason, policy.step))
    return PolicyError(reason)


def _unsound_rows(policy: Trained, assembler: Assembler, objective: Objective, rows: list[int]) -> list[int]:
    """Rows whose own loss or gradient is not finite. With several ranks a gradient is the sum over ranks. So
    if the gradient of a round is not finite and every loss is, the round's rows on all ranks are reported."""
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


@dataclass(frozen=True, slots=True)
class RowFinding:
    """The result of running one row again, alone."""

    key: str
    loss: float
    """Its share of the step's loss."""
    grad_norm: float
    broken_columns: tuple[str, ...]
    """Columns with a non-finite number where a finite one is needed."""

    @property
    def sound(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def replay(policy: Trained, refused: RefusedRows, objective: Objective) -> list[RowFinding]:
    """Loss and gradient of each row under the policy's current weights, which do not change; on one rank."""
    heads = {
        name: TeacherHead(
            head.weight_VH.to(policy.device), None if head.bias_V is None else head.bias_V.to(policy.device),
            head.softcap, head.logit_scale, head.temperature,
        )
        for name, head in refused.heads.items()
    }  # fmt: skip
    assembler = Assembler(refused.rows, refused.weights, refused.old_logprobs, heads).hold()
    findings = []
    with attention_for(policy.model, policy.layout):
        for row, key in enumerate(refused.rows.keys):
            policy.optimizer.zero_grad()
            micro = assembler.cut([row], policy.layout).to(policy.device)
            loss, _ = policy.forward(micro, objective)
            loss.backward()
            findings.append(
                RowFinding(
                    key, float(loss.detach()), policy.optimizer.grad_norm(), _broken_columns(refused, row)
                )
            )
    policy.optimizer.zero_grad()
    return findings


def _broken_columns(refused: RefusedRows, row: int) -> tuple[str, ...]:
    """Behaviour logprobs are NaN where nothing was sampled, which is correct; only sampled positions are
    checked, and none of a given answer."""
    rows = refused.rows
    drawn = student_rows(rows)
    found = {name: getattr(rows, name) for name in COLUMNS} | {
        "weights": refused.weights, "old_logprobs": refused.old_logprobs
    }  # fmt: skip
    broken = []
    for name, column in found.items():
        if column is None or not column.values.is_floating_point():
            continue
        values = column[row]
        if name == "behaviour_logprobs":
            if row not in drawn:
                continue
            values = values[rows.loss_mask[row]]
        if not bool(torch.isfinite(values).all()):
            broken.append(name)
    if rows.advantages is not None and rows.rewards and not math.isfinite(rows.rewards[row]):
        broken.append("rewards")
    return tuple(broken)
