"""Records what an update computes for each token of a few rows, for `run.keep_rows`.

The update's own pass is used: hidden states, losses and flags are there already. Only the vocabulary
projection of the watched tokens is computed again, because no loss keeps it. With several ranks each records its
own rows, and rank 0 gathers them.

| column | is |
|---|---|
| `trainer_logprobs` | log q of the written token, under the weights of this pass |
| `losses`, `loss_weights` | loss before the reduction weight, and that weight |
| `student_entropy` | entropy of q |
| `student_topk_logprobs` | log q at the teacher's candidates [P, K] |
| `student_ids`, `student_logprobs` | the student's own best ids and their log q [P, OWN] |
| `advantages` | the task's, or the precomputed one of the distillation |
| `clamped` | 1 where the loss was clamped or its gradient clipped |

Shape legend: N tokens of a micro-batch, W watched ones, V vocabulary, K candidates, P tokens of a row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from understudy.policy.assemble import MicroBatch
from understudy.policy.forward.forward import Objective
from understudy.policy.forward.head import logits_of
from understudy.policy.ranks.shard import Ranks
from understudy.policy.ranks.wire import pack, unpack
from understudy.types.loss import LossInputs, LossOutput, StudentHead

OWN = 8
"""The student's own best candidates that are recorded per token."""
_MOST_LOGITS = 1 << 24
"""Logits held at once: 64 MiB in float32."""
_FLAGS = (
    "clamped",
    "distill_clipped",
    "distill_clipped_lower",
    "task_clipped",
    "task_clipped_lower",
)


@dataclass(frozen=True, slots=True)
class _Recorded:
    keys: list[str]
    counts: list[int]
    columns: Mapping[str, Tensor]
    """[W, …] each, on the device: reading them at once would wait for the pass."""


class TokenWatch:
    """The columns of the rows named. Filled on the threads of one update, then read once by `columns`."""

    def __init__(self, keys: Collection[str]) -> None:
        self._left = set(keys)
        self._found: list[_Recorded] = []

    @property
    def left(self) -> list[str]:
        """Keys of rows that were not recorded yet."""
        return sorted(self._left)

    def around(self, objective: Objective, micro: MicroBatch) -> Objective:
        """The objective, which also records the watched rows of this micro-batch at their first pass."""
        mine = {place: key for place, key in enumerate(micro.keys) if key in self._left}
        if not mine:
            return objective
        self._left.difference_update(mine.values())
        begins = np.cumsum([0, *micro.loss_counts])
        places = [torch.arange(int(begins[row]), int(begins[row + 1])) for row in mine]
        at_W = torch.cat(places).to(micro.predict_N.device, non_blocking=True)
        counts = [micro.loss_counts[row] for row in mine]

        def recorded(head: StudentHead, inputs: LossInputs) -> LossOutput:
            output = objective(head, inputs)
            self._found.append(_Recorded(list(mine.values()), counts, _read(head, inputs, output, at_W)))
            return output

        return recorded

    def gather(self, ranks: Ranks) -> None:
        """Rank 0 gets what the other ranks recorded. Collective: every rank must call it."""
        if ranks.size == 1:
            return
        mine = self.columns() if ranks.rank else {}
        tensors = {
            f"{n}/{name}": torch.from_numpy(column)
            for n, key in enumerate(mine)
            for name, column in mine[key].items()
        }
        for message in ranks.gathered(pack({"keys": list(mine)}, tensors))[1:]:
            if ranks.rank:
                continue
            head, columns = unpack(message)
            for n, key in enumerate(head["keys"]):
                own = {
                    name.partition("/")[2]: column
                    for name, column in columns.items()
                    if name.startswith(f"{n}/")
                }
                self._found.append(_Recorded([key], [len(own["losses"])], own))
                self._left.discard(key)

    def columns(self) -> dict[str, dict[str, np.ndarray]]:
        """Key → column → values [P, …], of the rows that were trained on."""
        found: dict[str, dict[str, np.ndarray]] = {}
        for one in self._found:
            host = {name: column.cpu().numpy() for name, column in one.columns.items()}
            ends = np.cumsum(one.counts)
            for key, count, end in zip(one.keys, one.counts, ends, strict=True):
                found[key] = {name: column[end - count : end] for name, column in host.items()}
        self._found.clear()
        return found


@torch.no_grad()
def _read(head: StudentHead, inputs: LossInputs, output: LossOutput, at_W: Tensor) -> dict[str, Tensor]:
    found = {
        "trainer_logprobs": output.logprobs_N[at_W],
        "losses": output.per_token_N[at_W],
        "loss_weights": inputs.weights_N[at_W],
    }
    advantages_N = inputs.distill_advantages_N if inputs.advantages_N is None else inputs.advantages_N
    if advantages_N is not None:
        found["advantages"] = advantages_N[at_W]
    flags = [output.columns[name][at_W] for name in _FLAGS if name in output.columns]
    if flags:
        found["clamped"] = torch.stack(flags).amax(0)
    ids_NK = inputs.teacher_ids_NK
    pieces: dict[str, list[Tensor]] = {}
    # In slices, because [W, V] may be gigabytes.
    for part_w in at_W.split(max(1, _MOST_LOGITS // head.vocab_size)):
        piece = _projected(replace(head, hidden_NH=head.hidden_NH[part_w]), ids_NK, part_w)
        for name, values in piece.items():
            pieces.setdefault(name, []).append(values)
    found |= {name: torch.cat(parts) for name, parts in pieces.items()}
    return {
        name: values.to(torch.int32 if name == "student_ids" else torch.float32)
        for name, values in found.items()
    }


def _projected(head: StudentHead, ids_NK: Tensor | None, part_w: Tensor) -> dict[str, Tensor]:
    logq_wV = torch.log_softmax(logits_of(head), -1)
    own, own_ids = logq_wV.topk(min(OWN, logq_wV.shape[1]), dim=-1)
    found = {
        # Ids that the softmax leaves out have −inf, and add nothing.
        "student_entropy": -(logq_wV.exp() * logq_wV.clamp_min(-1e4)).sum(-1),
        "student_ids": own_ids,
        "student_logprobs": own,
    }
    if ids_NK is not None:
        found["student_topk_logprobs"] = logq_wV.gather(1, ids_NK[part_w])
    return found
