"""Plans one step's forward and backward passes on one rank.

With sharded weights every pass is collective, so all ranks make the same number of passes. Ranks with fewer
micro-batches run dummy passes whose tokens have weight 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from understudy.nn.rotary_border import rotary_border
from understudy.policy.cpu.lanes import CpuLanes
from understudy.policy.microbatch import Layout, plan_microbatches
from understudy.policy.ranks.shard import deal_rows


@dataclass(frozen=True, slots=True)
class Plan:
    """One rank's passes of one step."""

    mine: list[list[int]]
    """Row indexes of this rank's micro-batches."""
    rounds: int
    """Passes that every rank makes, dummy passes included."""
    dummy_rows: list[int]
    """The rows of a dummy pass: the shortest row of the batch."""

    def rows(self) -> list[int]:
        """Every row this rank may need, also for passes of one row each."""
        mine = [row for group in self.mine for row in group]
        return mine + [row for row in self.dummy_rows if row not in mine]

    def passes(self) -> Iterator[tuple[list[int], bool]]:
        """(rows, whether they count in the loss), `rounds` times."""
        for index in range(self.rounds):
            yield (self.mine[index], True) if index < len(self.mine) else (self.dummy_rows, False)


def border_of(model: PreTrainedModel) -> int | None:
    """The length above which rows use other rotary frequencies; rows below and above it may not share a pass
    (`nn/rotary_border.py`)."""
    return rotary_border(model.config.get_text_config().to_dict())


def lanes_of(count: int, border: int | None) -> CpuLanes:
    """One lane if there is a rotary border: threads would change the rotary frequencies of each other's
    passes."""
    return CpuLanes(count if border is None else 1)


def by_length(groups: Sequence[str], lengths: Sequence[int], rotary_border: int | None) -> Sequence[str]:
    """`groups`, each split in two at the rotary border, if there is one."""
    if rotary_border is None:
        return groups
    return [
        f"{group}/{'long' if length > rotary_border else 'short'}"
        for group, length in zip(groups, lengths, strict=True)
    ]


def plan_step(
    rows: Sequence[int],
    lengths: Sequence[int],
    keys: Sequence[str],
    groups: Sequence[str],
    max_tokens: int,
    layout: Layout,
    rank: int = 0,
    size: int = 1,
    lanes: int = 1,
) -> Plan:
    """Distributes the rows over ranks and cuts each rank's share into micro-batches for `lanes` parallel
    lanes. `lengths`, `keys` and `groups` are by row; rows of different groups never share a pass."""
    plans = []
    for share in deal_rows(rows, lengths, keys, size):
        plan: list[list[int]] = []
        for name in sorted({groups[row] for row in share}):
            members = [row for row in share if groups[row] == name]
            pieces = plan_microbatches(
                [lengths[row] for row in members], [keys[row] for row in members], max_tokens, layout, lanes
            )
            plan += [[members[place] for place in piece] for piece in pieces]
        plans.append(plan)
    shortest = min(rows, key=lambda row: (lengths[row], keys[row]))
    return Plan(plans[rank], max(len(plan) for plan in plans), [shortest])
