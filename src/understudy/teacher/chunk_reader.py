"""What is read off a chunk of logits: its logsumexp, some of its values, its best ones.

`WholeVocabulary` has every column. `VocabularyShard` has some columns, and other processes have the rest (tensor
parallel): totals, values and candidates are combined across them, so a chunk's logits never travel.

Legend: C rows of a chunk, V columns held here, K candidates, W processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from understudy.teacher.scoring.head_kernel import fits, row_best, row_summary, usable
from understudy.types.usable_ids import UsableIds


class ChunkReader(Protocol):
    def cut(self, logits_CV: torch.Tensor, usable: UsableIds) -> torch.Tensor:
        """The logits of usable ids; −inf where a column of another id stays."""
        ...

    def read(
        self, logits_CV: torch.Tensor, topk: int
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """(logsumexp [C], (values, ids) of the K best [C, K] or None where topk is 0)."""
        ...

    def at(self, logits_CV: torch.Tensor, ids_CK: torch.Tensor) -> torch.Tensor:
        """The logits of the named ids, [C, K]."""
        ...


class WholeVocabulary:
    def cut(self, logits_CV: torch.Tensor, usable: UsableIds) -> torch.Tensor:
        if usable.holes:
            logits_CV[:, list(usable.holes)] = -torch.inf
        return logits_CV[:, : usable.limit]

    def read(
        self, logits_CV: torch.Tensor, topk: int
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        if logits_CV.is_cuda and fits(logits_CV.shape[1], topk) and usable(logits_CV.device):
            total_C, maxima_CB = row_summary(logits_CV)
            return total_C, row_best(logits_CV, maxima_CB, topk) if topk else None
        total_C = torch.logsumexp(logits_CV, dim=-1)
        if not topk:
            return total_C, None
        best = logits_CV.topk(topk, dim=-1)
        return total_C, (best.values, best.indices)

    def at(self, logits_CV: torch.Tensor, ids_CK: torch.Tensor) -> torch.Tensor:
        return logits_CV.gather(1, ids_CK)


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """Columns first … first + V − 1 of the vocabulary; every process holds a part and calls in step."""

    first: int

    def cut(self, logits_CV: torch.Tensor, usable: UsableIds) -> torch.Tensor:
        """Every column stays: all processes must cut their chunks alike, and a part may have no usable id at all."""
        logits_CV[:, max(usable.limit - self.first, 0) :] = -torch.inf
        own = [one - self.first for one in usable.holes if 0 <= one - self.first < logits_CV.shape[1]]
        if own:
            logits_CV[:, own] = -torch.inf
        return logits_CV

    def read(
        self, logits_CV: torch.Tensor, topk: int
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        own_C, best = WholeVocabulary().read(logits_CV, min(topk, logits_CV.shape[1]))
        total_C = torch.logsumexp(_gathered(own_C), dim=0)
        if best is None:
            return total_C, None
        values_CK, ids_CK = best
        short = topk - values_CK.shape[1]  # a shard narrower than K offers what it has
        values_CK = torch.nn.functional.pad(values_CK, (0, short), value=-torch.inf)
        ids_CK = torch.nn.functional.pad(ids_CK + self.first, (0, short))
        all_values = _gathered(values_CK).transpose(0, 1).flatten(1)
        all_ids = _gathered(ids_CK).transpose(0, 1).flatten(1)
        best_CK, places_CK = all_values.topk(topk, dim=-1)
        return total_C, (best_CK, all_ids.gather(1, places_CK))

    def at(self, logits_CV: torch.Tensor, ids_CK: torch.Tensor) -> torch.Tensor:
        """Whoever holds an id says its logit; the others say −inf, and the largest is kept."""
        here_CK = ids_CK - self.first
        mine_CK = (here_CK >= 0) & (here_CK < logits_CV.shape[1])
        values_CK = logits_CV.gather(1, here_CK.clamp(0, logits_CV.shape[1] - 1))
        values_CK = torch.where(mine_CK, values_CK, -torch.inf)
        dist.all_reduce(values_CK, op=dist.ReduceOp.MAX)
        return values_CK


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    """[W, …]: everyone's tensor, in rank order."""
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.stack(parts)
