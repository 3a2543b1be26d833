"""Whether `student.lora.targets` name layers of the student, by the names in its weight files.

Imports no torch: `understudy check` runs this.
"""

from __future__ import annotations

import re

from understudy.config import LoraConfig, Recipe
from understudy.config.base import nearest
from understudy.media.processor import FAMILIES, VISION_PARTS
from understudy.planning.models.config_checks import modeling_source
from understudy.planning.models.folder import ModelFolder, ends_with

_TIED = ("lm_head", "embed_out")
"""A head that shares the embedding's tensor is not in the weight files."""


def targets_fit(recipe: Recipe, student: ModelFolder) -> tuple[list[str], list[str]]:
    """(problems, notes). Nothing is known of a hub id whose weights are not here yet."""
    lora, layers = recipe.student.lora, student.matrices
    if lora is None or not layers:
        return [], []
    if recipe.student.freeze_vision and student.config.get("model_type") in FAMILIES:
        layers = [name for name in layers if not re.fullmatch(VISION_PARTS, name)]
    source = modeling_source(str(student.config.get("model_type")))
    missing = [one for one in lora.targets if not _is_layer(one, layers, source)]
    own = sorted({name.rpartition(".")[2] for name in layers if re.search(r"\.\d+\.", name)})
    place = f"student.model = {str(student.path)!r}"
    if lora.targets != LoraConfig().targets:
        return [_unknown(one, own, place) for one in missing], []
    adapted = [one for one in lora.targets if one not in missing]
    others = ", ".join(name for name in own if name not in adapted) or "none"
    if not adapted:
        return [
            f"student.lora.targets: {place} has no layer with one of the default names ({', '.join(missing)}); name layers of its own: "
            f"{others}"
        ], []
    if not missing:
        return [], []
    return [], [
        f"student.lora.targets: {place} has no {', '.join(missing)}; of the default targets {', '.join(adapted)} get adapters. Its other "
        f"layers: {others}"
    ]


def _is_layer(target: str, layers: list[str], source: str) -> bool:
    """In the weight files, or in transformers' code, which renames some layers when it loads them."""
    in_code = rf"self\.{re.escape(target)} = (nn\.Linear|Conv1D)\("
    return (
        target in _TIED or any(ends_with(name, target) for name in layers) or bool(re.search(in_code, source))
    )


def _unknown(target: str, own: list[str], place: str) -> str:
    guess = nearest(target, own)
    hint = f"did you mean {guess!r}? " if guess else ""
    return (
        f"student.lora.targets: {place} has no layer whose name ends in {target!r}; {hint}Expected some of "
        f"{', '.join(own)}"
    )
