"""One pass over a chunk of logits: each row's logsumexp and the maximum of each of its column blocks.

torch needs several passes for a logsumexp and another for block maxima; a chunk is gigabytes, so passes are the cost.
`row_summary` runs the kernel; `row_summary_plain` is its twin in plain torch, and what machines without Triton use.

Legend: C rows of a chunk, V vocabulary, B column blocks.
"""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # Triton comes with torch's CUDA builds; a CPU machine needs none
    triton = None

BLOCK = 64
"""Columns whose maximum decides whether a block can hold one of the K best."""
TILE = 32
"""Blocks read at a time by one program: 2048 columns."""


def row_summary_plain(logits_CV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(logsumexp [C], block maxima [C, B]) in fp32; a last block may be short."""
    rows, vocab = logits_CV.shape
    blocks = -(-vocab // BLOCK)
    total_C = torch.logsumexp(logits_CV.float(), dim=-1)
    short = blocks * BLOCK - vocab
    padded = torch.nn.functional.pad(logits_CV, (0, short), value=-torch.inf) if short else logits_CV
    return total_C, padded.view(rows, blocks, BLOCK).amax(-1).float()


if triton is not None:

    @triton.jit
    def _row_summary(logits, totals, maxima, vocab, blocks, stride, BLOCK: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        largest = -1e38  # finite, so that a tile of −inf alone does not become NaN
        mass = 0.0
        for start in range(0, blocks, TILE):
            block = start + tl.arange(0, TILE)
            column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            values = tl.load(logits + row * stride + column, mask=column < vocab, other=-float("inf")).to(
                tl.float32
            )
            best = tl.max(values, axis=1)
            tl.store(maxima + row * blocks + block, best, mask=block < blocks)
            higher = tl.maximum(largest, tl.max(best, axis=0))
            mass = mass * tl.exp(largest - higher) + tl.sum(tl.sum(tl.exp(values - higher), axis=1), axis=0)
            largest = higher
        tl.store(totals + row, largest + tl.log(mass))


def row_summary(logits_CV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `row_summary_plain`, in one pass where Triton is there."""
    if triton is None:
        return row_summary_plain(logits_CV)
    rows, vocab = logits_CV.shape
    blocks = -(-vocab // BLOCK)
    total_C = torch.empty(rows, dtype=torch.float32, device=logits_CV.device)
    maxima_CB = torch.empty(rows, blocks, dtype=torch.float32, device=logits_CV.device)
    _row_summary[(rows,)](
        logits_CV, total_C, maxima_CB, vocab, blocks, logits_CV.stride(0), BLOCK=BLOCK, TILE=TILE, num_warps=8
    )
    return total_C, maxima_CB
