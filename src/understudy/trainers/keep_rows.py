"""The update of a step, and the copies of its rows that stay in the run directory: some rows with all token columns
(`run.keep_rows`), and the text of all (`run.rollout_dump_every`).

    batch ──choose──> keys ──TokenWatch──> update ──> columns per token ──┐
                      └──── weight versions, turns ──────────────────────┴──> kept_rows/STEP.rows, STEP.jsonl

`dataplane/kept_rows.py` says which rows and in which files. They are written while the next step is produced.
A batch whose columns are not in this process is not kept.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.dataplane.base import Lease
from understudy.dataplane.kept_rows import FOLDER_NAME, RowKeeper, choose
from understudy.dataplane.token_measures import worst_tokens
from understudy.observability.rundir import write_atomically
from understudy.policy.token_watch import TokenWatch
from understudy.trainers.learn.update import update
from understudy.trainers.rollout_dump import dump_rollouts
from understudy.trainers.row_columns import MEDIA, ORIGIN, REPLICA, SCORED, VERSION, own_prompt_column
from understudy.types.batch import Batch
from understudy.types.batch_ref import BatchRef
from understudy.types.prompt import split_key
from understudy.types.trajectory import Origin

if TYPE_CHECKING:
    from understudy.policy.step import StepResult
    from understudy.trainers.system import Producer, System

logger = logging.getLogger(__name__)

_NOT_IN_BATCH = ("weight_versions", "turns", "metrics")
"""Columns of the plane that a batch lacks. Of scored rows also `REPLICA`, and `VERSION` if teachers follow the student."""
_LINE_ONLY = ("source", "why", "own_prompts")
"""Facts that are written into the row's line of the .jsonl file alone, not into its pack of columns."""
_PER_TOKEN = ("tokens", "loss_mask", "behaviour_logprobs")
"""Columns with an entry for every token."""
_PER_WRITTEN = ("teacher_logprobs", "teacher_ids", "teacher_topk_logprobs")
"""Columns with an entry for every loss-bearing token."""

Row = dict[str, Any]


async def update_and_keep(system: System, lease: Lease, batch: BatchRef, step: int) -> StepResult:
    """One step of the student, on the event loop (`update` computes on its own thread). When it returns, everything to be
    kept of the rows has been read from the plane, so the caller may ack them, which deletes them there."""
    producer, settings = system.producer, system.producer.settings
    chosen: dict[int, str] = {}
    if settings.keep_rows and isinstance(batch, Batch):
        chosen = choose(step, batch.keys, mean_gaps(batch))
    watch = TokenWatch([batch.keys[i] for i in chosen]) if chosen else None
    dumps = settings.dump_every and step % settings.dump_every == 0
    dump = asyncio.create_task(dump_rollouts(producer, lease, step)) if dumps else None
    try:
        result = await update(system.learner, batch, watch)
    except BaseException:
        if dump is not None:
            dump.cancel()
        raise
    if watch is not None and isinstance(batch, Batch):
        await _keep(producer, lease, batch, step, chosen, watch)
    if dump is not None:
        await dump
    return result


async def _keep(
    producer: Producer, lease: Lease, batch: Batch, step: int, chosen: Mapping[int, str], watch: TokenWatch
) -> None:
    """Reads the columns that are deleted with the ack, and starts a task that writes the files. An error here is
    logged and does not fail the step."""
    state, some = producer.state, lease.meta.at(list(chosen))
    if state.kept_rows.writing is not None:
        await state.kept_rows.writing  # files of two steps are not written at the same time
    try:
        names = (*_NOT_IN_BATCH, REPLICA) if batch.teachers else _NOT_IN_BATCH
        if producer.teachers.gate is not None:
            names = (*names, VERSION)
        facts: dict[str, Any] = await state.plane.get(some, names)
        facts["own_prompts"] = [await _own_prompts(producer, lease, batch, i) for i in chosen]
    except Exception as error:
        logger.warning("step %d: its rows could not be kept: %s", step, error)
        return
    facts["source"] = [tags.get("data_source") for tags in some.tags] or [None] * len(some)
    facts |= {
        "why": list(chosen.values()),
        "weight_versions": [one.numpy() for one in facts["weight_versions"]],
    }
    row_facts = [dict(zip(facts, row, strict=True)) for row in zip(*facts.values(), strict=True)]

    async def write() -> None:
        try:
            await asyncio.to_thread(_write, producer, step, batch, list(chosen), row_facts, watch)
        except Exception as error:
            logger.warning("step %d: its rows could not be kept: %s", step, error)

    state.kept_rows.writing = state.background.create_task(write(), name=f"keep rows of step {step}")


async def _own_prompts(producer: Producer, lease: Lease, batch: Batch, row: int) -> dict[str, np.ndarray]:
    """The ids that the row's teachers read in place of its prompt, if they do. They are made again from the
    row, which gives the same ids. The journal holds those that show what became of the row's session."""
    if not producer.teachers.prompts.any or not batch.teachers:
        return {}
    prompt = producer.cursor.prompt(split_key(batch.keys[row])[0])
    names = batch.teachers[row].split("+")
    found = {}
    for name in names:
        if producer.teachers.prompts.shows_session(name):
            column = own_prompt_column(name)
            stored: Any = await producer.state.plane.get(lease.meta.at([row]), (column,))
            found[name] = np.asarray(stored[column][0])
        elif (ids := producer.teachers.prompts.ids(name, prompt)) is not None:
            found[name] = ids
    return found


def mean_gaps(batch: Batch) -> list[float | None]:
    """The mean of log q(y) − log p(y) of each row, q as sampled; None without scores."""
    if batch.teacher_logprobs is None:
        return [None] * len(batch)
    own_N = batch.behaviour_logprobs.values.numpy()[batch.loss_mask.values.numpy()]
    gap_N = own_N.astype(np.float64) - batch.teacher_logprobs.values.numpy()
    lengths_B = batch.teacher_logprobs.lengths.numpy()
    sums_B = np.bincount(np.repeat(np.arange(len(batch)), lengths_B), gap_N, len(batch))
    means = (total / length if length else math.nan for total, length in zip(sums_B, lengths_B, strict=True))
    return [float(mean) if math.isfinite(mean) else None for mean in means]


def _write(
    producer: Producer,
    step: int,
    batch: Batch,
    chosen: Sequence[int],
    row_facts: Sequence[Row],
    watch: TokenWatch,
) -> None:
    """Writes the files of one step. Runs on a thread of `asyncio.to_thread`, one step at a time."""
    kept, tokenizer = producer.state.kept_rows, producer.renderer.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if kept.keeper is None:
        folder = producer.state.run.path / FOLDER_NAME
        kept.keeper = RowKeeper(folder, producer.settings.keep_rows, last_step=step - 1)
        if backend is not None and not (folder / "tokenizer.json").exists():
            write_atomically(folder / "tokenizer.json", backend.to_str())
    trained = watch.columns()
    rows = [
        columns
        | trained.get(batch.keys[i], {})
        | {name: facts[name] for name in facts if name not in _LINE_ONLY}
        for i, columns, facts in zip(chosen, columns_of(batch, chosen), row_facts, strict=True)
    ]
    ids = [row["tokens"].tolist() for row in rows]
    firsts = [
        int(row["loss_mask"].argmax()) if row["loss_mask"].any() else len(row["tokens"]) for row in rows
    ]
    pieces = [*(one[:first] for one, first in zip(ids, firsts, strict=True)),
              *(one[first:] for one, first in zip(ids, firsts, strict=True))]  # fmt: skip
    if backend is not None:
        # One by one: a batch wakes a thread per core, which costs more than a few short rows.
        texts = [backend.decode(one, skip_special_tokens=False) for one in pieces]
    else:
        texts = [tokenizer.decode(one) for one in pieces]
    entries: list[tuple[Row, Row]] = []
    for n, (row, facts) in enumerate(zip(rows, row_facts, strict=True)):
        summary = _summary(batch.keys[chosen[n]], row, facts, texts[n], texts[n + len(rows)])
        if batch.media and (media := batch.media[chosen[n]]):
            summary[MEDIA] = list(media)
        if own := facts["own_prompts"]:
            row |= {own_prompt_column(name): ids for name, ids in own.items()}
            summary["teacher_prompts"] = {
                name: producer.teachers.prompts.text(name, ids) for name, ids in own.items()
            }
        if VERSION in row:
            summary[VERSION] = row[VERSION]
        entries.append((summary, row))
    kept.keeper.write(step, entries)


def columns_of(batch: Batch, chosen: Sequence[int]) -> list[Row]:
    """The columns of these rows as arrays."""
    rows: list[Row] = [
        {"reward": _finite(batch.rewards[i]), "stop_reason": batch.stop_reasons[i]} for i in chosen
    ]
    for name in (*_PER_TOKEN, *_PER_WRITTEN):
        column = getattr(batch, name)
        if column is None:
            continue
        values, offsets = column.values.numpy(), column.offsets.tolist()
        narrow = np.int32 if values.dtype == np.int64 else values.dtype
        for row, i in zip(rows, chosen, strict=True):
            row[name] = values[offsets[i] : offsets[i + 1]].astype(narrow, copy=False)
    for row, i in zip(rows, chosen, strict=True):
        if batch.teachers:
            row[SCORED] = batch.teachers[i]
        if batch.origins:
            row[ORIGIN] = batch.origins[i]
    return rows


def _summary(key: str, row: Row, facts: Row, prompt: str, completion: str) -> Row:
    mask = row["loss_mask"]
    versions, teacher = row["weight_versions"][mask], row.get("teacher_logprobs")
    drawn = versions[versions >= 0]
    gap = None if teacher is None else row["behaviour_logprobs"][mask] - teacher
    return {
        "key": key,
        "prompt": prompt,
        "completion": completion,
        "reward": row["reward"],
        "advantage": _mean(row.get("advantages")),
        "stop_reason": row["stop_reason"],
        "turns": row["turns"],
        "tokens": len(versions),
        "teacher": row.get(SCORED),
        "kl": _mean(gap),
        "origin": row.get(ORIGIN, str(Origin.STUDENT)),
        "oldest": int(drawn.min()) if len(drawn) else None,
        "newest": int(drawn.max()) if len(drawn) else None,
        "worst": [] if gap is None else worst_tokens(row, gap),
        "why": facts["why"],
        "source": facts["source"],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _mean(values: np.ndarray | None) -> float | None:
    if values is None or not len(values):
        return None
    return _finite(float(values.mean(dtype=np.float64)))
