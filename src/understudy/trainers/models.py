"""Loads a model on its device, with the ids that end and pad a sequence."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from understudy.engines.local.engine import HFEngine
from understudy.engines.local.kv_pool import KVFormat
from understudy.engines.local.scheduler import Batching
from understudy.errors import DataError
from understudy.media.processor import PictureProcessor, PictureReader
from understudy.media.store import MediaStore
from understudy.nn.pretrained import AUTO, sharing_copy
from understudy.nn.rotary_border import rotary_border
from understudy.policy.checkpoints.state import PolicyState
from understudy.policy.load import load_student
from understudy.policy.lora import LoraSettings, add_lora


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device with its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    context: int
    device: torch.device
    stop_ids: tuple[int, ...]
    """Ids that end a turn: those of the generation config, and the tokenizer's EOS."""
    pictures: PictureReader | None = None
    """For a vision-language model: its processor, and the store it reads pictures from."""

    @property
    def rotary_border(self) -> int | None:
        """The length beyond which the rotary embedding changes; None if it never does."""
        return rotary_border(self.model.config.get_text_config().to_dict())

    @property
    def steady_context(self) -> int:
        """The maximum length of a generated sequence: the context length, or `rotary_border` if that is
        shorter."""
        return min(self.context, self.rotary_border or self.context)

    @property
    def pad_id(self) -> int:
        """The padding id. Padding is never attended to, so any id works."""
        pad = self.tokenizer.pad_token_id
        return int(pad) if pad is not None else self.stop_ids[0]

    def copy(self) -> LoadedModel:
        """A copy of the model with its own tensors."""
        return replace(self, model=copy.deepcopy(self.model))

    def sharing_copy(self) -> LoadedModel:
        """A copy with its own modules and the same tensors. An engine may replace the modules' code; the
        trained model keeps its."""
        return replace(self, model=sharing_copy(self.model))

    def engine(
        self,
        max_batch: int,
        batching: Batching = Batching.COMPOSED,
        max_length: int | None = None,
        kv_format: KVFormat = KVFormat.MODEL,
        recompute_kv: bool = True,
    ) -> HFEngine:
        return HFEngine(
            self.model,
            max_batch=max_batch,
            device=self.device,
            pad_id=self.pad_id,
            max_length=max_length or self.steady_context,
            batching=batching,
            detokenize=self.tokenizer.decode,
            kv_format=kv_format,
            recompute_kv=recompute_kv,
            pictures=self.pictures,
        )

    def with_pictures(self, store: MediaStore, source: str, revision: str | None = None) -> LoadedModel:
        """The same model with the pictures of a store, if it is a vision-language model."""
        processor = PictureProcessor.load(source, revision)
        return self if processor is None else replace(self, pictures=PictureReader(processor, store))


def load_model(
    name: str,
    *,
    dtype: str = "float32",
    device: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    attention: str = AUTO,
) -> LoadedModel:
    transformers_logging.disable_progress_bar()  # a run has its own display
    where = resolve_device(device)
    student = load_student(name, dtype, where, trust_remote_code, revision, attention)
    known = stop_ids(student.model, student.tokenizer)
    if not known:
        raise DataError(
            f"{name} names no end-of-sequence token; set eos_token_id in its generation_config.json"
        )
    return LoadedModel(student.model, student.tokenizer, student.context_length, where, known)


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids at which generation stops: those of the generation config, and the tokenizer's EOS."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    stops = configured if isinstance(configured, list) else [configured]
    return tuple(sorted({int(stop) for stop in [*stops, tokenizer.eos_token_id] if stop is not None}))


def resolve_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def put_student(model: PreTrainedModel, saved: PolicyState) -> None:
    """Load a checkpoint's student into a model that was loaded like the run's. Adapters are added first."""
    if adapters := saved.progress.get("lora"):
        add_lora(model, LoraSettings.from_json(adapters))
    copy_weights(model, saved.model)


@torch.no_grad()
def copy_weights(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy a checkpoint's weights into a model. A tied tensor is stored once, so its second name may be
    missing."""
    own = model.state_dict()
    for name, tensor in weights.items():
        own[name].copy_(tensor)
