"""Loads a frozen causal LM, its vocabulary and the digest of its weights; runs its own forward."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer
from transformers.utils import cached_file

from understudy.errors import TeacherError
from understudy.media.processor import PictureReader
from understudy.nn.pretrained import AUTO, CannotLoadError, load_causal_lm
from understudy.nn.rotary_border import rotary_border, stated_context
from understudy.teacher.scoring.probe import probe_family
from understudy.teacher.vocabulary import SPECIAL, Vocabulary
from understudy.types.scores import ScoreItem
from understudy.types.usable_ids import UsableIds

_HASHING_THREADS = 8
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """A loaded teacher model and what the scorer must know of it."""

    model: Any
    """A transformers causal LM in eval mode, without gradients."""
    path: str
    dtype: str
    device: torch.device
    max_length: int
    """The longest sequence the model's positions allow."""
    bits: str | None = None
    """How its weights are quantized; None: they are not."""
    rounding: float = 0.0
    """Nats by which two orders of the same operations may differ. Above 0 with fp8: activations are rounded to three
    bits of mantissa in every layer, so a change of their last bfloat16 bit can grow to the size of the rounding."""
    pictures: PictureReader | None = None
    """For a vision-language model: its processor, and the store of pictures that clients sent."""

    def on(self, device: str) -> FrozenModel:
        """The same record after the model was moved to another device."""
        return replace(self, device=torch.device(device))

    @property
    def body(self) -> Any:
        return body_of(self.model)

    @property
    def config(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def rotary_border(self) -> int | None:
        """Sequences up to this length and longer ones may not share a forward (`nn/rotary_border.py`)."""
        return rotary_border(self.config.to_dict())


def body_of(model: Any) -> Any:
    """The model without its head. Llama4ForCausalLM names itself as its base model."""
    base = model.base_model
    return base if base is not model else getattr(model, "model", model)


def load_frozen(
    path: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
    attention: str = AUTO,
) -> FrozenModel:
    """Load from a folder or a hub id.

    Code that comes with a model runs only on request; from the hub only at a pinned revision.
    """
    if trust_remote_code and revision is None and not Path(path).is_dir():
        raise TeacherError(f"trust_remote_code for {path} runs code from the hub: pin it with a revision")
    if dtype not in DTYPES:
        raise TeacherError(f"dtype {dtype!r}; expected one of {', '.join(DTYPES)}")
    if looks_like_folder(path) and not (Path(path) / "config.json").is_file():
        raise TeacherError(f"no model at {path}: expected a folder with config.json and *.safetensors")
    try:
        model = load_causal_lm(
            path,
            dtype=DTYPES[dtype],
            attention=attention,
            trust_remote_code=trust_remote_code,
            revision=revision,
        )
    except CannotLoadError as error:
        raise TeacherError(f"cannot load the teacher model {path}: {error}") from error
    model.to(device).eval().requires_grad_(False)
    config = model.config.get_text_config()
    return FrozenModel(
        model=model,
        path=path,
        dtype=dtype,
        device=torch.device(device),
        max_length=stated_context(lambda name: getattr(config, name, None)) or 1 << 30,
    )


def looks_like_folder(path: str) -> bool:
    """A hub id is `name` or `owner/name`; everything else is a folder."""
    return Path(path).exists() or path.startswith(("/", ".", "~")) or path.count("/") > 1


def weights_sha256(model: Any) -> str:
    """A digest of the digests of all tensors, in the order of their names; it does not depend on how files store them."""
    return hashed_weights(model).result()


def hashed_weights(model: Any) -> Future[str]:
    """`weights_sha256` on threads of its own, which read the tensors that the model has now. One alone needs seconds for
    a model of some billions of weights."""
    state = model.state_dict()
    threads = ThreadPoolExecutor(_HASHING_THREADS, thread_name_prefix="weights-sha256")
    found = [threads.submit(_tensor_digest, name, state[name]) for name in sorted(state)]
    whole = threads.submit(lambda: hashlib.sha256(b"".join(one.result() for one in found)).hexdigest())
    threads.shutdown(wait=False)
    return whole


def _tensor_digest(name: str, tensor: torch.Tensor) -> bytes:
    """Of its name, type, shape and bytes."""
    total = hashlib.sha256(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode())
    for part in tensor.detach().reshape(-1).contiguous().view(torch.uint8).split(64 << 20):
        total.update(part.cpu().numpy())
    return total.digest()


def vocabulary_of(model: str, revision: str | None = None) -> Vocabulary:
    """The token→id map of a model, from a folder or the hub.

    Student and teachers are read in the same way, from tokenizer.json if there is one: the classes of
    transformers add ids of their own for some models.
    """
    folder = Path(model)
    if not folder.is_dir():
        found = cached_file(
            model, "tokenizer.json", revision=revision, _raise_exceptions_for_missing_entries=False
        )
        folder = Path(found).parent if found else folder
    if (folder / "tokenizer.json").is_file():
        return Vocabulary.load(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise TeacherError(f"no tokenizer beside the model {model}: {error}") from error
    return Vocabulary(
        tokenizer.get_vocab(), {name: getattr(tokenizer, f"{name}_id", None) for name in SPECIAL}
    )


def plain_scores(frozen: FrozenModel, usable: UsableIds | None) -> np.ndarray:
    """The probe's logprobs by the model's own forward, over the ids that have a token."""
    vocab = frozen.model.get_output_embeddings().weight.shape[0] if usable is None else usable.limit
    items = probe_family(vocab, frozen.max_length, () if usable is None else usable.holes)
    return np.concatenate([plain_logprobs(frozen, item, usable) for item in items])


@torch.inference_mode()
def plain_logprobs(frozen: FrozenModel, item: ScoreItem, usable: UsableIds | None = None) -> np.ndarray:
    """The logprobs of one sequence by the model's own forward, including its head."""
    tokens = torch.from_numpy(item.tokens.astype(np.int64)).to(frozen.device)
    logits = frozen.model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
    if usable is not None:
        usable.hide_(logits)
    return logits.log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1).cpu().numpy()
