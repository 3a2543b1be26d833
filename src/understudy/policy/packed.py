"""Rows one after another through the body, and no token more than is needed.

On a CPU, where every product counts, two things are left out that change no number but its rounding:

  - a beginning that several rows share is computed once (`engines/prefix_tree.py`); attention alone lays whole rows out again,
  - the last layer's feed-forward part runs where its result is read: at the positions that predict a loss-bearing token.

Shapes: B rows, L longest row, T tokens of all rows, U tokens that are computed (T, or the nodes of the rows' tree), N read
positions, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from understudy.engines.prefix_tree import prefix_tree

WORTH_SHARING = 0.1
"""The share of the tokens that shared beginnings must save before they are used."""
BODIES = {"LlamaModel", "Qwen2Model", "Qwen3Model"}
"""Classes of transformers that are an embedding, layers, and a norm."""
LAYERS = {"LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
"""Their layers: x + attention(norm(x)), then x + mlp(norm(x)). Sharding gives a layer another class."""


@dataclass(frozen=True, slots=True)
class Line:
    """What goes through the body: rows one after another, or the nodes of their tree."""

    ids_1U: torch.Tensor
    position_ids_1U: torch.Tensor
    options: dict[str, Any]
    """What the packed attention must know."""
    nodes_T: torch.Tensor | None
    """Which computed token each token of the rows is; None where each is its own."""


def lay_out(ids_1T: torch.Tensor, lengths: Sequence[int], share: bool) -> Line:
    """`share`: compute what several rows begin with once, if that saves enough."""
    device, lengths_B, longest = ids_1T.device, torch.tensor(lengths), max(lengths)
    ends_B = lengths_B.cumsum(0)
    bounds = nn.functional.pad(ends_B, (1, 0)).to(torch.int32).to(device, non_blocking=True)
    if device.type == "cuda":
        # A bound to the kernel; a compiled layer should see few different ones.
        longest = 1 << (longest - 1).bit_length()
    options: dict[str, Any] = {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    if share and (line := _shared(ids_1T, lengths, options)):
        return line
    begins_T = (ends_B - lengths_B).repeat_interleave(lengths_B)
    position_ids = (torch.arange(len(begins_T)) - begins_T)[None]
    return Line(ids_1T, position_ids.to(device, non_blocking=True), options, None)


def _shared(ids_1T: torch.Tensor, lengths: Sequence[int], options: dict[str, Any]) -> Line | None:
    ids_T = ids_1T[0].numpy()
    tree = prefix_tree(np.split(ids_T, np.cumsum(lengths)[:-1]))
    if len(tree) > (1 - WORTH_SHARING) * len(ids_T):
        return None
    longest = tree.nodes_BL.shape[1]
    real_BL = np.arange(longest) < np.asarray(lengths)[:, None]
    # From a place among filled-up rows to one in the line.
    line_BL = (np.cumsum(real_BL) - 1).reshape(real_BL.shape)
    nodes_T = torch.from_numpy(tree.nodes_BL[real_BL])
    places_U = torch.from_numpy(line_BL.ravel()[tree.places_U])
    ids_1U, position_ids_1U = (torch.from_numpy(a)[None] for a in (tree.tokens_U, tree.positions_U))
    return Line(ids_1U, position_ids_1U, {**options, "nodes_T": nodes_T, "places_U": places_U}, nodes_T)


def packed_states(body: nn.Module, ids_1T: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """[1, T, H]: final hidden states of every token."""
    return _through(body, lay_out(ids_1T, lengths, share=False))


def _through(body: nn.Module, line: Line) -> torch.Tensor:
    states: torch.Tensor = body(
        input_ids=line.ids_1U, position_ids=line.position_ids_1U, use_cache=False, **line.options
    ).last_hidden_state
    return states


def packed_states_at(
    body: Any, ids_1T: torch.Tensor, lengths: Sequence[int], read_N: torch.Tensor
) -> torch.Tensor:
    """[N, H]: final hidden states of the tokens at `read_N`."""
    if ids_1T.device.type != "cpu":
        return packed_states(body, ids_1T, lengths)[0].index_select(0, read_N)
    line = lay_out(ids_1T, lengths, share=True)
    read_N = read_N if line.nodes_T is None else line.nodes_T[read_N]
    if not _can_stop_early(body):
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
    """Whether the last layer may be run in two parts: it is what it is thought to be, and nobody waits for it to be called."""
    if type(body).__name__ not in BODIES or type(body.layers[-1]).__name__ not in LAYERS:
        return False
    watched = (body, body.layers[-1])
    called = any(m._forward_hooks or m._forward_pre_hooks or m._compiled_call_impl for m in watched)
    return not called and not body.layers[-1].gradient_checkpointing
