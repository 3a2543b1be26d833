"""Reads a model folder without torch: sizes, context, token→id map, special ids.

`understudy check` and `understudy plan` read models through this file, in milliseconds.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from understudy.config.paths import nearest_folder
from understudy.errors import DataError, TeacherError
from understudy.nn.rotary_border import rotary_border, stated_context
from understudy.planning.models.weight_files import incomplete, tensor_shapes, weight_files
from understudy.teacher.vocabulary import Vocabulary

_LAYER = re.compile(r"^(?:model\.)?layers\.(\d+)\.")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_PLAIN_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Classes of transformers whose special tokens are those of the files alone."""
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")


class HubNotReached(DataError):
    """A hub id whose files are not in the local hub cache, while the hub cannot be asked."""


def is_hub_id(model: str) -> bool:
    """Whether a name that is not a local folder can be a hub id (`Qwen/Qwen3-0.6B`) rather than a mistyped
    path."""
    path = Path(model)
    return (
        bool(_HUB_ID.match(model))
        and not path.exists()
        and not (len(path.parts) > 1 and Path(path.parts[0]).exists())
    )


@dataclass(frozen=True)
class ModelFolder:
    path: Path

    @classmethod
    def open(cls, path: str, role: str) -> ModelFolder:
        """Checks that the folder has the needed files. `role` is the recipe key, for errors
        (`student.model`)."""
        folder = cls(Path(path))
        if not folder.path.is_dir():
            near = nearest_folder(folder.path)
            hint = f"did you mean {str(near)!r}? Else give" if near else "give"
            raise DataError(
                f"{role} = {path!r}: no such folder; {hint} a folder with config.json, or a hub id like 'Qwen/Qwen3-0.6B'"
            )
        if (folder.path / "adapter_config.json").is_file() and not (folder.path / "config.json").is_file():
            base = _optional(folder.path / "adapter_config.json").get(
                "base_model_name_or_path", "its base model"
            )
            raise DataError(
                f"{role} = {path!r}: the folder holds an adapter of {base}, not a model; merge it into its base and save that "
                "(peft: `model.merge_and_unload().save_pretrained(...)`)"
            )
        missing = [name for name in ("config.json", "tokenizer.json") if not (folder.path / name).is_file()]
        if missing:
            raise DataError(
                f"{role} = {path!r}: the folder has no {' and no '.join(missing)}; save the model with save_pretrained"
            )
        problem = incomplete(folder.path) or folder.unreadable()
        if problem:
            raise DataError(f"{role} = {path!r}: {problem}")
        if not folder.weight_files:
            raise DataError(
                f"{role} = {path!r}: no *.safetensors in the folder; save the weights as safetensors"
            )
        return folder

    def unreadable(self) -> str | None:
        """Which of the small files cannot be used."""
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            try:
                _optional(self.path / name)
            except (ValueError, TypeError) as error:
                return f"{name} is not a JSON object ({error}); download or copy it again"
        try:
            Vocabulary.load(self.path)
        except TeacherError as error:
            return f"tokenizer.json cannot be read ({error.__cause__}); download or copy it again"
        return None

    @cached_property
    def config(self) -> dict[str, Any]:
        return dict(json.loads((self.path / "config.json").read_text()))

    @property
    def _text(self) -> dict[str, Any]:
        """The language model's config; multimodal configs hold it one level down."""
        return dict(self.config.get("text_config") or self.config)

    @cached_property
    def vocab_size(self) -> int:
        """From config.json; where it leaves that to transformers (Gemma 3), from the embedding or the tokenizer."""
        if (size := self._text.get("vocab_size")) is not None:
            return int(size)
        rows = [shape[0] for name, shape in self._shapes.items() if name.endswith(_EMBEDDINGS)]
        return rows[0] if rows else max(self.token_ids.values(), default=-1) + 1

    @property
    def context(self) -> int | None:
        return stated_context(self._text.get)

    @property
    def layer_types(self) -> list[str] | None:
        """What each layer is, if its config says so."""
        return self._text.get("layer_types")

    @property
    def rotary_border(self) -> int | None:
        """The length beyond which its rotary embedding changes; None if it never does."""
        return rotary_border(self._text)

    @property
    def weight_files(self) -> list[Path]:
        return weight_files(self.path)

    @cached_property
    def parameters(self) -> int:
        """Counted from the headers of the weight files."""
        return sum(math.prod(shape) for shape in self._shapes.values())

    @property
    def quantized_parameters(self) -> int:
        """Those that `quantize` keeps in eight bits: all matrices but learned positions and experts."""
        others = ("wpe", "embed_positions", ".experts.")
        return sum(
            math.prod(shape)
            for name, shape in self._shapes.items()
            if len(shape) == 2 and not any(other in name for other in others)
        )

    @property
    def layer_parameters(self) -> list[int]:
        """Of each decoder layer, in order."""
        found: dict[int, int] = {}
        for name, shape in self._shapes.items():
            if number := _LAYER.match(name):
                found[int(number[1])] = found.get(int(number[1]), 0) + math.prod(shape)
        return [found[number] for number in sorted(found)]

    def adapter_parameters(self, rank: int, targets: Sequence[str]) -> int:
        """Parameters of low-rank adapters on the linear layers with these name endings: two thin matrices
        each."""
        return sum(rank * sum(shape) for shape in self._adapted(targets))

    def adapted_parameters(self, targets: Sequence[str]) -> int:
        """Parameters of the matrices themselves."""
        return sum(math.prod(shape) for shape in self._adapted(targets))

    def _adapted(self, targets: Sequence[str]) -> list[list[int]]:
        return [
            self._shapes[f"{name}.weight"]
            for name in self.matrices
            if any(ends_with(name, target) for target in targets)
        ]

    @property
    def matrices(self) -> list[str]:
        """The layers whose weight is a matrix, by name; none if there are no weight files yet."""
        return [
            name.removesuffix(".weight")
            for name, shape in self._shapes.items()
            if len(shape) == 2 and name.endswith(".weight")
        ]

    @cached_property
    def _shapes(self) -> dict[str, list[int]]:
        """The shape of every tensor in the weight files, by name."""
        return {name: shape for file in self.weight_files for name, shape in tensor_shapes(file).items()}

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary.load(self.path)

    @property
    def token_ids(self) -> Mapping[str, int]:
        """The token→id map, added tokens included."""
        return self.vocabulary.ids

    @property
    def special_ids(self) -> Mapping[str, int | None]:
        """The ids that start, end and pad a sequence, from the tokenizer's files."""
        return self.vocabulary.special

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Ids that end a turn: the generation config's, and the tokenizer's own EOS."""
        found = [*self._generation_ends, self.special_ids.get("eos_token")]
        return tuple(sorted({int(one) for one in found if one is not None}))

    @property
    def _generation_ends(self) -> list[int | None]:
        """Those of config.json count only without a generation_config.json, as in transformers."""
        file = self.path / "generation_config.json"
        eos = _optional(file).get("eos_token_id") if file.is_file() else self._text.get("eos_token_id")
        return list(eos) if isinstance(eos, list) else [eos]

    @property
    def has_no_end(self) -> bool:
        """Whether no file names a token that ends a turn, and the tokenizer's class has none of its own."""
        config = _optional(self.path / "tokenizer_config.json")
        named = config.get("eos_token") or _optional(self.path / "special_tokens_map.json").get("eos_token")
        plain = config.get("tokenizer_class") in _PLAIN_TOKENIZERS
        return plain and not named and all(one is None for one in self._generation_ends)

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    @cached_property
    def chat_templates(self) -> Mapping[str, str]:
        """By name, from where transformers reads them: `default`, and perhaps `tool_use` and others."""
        found = {path.stem: path.read_text() for path in self.path.glob("additional_chat_templates/*.jinja")}
        if (separate := self.path / "chat_template.jinja").is_file():
            found["default"] = separate.read_text()
        given = None if found else _optional(self.path / "tokenizer_config.json").get("chat_template")
        if isinstance(given, str):
            return {"default": given}
        if isinstance(given, list):
            given = {one.get("name"): one.get("template", "") for one in given if isinstance(one, dict)}
        return found or (given if isinstance(given, dict) else {})


def ends_with(layer: str, target: str) -> bool:
    """Whether a layer's name ends in these whole parts: `q_proj`, `self_attn.q_proj`."""
    return f".{layer}".endswith(f".{target}")


def _optional(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}
