"""The exact rule by which a token is drawn from logits.

Legend: B rows, V vocabulary, N new tokens, S stop ids.

For a request with seed s, temperature τ > 0 and no filters, the t-th new token (t from 0) is

    u      = numpy.random.default_rng(s).random(max_new_tokens)[t]          float64 in [0, 1)
    probs  = softmax(logits.float() / τ)                                    float32
    cdf    = cumsum(probs.double())                                         float64, in order of token id
    token  = searchsorted(cdf, u · cdf[-1], right=True)                     the first id whose cdf is above
    logprob = log_softmax(logits.float() / τ)[token]                        float32

So a row's tokens depend on its own logits and seed, not on other rows of the batch. We use numpy's
generator, because torch's CPU generator keeps only 32 bits of a seed: two of a million rollouts would share
their randomness. On a GPU `kernels/draw.py` draws rows without filters: the same rule, summed in another
order.

Filters change the logits before the softmax, in vLLM's order, so that one recipe gives one distribution on
either engine: repetition penalty (over prompt and generated ids), temperature, min-p, top-k, then top-p on
the ids that top-k kept (renormalised). Equal logits are ranked by id. The reported logprob is that of the
filtered, renormalised distribution. Greedy (τ = 0) takes argmax(logits) and reports
log_softmax(logits)[token].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from understudy.engines.base import Sampling


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling settings of B rows as tensors, so that a step needs no Python work per row.

    A column is None, and its filter skipped, if every row of the batch has the neutral value.
    """

    uniforms_NB: Tensor
    """float64: u of the next tokens, one row per step; 0 after a request's last token."""
    stop_ids_BS: Tensor
    """int64, padded with −1."""
    temperature_B1: Tensor | None
    """float32; 1 for greedy rows."""
    greedy_B: Tensor | None
    min_p_B1: Tensor | None
    top_k_B1: Tensor | None
    """int64; the vocabulary's size for rows that keep every token."""
    top_p_B1: Tensor | None
    penalty_B1: Tensor | None

    @staticmethod
    def build(
        settings: Sequence[Sampling],
        seeds: Sequence[int],
        written: Sequence[int],
        vocab: int,
        device: torch.device,
    ) -> SamplingBatch:
        """`written` is the number of tokens each request has; its random numbers continue from there."""
        steps = max(setting.max_new_tokens - done for setting, done in zip(settings, written, strict=True))
        randomness_NB = np.zeros((steps, len(settings)))
        stops = np.full(
            (len(settings), max(1, *(len(setting.stop_ids) for setting in settings))), -1, dtype=np.int64
        )
        for i, setting in enumerate(settings):
            stops[i, : len(setting.stop_ids)] = setting.stop_ids
            if setting.temperature > 0:
                uniforms_N = np.random.default_rng(seeds[i]).random(setting.max_new_tokens)
                randomness_NB[: len(uniforms_N) - written[i], i] = uniforms_N[written[i] :]

        def column(values: list[float], neutral: float, dtype: torch.dtype = torch.float32) -> Tensor | None:
            if all(value == neutral for value in values):
                return None
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        greedy = [setting.temperature == 0 for setting in settings]
        return SamplingBatch(
            uniforms_NB=torch.from_numpy(randomness_NB).to(device),
            stop_ids_BS=torch.from_numpy(stops).to(device),
            temperature_B1=column([s.temperature or 1.0 for s in settings], 1.0),
            greedy_B=torch.tensor(greedy, device=device) if any(greedy) else None,
            # Greedy rows skip the filters: the likeliest token passes them, with the model's own logprob.
            min_p_B1=column([s.min_p if s.temperature else 0.0 for s in settings], 0.0),
            top_k_B1=column(
                [(min(s.top_k, vocab) or vocab) if s.temperature else vocab for s in settings],
                vocab,
                torch.int64,
            ),
            top_p_B1=column([s.top_p if s.temperature else 1.0 for s in settings], 1.0),
            penalty_B1=column([s.repetition_penalty for s in settings], 1.0),
        )

    def select(self, rows_B: Tensor) -> SamplingBatch:
        """The given rows, in the given order."""

        def pick(column: Tensor | None) -> Tensor | None:
            return None if column is None else column[rows_B]

        return SamplingBatch(
            uniforms_NB=self.uniforms_NB[:, rows_B],
            stop_ids_BS=self.stop_ids_BS[rows_B],
            temperature_B1=pick(self.temperature_B1),
            greedy_B=pick(self.greedy_B),
            min_p_B1=pick(self.min_p_B1),
            top_k_B1=pick(self.top_k_B1),
            top_p_B1=pick(self.top_p_B1),
            penalty_B1=pick(self.penalty_B1),
        )


def shape_logits(logits_BV: Tensor, batch: SamplingBatch, seen_BV: Tensor | None) -> Tensor:
    """fp32 logits of the distribution to draw from; filtered tokens become −inf.

    `seen_BV` marks the ids in each row's prompt and generation; needed for a repetition penalty.
    """
    logits_BV = logits_BV.float()
    if batch.penalty_B1 is not None and seen_BV is not None:
        damped_BV = torch.where(logits_BV > 0, logits_BV / batch.penalty_B1, logits_BV * batch.penalty_B1)
        logits_BV = torch.where(seen_BV, damped_BV, logits_BV)
    if batch.temperature_B1 is not None:
        logits_BV = logits_BV / batch.temperature_B1
    if batch.min_p_B1 is not None:
        floor_B1 = logits_BV.amax(-1, keepdim=True) + batch.min_p_B1.log()
        logits_BV = logits_BV.masked_fill(logits_BV < floor_B1, -torch.inf)
    if batch.top_k_B1 is not None or batch.top_p_B1 is not None:
        logits_BV = _keep_top(logits_BV, batch.top_k_B1, batch.top_p_B1)
    return logits_BV


def _keep_top(logits_BV: Tensor, top_k_B1: Tensor | None, top_p_B1: Tensor | None) -> Tensor:
    ranked_BV, ids_BV = torch.sort(logits_BV, dim=-1, descending=True, stable=True)
    if top_k_B1 is not None:
        ranks_V = torch.arange(logits_BV.shape[-1], device=logits_BV.device)
        ranked_BV = ranked_BV.masked_fill(ranks_V >= top_k_B1, -torch.inf)
    if top_p_B1 is not None:
        # Keep a token while the mass ranked before it is below p: the smallest set that reaches p.
        mass_BV = ranked_BV.softmax(-1)
        before_BV = mass_BV.cumsum(-1) - mass_BV
        drop_BV = before_BV >= top_p_B1
        drop_BV[:, 0] = False
        ranked_BV = ranked_BV.masked_fill(drop_BV, -torch.inf)
    return torch.empty_like(logits_BV).scatter_(-1, ids_BV, ranked_BV)


def draw(logits_BV: Tensor, batch: SamplingBatch, step: int) -> tuple[Tensor, Tensor]:
    """Ids [B] and logprobs [B] from shaped logits, by the rule at the top; `step` counts from `build`."""
    logprobs_BV = logits_BV.log_softmax(-1)
    # softmax, not exp(log_softmax), so that the rule at the top can be reproduced to the bit.
    cdf_BV = logits_BV.softmax(-1).double().cumsum(-1)
    target_B1 = batch.uniforms_NB[step][:, None] * cdf_BV[:, -1:]
    tokens_B1 = torch.searchsorted(cdf_BV, target_B1, right=True).clamp_(max=logits_BV.shape[-1] - 1)
    if batch.greedy_B is not None:
        tokens_B1 = torch.where(batch.greedy_B[:, None], logits_BV.argmax(-1, keepdim=True), tokens_B1)
    return tokens_B1[:, 0], logprobs_BV.gather(-1, tokens_B1)[:, 0]
