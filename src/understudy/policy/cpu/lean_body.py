"""A small student's body on a CPU, layer by layer with hand-written gradients (`lean_layers.py`).

Only for models whose code is known exactly and that have no hooks. Everything else (adapters, hooks, biases,
windows, compiled or checkpointed layers, shards) runs transformers' own forward: `lean_states` returns None.

Shapes: U tokens that are computed, T tokens of all rows, N read positions, F features, E features of the
query heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from understudy.policy.cpu.lean_layers import Heads, Norm, Places, Rest, Turns
from understudy.policy.forward.attention import few_runs, rows_by_runs, rows_side_by_side

SMALL = 1 << 22
"""Parameters. Larger models gain nothing measurable here, and this path keeps more for the gradient."""
BODIES = {"LlamaModel", "Qwen3Model"}
LAYERS = {"LlamaDecoderLayer", "Qwen3DecoderLayer"}
SILU = {"SiLU", "SiLUActivation"}


def lean_states(
    body: Any,
    ids_U: Tensor,
    positions_1U: Tensor,
    bounds: Tensor,
    longest: int,
    read_N: Tensor,
    nodes_T: Tensor | None,
    places_U: Tensor | None,
) -> Tensor | None:
    """[N, F]: final states of the tokens at `read_N`, or None if the body is not known.

    `bounds` are the row boundaries in T; `nodes_T` and `places_U` as in `packed.py`, None if tokens are not
    shared.
    """
    if not is_known(body):
        return None
    states_UF = body.embed_tokens(ids_U)
    cosine_1UD, sine_1UD = body.rotary_emb(states_UF, positions_1U)
    turns = Turns.of(cosine_1UD[0], sine_1UD[0])
    every = Places(places_U, None, distinct=True)
    wanted = Places(read_N if places_U is None else places_U[read_N], read_N, distinct=False)
    runs = few_runs(bounds)
    for layer in body.layers:
        attention = layer.self_attn
        heads_TYD = _heads(layer, states_UF, turns, nodes_T)
        key_heads = attention.k_proj.out_features // attention.head_dim
        query_heads = attention.q_proj.out_features // attention.head_dim
        query, key, value = heads_TYD.transpose(0, 1).split((query_heads, key_heads, key_heads))
        if runs:
            mixed_TQD = rows_by_runs(query, key, value, runs, attention.scaling, None)
        else:
            mixed_TQD = rows_side_by_side(query, key, value, bounds, longest, attention.scaling, None)
        places = wanted if layer is body.layers[-1] else every
        states_UF = _rest(layer, states_UF, mixed_TQD.flatten(1), places)
    final_NF: Tensor = Norm.apply(states_UF, body.norm.weight, body.norm.variance_epsilon)
    return final_NF


def _heads(layer: Any, states_UF: Tensor, turns: Turns, nodes_T: Tensor | None) -> Tensor:
    attention, norm = layer.self_attn, layer.input_layernorm
    normed = hasattr(attention, "q_norm")
    heads_TYD: Tensor = Heads.apply(
        states_UF,
        norm.weight,
        attention.q_proj.weight,
        attention.k_proj.weight,
        attention.v_proj.weight,
        attention.q_norm.weight if normed else None,
        attention.k_norm.weight if normed else None,
        norm.variance_epsilon,
        turns,
        nodes_T,
    )
    return heads_TYD


def _rest(layer: Any, states_UF: Tensor, mixed_TE: Tensor, places: Places) -> Tensor:
    norm, mlp = layer.post_attention_layernorm, layer.mlp
    after_RF: Tensor = Rest.apply(
        states_UF,
        mixed_TE,
        norm.variance_epsilon,
        places,
        layer.self_attn.o_proj.weight,
        norm.weight,
        mlp.gate_proj.weight,
        mlp.up_proj.weight,
        mlp.down_proj.weight,
    )
    return after_RF


def is_known(body: Any) -> bool:
    """Whether the formulas here compute exactly what this body does."""
    if type(body).__name__ not in BODIES or any(type(layer).__name__ not in LAYERS for layer in body.layers):
        return False
    config = body.config
    plain = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    # Model code from the hub may build another activation than its configuration names.
    silu = all(type(layer.mlp.act_fn).__name__ in SILU for layer in body.layers)
    checkpointed = any(layer.gradient_checkpointing for layer in body.layers)
    if not plain or not silu or checkpointed:
        return False
    return all(_is_plain(module) for module in body.modules()) and _size(body) <= SMALL


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is transformers' or torch's own, without hooks or bias, in float32 on a CPU."""
    watched = (
        "forward" in vars(module)
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or module._compiled_call_impl is not None
    )
    if watched or not type(module).__module__.startswith(("transformers.", "torch.nn.")):
        return False
    if isinstance(module, nn.Linear) and module.bias is not None:
        return False
    own = [p for p in module._parameters.values() if p is not None]
    return all(p.device.type == "cpu" and p.dtype is torch.float32 for p in own)


def _size(body: nn.Module) -> int:
    return sum(parameter.numel() for parameter in body.parameters())
