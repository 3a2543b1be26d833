"""The parts of a small model's decoder layer as autograd Functions with hand-written gradients.

Under plain autograd a layer of a small model is sixty operations forward and twice as many backward, and
most of them take less time than autograd's bookkeeping for them. Here a layer is two Functions with
attention between them:

    states ──norm, products, head norms, rotation──> heads ──(attention)──> mixed
    mixed ──product, norm, gated feed-forward──> states

Results equal those of transformers' code up to rounding; gradients are those of the same formulas. Each
formula is compiled by torch.jit where that is available: the same operations in the same order, without
Python between them, so the GIL is free for other threads.

Shapes: U tokens that are computed, R of them that a layer goes on with, T tokens of all rows, F features, X
query and key heads, Y those and value heads, D head size, E features of all of them, I features of the
feed-forward part.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


def _without_python(formula: Callable[..., Any]) -> Callable[..., Any]:
    """The formula compiled by torch.jit, or unchanged where this torch or this Python cannot compile it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compiled: Callable[..., Any] = torch.jit.script(formula)
        except Exception:
            return formula
    return compiled


@_without_python
def _normed(states: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """States scaled to mean square one, and the scale."""
    scale = states.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
    return states * scale, scale


@_without_python
def _norm_backward(grad: Tensor, normed: Tensor, scale: Tensor) -> Tensor:
    """The gradient of `_normed`'s states; `grad` is overwritten."""
    along = (grad * normed).mean(-1, keepdim=True)
    return grad.addcmul_(normed, along, value=-1.0).mul_(scale)


@_without_python
def _crossed(heads_UXD: Tensor) -> Tensor:
    """The two halves of each head swapped."""
    half = heads_UXD.shape[-1] // 2
    return torch.cat((heads_UXD[..., half:], heads_UXD[..., :half]), -1)


@_without_python
def _heads(
    states_UF: Tensor,
    norm_F: Tensor,
    weight_EF: Tensor,
    head_norm_XD: Tensor,
    has_head_norm: bool,
    cosine_U1D: Tensor,
    sine_U1D: Tensor,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Heads [U, Y, D]; then what the gradient needs."""
    count, size = head_norm_XD.shape[0], head_norm_XD.shape[1]
    hat_UF, scale_U1 = _normed(states_UF, epsilon)
    normed_UF = hat_UF * norm_F
    heads_UYD = linear(normed_UF, weight_EF).view(states_UF.shape[0], -1, size)
    plain_UXD = heads_UYD[:, :count]
    head_hat_UXD, head_scale_UX1 = plain_UXD, plain_UXD
    if has_head_norm:
        head_hat_UXD, head_scale_UX1 = _normed(plain_UXD, epsilon)
        plain_UXD = head_hat_UXD * head_norm_XD
    turned_UXD = (plain_UXD * cosine_U1D).add_(_crossed(plain_UXD).mul_(sine_U1D))
    heads_UYD[:, :count] = turned_UXD
    return heads_UYD, hat_UF, scale_U1, normed_UF, head_hat_UXD, head_scale_UX1


@_without_python
def _heads_backward(
    grad_UYD: Tensor,
    hat_UF: Tensor,
    scale_U1: Tensor,
    normed_UF: Tensor,
    norm_F: Tensor,
    weight_EF: Tensor,
    head_hat_UXD: Tensor,
    head_scale_UX1: Tensor,
    head_norm_XD: Tensor,
    has_head_norm: bool,
    cosine_U1D: Tensor,
    sine_U1D: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of states, norm, weight and head norm; `grad_UYD` is overwritten."""
    count = head_norm_XD.shape[0]
    turned_UXD = grad_UYD[:, :count]
    grad_UXD = (turned_UXD * cosine_U1D).add_(_crossed(turned_UXD * sine_U1D))
    head_norm = head_norm_XD
    if has_head_norm:
        head_norm = (grad_UXD * head_hat_UXD).sum(0)
        grad_UXD = _norm_backward(grad_UXD.mul_(head_norm_XD), head_hat_UXD, head_scale_UX1)
    grad_UYD[:, :count] = grad_UXD
    grad_UE = grad_UYD.flatten(1)
    weight = torch.mm(grad_UE.t(), normed_UF)
    grad_UF = torch.mm(grad_UE, weight_EF)
    norm = (grad_UF * hat_UF).sum(0)
    return _norm_backward(grad_UF.mul_(norm_F), hat_UF, scale_U1), norm, weight, head_norm


@_without_python
def _rest(
    before_RF: Tensor,
    mixed_RE: Tensor,
    mixed_FE: Tensor,
    norm_F: Tensor,
    gate_IF: Tensor,
    up_IF: Tensor,
    down_FI: Tensor,
    epsilon: float,
) -> tuple[Tensor, list[Tensor]]:
    """States after the layer, and what the gradient needs."""
    middle_RF = linear(mixed_RE, mixed_FE).add_(before_RF)
    hat_RF, scale_R1 = _normed(middle_RF, epsilon)
    normed_RF = hat_RF * norm_F
    gate_RI, up_RI = linear(normed_RF, gate_IF), linear(normed_RF, up_IF)
    open_RI = torch.sigmoid(gate_RI)
    active_RI = gate_RI * open_RI
    fed_RI = active_RI * up_RI
    kept = [mixed_RE, hat_RF, scale_R1, normed_RF, gate_RI, open_RI, active_RI, up_RI, fed_RI]
    return middle_RF.add_(linear(fed_RI, down_FI)), kept


@_without_python
def _rest_backward(
    grad_RF: Tensor,
    kept: list[Tensor],
    mixed_FE: Tensor,
    norm_F: Tensor,
    gate_IF: Tensor,
    up_IF: Tensor,
    down_FI: Tensor,
) -> list[Tensor]:
    """Gradients of the states before, of attention's output, and of the weights in their order."""
    mixed_RE, hat_RF, scale_R1, normed_RF, gate_RI, open_RI, active_RI, up_RI, fed_RI = kept
    down = torch.mm(grad_RF.t(), fed_RI)
    grad_up_RI = torch.mm(grad_RF, down_FI)
    # x · s(x) has the slope s · (1 + x − x · s).
    slope_RI = (gate_RI - active_RI).add_(1.0).mul_(open_RI)
    grad_gate_RI = slope_RI.mul_(up_RI).mul_(grad_up_RI)
    grad_up_RI.mul_(active_RI)
    gate, up = torch.mm(grad_gate_RI.t(), normed_RF), torch.mm(grad_up_RI.t(), normed_RF)
    inner_RF = torch.mm(grad_gate_RI, gate_IF).addmm_(grad_up_RI, up_IF)
    norm = (inner_RF * hat_RF).sum(0)
    middle_RF = _norm_backward(inner_RF.mul_(norm_F), hat_RF, scale_R1).add_(grad_RF)
    return [
        middle_RF,
        torch.mm(middle_RF, mixed_FE),
        torch.mm(middle_RF.t(), mixed_RE),
        norm,
        gate,
        up,
        down,
    ]


class Turns(NamedTuple):
    """Rotary angles by token, for any number of heads. The sine of the first half is negated in advance, so
    a rotation needs no negated copy."""

    cosine_U1D: Tensor
    sine_U1D: Tensor

    @staticmethod
    def of(cosine_UD: Tensor, sine_UD: Tensor) -> Turns:
        half = sine_UD.shape[1] // 2
        signed_UD = torch.cat((-sine_UD[:, :half], sine_UD[:, half:]), 1)
        return Turns(cosine_UD[:, None], signed_UD[:, None])


class Norm(Function):
    """weight · states of mean square one."""

    @staticmethod
    def forward(ctx: Any, states_RF: Tensor, weight_F: Tensor, epsilon: float) -> Tensor:
        normed_RF, scale_R1 = _normed(states_RF, epsilon)
        ctx.save_for_backward(normed_RF, scale_R1, weight_F)
        normed: Tensor = normed_RF * weight_F
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Any, ...]:
        normed_RF, scale_R1, weight_F = ctx.saved_tensors
        weight = (grad_RF * normed_RF).sum(0)
        return _norm_backward(grad_RF * weight_F, normed_RF, scale_R1), weight, None


class Heads(Function):
    """Queries, keys and values [T, Y, D] of the rows, from the states of their nodes."""

    @staticmethod
    def forward(
        ctx: Any,
        states_UF: Tensor,
        norm_F: Tensor,
        query_EF: Tensor,
        key_EF: Tensor,
        value_EF: Tensor,
        query_norm_D: Tensor | None,
        key_norm_D: Tensor | None,
        epsilon: float,
        turns: Turns,
        nodes_T: Tensor | None,
    ) -> Tensor:
        size = turns.cosine_U1D.shape[-1]
        counts = (len(query_EF) // size, len(key_EF) // size)
        has_head_norm = query_norm_D is not None and key_norm_D is not None
        if query_norm_D is not None and key_norm_D is not None:
            pairs = zip((query_norm_D, key_norm_D), counts, strict=True)
            head_norm_XD = torch.cat([norm_D.expand(count, size) for norm_D, count in pairs])
        else:
            head_norm_XD = states_UF.new_empty(sum(counts), size)
        weight_EF = torch.cat((query_EF, key_EF, value_EF))
        heads_UYD, hat_UF, scale_U1, normed_UF, *of_heads = _heads(
            states_UF, norm_F, weight_EF, head_norm_XD, has_head_norm, *turns, epsilon
        )
        if not has_head_norm:
            of_heads = [head_norm_XD, head_norm_XD]
        weights = (norm_F, query_EF, key_EF, value_EF)
        ctx.save_for_backward(hat_UF, scale_U1, normed_UF, *weights, *of_heads, head_norm_XD)
        ctx.counts, ctx.turns, ctx.nodes_T, ctx.has_head_norm = counts, turns, nodes_T, has_head_norm
        heads: Tensor = heads_UYD if nodes_T is None else heads_UYD.index_select(0, nodes_T)
        return heads

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        hat_UF, scale_U1, normed_UF, norm_F, *weights, head_hat, head_scale, head_norm_XD = ctx.saved_tensors
        if ctx.nodes_T is None:
            grad_UYD = grad.clone()
        else:
            grad_UYD = grad.new_zeros(len(hat_UF), *grad.shape[1:]).index_add_(0, ctx.nodes_T, grad)
        states_UF, norm, weight, head_norm = _heads_backward(
            grad_UYD, hat_UF, scale_U1, normed_UF, norm_F, torch.cat(weights), head_hat, head_scale,
            head_norm_XD, ctx.has_head_norm, *ctx.turns,
        )  # fmt: skip
        queries = ctx.counts[0]
        head_norms = (head_norm[:queries].sum(0), head_norm[queries:].sum(0))
        head_norms = head_norms if ctx.has_head_norm else (None, None)
        split = weight.split([len(one) for one in weights])
        return states_UF, norm, *split, *head_norms, None, None, None


class Places(NamedTuple):
    """Which states a layer's second part goes on with, and where attention's output for them is."""

    mixed_R: Tensor | None
    """Indexes of tokens of the rows; None: all, in their order."""
    states_R: Tensor | None
    """Indexes of nodes; None: all."""
    distinct: bool
    """Whether each index appears once."""

    def spread_mixed(self, grad_RE: Tensor, tokens: int) -> Tensor:
        """The gradient of attention's output for all tokens."""
        if self.mixed_R is None:
            return grad_RE
        grad_TE = grad_RE.new_zeros(tokens, grad_RE.shape[1])
        if self.distinct:
            return grad_TE.index_copy_(0, self.mixed_R, grad_RE)
        return grad_TE.index_add_(0, self.mixed_R, grad_RE)


class Rest(Function):
    """States [R, F] after a layer, from those before it and attention's output [T, E]."""

    @staticmethod
    def forward(
        ctx: Any, states_UF: Tensor, mixed_TE: Tensor, epsilon: float, places: Places, *weights: Tensor
    ) -> Tensor:
        """`weights`: of attention's product, norm, gate, up, down."""
        mixed_RE = mixed_TE if places.mixed_R is None else mixed_TE.index_select(0, places.mixed_R)
        before_RF = states_UF if places.states_R is None else states_UF.index_select(0, places.states_R)
        after_RF, kept = _rest(before_RF, mixed_RE, *weights, epsilon)
        ctx.save_for_backward(*kept, *weights)
        ctx.places, ctx.nodes, ctx.tokens = places, len(states_UF), len(mixed_TE)
        after: Tensor = after_RF
        return after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        states_UF, mixed_RE, *weights = _rest_backward(grad_RF, list(saved[:-5]), *saved[-5:])
        mixed_TE = ctx.places.spread_mixed(mixed_RE, ctx.tokens)
        if ctx.places.states_R is not None:
            every = states_UF.new_zeros(ctx.nodes, states_UF.shape[1])
            states_UF = every.index_add_(0, ctx.places.states_R, states_UF)
        return states_UF, mixed_TE, None, None, *weights
