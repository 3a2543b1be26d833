"""A whole decode step over slots: matrix products and five kernels per layer. Also computes prompts.

    states ──norm──> q, k, v in one product ──norms, rotary, into the pool──> attention ──> product
       └──────────────── + ────────────────────────────────────────────────────────────────────┘
           ──norm──> gate, up in one product ──silu · up──> product ── + ──> the next layer's norm

transformers' modules launch fourteen kernels per layer for the same arithmetic, even with our kernels inside
(`fused.py`). Rounding is the same as in transformers: every sum, product and norm is rounded where its code
rounds. Models with other layers use transformers' code. Prompts are written directly into their slots.

Legend: B rows, T tokens of all prompts, R either, F features, Q query heads, H key/value heads, D head size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention

from understudy.engines.local.kernels import attention as decode_attention
from understudy.engines.local.kernels import fused as fused_decode
from understudy.engines.local.kernels import rms_norm as fused_norm
from understudy.engines.local.kernels.merged_linear import MergedLinear, lay_side_by_side

if TYPE_CHECKING:
    from understudy.engines.local.kv_pool import Places, SlotLayer

LAYERS = {"LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
"""Classes of transformers: x + attention(norm(x)), then x + mlp(norm(x))."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """The token ids of several rows, concatenated, and the place of each token in the pool."""

    tokens_T: Tensor
    places: Places
    """Per token: its row's slot, and its position."""
    bounds: Tensor
    """int32 [B + 1]: the start of each row, and the end of the last."""
    longest: int
    last_B: Tensor
    """Index of each row's last token."""


Attend = Callable[["_Layer", Tensor, "SlotLayer"], Tensor]
"""(layer, rotated queries [R, Q, D], its pool) → [R, Q, D]."""


class _Layer:
    """References to one decoder layer's weights, with its merged products."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.size, self.scale = int(attention.head_dim), float(attention.scaling)
        self.window = int(getattr(attention, "sliding_window", None) or 0)
        self.entry, self.middle = layer.input_layernorm, layer.post_attention_layernorm
        norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        self.head_weights = None if norms is None else (norms[0].weight, norms[1].weight)
        self.head_epsilon = 0.0 if norms is None else float(norms[0].variance_epsilon)
        self.heads = MergedLinear(_heads(attention))
        self.gates = MergedLinear(_gates(mlp))
        self.mixed, self.down = attention.o_proj, mlp.down_proj

    def mix(
        self, normed_RF: Tensor, turns: tuple[Tensor, Tensor], pool: SlotLayer, places: Places, attend: Attend
    ) -> Tensor:
        """The attention block: writes keys and values into the pool and returns the projected output."""
        rows = len(normed_RF)
        query_RQD, key_RHD, value_RHD = (one.view(rows, -1, self.size) for one in self.heads(normed_RF))
        turned_RQD = fused_decode.place_heads(
            query_RQD, key_RHD, value_RHD, self.head_weights, self.head_epsilon, *turns,
            places.slots_B, places.lengths_B, pool.pool,
        )  # fmt: skip
        out: Tensor = self.mixed(attend(self, turned_RQD, pool).reshape(rows, -1))
        return out

    def feed_forward(self, normed_RF: Tensor) -> Tensor:
        gate_RF, up_RF = self.gates(normed_RF)
        out: Tensor = self.down(fused_decode.silu_times(gate_RF, up_RF))
        return out


class DecodeLoop:
    """One model's decode step. It holds the weights' addresses: build a new one when weights have moved."""

    def __init__(self, model: Any) -> None:
        fused_norm.generates_only(model)
        body = model.model
        self._embedding, self._rotary, self._norm = body.embed_tokens.weight, body.rotary_emb, body.norm
        self._layers = [_Layer(layer) for layer in body.layers]
        self._head = model.lm_head

    def step(self, tokens_B: Tensor, places: Places, pools: Sequence[SlotLayer]) -> Tensor:
        """Logits [B, V] after each row's newest token."""
        function = (
            decode_attention.slot_attention if tokens_B.is_cuda else decode_attention.slot_attention_plain
        )

        def attend(layer: _Layer, query_BQD: Tensor, pool: SlotLayer) -> Tensor:
            return function(
                query_BQD, pool.pool, places.slots_B, places.ends_B, layer.scale, layer.window, places.parts
            )

        return self._logits(self._through(tokens_B, places, pools, attend))

    def read(self, prompts: Prompts, pools: Sequence[SlotLayer]) -> Tensor:
        """Logits [B, V] after each prompt; writes its keys and values into its slot."""
        places = prompts.places

        def attend(layer: _Layer, query_TQD: Tensor, pool: SlotLayer) -> Tensor:
            keys_THD, values_THD = pool.pool.read(places.slots_B, places.lengths_B, query_TQD.dtype)
            return packed_attention(query_TQD, keys_THD, values_THD, prompts, layer.scale, layer.window)

        normed_TF = self._through(prompts.tokens_T, places, pools, attend)
        return self._logits(normed_TF.index_select(0, prompts.last_B))

    def _logits(self, normed_BF: Tensor) -> Tensor:
        logits_BV: Tensor = self._head(normed_BF)
        return logits_BV

    def _through(
        self, tokens_R: Tensor, places: Places, pools: Sequence[SlotLayer], attend: Attend
    ) -> Tensor:
        """Hidden states [R, F] after the last norm."""
        fused_norm.refuse_gradients(self)
        states_RF = embedding(tokens_R, self._embedding)
        cosine_R1D, sine_R1D = self._rotary(states_RF[:, None], places.lengths_B[:, None])
        turns = (cosine_R1D[:, 0].contiguous(), sine_R1D[:, 0].contiguous())
        entry = self._layers[0].entry
        normed_RF = fused_norm.rms_norm(states_RF, entry.weight, entry.variance_epsilon)
        following = [layer.entry for layer in self._layers[1:]] + [self._norm]
        for layer, pool, after in zip(self._layers, pools, following, strict=True):
            mixed_RF = layer.mix(normed_RF, turns, pool, places, attend)
            middle = layer.middle
            states_RF, normed_RF = fused_norm.add_norm(
                mixed_RF, states_RF, middle.weight, middle.variance_epsilon
            )
            states_RF, normed_RF = fused_norm.add_norm(
                layer.feed_forward(normed_RF), states_RF, after.weight, after.variance_epsilon
            )
        return normed_RF


def packed_attention(
    query_TQD: Tensor, key_THD: Tensor, value_THD: Tensor, prompts: Prompts, scale: float, window: int
) -> Tensor:
    """Causal attention inside each row; by FlashAttention on a GPU in half precision."""
    if query_TQD.is_cuda and query_TQD.dtype in (torch.float16, torch.bfloat16):
        out_TQD: Tensor = torch.ops.aten._flash_attention_forward(
            query_TQD, key_THD, value_THD, prompts.bounds, prompts.bounds, prompts.longest, prompts.longest,
            0.0, True, False, scale=scale,
            window_size_left=window - 1 if window else None, window_size_right=0 if window else None,
        )[0]  # fmt: skip
        return out_TQD
    pieces = []
    for start, end in pairwise(prompts.bounds.tolist()):
        query_QLD, key_HLD, value_HLD = (
            x[start:end].transpose(0, 1) for x in (query_TQD, key_THD, value_THD)
        )
        age_LL = torch.arange(end - start, device=query_TQD.device)
        age_LL = age_LL[:, None] - age_LL
        shown_LL = (age_LL >= 0) & (age_LL < window) if window else age_LL >= 0
        mixed_QLD = scaled_dot_product_attention(
            query_QLD[None], key_HLD[None], value_HLD[None], attn_mask=shown_LL, scale=scale,
            enable_gqa=query_TQD.shape[1] != key_THD.shape[1],
        )[0]  # fmt: skip
        pieces.append(mixed_QLD.transpose(0, 1))
    return torch.cat(pieces)


def fits(model: Any) -> bool:
    """Whether every layer of a model is one that this loop computes exactly."""
    body = getattr(model, "model", None)
    layers = getattr(body, "layers", None)
    return layers is not None and hasattr(model, "lm_head") and all(_known(layer) for layer in layers)


def join_products(model: Any) -> None:
    """Makes weights of products over the same input contiguous in memory; parameters keep their identity."""
    for layer in model.model.layers:
        lay_side_by_side(_heads(layer.self_attn))
        lay_side_by_side(_gates(layer.mlp))


def _heads(attention: Any) -> list[Any]:
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def _gates(mlp: Any) -> list[Any]:
    return [mlp.gate_proj, mlp.up_proj]


def _known(layer: Any) -> bool:
    attention: Any = getattr(layer, "self_attn", None)
    mlp: Any = getattr(layer, "mlp", None)
    norms = (getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm"))
    return (
        type(layer).__name__ in LAYERS
        and type(attention).__name__ in fused_decode.ATTENTIONS
        and type(mlp).__name__ in fused_decode.MLPS
        and type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
        and all(type(norm).__name__ in fused_norm.NORMS for norm in norms)
        and all(type(one) is torch.nn.Linear for one in (*_heads(attention), *_gates(mlp)))
        and not any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules())
    )
