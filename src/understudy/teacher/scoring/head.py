"""The head: from hidden states to logprobs without a [tokens × vocabulary] tensor.

Only scored positions come here, in chunks bounded by bytes. Of a chunk's logits only the logsumexp (fp32),
the scored token's logit, and the K best or the named logits are kept.

Legend: P scored positions, C rows of one chunk, H hidden size, V vocabulary (or the part of it held here), K
candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from understudy.teacher.head_frame import WireHead
from understudy.teacher.scoring.eight_bits import WIDE_PRODUCT, Int8Head, int8_logits, widened_rows
from understudy.teacher.scoring.head_kernel import ChunkReader, WholeVocabulary
from understudy.types.usable_ids import UsableIds


@dataclass(frozen=True, slots=True)
class Head:
    """The output projection of a causal LM, with the scale and soft cap that some families apply to the
    logits."""

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None = None
    scale: float = 1.0
    """logits × scale (Cohere's `logit_scale`, Granite's 1 / `logits_scaling`, …)."""
    softcap: float | None = None
    """cap · tanh(logits / cap), after the scale (Gemma)."""
    reader: ChunkReader = field(default_factory=WholeVocabulary)
    vocab_size: int | None = None
    """Rows of the whole vocabulary, if `weight_VH` holds only some of them."""
    widest_shard: int | None = None
    """The most rows a rank holds. All ranks must use equal chunks, or their collectives would not match."""
    row_scale_V: torch.Tensor | None = None
    """Of a `weight_VH` in int8: row v is weight[v] · row_scale[v]."""

    @property
    def vocab(self) -> int:
        return self.vocab_size or self.weight_VH.shape[0]

    def logits(self, hidden_CH: torch.Tensor) -> torch.Tensor:
        """fp32 [C, V]."""
        if self.row_scale_V is not None:
            logits_CV = int8_logits(hidden_CH, self.weight_VH, self.row_scale_V)
            if self.bias_V is not None:
                logits_CV += self.bias_V
        elif hidden_CH.is_cuda and hidden_CH.dtype != torch.float32 and WIDE_PRODUCT:
            # The product stays in the accumulator's fp32: rounding logits to bf16 costs up to 0.06 nats.
            logits_CV = torch.mm(hidden_CH, self.weight_VH.T, out_dtype=torch.float32)
            if self.bias_V is not None:
                logits_CV += self.bias_V
        else:
            logits_CV = F.linear(hidden_CH, self.weight_VH, self.bias_V).float()
        if self.scale != 1.0:
            logits_CV = logits_CV.mul_(self.scale)
        if self.softcap is not None:
            logits_CV = logits_CV.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_CV


def head_of(model: Any) -> Head:
    """The head of a transformers causal LM. The scorer compares its result with the model's own at start-up."""
    projection = model.get_output_embeddings()
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
        getattr(config, "logits_scaling", None) or 1.0
    )
    scale *= float(getattr(config, "lm_head_multiplier", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    bias = getattr(projection, "bias", None)
    return Head(
        weight_VH=projection.weight.detach(),
        bias_V=None if bias is None else bias.detach(),
        scale=scale,
        softcap=None if softcap is None else float(softcap),
        row_scale_V=projection.scale if isinstance(projection, Int8Head) else None,
    )


def to_wire(head: Head, widened: torch.dtype = torch.float32) -> WireHead:
    """`widened`: the dtype in which rows of int8 are sent."""

    def bits(tensor: torch.Tensor) -> np.ndarray:
        tensor = tensor.detach().cpu().contiguous()
        return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()

    bias_V = None if head.bias_V is None else bits(head.bias_V)
    weight_VH = head.weight_VH
    if head.row_scale_V is not None:
        weight_VH = widened_rows(weight_VH.cpu(), head.row_scale_V.cpu(), widened)
    dtype = str(weight_VH.dtype).removeprefix("torch.")
    return WireHead(bits(weight_VH), bias_V, dtype, head.scale, head.softcap)


def from_wire(wire: WireHead) -> Head:
    def tensor(array: np.ndarray) -> torch.Tensor:
        copy = torch.from_numpy(array.copy())
        return copy.view(torch.bfloat16) if wire.dtype == "bfloat16" else copy

    bias_V = None if wire.bias_V is None else tensor(wire.bias_V)
    return Head(tensor(wire.weight_VH), bias_V, wire.scale, wire.softcap)


@dataclass(frozen=True, slots=True)
class HeadScores:
    """Scores on the model's device."""

    sampled_P: torch.Tensor
    ids_PK: torch.Tensor | None = None
    logprobs_PK: torch.Tensor | None = None


def rows_per_chunk(columns: int, chunk_bytes: int) -> int:
    return max(1, chunk_bytes // (4 * columns))


def score_rows(
    head: Head,
    hidden_PH: torch.Tensor,
    scored_P: torch.Tensor,
    *,
    topk: int = 0,
    at_ids_PK: torch.Tensor | None = None,
    chunk_bytes: int,
    usable: UsableIds | None = None,
) -> HeadScores:
    """Full-softmax logprobs at temperature 1: of the scored token, and of the K best or the named ids.

    The softmax runs over the `usable` ids, which must include the scored and the named ones; None: over all
    ids.
    """
    if usable is not None:
        usable = usable.within(head.vocab)
    rows = rows_per_chunk(head.widest_shard or head.vocab, chunk_bytes)
    positions = hidden_PH.shape[0]
    columns = topk or (0 if at_ids_PK is None else at_ids_PK.shape[1])
    device = hidden_PH.device
    sampled_P = torch.empty(positions, dtype=torch.float32, device=device)
    ids_PK = torch.empty(positions, columns, dtype=torch.int32, device=device) if topk else None
    logprobs_PK = torch.empty(positions, columns, dtype=torch.float32, device=device) if columns else None
    for start in range(0, positions, rows):
        part = slice(start, min(start + rows, positions))
        logits_CV = head.logits(hidden_PH[part])
        if usable is not None:
            logits_CV = head.reader.cut(logits_CV, usable)
        total_C, best = head.reader.read(logits_CV, topk)
        torch.sub(head.reader.at(logits_CV, scored_P[part, None]).squeeze(1), total_C, out=sampled_P[part])
        if best is not None and ids_PK is not None and logprobs_PK is not None:
            torch.sub(best[0], total_C[:, None], out=logprobs_PK[part])
            ids_PK[part] = best[1]
        elif at_ids_PK is not None and logprobs_PK is not None:
            torch.sub(head.reader.at(logits_CV, at_ids_PK[part]), total_C[:, None], out=logprobs_PK[part])
    return HeadScores(sampled_P, ids_PK, logprobs_PK)
