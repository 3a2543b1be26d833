"""Keeps some rows of every step with their token columns in the run directory (`run.keep_rows`).

`dataplane/kept_rows.py` says which rows and in which files. Rows are read from the data plane while the update
runs, and written before the ack removes them. Two reads: log-probabilities of the written tokens of all rows, to
choose; then all columns of the chosen ones.
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
from understudy.dataplane.token_measures import measures, worst_tokens
from understudy.dataplane.transfer_queue.bridge import ColumnDict, bridged, serving
from understudy.trainers.row_columns import SCORED, token_columns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from understudy.trainers.system import Producer

logger = logging.getLogger(__name__)

_WRITTEN = ("reward", "stop_reason", "turns", "metrics", "weight_versions")


class RowReader:
    """Reads rows of a lease. Its methods run on a thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    @bridged()
    def mean_kls(self, columns: ColumnDict) -> list[float | None]:
        """The mean of log q(y) − log p(y) of each row; None without scores."""
        found: dict[str, Any] = dict(columns)
        if "teacher_logprobs" not in found:
            return [None] * len(found["loss_mask"])
        rows = zip(found["loss_mask"], found["behaviour_logprobs"], found["teacher_logprobs"], strict=True)
        return [_mean(own.numpy()[mask.numpy()] - teacher.numpy()) for mask, own, teacher in rows]

    @bridged()
    def rows(self, keys: Sequence[str], columns: ColumnDict) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """(summary, columns) of each row."""
        found: dict[str, Any] = dict(columns)
        cells = {name: [_cell(one) for one in column] for name, column in found.items()}
        rows = [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]
        return [(self._summary(key, row), row) for key, row in zip(keys, rows, strict=True)]

    def _summary(self, key: str, row: Mapping[str, Any]) -> dict[str, Any]:
        tokens, mask = row["tokens"].tolist(), row["loss_mask"]
        first = int(mask.argmax()) if mask.any() else len(tokens)
        versions = row["weight_versions"][mask]
        gap = measures(row).get("gap")
        return {
            "key": key,
            "prompt": self._tokenizer.decode(tokens[:first]),
            "completion": self._tokenizer.decode(tokens[first:]),
            "reward": row["reward"],
            "stop_reason": row["stop_reason"],
            "turns": row["turns"],
            "tokens": int(np.count_nonzero(mask)),
            "teacher": row.get(SCORED),
            "kl": None if gap is None else _mean(gap),
            "oldest": int(versions.min()) if len(versions) else None,
            "newest": int(versions.max()) if len(versions) else None,
            "worst": worst_tokens(row),
        }


async def keep_rows(producer: Producer, lease: Lease, step: int) -> None:
    """Writes the step's sample. An error here is logged and does not fail the step."""
    judged = producer.settings.judged
    try:
        reader, meta = RowReader(producer.renderer.tokenizer), lease.meta
        known = ("loss_mask", "behaviour_logprobs") + (("teacher_logprobs",) if judged else ())
        with serving(producer.state.plane):
            kls = await reader.mean_kls(meta.but(fields=known))
            chosen = choose(step, meta.keys, kls)
            names = (
                *(n for n in token_columns(producer.settings.loss, judged) if n != "teacher_hidden"),
                *_WRITTEN,
            )
            some = meta.at(list(chosen)).but(fields=(*names, *((SCORED,) if judged else ())))
            rows = await reader.rows(some.keys, some)
        for (summary, _), why, tags in zip(rows, chosen.values(), _tags_of(meta, chosen), strict=True):
            summary |= {"why": why, "source": tags.get("data_source")}
        await asyncio.to_thread(_write, producer, step, rows)
    except Exception as error:
        logger.warning("step %d: its rows could not be kept: %s", step, error)


def _tags_of(meta: Any, chosen: Mapping[int, str]) -> list[Mapping[str, Any]]:
    return [meta.tags[i] if meta.tags else {} for i in chosen]


def _write(producer: Producer, step: int, rows: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    kept = producer.state.kept_rows
    if kept.keeper is None:
        folder = producer.state.run.path / FOLDER_NAME
        kept.keeper = RowKeeper(folder, producer.settings.keep_rows)
        backend = getattr(producer.renderer.tokenizer, "backend_tokenizer", None)
        if backend is not None and not (folder / "tokenizer.json").exists():
            backend.save(str(folder / "tokenizer.json"))
    kept.keeper.write(step, rows)


def _cell(value: Any) -> Any:
    return value.numpy() if hasattr(value, "numpy") else value


def _mean(values: np.ndarray) -> float | None:
    mean = float(np.mean(values, dtype=np.float64)) if len(values) else math.nan
    return mean if math.isfinite(mean) else None
