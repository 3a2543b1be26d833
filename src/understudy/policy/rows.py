"""The rows of an update: which are trained, whether they are complete and valid, and their losses."""

from __future__ import annotations

from dataclasses import replace

import torch

from understudy.errors import PolicyError, RowsUnreachable, UnderstudyError
from understudy.policy.assemble import Assembler
from understudy.policy.plan import Plan
from understudy.policy.ranks.shard import Ranks
from understudy.types.batch import Batch
from understudy.types.loss import LossOutput

_DISTILL = "distill"
"""The column of `losses/per_token.py` with the distillation term."""


def trainable_rows(assembler: Assembler, context_length: int) -> list[int]:
    """Rows that bear loss. Checks first what would otherwise surface as an index error deep in a kernel."""
    keys, lengths = assembler.keys, assembler.token_lengths
    rows = assembler.rows_with_loss()
    if not rows:
        raise PolicyError(f"none of the {len(keys)} rows of this batch bears loss: every loss mask is empty")
    if int(lengths.max()) > context_length:
        row = int(lengths.argmax())
        raise PolicyError(
            f"row {keys[row]} has {int(lengths[row])} tokens, the student's context holds {context_length}; "
            "lower rollout.max_new_tokens or the prompt length"
        )
    return rows


def hold_rows(assembler: Assembler, plan: Plan, ranks: Ranks, vocab_size: int) -> None:
    """Fetches and checks this rank's rows. If one rank cannot use its share, every rank raises."""
    trouble: UnderstudyError | None = None
    try:
        assembler.hold(plan.rows())
        _check_ids(assembler.batch, vocab_size)
    except UnderstudyError as error:
        trouble = error
    ranks_in_trouble = int(ranks.total(torch.tensor([float(trouble is not None)])))
    if trouble is not None:
        raise trouble
    if ranks_in_trouble:
        raise RowsUnreachable(f"{ranks_in_trouble} other rank(s) cannot use their rows")


def _check_ids(batch: Batch, vocab_size: int) -> None:
    low, high = (int(bound) for bound in torch.aminmax(batch.tokens.values))
    if low < 0 or high >= vocab_size:
        raise PolicyError(
            f"token ids run from {low} to {high}, the student's vocabulary from 0 to {vocab_size - 1}"
        )


def without_graph(output: LossOutput, loss: torch.Tensor) -> LossOutput:
    """The output with its loss detached, and of its columns only those that `row_sums` reads."""
    columns = {name: output.columns[name] for name in (_DISTILL,) if name in output.columns}
    return replace(output, loss=loss.detach(), columns=columns)


def row_sums(assembler: Assembler, plan: list[list[int]], outputs: list[LossOutput]) -> torch.Tensor:
    """float64 [1 + 2 · rows]: the loss of this rank's micro-batches, the per-token losses summed by row, and
    the same of the distillation term alone, before its coefficient (0 if the objective has none)."""
    counts = assembler.loss_offsets.diff()
    sums = torch.zeros(1 + 2 * len(counts), dtype=torch.float64)
    if outputs:
        sums[0] = torch.stack([output.loss for output in outputs]).double().sum()
        losses_N = torch.cat([output.per_token_N.detach() for output in outputs])
        found_N = [output.columns[_DISTILL] for output in outputs if _DISTILL in output.columns]
        distill_N = torch.cat(found_N) if found_N else torch.zeros_like(losses_N)
        values_2N = torch.stack([losses_N, distill_N]).to("cpu", torch.float64)
        rows = torch.tensor([row for group in plan for row in group])
        at_N = 1 + rows.repeat_interleave(counts[rows])
        sums.index_add_(0, torch.cat([at_N, at_N + len(counts)]), values_2N.flatten())
    return sums
