"""Exports a checkpoint as a Hugging Face folder, or its LoRA adapter alone."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.utils import cached_file

from understudy.errors import CheckpointError
from understudy.media.processor import PictureProcessor
from understudy.observability.rundir import check_free, disk_failure
from understudy.policy.checkpoints.checkpoint import MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, verify
from understudy.policy.load import load_student, load_tokenizer
from understudy.policy.lora import LoraSettings, add_lora, merged_weights, peft_config, peft_name

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Of a vision-language model, also of one that trains on text alone because its family's pictures are not supported."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_FACTS = {
    "student": "Student (base model)",
    "teachers": "Teachers",
    "teacher": "Teacher",
    "objective": "Objective",
    "step": "Steps trained",
    "data": "Training data",
    "command": "Command",
    "versions": "Versions",
}


def export(
    run_checkpoint_dir: Path | str,
    base_model: Path | str,
    out: Path | str,
    card: Mapping[str, Any],
    trust_remote_code: bool = False,
    revision: str | None = None,
    averaged: bool = False,
    adapter: bool = False,
) -> Path:
    """Writes the student of one checkpoint to `out`, ready for `AutoModelForCausalLM.from_pretrained(out)`.

    The folder holds config, safetensors, tokenizer, generation config and a model card. Adapters are merged;
    `adapter` writes them alone, in peft's layout, for `PeftModel.from_pretrained(base, out)`. `averaged`
    writes the running average of the weights instead, if the run kept one.

    `base_model` (folder or hub id) gives architecture, tokenizer and generation config. The folder gets its
    name only when it is complete. An empty folder that exists gets the complete files; one that is not empty is refused.
    """
    checkpoint, given = Path(run_checkpoint_dir), Path(out)
    check_free(given)
    out = given.absolute()
    verify(checkpoint, optimizer=averaged)
    # It may be a mount point, a link, or the shell's own folder: it is neither replaced, nor is its parent written to.
    there = out.exists()
    name = f".{out.name}.{os.getpid()}.tmp"
    temporary = out / name if there else out.with_name(name)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        if adapter:
            _write_adapter(temporary, checkpoint, str(base_model), revision, averaged)
            load_tokenizer(str(base_model), trust_remote_code, revision).save_pretrained(temporary)
        else:
            _write_model(temporary, checkpoint, str(base_model), trust_remote_code, revision, averaged)
        library = "peft" if adapter else "transformers"
        (temporary / "README.md").write_text(model_card(card, out.name, library), encoding="utf-8")
        if there:
            for file in sorted(temporary.iterdir(), key=lambda file: file.name == "config.json"):
                os.rename(file, out / file.name)
        else:
            os.rename(temporary, out)
    except Exception as error:
        if isinstance(error, OSError) or disk_failure(error):
            raise CheckpointError(f"could not export to {out}: {error}") from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return given


def _write_model(
    folder: Path,
    checkpoint: Path,
    base_model: str,
    trust_remote_code: bool,
    revision: str | None,
    averaged: bool,
) -> None:
    """The whole student, adapters merged, with its tokenizer."""
    dtype, tensors = _stored_dtype(checkpoint), _stored_tensors(checkpoint, averaged)
    student = load_student(base_model, dtype, "cpu", trust_remote_code, revision)
    adapters = _adapter_settings(checkpoint)
    if adapters is not None:
        adapted = load_student(base_model, dtype, "cpu", trust_remote_code, revision).model
        add_lora(adapted, adapters)
        _fill(adapted, tensors, checkpoint)
        tensors = dict(merged_weights(adapted))
    _fill(student.model, tensors, checkpoint)
    student.model.save_pretrained(folder)
    student.tokenizer.save_pretrained(folder)
    if (pictures := PictureProcessor.load(base_model, revision)) is not None:
        pictures.image_processor.save_pretrained(str(folder))
    for name in _PROCESSOR_FILES:
        found = None
        if not (folder / name).exists():
            found = cached_file(
                base_model,
                name,
                revision=revision,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
        if found is not None:
            shutil.copyfile(found, folder / name)


def _write_adapter(
    folder: Path, checkpoint: Path, base_model: str, revision: str | None, averaged: bool
) -> None:
    """Writes adapter_config.json and adapter_model.safetensors; the base model is named there, not written."""
    adapters = _adapter_settings(checkpoint)
    if adapters is None:
        raise CheckpointError(
            f"{checkpoint} has no adapter: the run trained whole weights (no [student.lora]); leave --adapter out"
        )
    config = peft_config(adapters)
    config.base_model_name_or_path, config.revision = base_model, revision
    config.target_modules = list(adapters.targets)  # peft keeps a set, whose order differs between processes
    config.inference_mode = True
    config.save_pretrained(str(folder))
    tensors = {
        peft_name(name): tensor.contiguous() for name, tensor in _stored_tensors(checkpoint, averaged).items()
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def model_card(card: Mapping[str, Any], title: str, library: str = "transformers") -> str:
    """A README for the hub: student, teachers, data, objective, command and final metrics."""
    lines = ["---", f"library_name: {library}", "pipeline_tag: text-generation"]
    lines += [*_base_model(str(card.get("student", "")), library), *_hub_datasets(card)]
    lines += ["# license: yours to name; the base model's and the data's bind you"]
    lines += ["tags:", "- on-policy-distillation", "- understudy", "---", "", f"# {title}", ""]
    lines += [
        "Trained on its own rollouts which teachers score token by token (on-policy distillation), with Understudy.",
        "",
    ]
    lines += ["| | |", "|---|---|"]
    facts = [(label, card[key]) for key, label in _FACTS.items() if key in card]
    facts += [(key, value) for key, value in card.items() if key not in (*_FACTS, "metrics", "datasets")]
    lines += [f"| {_cell(label)} | {_cell(_words(value))} |" for label, value in facts]
    metrics = card.get("metrics") or {}
    if metrics:
        lines += ["", "## Final metrics", "", "| metric | value |", "|---|---|"]
        lines += [f"| {_cell(name)} | {_cell(_words(value))} |" for name, value in sorted(metrics.items())]
    return "\n".join(lines) + "\n"


def _base_model(student: str, library: str) -> list[str]:
    """The hub's metadata for the base model. The hub refuses a folder as an id, so a folder becomes a
    comment that asks for one."""
    if not student:
        return []
    relation = f"base_model_relation: {'adapter' if library == 'peft' else 'finetune'}"
    if _HUB_ID.fullmatch(student):
        return [f"base_model: {json.dumps(student)}", relation]
    return [f"# base_model: write the hub id of {json.dumps(_cell(_words(student)))} here", f"# {relation}"]


def _hub_datasets(card: Mapping[str, Any]) -> list[str]:
    names = card.get("datasets") or []
    return ["datasets:", *(f"- {json.dumps(name)}" for name in names)] if names else []


def _fill(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], checkpoint: Path) -> None:
    """Copies weights into a model; raises for a tensor that the model lacks."""
    own = model.state_dict()
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name not in own or own[name].shape != tensor.shape:
                raise CheckpointError(
                    f"checkpoint {checkpoint} holds {name} {tuple(tensor.shape)}, which the base model lacks"
                )
            own[name].copy_(tensor)


def _stored_tensors(checkpoint: Path, averaged: bool) -> dict[str, torch.Tensor]:
    if not averaged:
        return dict(load_file(checkpoint / MODEL_FILE))
    stored = load_file(checkpoint / OPTIMIZER_FILE)
    averages = {
        name.removeprefix("ema/"): tensor for name, tensor in stored.items() if name.startswith("ema/")
    }
    if not averages:
        raise CheckpointError(
            f"checkpoint {checkpoint} holds no average of the weights; was the run started with ema_decay?"
        )
    return averages


def _adapter_settings(checkpoint: Path) -> LoraSettings | None:
    state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    found = state["policy"].get("lora")
    return LoraSettings.from_json(found) if found else None


def _stored_dtype(checkpoint: Path) -> torch.dtype:
    with safe_open(checkpoint / MODEL_FILE, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            dtype: torch.dtype = file.get_tensor(name).dtype
            if dtype.is_floating_point:
                return dtype
    raise CheckpointError(f"checkpoint {checkpoint} holds no weights")


def _words(value: Any) -> str:
    """A value for a table cell; an absolute path becomes its last part."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_words(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_words(item) for item in value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str | Path) and os.path.isabs(value):
        return Path(value).name
    return str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
