"""Packed rows through the body, without computing tokens whose result is not needed.

On a CPU two things are skipped, which changes results by rounding only:

- A prefix that several rows share is computed once (`nn/prefix_tree.py`); only attention expands whole rows
  again.
- The last layer's feed-forward part runs only at the positions that predict a loss-bearing token.

On a GPU whose attention is fastest over rows of one length (`nn/grouped_attention.py`), rows are padded to
equal lengths with a few unused tokens, where that costs little.

Shapes: B rows, L longest row, T tokens of all rows, U tokens that are computed (T, the nodes of the rows'
tree, or T and the padding), N read positions, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from understudy.nn.grouped_attention import NO_GROUPS, in_groups, takes_groups
from understudy.nn.prefix_tree import prefix_tree

WORTH_SHARING = 0.1
"""The share of tokens that shared prefixes must save before they are used."""
BODIES = {"LlamaModel", "Qwen2Model", "Qwen3Model"}
"""Classes of transformers that are an embedding, layers, and a norm."""
LAYERS = {"LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
"""Their layers: x + attention(norm(x)), then x + mlp(norm(x)). Sharding gives a layer another class."""


@dataclass(frozen=True, slots=True)
class PackedInput:
    """The input of the body: rows one after another, padded or not, or the nodes of their prefix tree."""

    ids_1U: torch.Tensor
    position_ids_1U: torch.Tensor
    options: dict[str, Any]
    """Keyword arguments for the packed attention."""
    nodes_T: torch.Tensor | None
    """Index of the computed token for each token of the rows; None if each token is computed for itself."""


def lay_out(
    ids_1T: torch.Tensor, lengths: Sequence[int], *, share: bool = False, group: bool = False
) -> PackedInput:
    """`share`: compute shared prefixes once; `group`: pad rows into groups of equal length. Each is applied
    only if it saves time.

    With `group` the options always hold a table, so that a compiled layer gets the same arguments every
    time.
    """
    if group and (line := _grouped(ids_1T, lengths)):
        return line
    ends_B = np.cumsum(lengths)
    bounds = np.concatenate([[0], ends_B]).astype(np.int32)
    options = _bounds(bounds, ids_1T.device) | ({"groups": NO_GROUPS} if group else {})
    if share and (line := _shared(ids_1T, lengths, options)):
        return line
    positions_T = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
    return PackedInput(ids_1T, _to(positions_T, ids_1T.device)[None], options, None)


def _bounds(bounds: np.ndarray, device: torch.device) -> dict[str, Any]:
    longest, ends = int(np.diff(bounds).max()), _to(bounds, device)
    if device.type == "cuda":
        # An upper bound for the kernel, rounded up so that a compiled layer sees few different values.
        longest = 1 << (longest - 1).bit_length()
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def _to(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    # From memory that is not page-locked, the copy would wait for all queued kernels.
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def _grouped(ids_1T: torch.Tensor, lengths: Sequence[int]) -> PackedInput | None:
    own_B, device = np.asarray(lengths, dtype=np.int64), ids_1T.device
    groups = in_groups(own_B)
    if groups is None:
        return None
    within_T = np.arange(own_B.sum()) - np.repeat(np.cumsum(own_B) - own_B, own_B)
    nodes_T = _to(np.repeat(groups.begins_B, own_B) + within_T, device)
    ids_U = ids_1T.new_zeros(groups.total).index_copy(0, nodes_T, ids_1T[0])
    positions_U = np.arange(groups.total) - np.repeat(groups.bounds[:-1], np.diff(groups.bounds))
    options = _bounds(groups.bounds, device) | {"groups": torch.from_numpy(groups.table_G3)}
    return PackedInput(ids_U[None], _to(positions_U, device)[None], options, nodes_T)


def _shared(ids_1T: torch.Tensor, lengths: Sequence[int], options: dict[str, Any]) -> PackedInput | None:
    ids_T = ids_1T[0].numpy()
    tree = prefix_tree(np.split(ids_T, np.cumsum(lengths)[:-1]))
    if len(tree) > (1 - WORTH_SHARING) * len(ids_T):
        return None
    longest = tree.nodes_BL.shape[1]
    real_BL = np.arange(longest) < np.asarray(lengths)[:, None]
    # From an index in padded rows to one in the line.
    line_BL = (np.cumsum(real_BL) - 1).reshape(real_BL.shape)
    nodes_T = torch.from_numpy(tree.nodes_BL[real_BL])
    places_U = torch.from_numpy(line_BL.ravel()[tree.places_U])
    ids_1U, position_ids_1U = (torch.from_numpy(a)[None] for a in (tree.tokens_U, tree.positions_U))
    return PackedInput(
        ids_1U, position_ids_1U, {**options, "nodes_T": nodes_T, "places_U": places_U}, nodes_T
    )


def packed_states(body: nn.Module, ids_1T: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """[1, T, H]: final hidden states of every token."""
    return _through(body, lay_out(ids_1T, lengths))


def _through(body: nn.Module, line: PackedInput) -> torch.Tensor:
    states: torch.Tensor = body(
        input_ids=line.ids_1U, position_ids=line.position_ids_1U, use_cache=False, **line.options
    ).last_hidden_state
    return states


def packed_states_at(
    body: Any, ids_1T: torch.Tensor, lengths: Sequence[int], read_N: torch.Tensor
) -> torch.Tensor:
    """[N, H]: final hidden states of the tokens at `read_N`."""
    on_cpu, weight = ids_1T.device.type == "cpu", next(body.parameters(), None)
    group = weight is not None and takes_groups(
        ids_1T.device, weight.dtype, getattr(body, "config", None), learns=True
    )
    line = lay_out(ids_1T, lengths, share=on_cpu, group=group)
    read_N = read_N if line.nodes_T is None else line.nodes_T[read_N]
    if not on_cpu or not _can_stop_early(body):
        return _through(body, line)[0].index_select(0, read_N)
    states_1UH = body.embed_tokens(line.ids_1U)
    options = {
        "attention_mask": None,
        "position_ids": line.position_ids_1U,
        "past_key_values": None,
        "use_cache": False,
        "position_embeddings": body.rotary_emb(states_1UH, line.position_ids_1U),
        **line.options,
    }
    *before, last = body.layers
    for layer in before:
        states_1UH = layer(states_1UH, **options)
    mixed_1UH, _ = last.self_attn(hidden_states=last.input_layernorm(states_1UH), **options)
    states_NH = (states_1UH + mixed_1UH).squeeze(0).index_select(0, read_N)
    states_NH = states_NH + last.mlp(last.post_attention_layernorm(states_NH))
    states: torch.Tensor = body.norm(states_NH)
    return states


def _can_stop_early(body: Any) -> bool:
    """Whether the last layer may be run in two parts: its class is known, and it has no hooks, compiled call
    or checkpointing."""
    if type(body).__name__ not in BODIES or type(body.layers[-1]).__name__ not in LAYERS:
        return False
    watched = (body, body.layers[-1])
    called = any(m._forward_hooks or m._forward_pre_hooks or m._compiled_call_impl for m in watched)
    return not called and not body.layers[-1].gradient_checkpointing
