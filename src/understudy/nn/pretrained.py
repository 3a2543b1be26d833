"""Loads a causal language model for training, scoring or generation, with one-line errors; copies one without its tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from understudy.media.processor import vision_family

AUTO = "auto"
"""transformers' own choice: `sdpa`, or `eager` for a model that has no `sdpa`."""


_ADVICE = "download or copy the model again, or correct its config.json"


class CannotLoadError(ValueError):
    """The model cannot be loaded; the message is one line and says what to set where it can."""


def load_causal_lm(
    source: str,
    *,
    dtype: torch.dtype,
    attention: str = AUTO,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> Any:
    """Loads from a folder or a hub id; only safetensors weights, because the older format can run code. A
    vision-language model of a supported family keeps its vision part."""
    code: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
    try:
        sees = vision_family(AutoConfig.from_pretrained(source, **code)) is not None
        made = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model, report = made.from_pretrained(
            source,
            dtype=dtype,
            attn_implementation=None if attention == AUTO else attention,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, in one line
            **code,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CannotLoadError(_reason(error, attention)) from error
    except SafetensorError as error:
        raise CannotLoadError(
            f"its weights cannot be read ({error}); download or copy the model again"
        ) from error
    if problem := _not_whole(report):
        raise CannotLoadError(problem)
    chosen = model.config._attn_implementation
    if attention not in (AUTO, chosen):
        raise CannotLoadError(
            f"attention = {attention!r}: transformers takes {chosen!r} instead, a kernel that is downloaded from the hub; leave "
            f'attention out, or set "eager"'
        )
    return model


def sharing_copy(model: Any) -> Any:
    """A copy of the modules of `model` that shares its tensors."""
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    twin = copy.deepcopy(model, memo=dict(shared))
    if any(getattr(module, "gradient_checkpointing", False) for module in twin.modules()):
        twin.gradient_checkpointing_disable()
    return twin


def _not_whole(report: Mapping[str, Any]) -> str | None:
    """Which weights transformers filled with random numbers. `report`: its `output_loading_info`."""
    if wrong := sorted(report["mismatched_keys"]):
        name, found, expected = wrong[0]
        return f"{name}{_more(wrong)} has the shape {list(found)}, by its config.json {list(expected)}; {_ADVICE}"
    if lacking := sorted(report["missing_keys"]):
        return f"its files lack the weights {lacking[0]}{_more(lacking)}; {_ADVICE} (tie_word_embeddings, num_hidden_layers)"
    return None


def _more(names: Sequence[Any]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _reason(error: Exception, attention: str) -> str:
    first = str(error).strip().split("\n", 1)[0]
    if "custom code" in first and "trust_remote_code" in str(error):
        return (
            "its code comes with the model (auto_map in config.json); set trust_remote_code = true if you trust that code "
            "(of a hub id, together with revision)"
        )
    if attention != AUTO and ("attention" in first.lower() or "kernels" in first):
        return f'attention = {attention!r}: {first.split(". ", 1)[0].rstrip(".")}; leave attention out, or set "eager"'
    return first
