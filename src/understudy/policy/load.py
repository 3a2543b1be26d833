"""Loads the student from a hub id or a folder, ready for training."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from understudy.errors import DataError, PolicyError
from understudy.nn.pretrained import AUTO, CannotLoadError, load_causal_lm
from understudy.nn.rotary_border import stated_context

logger = logging.getLogger(__name__)

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Student:
    """A loaded student."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    context_length: int
    """Most tokens one sequence may hold, prompt and response together."""


def load_student(
    path_or_hub_id: str,
    dtype: str | torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    revision: str | None = None,
    attention: str = AUTO,
) -> Student:
    """Loads model and tokenizer. Dropout and the noise of routers are off: the student is trained on exactly the
    distribution it samples from.

    `trust_remote_code` runs code from the hub and therefore needs a pinned `revision` (or a local folder).
    """
    _require_source(path_or_hub_id)
    if trust_remote_code and revision is None and not Path(path_or_hub_id).is_dir():
        raise PolicyError(
            f"trust_remote_code for {path_or_hub_id} runs code from the hub: pin it with `revision`"
        )
    try:
        model = load_causal_lm(
            path_or_hub_id,
            dtype=resolve_dtype(dtype),
            attention=attention,
            trust_remote_code=trust_remote_code,
            revision=revision,
        )
    except CannotLoadError as error:
        raise PolicyError(f"the student {path_or_hub_id} cannot be loaded: {error}") from error
    switch_off_dropout(model)
    if noisy := switch_off_router_noise(model):
        logger.info("%s: the noise that %s adds in training is off", path_or_hub_id, ", ".join(noisy))
    model.to(device)
    model.train()
    tokenizer = load_tokenizer(path_or_hub_id, trust_remote_code, revision)
    return Student(model, tokenizer, context_length(model))


def load_tokenizer(
    path_or_hub_id: str, trust_remote_code: bool = False, revision: str | None = None
) -> PreTrainedTokenizerBase:
    _require_source(path_or_hub_id)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path_or_hub_id, trust_remote_code=trust_remote_code, revision=revision
        )
    except Exception as error:  # what the tokenizers library raises has no narrower class
        raise DataError(
            f"the tokenizer of {path_or_hub_id} cannot be loaded: {_first_line(error)}"
        ) from error
    # Lengths are checked where prompts are rendered. A long tool result, which is cut later, is no reason for a warning.
    given = getattr(tokenizer, "deprecation_warnings", {})  # mistral_common's tokenizers have none
    given["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def context_length(model: PreTrainedModel) -> int:
    """The longest sequence the model was made for; a very large number for models without a limit."""
    return context_of_config(model.config)


def context_of_config(whole: PretrainedConfig) -> int:
    config = whole.get_text_config()
    return stated_context(lambda name: getattr(config, name, None)) or 1 << 30


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise PolicyError(f"dtype = {dtype!r}: expected one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def switch_off_dropout(model: nn.Module) -> None:
    """Sets every dropout probability to zero, in modules and in the attributes attention layers read directly."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)


def switch_off_router_noise(model: nn.Module) -> list[str]:
    """Keeps routers of experts that are noisy in training in eval mode, also after `model.train()`; returns their classes.

    Their noise (`jitter` in transformers) is not set to 0: PhiMoE's router uses the number to choose experts in eval mode
    too, and in training it draws them at random whatever the number.
    """
    noisy = [
        module
        for module in model.modules()
        if any(_is_noise(name, value) for name, value in vars(module).items())
    ]
    for module in noisy:
        module.eval()
        vars(module)["train"] = _stays_in_eval
    return sorted({type(module).__name__ for module in noisy})


def _is_noise(name: str, value: object) -> bool:
    if not isinstance(value, float) or "jitter" not in name:
        return False
    return value > 0 or name == "router_jitter_noise"


def _stays_in_eval(mode: bool = True) -> None:
    """In place of a module's `train`."""


def _require_source(path_or_hub_id: str) -> None:
    """Raises for a path that looks local and does not exist; transformers would ask the hub instead and fail
    with an unclear error."""
    path = Path(path_or_hub_id)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise PolicyError(f"the folder {path_or_hub_id} holds no model: config.json is missing")
        return
    looks_local = path.is_absolute() or path_or_hub_id.startswith((".", "~")) or path_or_hub_id.count("/") > 1
    if path.exists() or looks_local or (path.parent.is_dir() and path.parent != Path(".")):
        raise PolicyError(
            f"the model folder {path_or_hub_id} does not exist; give a folder with config.json and safetensors, "
            "or a hub id such as Qwen/Qwen3-0.6B"
        )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
