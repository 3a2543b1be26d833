"""Models as a run needs them: on their device, with the ids that end and pad a sequence."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from understudy.engines.local.engine import HFEngine, sharing_copy
from understudy.engines.local.kv_pool import KeptAs
from understudy.engines.local.scheduler import Batching
from understudy.errors import DataError
from understudy.nn.pretrained import AUTO
from understudy.nn.rotary_border import rotary_border
from understudy.policy.checkpoints.state import PolicyState
from understudy.policy.load import load_student
from understudy.policy.lora import LoraSettings, add_lora


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    context: int
    device: torch.device
    stop_ids: tuple[int, ...]
    """Ids that end a turn: the generation config's, and the tokenizer's own EOS."""

    @property
    def rotary_border(self) -> int | None:
        """The length beyond which its rotary embedding changes; None where it never does."""
        return rotary_border(self.model.config.get_text_config().to_dict())

    @property
    def steady_context(self) -> int:
        """Most tokens of a sequence that is generated: what the model holds, on the near side of that length."""
        return min(self.context, self.rotary_border or self.context)

    @property
    def pad_id(self) -> int:
        """Filling that is never attended to: any id would do."""
        pad = self.tokenizer.pad_token_id
        return int(pad) if pad is not None else self.stop_ids[0]

    def twin(self) -> LoadedModel:
        """The same model with tensors of its own."""
        return replace(self, model=copy.deepcopy(self.model))

    def sharing_twin(self) -> LoadedModel:
        """The same tensors in modules of its own: an engine may give those other code, and the trained model keeps its own."""
        return replace(self, model=sharing_copy(self.model))

    def engine(
        self,
        max_batch: int,
        batching: Batching = Batching.COMPOSED,
        max_length: int | None = None,
        kept_as: KeptAs = KeptAs.MODEL,
    ) -> HFEngine:
        return HFEngine(
            self.model,
            max_batch=max_batch,
            device=self.device,
            pad_id=self.pad_id,
            max_length=max_length or self.steady_context,
            batching=batching,
            detokenize=self.tokenizer.decode,
            kept_as=kept_as,
        )


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
    configured = student.model.generation_config.eos_token_id if student.model.generation_config else None
    stops = configured if isinstance(configured, list) else [configured]
    known = sorted({int(stop) for stop in [*stops, student.tokenizer.eos_token_id] if stop is not None})
    if not known:
        raise DataError(
            f"{name} names no end-of-sequence token; set eos_token_id in its generation_config.json"
        )
    return LoadedModel(student.model, student.tokenizer, student.context_length, where, tuple(known))


def resolve_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def put_student(model: PreTrainedModel, saved: PolicyState) -> None:
    """Put a checkpoint's student into a model that was loaded as the run's was; adapters are added first."""
    if adapters := saved.progress.get("lora"):
        add_lora(model, LoraSettings.from_json(adapters))
    copy_weights(model, saved.model)


@torch.no_grad()
def copy_weights(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Put a checkpoint's weights into a model; a tied tensor is stored once, so a missing twin is fine."""
    own = model.state_dict()
    for name, tensor in weights.items():
        own[name].copy_(tensor)
