"""Splits a batch into mini-batches for several optimizer steps, and combines their results.

Each of `epochs` passes over the batch has its own order and is cut into mini-batches of whole prompts. The
order is a hash of (run seed, step, epoch, prompt), so it repeats and does not depend on the order of arrival.
Advantages were computed for the whole batch before, so it does not matter which rows share a mini-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from understudy.policy.step import StepResult
from understudy.rollout.seeds import hash63
from understudy.types.loss_metrics import Metric, MetricTotal, merge_metrics
from understudy.types.prompt import split_key


def split_rows(
    keys: Sequence[str], rows: Sequence[int], prompts_each: int | None, epochs: int, seed: int, step: int
) -> list[list[int]]:
    """Row indexes of every update, in the order of the updates.

    `prompts_each` bounds a mini-batch. A remainder is spread, so that sizes differ by at most one prompt: a
    last mini-batch of one prompt would move the weights as much as a full one, on much less data.

    >>> split_rows(["a_0_0", "a_1_0", "b_0_0"], [0, 1, 2], None, 1, seed=0, step=0)
    [[0, 1, 2]]
    >>> sorted(map(tuple, split_rows(["a_0_0", "a_1_0", "b_0_0"], [0, 1, 2], 1, 1, seed=0, step=0)))
    [(0, 1), (2,)]
    """
    members: dict[str, list[int]] = {}
    if prompts_each is not None:
        for row in rows:
            members.setdefault(split_key(keys[row])[0], []).append(row)
    pieces = 1 if prompts_each is None else -(-len(members) // prompts_each)
    if pieces <= 1:
        return [list(rows) for _ in range(epochs)] if rows else []
    updates: list[list[int]] = []
    for epoch in range(epochs):
        order = sorted(members, key=lambda prompt: (hash63("mini-batch", seed, step, epoch, prompt), prompt))
        size, rest = divmod(len(order), pieces)
        start = 0
        for piece in range(pieces):
            stop = start + size + (piece < rest)
            updates.append(sorted(row for prompt in order[start:stop] for row in members[prompt]))
            start = stop
    return updates


def combine(parts: Sequence[tuple[list[int], StepResult]], rows_in_batch: int) -> StepResult:
    """The updates of one step as one result: means over updates, row losses as means over epochs, sums of
    tokens and time."""
    results = [result for _, result in parts]
    first, count = results[0], len(results)
    if count == 1 and len(parts[0][0]) == rows_in_batch:
        return first
    losses, distill = [0.0] * rows_in_batch, [0.0] * rows_in_batch
    seen, tokens = [0] * rows_in_batch, [0] * rows_in_batch
    for rows, result in parts:
        for place, row in enumerate(rows):
            losses[row] += result.row_losses[place]
            distill[row] += result.row_distill[place]
            tokens[row] = result.row_tokens[place]
            seen[row] += 1
    return replace(
        first,
        loss=sum(result.loss for result in results) / count,
        grad_norm=sum(result.grad_norm for result in results) / count,
        learning_rate=results[-1].learning_rate,
        metrics=_mean_metrics(results),
        tokens=sum(result.tokens for result in results),
        loss_tokens=sum(result.loss_tokens for result in results),
        micro_batches=sum(result.micro_batches for result in results),
        row_losses=tuple(loss / max(times, 1) for loss, times in zip(losses, seen, strict=True)),
        row_distill=tuple(part / max(times, 1) for part, times in zip(distill, seen, strict=True)),
        row_tokens=tuple(tokens),
        seconds={name: sum(result.seconds[name] for result in results) for name in first.seconds},
        updates=count,
    )


def _mean_metrics(results: Sequence[StepResult]) -> dict[str, Metric]:
    """Means stay weighted by tokens. Totals (losses that carry their weight already) become means over
    updates."""
    merged = merge_metrics(dict(result.metrics) for result in results)
    return {
        name: MetricTotal(metric.total / len(results)) if isinstance(metric, MetricTotal) else metric
        for name, metric in merged.items()
    }
