"""From hidden states to log-probabilities without ever holding [tokens × vocabulary].

Only the judged positions come here, in chunks bounded by bytes. A chunk's logits live just long enough to give
their logsumexp (fp32), the judged token's logit, and the K best or the named ones.

Legend: P judged positions, C rows of one chunk, H hidden size, V vocabulary, K candidates, B column blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from understudy.teacher.head_frame import WireHead

TOPK_BLOCK = 64
"""Columns whose maximum decides whether a block can hold one of the K best."""


@dataclass(frozen=True, slots=True)
class Head:
    """The output projection of a causal LM, with what some families do to the logits afterwards."""

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None = None
    scale: float = 1.0
    """logits × scale (Cohere's `logit_scale`, Granite's 1 / `logits_scaling`, …)."""
    softcap: float | None = None
    """cap · tanh(logits / cap), after the scale (Gemma)."""

    @property
    def vocab(self) -> int:
        return self.weight_VH.shape[0]

    def logits(self, hidden_CH: torch.Tensor) -> torch.Tensor:
        """fp32 [C, V]."""
        if hidden_CH.is_cuda and hidden_CH.dtype != torch.float32:
            # The product stays in the accumulator's precision: rounding logits to bf16 costs up to 0.06 nats.
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
    )


def to_wire(head: Head) -> WireHead:
    def bits(tensor: torch.Tensor) -> np.ndarray:
        tensor = tensor.detach().cpu().contiguous()
        return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()

    bias_V = None if head.bias_V is None else bits(head.bias_V)
    dtype = str(head.weight_VH.dtype).removeprefix("torch.")
    return WireHead(bits(head.weight_VH), bias_V, dtype, head.scale, head.softcap)


def from_wire(wire: WireHead) -> Head:
    def tensor(array: np.ndarray) -> torch.Tensor:
        copy = torch.from_numpy(array.copy())
        return copy.view(torch.bfloat16) if wire.dtype == "bfloat16" else copy

    bias_V = None if wire.bias_V is None else tensor(wire.bias_V)
    return Head(tensor(wire.weight_VH), bias_V, wire.scale, wire.softcap)


@dataclass(frozen=True, slots=True)
class HeadScores:
    """On the device the model is on."""

    sampled_P: torch.Tensor
    ids_PK: torch.Tensor | None = None
    logprobs_PK: torch.Tensor | None = None


def rows_per_chunk(vocab: int, chunk_bytes: int) -> int:
    return max(1, chunk_bytes // (4 * vocab))


def score_rows(
    head: Head,
    hidden_PH: torch.Tensor,
    judged_P: torch.Tensor,
    *,
    topk: int = 0,
    at_ids_PK: torch.Tensor | None = None,
    chunk_bytes: int,
) -> HeadScores:
    """Full-softmax logprobs at temperature 1: of the judged token, and of the K best or the named ids."""
    rows = rows_per_chunk(head.vocab, chunk_bytes)
    positions = hidden_PH.shape[0]
    columns = topk or (0 if at_ids_PK is None else at_ids_PK.shape[1])
    sampled_P = torch.empty(positions, dtype=torch.float32, device=hidden_PH.device)
    ids_PK = torch.empty(positions, columns, dtype=torch.int32, device=hidden_PH.device) if topk else None
    logprobs_PK = (
        torch.empty(positions, columns, dtype=torch.float32, device=hidden_PH.device) if columns else None
    )
    for start in range(0, positions, rows):
        part = slice(start, min(start + rows, positions))
        logits_CV = head.logits(hidden_PH[part])
        total_C = torch.logsumexp(logits_CV, dim=-1)
        torch.sub(logits_CV.gather(1, judged_P[part, None]).squeeze(1), total_C, out=sampled_P[part])
        if topk:
            assert ids_PK is not None and logprobs_PK is not None
            best_CK, ids_CK = best_of(logits_CV, topk)
            torch.sub(best_CK, total_C[:, None], out=logprobs_PK[part])
            ids_PK[part] = ids_CK
        elif at_ids_PK is not None:
            assert logprobs_PK is not None
            torch.sub(logits_CV.gather(1, at_ids_PK[part]), total_C[:, None], out=logprobs_PK[part])
    return HeadScores(sampled_P, ids_PK if topk else at_ids_PK, logprobs_PK)


def best_of(logits_CV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, ids) of the K best, best first."""
    worthwhile = logits_CV.is_cuda and 8 * k * TOPK_BLOCK <= logits_CV.shape[1]
    return two_stage_topk(logits_CV, k) if worthwhile else torch.topk(logits_CV, k, dim=-1)


def two_stage_topk(logits_CV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An exact top-k for large vocabularies: over block maxima first, then over K × 64 candidates.

    The K best values lie in the K blocks with the largest maxima: were one outside, K blocks would each hold
    a value at least as large.
    """
    rows, vocab = logits_CV.shape
    blocks = vocab // TOPK_BLOCK
    whole = blocks * TOPK_BLOCK
    maxima_CB = logits_CV[:, :whole].view(rows, blocks, TOPK_BLOCK).amax(-1)
    chosen_CK = maxima_CB.topk(k, dim=-1, sorted=False).indices
    columns = torch.arange(TOPK_BLOCK, device=logits_CV.device)
    candidates = (chosen_CK[:, :, None] * TOPK_BLOCK + columns).flatten(1)
    if whole < vocab:
        rest = torch.arange(whole, vocab, device=logits_CV.device).expand(rows, -1)
        candidates = torch.cat([candidates, rest], dim=1)
    best_CK, places_CK = logits_CV.gather(1, candidates).topk(k, dim=-1)
    return best_CK, candidates.gather(1, places_CK)
