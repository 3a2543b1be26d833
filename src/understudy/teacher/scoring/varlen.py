"""Causal attention over packed sequences, as an attention function for transformers.

Queries of one segment see the keys of that segment only. With shared prefixes a segment has more keys than queries
(the prefix's keys, then its own), aligned at the end: query i of m sees keys 0 … n − m + i of n.

Three implementations, all exact:

    cuDNN          on Hopper and later in half precision, over groups of equally long segments (`nn/grouped_attention.py`);
                   1.8 × FlashAttention 2 there
    FlashAttention torch's own kernel for variable lengths, in half precision: shared prefixes, windows, short segments
    SDPA           one call per segment; everything else

No mask is built: transformers builds none for an attention function it has no mask for.

Legend: T packed tokens, Q queries, N keys, H heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from understudy.nn.grouped_attention import grouped_attention

NAME = "understudy_scoring"
"""A name of its own: the policy registers another function for packed rows, and both may be in one
process."""
MAX_FLASH_HEAD = 256


def varlen_attention(
    module: torch.nn.Module,
    query_1HTD: torch.Tensor,
    key_1HTD: torch.Tensor,
    value_1HTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    *,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    max_length_q: int,
    max_length_k: int,
    key_places: torch.Tensor | None = None,
    groups: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """`key_places` lists the packed tokens whose keys each segment sees, segment by segment; None: its own.

    `groups` (on the host) lists neighbouring segments of equal length; each of them must see only itself.
    """
    if softcap is not None or attention_mask is not None or others.get("s_aux") is not None:
        raise ValueError("packed attention knows no soft caps, no attention sinks and no masks")
    query_THD, key_NHD, value_NHD = (x.squeeze(0).transpose(0, 1) for x in (query_1HTD, key_1HTD, value_1HTD))
    if key_places is not None:
        key_NHD, value_NHD = key_NHD[key_places], value_NHD[key_places]
    if groups is not None and sliding_window is None:
        scale = query_THD.shape[-1] ** -0.5 if scaling is None else scaling
        out_THD, _ = grouped_attention(
            query_THD, key_NHD, value_NHD, groups, cu_seq_lens_q, max_length_q, scale, False
        )
    elif uses_flash(query_THD):
        out_THD = torch.ops.aten._flash_attention_forward(
            query_THD,
            key_NHD,
            value_NHD,
            cu_seq_lens_q,
            cu_seq_lens_k,
            max_length_q,
            max_length_k,
            0.0,
            True,
            False,
            scale=scaling,
            window_size_left=None if sliding_window is None else sliding_window - 1,
            window_size_right=None if sliding_window is None else 0,
        )[0]
    else:
        out_THD = per_segment(
            query_THD,
            key_NHD,
            value_NHD,
            cu_seq_lens_q.tolist(),
            cu_seq_lens_k.tolist(),
            scaling,
            sliding_window,
        )
    return out_THD.unsqueeze(0), None


def uses_flash(query: torch.Tensor) -> bool:
    return (
        query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= MAX_FLASH_HEAD
    )


def per_segment(
    query_THD: torch.Tensor,
    key_NHD: torch.Tensor,
    value_NHD: torch.Tensor,
    ends_q: list[int],
    ends_k: list[int],
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    out_THD = torch.empty_like(query_THD)
    for at in range(len(ends_q) - 1):
        queries, keys = slice(ends_q[at], ends_q[at + 1]), slice(ends_k[at], ends_k[at + 1])
        longer = (keys.stop - keys.start) - (queries.stop - queries.start)
        plain = longer == 0 and window is None
        out_THD[queries] = F.scaled_dot_product_attention(
            query_THD[queries].transpose(0, 1),
            key_NHD[keys].transpose(0, 1),
            value_NHD[keys].transpose(0, 1),
            attn_mask=None
            if plain
            else visible(queries.stop - queries.start, longer, window, query_THD.device),
            is_causal=plain,
            scale=scaling,
            enable_gqa=query_THD.shape[1] != key_NHD.shape[1],
        ).transpose(0, 1)
    return out_THD


def visible(queries: int, longer: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [Q, N]: the keys each query sees, aligned at the end."""
    ahead_QN = (
        torch.arange(queries + longer, device=device) - torch.arange(queries, device=device)[:, None] - longer
    )
    seen_QN = ahead_QN <= 0
    return seen_QN if window is None else seen_QN & (ahead_QN > -window)


def register() -> None:
    AttentionInterface.register(NAME, varlen_attention)
