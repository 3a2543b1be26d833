"""Fused elementwise kernels of a decode step; unfused, launching them takes a third of the step.

Legend: B rows, Q query heads, H key/value heads, D head size, S slots, C columns per slot, R rows of any
shape, F features.

Between a layer's projections and its attention are head norms, rotary embedding and the write into the
key/value pool: twenty kernels of a few microseconds each in transformers' code, one here. Arithmetic and
rounding are the same as in transformers: norm in fp32, rounded; times weight, rounded; each product of the
rotation rounded, then their sum.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor

from understudy.engines.local import kv_pool as key_values
from understudy.engines.local.kernels import attention as decode_attention
from understudy.engines.local.kernels.rms_norm import generates_only, refuse_gradients
from understudy.engines.local.kv_pool import KeyValues

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch comes without it
    triton = None

ATTENTIONS = {"LlamaAttention", "Qwen2Attention", "Qwen3Attention"}
"""transformers classes of: projections, optional head norms, rotary, cache, attention, projection."""
MLPS = {"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"}
"""transformers classes that compute down(act(gate(x)) * up(x))."""
SHARE = 8
"""Heads of a row per program. With one head each, starting programs takes as long as the rest of the step."""

if triton is not None:
    SMALLEST_TOP = tl.constexpr(key_values.SMALLEST_TOP)
    LARGEST = tl.constexpr(key_values.LARGEST)

    @triton.jit
    def _turned(  # type: ignore[no-untyped-def]
        x, head, there, weight, cosine, sine, epsilon, NORMED: tl.constexpr, SIZE: tl.constexpr
    ):
        """Some heads of a row, normed and rotated by the row's position."""
        place = tl.arange(0, SIZE)
        other = (place + SIZE // 2) % SIZE
        own = tl.load(x + head[:, None] * SIZE + place[None, :], mask=there[:, None], other=0.0)
        far = tl.load(x + head[:, None] * SIZE + other[None, :], mask=there[:, None], other=0.0)
        kind = own.dtype
        if NORMED:
            wide = own.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + epsilon)[:, None]
            weights, far_weights = tl.load(weight + place), tl.load(weight + other)
            own = (wide * scale).to(kind).to(tl.float32) * weights.to(tl.float32)[None, :]
            far = (far.to(tl.float32) * scale).to(kind).to(tl.float32) * far_weights.to(tl.float32)[None, :]
            own, far = own.to(kind), far.to(kind)
        far = tl.where(place[None, :] < SIZE // 2, -far.to(tl.float32), far.to(tl.float32))
        straight = (own.to(tl.float32) * tl.load(cosine + place).to(tl.float32)[None, :]).to(kind)
        crossed = (far * tl.load(sine + place).to(tl.float32)[None, :]).to(kind)
        return (straight.to(tl.float32) + crossed.to(tl.float32)).to(kind)

    @triton.jit
    def _keep(  # type: ignore[no-untyped-def]
        vectors, head, there, kept, pool_head, scales, scale_head, NARROW: tl.constexpr, SIZE: tl.constexpr
    ):
        """Stores some heads' vectors at one place; in fp8 as `key_values.narrowed` does."""
        places = kept + head[:, None] * pool_head + tl.arange(0, SIZE)[None, :]
        if NARROW:
            wide = vectors.to(tl.float32)
            own = tl.maximum(tl.max(tl.abs(wide), 1), SMALLEST_TOP) / LARGEST
            tl.store(places, (wide / own[:, None]).to(kept.dtype.element_ty), mask=there[:, None])
            tl.store(scales + head * scale_head, own, mask=there)
        else:
            tl.store(places, vectors, mask=there[:, None])

    @triton.jit
    def _heads_kernel(  # type: ignore[no-untyped-def]
        query, key, value, query_weight, key_weight, cosine, sine, slots, lengths, out, keys, values, key_scales, value_scales,
        epsilon, query_row, key_row, value_row, turn_row, pool_slot, pool_head, pool_column, scale_slot, scale_head,
        QUERIES: tl.constexpr, HEADS: tl.constexpr, SHARE: tl.constexpr,
        NORMED: tl.constexpr, SIZE: tl.constexpr, NARROW: tl.constexpr,
    ):  # fmt: skip
        """Each program handles `SHARE` heads of a row: programs of queries, then of keys, then of values."""
        row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
        query_parts: tl.constexpr = (QUERIES + SHARE - 1) // SHARE
        key_parts: tl.constexpr = (HEADS + SHARE - 1) // SHARE
        cosine += row * turn_row
        sine += row * turn_row
        slot = tl.load(slots + row).to(tl.int64)
        column = tl.load(lengths + row).to(tl.int64)
        place = slot * pool_slot + column * pool_column
        scale_place = slot * scale_slot + column
        if part < query_parts:
            head = part * SHARE + tl.arange(0, SHARE)
            there = head < QUERIES
            own = query + row * query_row
            turned = _turned(own, head, there, query_weight, cosine, sine, epsilon, NORMED, SIZE)
            at = out + (row * QUERIES + head)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
            tl.store(at, turned, mask=there[:, None])
        elif part < query_parts + key_parts:
            head = (part - query_parts) * SHARE + tl.arange(0, SHARE)
            there = head < HEADS
            own = key + row * key_row
            turned = _turned(own, head, there, key_weight, cosine, sine, epsilon, NORMED, SIZE)
            _keep(
                turned,
                head,
                there,
                keys + place,
                pool_head,
                key_scales + scale_place,
                scale_head,
                NARROW,
                SIZE,
            )
        else:
            head = (part - query_parts - key_parts) * SHARE + tl.arange(0, SHARE)
            there = head < HEADS
            at = value + row * value_row + head[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
            written = tl.load(at, mask=there[:, None], other=0.0)
            _keep(
                written,
                head,
                there,
                values + place,
                pool_head,
                value_scales + scale_place,
                scale_head,
                NARROW,
                SIZE,
            )

    @triton.jit
    def _gate_kernel(  # type: ignore[no-untyped-def]
        gate, up, out, gate_row, up_row, features, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < features
        g = tl.load(gate + row * gate_row + column, mask=inside, other=0.0)
        wide = g.to(tl.float32)
        activated = (wide / (1 + tl.exp(-wide))).to(g.dtype).to(tl.float32)
        factor = tl.load(up + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * features + column, (activated * factor).to(g.dtype), mask=inside)


def place_heads(
    query_BQD: Tensor,
    key_BHD: Tensor,
    value_BHD: Tensor,
    weights: tuple[Tensor, Tensor] | None,
    epsilon: float,
    cosine_BD: Tensor,
    sine_BD: Tensor,
    slots_B: Tensor,
    lengths_B: Tensor,
    pool: KeyValues,
) -> Tensor:
    """Norms (if `weights` are given) and rotates queries and keys, and writes keys and values into the pool.

    They go to each row's next column. Returns the queries [B, Q, D].
    """
    rows, queries, size = query_BQD.shape
    heads = key_BHD.shape[1]
    query_BQD, key_BHD, value_BHD = (_rows_of_heads(x) for x in (query_BQD, key_BHD, value_BHD))
    cosine_BD, sine_BD = cosine_BD.contiguous(), sine_BD.contiguous()
    query_weight, key_weight = weights or (query_BQD, key_BHD)
    keys_SHCD, values_SHCD = pool.keys_SHCD, pool.values_SHCD
    key_scales = pool.key_scales_SHC if pool.key_scales_SHC is not None else keys_SHCD
    value_scales = pool.value_scales_SHC if pool.value_scales_SHC is not None else values_SHCD
    out_BQD = torch.empty((rows, queries, size), dtype=query_BQD.dtype, device=query_BQD.device)
    _heads_kernel[(rows, -(-queries // SHARE) + 2 * -(-heads // SHARE))](
        query_BQD, key_BHD, value_BHD, query_weight, key_weight, cosine_BD, sine_BD, slots_B, lengths_B,
        out_BQD, keys_SHCD, values_SHCD, key_scales, value_scales, epsilon,
        query_BQD.stride(0), key_BHD.stride(0), value_BHD.stride(0), cosine_BD.stride(0),
        keys_SHCD.stride(0), keys_SHCD.stride(1), keys_SHCD.stride(2), key_scales.stride(0), key_scales.stride(1),
        QUERIES=queries, HEADS=heads, SHARE=SHARE, NORMED=weights is not None, SIZE=size, NARROW=pool.key_scales_SHC is not None,
        num_warps=4,
    )  # fmt: skip
    return out_BQD


def _rows_of_heads(heads_BXD: Tensor) -> Tensor:
    """Makes the heads of a row contiguous. Rows may have any stride, as slices of one wider product do."""
    together = heads_BXD.stride(2) == 1 and heads_BXD.stride(1) == heads_BXD.shape[2]
    return heads_BXD if together else heads_BXD.contiguous()


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, for tensors of one shape; rows may have any stride."""
    features = gate.shape[-1]
    gate_RF, up_RF = (_flat(one, features) for one in (gate, up))
    out_RF = torch.empty(gate_RF.shape, dtype=gate.dtype, device=gate.device)
    block = min(2048, 1 << (features - 1).bit_length())
    _gate_kernel[(len(gate_RF), -(-features // block))](
        gate_RF, up_RF, out_RF, gate_RF.stride(0), up_RF.stride(0), features, BLOCK=block
    )
    return out_RF.view(gate.shape)


def _flat(x: Tensor, features: int) -> Tensor:
    flat_RF = x.reshape(-1, features)
    return flat_RF if flat_RF.stride(1) == 1 else flat_RF.contiguous()


def fuse_decoding(model: Any) -> int:
    """Makes the model's attention and MLP blocks use these kernels; returns how many blocks changed.

    The model must be the engine's own, in eval mode and on a GPU. Passes that are not decode steps over slots
    (prompts) use transformers' attention.
    """
    generates_only(model)
    found = 0
    for module in model.modules():
        kind = type(module).__name__
        if kind in ATTENTIONS:
            module.forward = MethodType(_attention, module)
        elif kind in MLPS and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation"):
            module.forward = MethodType(_mlp, module)
        else:
            continue
        found += 1
    return found


def _mlp(module: Any, x: Tensor) -> Tensor:
    refuse_gradients(module)
    mixed: Tensor = module.down_proj(silu_times(module.gate_proj(x), module.up_proj(x)))
    return mixed


def _attention(
    module: Any, hidden_states: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    refuse_gradients(module)
    places, (cosine, sine) = options.get("slots"), options["position_embeddings"]
    if places is None or cosine.shape[-1] != module.head_dim:  # a prompt, or a head that is rotated in part
        result: tuple[Tensor, Tensor | None] = type(module).forward(module, hidden_states, *args, **options)
        return result
    norms = (module.q_norm, module.k_norm) if hasattr(module, "q_norm") else None
    window = int(getattr(module, "sliding_window", None) or 0)
    rows, size = hidden_states.shape[0], module.head_dim
    query_BQD, key_BHD, value_BHD = (
        projection(hidden_states).view(rows, -1, size)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    pool = options["past_key_values"].layers[module.layer_idx].pool
    turned_BQD = place_heads(
        query_BQD, key_BHD, value_BHD,
        None if norms is None else (norms[0].weight, norms[1].weight),
        0.0 if norms is None else norms[0].variance_epsilon,
        cosine[:, 0], sine[:, 0], places.slots_B, places.lengths_B, pool,
    )  # fmt: skip
    mixed_BQD = decode_attention.slot_attention(
        turned_BQD, pool, places.slots_B, places.ends_B, module.scaling, window, places.parts
    )
    return module.o_proj(mixed_BQD.view(rows, 1, -1)), None
