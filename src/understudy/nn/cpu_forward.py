"""A fast forward pass on a CPU, without gradients, for the plain decoder models of transformers.

With small models a decode step in transformers' code is mostly Python and operations of a few microseconds:
masks, keyword arguments, rotary angles computed again, queries and keys handled separately. Here a step is
little more than the matrix products, and a prompt pass

  - computes a prefix that several rows share once (`prefix_tree.py`),
  - computes no padding: only attention sees rows of one length,
  - runs the last layer's attention and feed-forward only at positions that predict the next token.

Results equal those of transformers' code up to the rounding of products of another shape. For any other model
(adapters, hooks, windows, other attention) `cpu_forward` returns None, and the caller uses transformers'
code.

Legend: B rows, L longest prompt, U nodes of the prompts' tree, R rows or nodes, T columns in use, F features,
Q query heads, H key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, scaled_dot_product_attention
from transformers.cache_utils import Cache

from understudy.nn.prefix_tree import PrefixTree

MODELS = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
"""transformers classes with layers: norm, grouped causal attention with rotary, norm, gated feed-forward."""
FLIPPED_UP_TO = 1 << 18
"""Largest weight, in elements, that is kept as a transposed copy for a batch. On ARM, torch hands a product
with a transposed weight to oneDNN, which costs 0.1 ms per call. Small products do not gain that back. Large
ones do, and are not copied."""
FIXED_ROTARY_TYPES = {"default", "linear", "llama3", "yarn"}
"""Rotary types whose angle at a position does not depend on the row's length."""


@dataclass(frozen=True, slots=True)
class _Norm:
    """RMS norm."""

    weight: Tensor
    epsilon: Tensor
    """A tensor: with a Python number, an operation on a few rows takes three times as long."""

    def __call__(self, states: Tensor) -> Tensor:
        wide = states if states.dtype is torch.float32 else states.float()
        squares = wide.pow(2).sum(-1, keepdim=True)
        normed = wide * torch.add(self.epsilon, squares, alpha=1 / wide.shape[-1]).rsqrt_()
        return (normed if wide is states else normed.to(states.dtype)).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class _Product:
    """A linear layer."""

    weight: Tensor
    bias: Tensor | None
    flipped: bool
    """Whether the weight is stored transposed, inputs first."""

    def __call__(self, states_RF: Tensor) -> Tensor:
        if not self.flipped:
            return linear(states_RF, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(states_RF, self.weight)
        return torch.addmm(self.bias, states_RF, self.weight)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer."""

    entry_norm: _Norm
    query: _Product
    key: _Product
    value: _Product
    head_norm: _Norm | None
    """The norm of queries and keys together: its weight is [Q + H, D]."""
    mixed: _Product
    middle_norm: _Norm
    gate: _Product
    up: _Product
    down: _Product
    activation: Callable[[Tensor], Tensor]
    scale: float

    def feed_forward(self, states_RF: Tensor) -> Tensor:
        normed_RF = self.middle_norm(states_RF)
        return states_RF + self.down(self.activation(self.gate(normed_RF)).mul_(self.up(normed_RF)))


@dataclass(frozen=True, slots=True)
class _Rotations:
    """Rotary cosines and sines. Sines of the first half are negated, so a rotation needs no negated copy."""

    cosine_RD: Tensor
    sine_RD: Tensor

    def at(self, positions_R: Tensor) -> _Rotations:
        return _Rotations(
            self.cosine_RD.index_select(0, positions_R), self.sine_RD.index_select(0, positions_R)
        )

    def __call__(self, heads_RXD: Tensor) -> Tensor:
        half = heads_RXD.shape[-1] // 2
        crossed_RXD = torch.cat((heads_RXD[..., half:], heads_RXD[..., :half]), -1)
        return (heads_RXD * self.cosine_RD[:, None]).add_(crossed_RXD.mul_(self.sine_RD[:, None]))


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a prefix tree as attention needs them: separate, padded to one length."""

    nodes_N: Tensor
    """The node at each of the B · L places."""
    places_U: Tensor
    """One place of each node."""
    count: int
    size: int

    @staticmethod
    def of(tree: PrefixTree, size: int) -> _Rows:
        nodes_N = torch.from_numpy(tree.nodes_BL.ravel())
        return _Rows(nodes_N, torch.from_numpy(tree.places_U), len(tree.nodes_BL), size)

    def spread(self, heads_UXD: Tensor) -> Tensor:
        """[B, X, L, D]."""
        heads_NXD = heads_UXD.index_select(0, self.nodes_N)
        return heads_NXD.view(self.count, -1, heads_UXD.shape[1], self.size).transpose(1, 2)

    def attend(self, query_UQD: Tensor, key_BHLD: Tensor, value_BHLD: Tensor, scale: float) -> Tensor:
        """[B · L, Q · D]: causal attention. Padding is on the right, where no token of the row attends."""
        mixed_BQLD = scaled_dot_product_attention(
            self.spread(query_UQD),
            key_BHLD,
            value_BHLD,
            is_causal=True,
            scale=scale,
            enable_gqa=query_UQD.shape[1] != key_BHLD.shape[1],
        )
        return mixed_BQLD.transpose(1, 2).reshape(len(self.nodes_N), -1)


class CpuForward:
    """One model's weights as the forward reads them: by reference, except for transposed copies of small ones. It is made
    again when the weights change or a row may get longer than `longest`."""

    def __init__(self, model: Any, longest: int) -> None:
        """`longest`: the most tokens that any row may reach."""
        body = model.model
        self._embedding = body.embed_tokens.weight
        self._layers = [_layer(layer) for layer in body.layers]
        self._norm, self._head = _norm(body.norm), _product(model.lm_head)
        self._size = int(body.layers[0].self_attn.head_dim)
        cosine_1TD, sine_1TD = body.rotary_emb(self._embedding, torch.arange(longest)[None])
        sine_TD = sine_1TD[0].clone()
        sine_TD[:, : self._size // 2].neg_()
        self._rotations = _Rotations(cosine_1TD[0], sine_TD)

    def prompts(
        self, tree: PrefixTree, lengths_B: np.ndarray, additive_mask_BT: Tensor | None, cache: Cache
    ) -> Tensor:
        """Logits [B, V] after the rows of `tree`; writes their keys and values into `cache`, right-aligned.

        `additive_mask_BT` masks the padding of its columns (see `step`).
        """
        rows, rotations = _Rows.of(tree, self._size), self._rotations.at(torch.from_numpy(tree.positions_U))
        aligned = (
            rows
            if additive_mask_BT is None
            else replace(rows, nodes_N=_right_aligned(tree.nodes_BL, lengths_B))
        )
        states_UF = embedding(torch.from_numpy(tree.tokens_U), self._embedding)
        for layer, kept in zip(self._layers[:-1], cache.layers, strict=False):
            query_UQD, key_UHD, value_UHD = self._heads(layer, layer.entry_norm(states_UF), rotations)
            keys, values = kept.update(aligned.spread(key_UHD), aligned.spread(value_UHD))
            if aligned is not rows:
                keys, values = rows.spread(key_UHD), rows.spread(value_UHD)
            mixed_UF = rows.attend(query_UQD, keys, values, layer.scale).index_select(0, rows.places_U)
            states_UF = layer.feed_forward(states_UF + layer.mixed(mixed_UF))
        layer, kept = self._layers[-1], cache.layers[-1]
        last_B = torch.from_numpy(tree.nodes_BL[np.arange(len(lengths_B)), lengths_B - 1])
        query_UQD, key_UHD, value_UHD = self._heads(layer, layer.entry_norm(states_UF), rotations)
        keys, values = kept.update(aligned.spread(key_UHD), aligned.spread(value_UHD))
        mixed_BF = _attend(query_UQD.index_select(0, last_B), keys, values, additive_mask_BT, layer.scale)
        return self._logits(layer.feed_forward(states_UF.index_select(0, last_B) + layer.mixed(mixed_BF)))

    def states(self, tree: PrefixTree, nodes_P: Tensor) -> Tensor:
        """[P, F]: final states of these nodes, without a cache; the last feed-forward runs for them only."""
        rows, rotations = _Rows.of(tree, self._size), self._rotations.at(torch.from_numpy(tree.positions_U))
        states_UF = embedding(torch.from_numpy(tree.tokens_U), self._embedding)
        for layer in self._layers[:-1]:
            mixed_UF = self._mixed(layer, states_UF, rotations, rows).index_select(0, rows.places_U)
            states_UF = layer.feed_forward(states_UF + layer.mixed(mixed_UF))
        layer = self._layers[-1]
        mixed_PF = self._mixed(layer, states_UF, rotations, rows).index_select(0, rows.places_U[nodes_P])
        return self._norm(layer.feed_forward(states_UF.index_select(0, nodes_P) + layer.mixed(mixed_PF)))

    def _mixed(self, layer: _Layer, states_UF: Tensor, rotations: _Rotations, rows: _Rows) -> Tensor:
        """[B · L, Q · D]: a layer's attention over whole rows."""
        query_UQD, key_UHD, value_UHD = self._heads(layer, layer.entry_norm(states_UF), rotations)
        return rows.attend(query_UQD, rows.spread(key_UHD), rows.spread(value_UHD), layer.scale)

    def step(
        self, tokens_B: Tensor, positions_B: Tensor, additive_mask_BT: Tensor | None, cache: Cache
    ) -> Tensor:
        """Logits [B, V] after one more token on every row.

        `additive_mask_BT` is added to the attention scores: −inf for padding, 0 otherwise; None if no row has
        padding.
        """
        rotations = self._rotations.at(positions_B)
        states_BF = embedding(tokens_B, self._embedding)
        for layer, kept in zip(self._layers, cache.layers, strict=True):
            query_BQD, key_BHD, value_BHD = self._heads(layer, layer.entry_norm(states_BF), rotations)
            keys, values = kept.update(key_BHD[:, :, None], value_BHD[:, :, None])
            mixed_BF = _attend(query_BQD, keys, values, additive_mask_BT, layer.scale)
            states_BF = layer.feed_forward(states_BF + layer.mixed(mixed_BF))
        return self._logits(states_BF)

    def _heads(
        self, layer: _Layer, normed_RF: Tensor, rotations: _Rotations
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [R, Q, D], keys and values [R, H, D]; queries and keys are normed and rotated together."""
        rows, size = normed_RF.shape[0], self._size
        query_RF, key_RF = layer.query(normed_RF), layer.key(normed_RF)
        both_RXD = torch.cat((query_RF, key_RF), -1).view(rows, -1, size)
        if layer.head_norm is not None:
            both_RXD = layer.head_norm(both_RXD)
        query_RQD, key_RHD = rotations(both_RXD).split(
            (query_RF.shape[1] // size, key_RF.shape[1] // size), 1
        )
        return query_RQD, key_RHD, layer.value(normed_RF).view(rows, -1, size)

    def _logits(self, states_BF: Tensor) -> Tensor:
        return self._head(self._norm(states_BF))


def _attend(
    query_BQD: Tensor, keys_BHTD: Tensor, values_BHTD: Tensor, additive_mask_BT: Tensor | None, scale: float
) -> Tensor:
    """Attention of one query per head and row; queries of one key head are laid out as query positions."""
    rows, _, size = query_BQD.shape
    mixed_BHGD = scaled_dot_product_attention(
        query_BQD.view(rows, keys_BHTD.shape[1], -1, size),
        keys_BHTD,
        values_BHTD,
        attn_mask=None if additive_mask_BT is None else additive_mask_BT[:, None, None, : keys_BHTD.shape[2]],
        scale=scale,
    )
    return mixed_BHGD.reshape(rows, -1)


def _right_aligned(nodes_BL: np.ndarray, lengths_B: np.ndarray) -> Tensor:
    """[B · L]: rows padded on the left instead; padding repeats a real node, so that its keys are finite."""
    longest = nodes_BL.shape[1]
    columns_BL = np.maximum(np.arange(longest) - (longest - lengths_B)[:, None], 0)
    return torch.from_numpy(np.take_along_axis(nodes_BL, columns_BL, axis=1).ravel())


def cpu_forward(model: Any, longest: int) -> CpuForward | None:
    """A fast forward for `model`; None if it is not exactly a model known here."""
    return CpuForward(model, longest) if _known(model) else None


def _known(model: Any) -> bool:
    if type(model).__name__ not in MODELS or not type(model).__module__.startswith("transformers."):
        return False
    config = model.config
    plain = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    rotary_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if not plain or rotary_type not in FIXED_ROTARY_TYPES or config._attn_implementation != "sdpa":
        return False
    return all(_untouched(module) for module in model.modules())


def _untouched(module: nn.Module) -> bool:
    """Whether a module is unmodified transformers or torch code, on a CPU."""
    changed = (
        "forward" in vars(module)
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._compiled_call_impl is not None
    )
    ours = type(module).__module__.startswith(("transformers.", "torch.nn."))
    return (
        ours
        and not changed
        and all(p.device.type == "cpu" for p in module._parameters.values() if p is not None)
    )


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        entry_norm=_norm(layer.input_layernorm),
        query=_product(attention.q_proj),
        key=_product(attention.k_proj),
        value=_product(attention.v_proj),
        head_norm=_head_norm(attention) if hasattr(attention, "q_norm") else None,
        mixed=_product(attention.o_proj),
        middle_norm=_norm(layer.post_attention_layernorm),
        gate=_product(mlp.gate_proj),
        up=_product(mlp.up_proj),
        down=_product(mlp.down_proj),
        activation=mlp.act_fn,
        scale=float(attention.scaling),
    )


def _norm(module: Any) -> _Norm:
    return _Norm(module.weight, torch.tensor([module.variance_epsilon]))


def _head_norm(attention: Any) -> _Norm:
    query, key, size = attention.q_norm, attention.k_norm, attention.head_dim
    counts = (attention.q_proj.out_features // size, attention.k_proj.out_features // size)
    weights = [norm.weight.expand(count, size) for norm, count in zip((query, key), counts, strict=True)]
    return _Norm(torch.cat(weights), torch.tensor([query.variance_epsilon]))


def _product(module: Any) -> _Product:
    if module.weight.numel() > FLIPPED_UP_TO:
        return _Product(module.weight, module.bias, flipped=False)
    return _Product(module.weight.t().contiguous(), module.bias, flipped=True)
