"""Kernels for the K best of each row of logits and its logsumexp, reading the logits once.

    row_summary   one pass over a row: its logsumexp, and the maximum of each block of 64 columns
    row_best      the K blocks with the largest maxima, then the K best of their 64 · K values

This is exact: the K best values lie in the K blocks with the largest maxima. If one were outside, K blocks
would each hold a value at least as large. Selection is by bisection on the bits of the K-th largest value, so
only the K results are sorted, and equal values are taken from the lowest id on.

torch needs several passes for a logsumexp and sorts much more for a top-k. A chunk is gigabytes, so passes
are the cost. Each kernel has an equivalent in plain torch, and `usable` compares them once per process before
the kernels are used.

Legend: C rows of a chunk, V vocabulary, B column blocks, K candidates.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from understudy.types.usable_ids import UsableIds

try:
    import triton
    import triton.language as tl
except ImportError:  # Triton comes with torch's CUDA builds and is not needed on CPU
    triton = None


log = logging.getLogger(__name__)
BLOCK = 64
"""Columns per block; a block's maximum decides whether it can hold one of the K best."""
TILE = 32
"""Blocks read at a time by one program of `row_summary`: 2048 columns."""
MOST_K = 256
"""A program of `row_best` holds 64 · K values at once."""
MOST_BLOCKS = 8192


def row_summary_plain(logits_CV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(logsumexp [C], block maxima [C, B]) in fp32; a last block may be short."""
    rows, vocab = logits_CV.shape
    blocks = -(-vocab // BLOCK)
    total_C = torch.logsumexp(logits_CV.float(), dim=-1)
    short = blocks * BLOCK - vocab
    padded = torch.nn.functional.pad(logits_CV, (0, short), value=-torch.inf) if short else logits_CV
    return total_C, padded.view(rows, blocks, BLOCK).amax(-1).float()


def row_best_plain(logits_CV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, ids) of the K best, best first, lowest id first among equals."""
    ordered = torch.sort(logits_CV.float(), dim=-1, descending=True, stable=True)
    return ordered.values[:, :k], ordered.indices[:, :k].int()


if triton is not None:

    @triton.jit
    def _row_summary(logits, totals, maxima, vocab, blocks, stride, BLOCK: tl.constexpr, TILE: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        largest = -1e38  # finite, so that a tile of nothing but −inf does not become NaN
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

    @triton.jit
    def _chosen(values, K: tl.constexpr):
        """Marks the K largest values: exactly K, the first among equals."""
        bits = values.to(tl.int32, bitcast=True)
        keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
        above_zero = tl.sum((keys >= 0).to(tl.int32), axis=0) >= K
        kth = tl.where(above_zero, 0, -2147483648)
        for step in tl.static_range(31):
            higher = kth + (1 << (30 - step))
            kth = tl.where(tl.sum((keys >= higher).to(tl.int32), axis=0) >= K, higher, kth)
        larger = (keys > kth).to(tl.int32)
        equal = (keys == kth).to(tl.int32)
        room = K - tl.sum(larger, axis=0)
        return larger + equal * (tl.cumsum(equal, axis=0) <= room).to(tl.int32)

    @triton.jit
    def _best_blocks(maxima, picked, blocks, K: tl.constexpr, WIDTH: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        block = tl.arange(0, WIDTH)
        values = tl.load(maxima + row * blocks + block, mask=block < blocks, other=-float("inf"))
        chosen = _chosen(values, K)
        tl.store(picked + row * K + tl.cumsum(chosen, axis=0) - 1, block, mask=chosen > 0)

    @triton.jit
    def _best_values(
        logits,
        picked,
        values_out,
        ids_out,
        vocab,
        stride,
        K: tl.constexpr,
        ROOM: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        place = tl.arange(0, ROOM * BLOCK)
        nth = place // BLOCK
        block = tl.load(picked + row * K + nth, mask=nth < K, other=0)
        column = block * BLOCK + place % BLOCK
        inside = (nth < K) & (column < vocab)
        values = tl.load(logits + row * stride + column, mask=inside, other=-float("inf")).to(tl.float32)
        chosen = _chosen(values, K)
        at = row * K + tl.cumsum(chosen, axis=0) - 1
        tl.store(values_out + at, values, mask=chosen > 0)
        tl.store(ids_out + at, column, mask=chosen > 0)


def row_summary(logits_CV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `row_summary_plain`, in one pass."""
    rows, vocab = logits_CV.shape
    blocks = -(-vocab // BLOCK)
    total_C = torch.empty(rows, dtype=torch.float32, device=logits_CV.device)
    maxima_CB = torch.empty(rows, blocks, dtype=torch.float32, device=logits_CV.device)
    _row_summary[(rows,)](
        logits_CV, total_C, maxima_CB, vocab, blocks, logits_CV.stride(0), BLOCK=BLOCK, TILE=TILE, num_warps=8
    )
    return total_C, maxima_CB


def row_best(logits_CV: torch.Tensor, maxima_CB: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `row_best_plain`, from the block maxima that `row_summary` found."""
    rows, vocab = logits_CV.shape
    blocks = maxima_CB.shape[1]
    device = logits_CV.device
    picked_CK = torch.empty(rows, k, dtype=torch.int32, device=device)
    _best_blocks[(rows,)](
        maxima_CB, picked_CK, blocks, K=k, WIDTH=triton.next_power_of_2(blocks), num_warps=4
    )
    values_CK = torch.empty(rows, k, dtype=torch.float32, device=device)
    ids_CK = torch.empty(rows, k, dtype=torch.int32, device=device)
    room = triton.next_power_of_2(k)
    _best_values[(rows,)](
        logits_CV,
        picked_CK,
        values_CK,
        ids_CK,
        vocab,
        logits_CV.stride(0),
        K=k,
        ROOM=room,
        BLOCK=BLOCK,
        num_warps=4 if room <= 64 else 8,
    )
    # Ids rise along a row here, so a stable sort keeps the lowest id first among equals.
    best_CK, order_CK = values_CK.sort(dim=-1, descending=True, stable=True)
    return best_CK, ids_CK.gather(1, order_CK)


def fits(vocab: int, k: int) -> bool:
    """Whether the kernels support this many columns and candidates, and pay off."""
    return k <= MOST_K and 8 * max(k, 1) * BLOCK <= vocab <= MOST_BLOCKS * BLOCK


@functools.cache
def usable(device: torch.device) -> bool:
    """Whether the kernels run here and equal plain torch; tested once per process."""
    if triton is None:
        return False
    try:
        agree(device)
    except Exception as error:  # unsupported compiler, driver or GPU: plain torch is equal, only slower
        log.warning("the head's kernels are not used on %s: %s", device, error)
        return False
    return True


CHECKED = ((2 * 8 * 64 * BLOCK, 64), (8 * 5 * BLOCK + 17, 5), (8 * 100 * BLOCK + 1, 100))


def agree(device: torch.device | str, shapes: Sequence[tuple[int, int]] = CHECKED) -> None:
    """Raise unless the kernels equal plain torch on logits with ties, short blocks, −inf and large values.

    `shapes` are (vocabulary, K).
    """
    for vocab, k in shapes:
        generator = torch.Generator().manual_seed(vocab)
        logits = torch.randn(6, vocab, generator=generator) * 5
        logits[1] = logits[1].round()  # many ties
        logits[2, : vocab // 2] = -torch.inf
        logits[3] += 200
        logits[4] = -3.0  # nothing but ties
        logits = logits.to(device)
        total, maxima = row_summary(logits)
        for got, right in zip((total, maxima), row_summary_plain(logits), strict=True):
            torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)
        for got, right in zip(row_best(logits, maxima, k), row_best_plain(logits, k), strict=True):
            torch.testing.assert_close(got, right, rtol=0, atol=0)


class ChunkReader(Protocol):
    """Reads the logsumexp, the K best and named logits from a chunk of logits."""

    def cut(self, logits_CV: torch.Tensor, usable: UsableIds) -> torch.Tensor:
        """The logits of usable ids; columns of unusable ids are removed or set to −inf."""
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
    """The reader if one process holds every column."""

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
    """The reader of one rank, which holds columns first … first + V − 1. All ranks call it in lockstep."""

    first: int

    def cut(self, logits_CV: torch.Tensor, usable: UsableIds) -> torch.Tensor:
        """Keeps every column: all ranks must use equal chunks, and a shard may have no usable id at all."""
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
        short = topk - values_CK.shape[1]  # a shard narrower than K gives all its columns
        values_CK = torch.nn.functional.pad(values_CK, (0, short), value=-torch.inf)
        ids_CK = torch.nn.functional.pad(ids_CK + self.first, (0, short))
        all_values = _gathered(values_CK).transpose(0, 1).flatten(1)
        all_ids = _gathered(ids_CK).transpose(0, 1).flatten(1)
        best_CK, places_CK = all_values.topk(topk, dim=-1)
        return total_C, (best_CK, all_ids.gather(1, places_CK))

    def at(self, logits_CV: torch.Tensor, ids_CK: torch.Tensor) -> torch.Tensor:
        """An all-reduce by maximum: the rank that holds an id contributes its logit, every other rank
        −inf."""
        here_CK = ids_CK - self.first
        mine_CK = (here_CK >= 0) & (here_CK < logits_CV.shape[1])
        values_CK = logits_CV.gather(1, here_CK.clamp(0, logits_CV.shape[1] - 1))
        values_CK = torch.where(mine_CK, values_CK, -torch.inf)
        dist.all_reduce(values_CK, op=dist.ReduceOp.MAX)
        return values_CK


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    """[W, …]: every rank's tensor, in rank order."""
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.stack(parts)
