"""Attention over packed rows without a flash-attention package.

Rows lie one after another in a single line; `cu_seq_lens_q` holds where each begins. Importing this module
registers `attn_implementation = "understudy_varlen"` with transformers.

| device and dtype | computed by |
|---|---|
| CUDA, half precision | PyTorch's own variable-length flash kernel |
| CUDA, and `groups` says which rows are equally long | `grouped_attention` (cuDNN) |
| CPU, few runs of equally long rows | SDPA on each run, without padding |
| anything else | SDPA on padded rows: the reference that the kernels are tested against |

Shapes: Q query heads, G key/value heads (Q is a multiple of G), T tokens of all rows, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from understudy.nn.grouped_attention import grouped_attention

VARLEN = "understudy_varlen"
TOKENS_PER_RUN = 128
"""The cost of one more attention call on a CPU, in tokens of padding saved."""


def varlen_attention(
    module: nn.Module,
    query_1QTD: torch.Tensor,
    key_1GTD: torch.Tensor,
    value_1GTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    nodes_T: torch.Tensor | None = None,
    places_U: torch.Tensor | None = None,
    groups: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each row; returns [1, T, Q, D] as transformers expects.

    With `nodes_T` and `places_U` (see `packed.py`) tokens that rows share come once and are returned once: T
    is then U. `groups` is a table on the host (see `nn/grouped_attention.py`).
    """
    twists = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    if twists:
        raise ValueError(f"packed attention knows no {', '.join(twists)}; this model's rows must be padded")
    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError(
            "packed attention needs cu_seq_lens_q and max_length_q; the model did not pass them on to its layers"
        )
    # `squeeze`, not `[0]`: its gradient is a view; that of an index fills and copies a tensor.
    query_QTD, key_GTD, value_GTD = (one.squeeze(0) for one in (query_1QTD, key_1GTD, value_1GTD))
    if nodes_T is not None and places_U is not None:
        query_QTD, key_GTD, value_GTD = (
            heads_XUD.transpose(0, 1).index_select(0, nodes_T).transpose(0, 1)
            for heads_XUD in (query_QTD, key_GTD, value_GTD)
        )
    heads = (query_QTD, key_GTD, value_GTD)
    if groups is not None and not sliding_window:
        scale = query_QTD.shape[-1] ** -0.5 if scaling is None else scaling
        learns = torch.is_grad_enabled() and any(one.requires_grad for one in heads)
        tokens_first = (
            one.transpose(0, 1) for one in heads
        )  # [T, heads, D], as `grouped_attention` takes them
        out_TQD, _ = grouped_attention(*tokens_first, groups, cu_seq_lens_q, max_length_q, scale, learns)
    elif query_QTD.is_cuda and query_QTD.dtype in (torch.float16, torch.bfloat16):
        out_TQD = _flash(*heads, cu_seq_lens_q, max_length_q, scaling, sliding_window)
    elif runs := few_runs(cu_seq_lens_q):
        out_TQD = rows_by_runs(*heads, runs, scaling, sliding_window)
    else:
        out_TQD = rows_side_by_side(*heads, cu_seq_lens_q, max_length_q, scaling, sliding_window)
    if places_U is not None:
        out_TQD = out_TQD.index_select(0, places_U)
    return out_TQD[None], None


def _flash(
    query_QTD: torch.Tensor,
    key_GTD: torch.Tensor,
    value_GTD: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    out_TQD, *_ = torch.ops.aten._flash_attention_forward(
        query_QTD.transpose(0, 1),
        key_GTD.transpose(0, 1),
        value_GTD.transpose(0, 1),
        bounds,
        bounds,
        longest,
        longest,
        0.0,
        True,
        False,
        scale=scaling,
        window_size_left=window - 1 if window else None,
        window_size_right=0 if window else None,
    )
    return out_TQD


def few_runs(bounds: torch.Tensor) -> list[tuple[int, int]]:
    """(rows, length) of each run of neighbouring rows of equal length, on a CPU if there are few runs; else
    an empty list.

    Rows come sorted by length, so short answers to prompts of one form are a handful of runs.
    """
    if bounds.device.type != "cpu":
        return []
    lengths, counts = torch.unique_consecutive(bounds.diff(), return_counts=True)
    if len(lengths) * TOKENS_PER_RUN > int(bounds[-1]):
        return []
    return list(zip(counts.tolist(), lengths.tolist(), strict=True))


def rows_by_runs(
    query_QTD: torch.Tensor,
    key_GTD: torch.Tensor,
    value_GTD: torch.Tensor,
    runs: list[tuple[int, int]],
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Rows of one length need no padding and are contiguous already."""
    sizes = [rows * length for rows, length in runs]
    pieces = []
    for (rows, length), *parts in zip(
        runs, *(heads_XTD.split(sizes, dim=1) for heads_XTD in (query_QTD, key_GTD, value_GTD)), strict=True
    ):
        query_BQLD, key_BGLD, value_BGLD = (
            part_XTD.unflatten(1, (rows, length)).transpose(0, 1) for part_XTD in parts
        )
        mask = _window_mask(length, window, query_QTD.device)
        out_BQLD = scaled_dot_product_attention(
            query_BQLD,
            key_BGLD,
            value_BGLD,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query_QTD.shape[0] != key_GTD.shape[0],
        )
        pieces.append(out_BQLD.transpose(1, 2).flatten(0, 1))
    return torch.cat(pieces)


def rows_side_by_side(
    query_QTD: torch.Tensor,
    key_GTD: torch.Tensor,
    value_GTD: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Pads the rows for SDPA; no other layer sees the padding. It comes last in a row, so under a causal
    mask no real token attends to it."""
    lengths_B = bounds.diff().long()
    row_T = torch.repeat_interleave(lengths_B)
    place_T = torch.arange(len(row_T), device=row_T.device) - bounds.long()[row_T] + row_T * longest
    rows = len(lengths_B)

    def spread(heads_XTD: torch.Tensor) -> torch.Tensor:
        flat = heads_XTD.new_zeros(rows * longest, heads_XTD.shape[0], heads_XTD.shape[2])
        flat = flat.index_copy(0, place_T, heads_XTD.transpose(0, 1))
        return flat.view(rows, longest, *flat.shape[1:]).transpose(1, 2)

    mask = _window_mask(longest, window, query_QTD.device)
    out_BQLD = scaled_dot_product_attention(
        spread(query_QTD),
        spread(key_GTD),
        spread(value_GTD),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query_QTD.shape[0] != key_GTD.shape[0],
    )
    out_flat = out_BQLD.transpose(1, 2).reshape(rows * longest, query_QTD.shape[0], -1)
    return out_flat.index_select(0, place_T)


def _window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    if not window or length <= window:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None]
    return (distance >= 0) & (distance < window)


AttentionInterface.register(VARLEN, varlen_attention)
