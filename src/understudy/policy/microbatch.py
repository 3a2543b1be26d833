"""Plans micro-batches: which rows go through the model together.

Floating-point results depend on how a batch is composed. So the composition depends only on the rows
themselves (length and key), never on their order of arrival. Sorting by length also keeps padding small.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from understudy.policy.cpu.lanes import balanced, spread


class Layout(StrEnum):
    """How the rows of a micro-batch are laid out."""

    PADDED = "padded"
    """One row per line, padded on the right to the longest: [rows, longest]."""
    PACKED = "packed"
    """Rows one after another in a single line without padding: [1, total]."""


def plan_microbatches(
    lengths: Sequence[int],
    keys: Sequence[str],
    max_tokens: int,
    layout: Layout = Layout.PADDED,
    lanes: int = 1,
) -> list[list[int]]:
    """Row indexes of each micro-batch, longest rows first (so that running out of memory shows at once).

    A micro-batch holds at most `max_tokens` tokens, padding included; a single longer row is a micro-batch
    of its own. As few micro-batches as that allows, of about equal work: a last one of few tokens would cost the
    host as much as a full one, and a GPU would wait for it. With several `lanes`, the micro-batches that run at the same time hold that many together, if
    there are enough rows.
    """
    if len(lengths) != len(keys):
        raise ValueError(f"{len(lengths)} lengths for {len(keys)} keys")
    if max_tokens < 1:
        raise ValueError(f"max_tokens = {max_tokens}: a micro-batch needs room for at least 1 token")
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], keys[row]))
    groups: list[list[int]] = []
    tokens = longest = 0
    for row in order:
        if groups:
            grown = tokens + lengths[row] if layout is Layout.PACKED else longest * (len(groups[-1]) + 1)
            if grown <= max_tokens:
                groups[-1].append(row)
                tokens = grown
                continue
        groups.append([row])
        tokens = longest = lengths[row]

    def fits(group: list[int], share: int) -> bool:
        own = [lengths[row] for row in group]
        tokens = sum(own) if layout is Layout.PACKED else max(own) * len(own)
        return tokens * share <= max_tokens or len(own) == 1

    even = balanced(order, lengths, len(groups))
    return spread(even if all(fits(part, 1) for part in even) else groups, lengths, lanes, fits)
