"""Checks of a model's config.json: its type, remote code, attention, and rotary embeddings that change with length.

Imports no torch and no transformers: `understudy check` runs this.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from understudy.config import Recipe
from understudy.engines.base import GROWING_LAYERS
from understudy.nn.rotary_border import crossing
from understudy.planning.models.folder import ModelFolder


def models_load(
    recipe: Recipe, student: ModelFolder | None, teachers: Mapping[str, ModelFolder]
) -> list[str]:
    """Problems of the student and of the teachers that the run starts itself."""
    problems = []
    trusted = recipe.student.trust_remote_code
    if student:
        problems += _is_a_decoder(student, "student") + _is_known(student, "student")
        problems += _can_be_trained(student)
        problems += _can_end(student)
        problems += _brings_code(student, "student", trusted)
        problems += _has_attention(student, "student", recipe.student.attention)
        problems += stays_within_border(recipe, student)
        problems += _can_generate(recipe, student)
    for name, folder in teachers.items():
        problems += _is_a_decoder(folder, f"teachers.{name}")
        if not recipe.teachers[name].starts_vllm:
            problems += _is_known(folder, f"teachers.{name}")
        problems += _brings_code(folder, f"teachers.{name}", recipe.teachers[name].trust_remote_code)
        problems += _has_attention(folder, f"teachers.{name}", recipe.teachers[name].attention)
    return problems


def topk_fits(recipe: Recipe, folder: ModelFolder, role: str) -> list[str]:
    """A model has at least as many tokens as `loss.topk` asks for. `role` is its place in the recipe."""
    if (
        recipe.loss.distill_coef > 0
        and recipe.loss.signal in ("topk", "at_ids")
        and recipe.loss.topk > folder.vocab_size
    ):
        return [
            f"loss.topk = {recipe.loss.topk} is larger than the vocabulary of {role} ({folder.vocab_size}); lower loss.topk"
        ]
    return []


def stays_within_border(recipe: Recipe, student: ModelFolder) -> list[str]:
    """If the student's rotary embedding changes beyond a length, all rollouts must stay below it."""
    border, room = student.rotary_border, recipe.rollout.context_length or student.context
    if border is None or room is None or room <= border:
        return []
    return [crossing(f"student.model = {str(student.path)!r}", border, room)]


def _can_generate(recipe: Recipe, student: ModelFolder) -> list[str]:
    """Our own engine keeps keys and values; a layer with another state is left to vLLM."""
    kind, layers = str(student.config.get("model_type")), student.layer_types
    recurrent = layers is None and "_is_stateful = True" in modeling_source(kind)
    other = sorted(set(layers or ()) - GROWING_LAYERS)
    if recipe.rollout.engine != "hf" or not (other or recurrent):
        return []
    what = f"{', '.join(other)} layers" if other else "a recurrent state"
    return [
        f'rollout.engine = "hf" cannot generate with student.model = {str(student.path)!r} ({kind!r}): it has {what}; set '
        'rollout.engine = "vllm"'
    ]


def _is_a_decoder(folder: ModelFolder, section: str) -> list[str]:
    if not folder.config.get("is_encoder_decoder"):
        return []
    return [
        f"{section}.model = {str(folder.path)!r} ({folder.config.get('model_type')!r}) has an encoder and a decoder; choose a causal "
        "language model"
    ]


def _is_known(folder: ModelFolder, section: str) -> list[str]:
    kind = folder.config.get("model_type")
    if folder.config.get("auto_map") or (kind and _known_to_transformers(str(kind))):
        return []
    reason = f"has no model type {kind!r}" if kind else "needs model_type in config.json"
    return [
        f"{section}.model = {str(folder.path)!r}: transformers {version('transformers')} {reason}; upgrade transformers, or choose "
        "another model"
    ]


def _can_be_trained(student: ModelFolder) -> list[str]:
    stored = student.config.get("quantization_config")
    if not stored:
        return []
    way = stored.get("quant_method", "quantized") if isinstance(stored, dict) else "quantized"
    return [
        f"student.model = {str(student.path)!r}: its weights are quantized ({way}), and such weights cannot be trained; give the model "
        "that it was made from"
    ]


def _can_end(student: ModelFolder) -> list[str]:
    if not student.has_no_end:
        return []
    return [
        f"student.model = {str(student.path)!r}: neither its generation_config.json nor its tokenizer_config.json names a token that ends "
        "a turn, so no rollout could end; set eos_token_id in its generation_config.json"
    ]


def _brings_code(folder: ModelFolder, section: str, trusted: bool) -> list[str]:
    """A folder's own code is needed only for model types that transformers lacks: it prefers its own."""
    kind, brought = str(folder.config.get("model_type")), folder.config.get("auto_map")
    if not brought or trusted or _known_to_transformers(kind):
        return []
    return [
        f"{section}.model = {str(folder.path)!r}: its code comes with the model (auto_map in config.json), and transformers has no "
        f"model type {kind!r} of its own; set {section}.trust_remote_code = true if you trust that code"
    ]


_SUPPORT = {
    "sdpa": "_supports_sdpa = True",
    "flash_attention_2": "_supports_flash_attn = True",
    "flash_attention_3": "_supports_flash_attn = True",
}
"""The line of a model class of transformers that has this attention."""


def _has_attention(folder: ModelFolder, section: str, attention: str) -> list[str]:
    kind = str(folder.config.get("model_type"))
    source = modeling_source(kind)
    # A class that derives from another model's has that model's attention, and is left to the loader.
    if "(PreTrainedModel)" not in source or _SUPPORT.get(attention, "") in source:
        return []
    return [
        f'{section}.attention = {attention!r}: transformers has none for {kind!r} models; leave attention out, or set "eager"'
    ]


@lru_cache
def modeling_source(kind: str) -> str:
    """The source of transformers' classes for a model type; "" if it has no file of the usual name."""
    folder, name = _transformers(), kind.replace("-", "_")
    file = folder / "models" / name / f"modeling_{name}.py" if folder else None
    return file.read_text(encoding="utf-8") if file and file.is_file() else ""


@lru_cache
def _known_to_transformers(kind: str) -> bool:
    """Reads the list of model types from its source files."""
    folder = _transformers()
    if folder is None:
        return True
    return any(f'"{kind}"' in file.read_text(encoding="utf-8") for file in folder.glob("models/auto/*.py"))


def _transformers() -> Path | None:
    """Its folder; importing it would import torch."""
    found = find_spec("transformers")
    return Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None
