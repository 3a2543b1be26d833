"""The rows of an update: which are trained, whether they are complete and valid, and their losses."""

from __future__ import annotations

import torch

from understudy.errors import PolicyError, RowsUnreachable, UnderstudyError
from understudy.policy.assemble import Assembler
from understudy.policy.plan import Plan
from understudy.policy.ranks.shard import Ranks
from understudy.types.batch import Batch
from understudy.types.loss import LossOutput


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


def row_sums(assembler: Assembler, plan: list[list[int]], outputs: list[LossOutput]) -> torch.Tensor:
    """float64 [1 + rows]: the loss of this rank's micro-batches, then the per-token losses summed by row."""
    counts = assembler.loss_offsets.diff()
    sums = torch.zeros(1 + len(counts), dtype=torch.float64)
    if outputs:
        sums[0] = torch.stack([output.loss for output in outputs]).double().sum()
        values_N = torch.cat([output.per_token_N.detach() for output in outputs]).to("cpu", torch.float64)
        rows = torch.tensor([row for group in plan for row in group])
        sums.index_add_(0, 1 + rows.repeat_interleave(counts[rows]), values_N)
    return sums
