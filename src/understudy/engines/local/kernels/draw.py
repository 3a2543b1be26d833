"""Draws tokens on a GPU in two kernels, for rows without filters.

Legend: B rows, V vocabulary, P pieces of the vocabulary (BLOCK ids each).

The rule is that of `sampling.py` for rows without filters: the first id at which the summed probability
passes u. Here the sum runs over pieces first (fp32 inside a piece, fp64 across pieces), then inside the
piece that contains u (fp64). So a token can differ from the plain rule's only if u is within rounding
(about 1e-6) of the border between two tokens. The same logits, seed and settings always give the same
token, whatever the rest of the batch. The plain version makes ten passes over fp32 and fp64 copies of the
logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from understudy.engines.local.sampling import SamplingBatch

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch comes without it
    triton = None

BLOCK = 2048
"""Ids of one piece."""

if triton is not None:

    @triton.jit
    def _pieces(  # type: ignore[no-untyped-def]
        logits, temperature, highest, place, mass, row_stride, vocab, pieces,
        TEMPERED: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """For each piece: its highest logit, the id of that logit, and Σ exp(logit − highest)."""
        row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
        ids = piece * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * row_stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        if TEMPERED:
            x = x / tl.load(temperature + row)
        top = tl.max(x, 0)
        # A piece without finite logits has mass 0; −inf − (−inf) would make it NaN.
        level = tl.where(top == float("-inf"), 0.0, top)
        tl.store(highest + row * pieces + piece, top)
        tl.store(place + row * pieces + piece, piece * BLOCK + tl.argmax(x, 0))
        tl.store(mass + row * pieces + piece, tl.sum(tl.exp(x - level), 0))

    @triton.jit
    def _choose(  # type: ignore[no-untyped-def]
        logits, temperature, uniforms, greedy, highest, place, mass, tokens, logprobs, row_stride, vocab, pieces,
        TEMPERED: tl.constexpr, GREEDY: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
    ):  # fmt: skip
        """Finds the piece that contains u, then the id inside it."""
        row = tl.program_id(0).to(tl.int64)
        piece = tl.arange(0, PIECES)
        there = piece < pieces
        tops = tl.load(highest + row * pieces + piece, mask=there, other=float("-inf"))
        top = tl.max(tops, 0)
        sums = tl.load(mass + row * pieces + piece, mask=there, other=0.0)
        weights = tl.where(there & (tops > float("-inf")), sums * tl.exp(tops - top), 0.0).to(tl.float64)
        total = tl.sum(weights, 0)
        target = tl.load(uniforms + row) * total
        chosen = tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
        chosen = tl.minimum(chosen, tl.max(tl.where(weights > 0, piece, 0), 0))
        before = tl.sum(tl.where(piece < chosen, weights, 0.0), 0)
        ids = chosen * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * row_stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        if TEMPERED:
            x = x / tl.load(temperature + row)
        share = tl.exp(x - top).to(tl.float64)
        token = chosen * BLOCK + tl.sum((before + tl.cumsum(share, 0) <= target).to(tl.int32), 0)
        token = tl.minimum(token, tl.max(tl.where(share > 0, ids, 0), 0))
        value = tl.sum(tl.where(ids == token, x, 0.0), 0)
        if GREEDY:  # noqa: SIM102 (decided when the kernel is compiled)
            if tl.load(greedy + row) != 0:
                token = tl.load(place + row * pieces + tl.argmax(tops, 0))
                value = top
        tl.store(tokens + row, token.to(tl.int64))
        tl.store(logprobs + row, value - top - tl.log(total).to(tl.float32))


def can_draw(logits_BV: Tensor, batch: SamplingBatch) -> bool:
    """Whether `draw_unfiltered` applies: no filters, on a GPU."""
    filters = (batch.min_p_B1, batch.top_k_B1, batch.top_p_B1, batch.penalty_B1)
    return triton is not None and logits_BV.is_cuda and all(column is None for column in filters)


def draw_unfiltered(logits_BV: Tensor, batch: SamplingBatch, step: int) -> tuple[Tensor, Tensor]:
    """Token ids [B] and logprobs [B] from the model's own logits; `sampling.draw` takes shaped logits."""
    rows, vocab = logits_BV.shape
    if logits_BV.stride(1) != 1:
        logits_BV = logits_BV.contiguous()
    device = logits_BV.device
    pieces = -(-vocab // BLOCK)
    highest_BP, mass_BP = (torch.empty((rows, pieces), dtype=torch.float32, device=device) for _ in range(2))
    place_BP = torch.empty((rows, pieces), dtype=torch.int32, device=device)
    tokens_B = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs_B = torch.empty(rows, dtype=torch.float32, device=device)
    tempered, greedy = batch.temperature_B1 is not None, batch.greedy_B is not None
    # The kernel never reads the pointer of a column that is None; pass any tensor.
    temperature = batch.temperature_B1.contiguous() if batch.temperature_B1 is not None else highest_BP
    greedy_B = batch.greedy_B.to(torch.int8) if batch.greedy_B is not None else place_BP
    _pieces[(rows, pieces)](
        logits_BV, temperature, highest_BP, place_BP, mass_BP, logits_BV.stride(0), vocab, pieces,
        TEMPERED=tempered, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    _choose[(rows,)](
        logits_BV, temperature, batch.uniforms_NB[step].contiguous(), greedy_B, highest_BP, place_BP, mass_BP,
        tokens_B, logprobs_B, logits_BV.stride(0), vocab, pieces,
        TEMPERED=tempered, GREEDY=greedy, BLOCK=BLOCK, PIECES=1 << (pieces - 1).bit_length(), num_warps=4,
    )  # fmt: skip
    return tokens_B, logprobs_B
