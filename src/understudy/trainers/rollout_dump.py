"""Writes the rows a step is trained on as text, `rollouts/STEP.jsonl` (`run.rollout_dump_every`).

One JSON object per row, in the order of the batch:

| key | is |
|---|---|
| `key` | the row's key |
| `prompt`, `completion` | what the student got, and all after it (tool answers too), with special tokens |
| `reward`, `stop_reason`, `turns` | as journalled |
| `tokens` | how many tokens the student wrote |
| `origin` | `student`, or `data` for a given answer, which has no `kl` |
| `teacher` | the teacher that scored the row |
| `kl` | the mean of log q(y) - log p(y) over the written tokens, q as sampled |
| `media` | hashes of its pictures, in their order; absent without |

Rows are read from the data plane and decoded in a thread while the update runs. The ack removes them from the
plane, so the file is written before the ack. A step that is made again after a resume replaces its file.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.dataplane.base import Lease
from understudy.dataplane.transfer_queue.bridge import ColumnDict, bridged, bridging
from understudy.observability.rundir import write_atomically
from understudy.trainers.row_columns import MEDIA, ORIGIN, SCORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from understudy.trainers.system import Producer

logger = logging.getLogger(__name__)

_WRITTEN = ("tokens", "loss_mask", "behaviour_logprobs", "reward", "stop_reason", "turns", ORIGIN)
_SCORED = (SCORED, "teacher_logprobs")


class RolloutDump:
    """Turns rows into text in a thread. The renderer may encode at the same time: neither changes the
    tokenizer's settings."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    @bridged()
    def lines(self, keys: Sequence[str], columns: ColumnDict) -> list[str]:
        """One line of JSON for each row."""
        found: dict[str, Any] = dict(columns)
        names = tuple(found)
        rows = zip(*(found[name] for name in names), strict=True)
        return [
            self._line(key, dict(zip(names, row, strict=True))) for key, row in zip(keys, rows, strict=True)
        ]

    def _line(self, key: str, row: dict[str, Any]) -> str:
        tokens, mask = row["tokens"].tolist(), row["loss_mask"].numpy()
        first = int(mask.argmax()) if mask.any() else len(tokens)
        line: dict[str, Any] = {
            "key": key,
            "prompt": self._tokenizer.decode(tokens[:first]),
            "completion": self._tokenizer.decode(tokens[first:]),
            "reward": row["reward"],
            "stop_reason": row["stop_reason"],
            "turns": row["turns"],
            "tokens": int(np.count_nonzero(mask)),
            "origin": row[ORIGIN],
        }
        if SCORED in row:
            gaps = row["behaviour_logprobs"].numpy()[mask] - row["teacher_logprobs"].numpy()
            mean = float(np.mean(gaps, dtype=np.float64)) if len(gaps) else math.nan
            line |= {"teacher": row[SCORED], "kl": mean if math.isfinite(mean) else None}
        if row.get(MEDIA):
            line[MEDIA] = list(row[MEDIA])
        return json.dumps(line, ensure_ascii=False)


async def dump_rollouts(producer: Producer, lease: Lease, step: int) -> None:
    """Writes the file. An error here is logged and does not fail the step."""
    names = _WRITTEN if producer.teachers.router is None else (*_WRITTEN, *_SCORED)
    if producer.renderer.pictures is not None:
        names = (*names, MEDIA)
    try:
        with bridging(producer.state.plane):
            lines = await RolloutDump(producer.renderer.tokenizer).lines(
                lease.meta.keys, lease.meta.but(fields=names)
            )
        producer.state.run.rollouts.mkdir(exist_ok=True)
        path = producer.state.run.rollouts / f"{step:06d}.jsonl"
        await asyncio.to_thread(write_atomically, path, "".join(f"{line}\n" for line in lines))
    except Exception as error:
        logger.warning("step %d: its rollouts could not be written as text: %s", step, error)
        producer.state.view.note(
            f"step {step}: its rollouts could not be written to {producer.state.run.rollouts}: {error}"
        )
