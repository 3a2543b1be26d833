"""Causal attention over sequences packed one after another, as an attention function transformers can call.

Queries of one segment see the keys of that segment only. With shared prefixes a segment has more keys than queries
(the prefix's keys, then its own), aligned at the end: query i of m sees keys 0 … n − m + i of n.

Three ways, all exact:

    cuDNN          on Hopper and later in half precision, over groups of equally long segments (`packing.pack_in_groups`);
                   1.8 × FlashAttention 2 there, but it plans anew for every list of lengths, so it gets few shapes
    FlashAttention torch's own kernel for variable lengths, in half precision: shared prefixes, windows, short segments
    SDPA           one call per segment; everything else

No mask is ever built: transformers builds none for an attention function it has no mask for.

Legend: T packed tokens, Q queries, N keys, H heads, D head size, G groups.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

log = logging.getLogger(__name__)

NAME = "understudy_scoring"
"""Its own: the policy registers another function for packed rows, and both may live in one process."""
MAX_FLASH_HEAD = 256
MAX_GROUPED_HEAD = 128
HOPPER = 9
"""The compute capability from which cuDNN's attention is the faster one."""


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
    """`key_places` says which packed tokens' keys each segment sees, one segment after another; None: its own.

    `groups` (on the host) says which neighbouring segments are equally long, and promises that each sees itself only.
    """
    if softcap is not None or attention_mask is not None:
        raise ValueError("packed attention knows neither soft-capping nor masks")
    query_THD, key_NHD, value_NHD = (x.squeeze(0).transpose(0, 1) for x in (query_1HTD, key_1HTD, value_1HTD))
    if key_places is not None:
        key_NHD, value_NHD = key_NHD[key_places], value_NHD[key_places]
    if groups is not None and sliding_window is None:
        scale = query_THD.shape[-1] ** -0.5 if scaling is None else scaling
        out_THD = grouped_attention(query_THD, key_NHD, value_NHD, groups, scale)
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


@torch.library.custom_op("understudy::grouped_attention", mutates_args=())
def grouped_attention(
    query_THD: torch.Tensor,
    key_THD: torch.Tensor,
    value_THD: torch.Tensor,
    groups_G3: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Causal attention of each segment with itself. A group is (first token, segments, tokens of each); a table may end
    in zeros, so that its shape need not change. One operator to the compiler, which must not see the lengths: it would
    compile a layer anew for each list of them."""
    parts = []
    for first, count, length in groups_G3.tolist():
        if not count:
            break
        query, key, value = (
            x[first : first + count * length].view(count, length, x.shape[1], x.shape[2]).transpose(1, 2)
            for x in (query_THD, key_THD, value_THD)
        )
        if query.is_cuda:
            out = torch.ops.aten._scaled_dot_product_cudnn_attention(
                query, key, value, None, False, 0.0, True, False, scale=scale
            )[0]
        else:
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=True
            )
        parts.append(out.transpose(1, 2).reshape(count * length, *query_THD.shape[1:]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@grouped_attention.register_fake
def _grouped_attention_shape(
    query_THD: torch.Tensor,
    key_THD: torch.Tensor,
    value_THD: torch.Tensor,
    groups_G3: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    return torch.empty_like(query_THD, memory_format=torch.contiguous_format)


@functools.cache
def takes_groups(
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, head_size: int
) -> bool:
    """Whether `grouped_attention` can be used for a model and agrees with FlashAttention; found out once per process."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or head_size > MAX_GROUPED_HEAD:
        return False
    if torch.cuda.get_device_capability(device)[0] < HOPPER:
        return False
    try:
        _compare_with_flash(device, dtype, heads, key_heads, head_size)
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # a cuDNN without this shape: FlashAttention serves as well
        log.warning("cuDNN's attention is not used on %s: %s", device, error)
        return False
    return True


def _compare_with_flash(
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, head_size: int
) -> None:
    generator = torch.Generator(device).manual_seed(0)
    groups = ((0, 2, 128), (256, 1, 192))
    ends = torch.tensor([0, 128, 256, 448], dtype=torch.int32, device=device)
    query, key, value = (
        torch.randn(448, count, head_size, device=device, generator=generator).to(dtype)
        for count in (heads, key_heads, key_heads)
    )
    scale = head_size**-0.5
    ours = grouped_attention(query, key, value, torch.tensor([*groups, (0, 0, 0)]), scale)
    theirs = torch.ops.aten._flash_attention_forward(
        query, key, value, ends, ends, 192, 192, 0.0, True, False, scale=scale
    )[0]
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


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
    """bool [Q, N]: which keys each query sees, aligned at the end."""
    ahead_QN = (
        torch.arange(queries + longer, device=device) - torch.arange(queries, device=device)[:, None] - longer
    )
    seen_QN = ahead_QN <= 0
    return seen_QN if window is None else seen_QN & (ahead_QN > -window)


def register() -> None:
    AttentionInterface.register(NAME, varlen_attention)
