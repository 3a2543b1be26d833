"""The student's vocabulary projection, in parts, so that a loss can apply it chunk by chunk.

A full [tokens, vocabulary] tensor is the largest one in a training step, so only the loss decides whether it
exists. Models differ in what they do after the matrix product (a bias, a scale, Gemma's soft cap). These
parts are read from the config and *checked* once, at the start, against the model's own forward: an
architecture that does anything else is refused instead of being trained with wrong logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from understudy.errors import PolicyError
from understudy.nn.vision import is_vision
from understudy.types.loss import StudentHead
from understudy.types.usable_ids import UsableIds

_TOLERANCE: dict[torch.dtype, float] = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """What the model does to the head's output to make a logit."""

    softcap: float | None
    logit_scale: float


def head_facts(model: PreTrainedModel) -> HeadFacts:
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    divisor = float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return HeadFacts(softcap=float(softcap) if softcap else None, logit_scale=scale / divisor)


def student_head(
    model: PreTrainedModel,
    facts: HeadFacts,
    hidden_NH: torch.Tensor,
    temperature: float,
    usable: UsableIds | None = None,
) -> StudentHead:
    """`usable`: the ids that the softmax runs over, if not all."""
    head = output_layer(model)
    weight_VH: torch.Tensor = head.weight
    bias_V: torch.Tensor | None = head.bias
    if usable is not None and facts.softcap is not None:
        # A hidden logit would not survive the cap, so the matrix is cut. That costs a copy of its gradient
        # per micro-batch.
        weight_VH, bias_V = weight_VH[: usable.limit], None if bias_V is None else bias_V[: usable.limit]
        usable = None
    return StudentHead(
        hidden_NH=hidden_NH,
        weight_VH=weight_VH,
        bias_V=bias_V,
        softcap=facts.softcap,
        logit_scale=facts.logit_scale,
        temperature=temperature,
        usable=usable,
    )


def logits_of(head: StudentHead) -> torch.Tensor:
    """[N, V] in float32: the formula of `StudentHead`; call it on slices."""
    logits_NV = nn.functional.linear(head.hidden_NH, head.weight_VH, head.bias_V).float() * head.logit_scale
    if head.softcap is not None:
        logits_NV = head.softcap * torch.tanh(logits_NV / head.softcap)
    logits_NV = logits_NV / head.temperature
    return logits_NV if head.usable is None else head.usable.hide_(logits_NV)


def output_layer(model: PreTrainedModel) -> nn.Linear:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise PolicyError(
            f"{type(model).__name__} has no linear head (found {type(head).__name__}); a causal language model is needed"
        )
    return head


def body_of(model: PreTrainedModel) -> nn.Module:
    """The model without its head: ids in, final hidden states out."""
    if is_vision(model):
        return model.base_model
    body = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    if body is None or body is model:
        raise PolicyError(f"{type(model).__name__} does not say which part of it is the body (`get_decoder`)")
    return body


@torch.no_grad()
def verify_head(model: PreTrainedModel) -> None:
    """Checks on a handful of tokens that body + head give the model's own logits."""
    embedding = model.get_input_embeddings()
    ids_1T = torch.arange(min(8, embedding.weight.shape[0]), device=embedding.weight.device)[None]
    expected_TV = model(input_ids=ids_1T, use_cache=False).logits[0].float()
    if not expected_TV.isfinite().all():
        raise PolicyError(
            f"{type(model).__name__}: the model's own logits are not finite in {str(model.dtype).removeprefix('torch.')}: its weights hold NaN or infinity, or overflow; "
            "download or copy the model again, or set another dtype"
        )
    hidden_TH = body_of(model)(input_ids=ids_1T, use_cache=False).last_hidden_state[0]
    found_TV = logits_of(student_head(model, head_facts(model), hidden_TH, temperature=1.0))
    bound = _TOLERANCE.get(hidden_TH.dtype, 5e-2) * max(1.0, float(expected_TV.abs().max()))
    gap = float((found_TV - expected_TV).abs().max())
    if not gap <= bound:
        raise PolicyError(
            f"{type(model).__name__}: head × hidden differs from the model's own logits by {gap:.3g} (allowed {bound:.3g}); "
            "this architecture changes its logits in a way that is not supported yet"
        )
