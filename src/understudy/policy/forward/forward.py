"""The student's forward pass: ids → hidden states of the predicting positions → objective.

    ids ──> body ──> hidden [tokens, H] ──take t−1──> hidden_NH ──> StudentHead ──> objective

Only positions that predict a loss-bearing token reach the head, and the objective itself applies the head.
The objective is called *inside* the module's forward, because with sharded weights the whole head matrix
exists only there.

Padded rows are padded on the right and need no attention mask: under causal attention no real token sees
what comes after it, and the padding's own hidden states are never read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from understudy.errors import PolicyError
from understudy.media.processor import PictureReader
from understudy.nn.short_windows import short_windows
from understudy.nn.vision import is_vision, is_vision_frozen, vision_rows
from understudy.nn.vision_features import VisionFeatures, features_for
from understudy.policy.assemble import MicroBatch
from understudy.policy.forward.attention import VARLEN
from understudy.policy.forward.head import body_of, head_facts, logits_of, output_layer, student_head
from understudy.policy.forward.packed import packed_states, packed_states_at
from understudy.policy.microbatch import Layout
from understudy.types.loss import LossInputs, LossOutput, StudentHead
from understudy.types.usable_ids import UsableIds

logger = logging.getLogger(__name__)

Objective = Callable[[StudentHead, LossInputs], LossOutput]
Result = TypeVar("Result")

_HEAD_CHUNK_ELEMENTS = 1 << 25
"""Most logits held at once when only the sampled token's logprob is needed: 128 MiB in float32."""


class StudentForward(nn.Module):
    """Wraps a causal language model so that one call runs body, head and objective."""

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float = 1.0,
        usable: UsableIds | None = None,
        pictures: PictureReader | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.facts = head_facts(model)
        self.temperature = temperature
        self.usable = usable.within(output_layer(model).weight.shape[0]) if usable is not None else None
        self.pictures = pictures
        self.features: VisionFeatures | None = None
        """Of a frozen vision tower."""
        if is_vision(model) and is_vision_frozen(model):
            together = not torch.are_deterministic_algorithms_enabled()
            self.features = features_for(model, pictures, together=together)

    def forward(
        self,
        micro: MicroBatch,
        objective: Callable[[StudentHead, LossInputs], Result],
        temperature: float | None = None,
        known_NH: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, Result]:
        """(loss, the objective's result). The loss is returned separately because FSDP hooks into plain
        tensors only. `known_NH`: hidden states that are computed already."""
        hidden_NH = self.hidden(micro) if known_NH is None else known_NH
        head = student_head(self.model, self.facts, hidden_NH, temperature or self.temperature, self.usable)
        result = objective(head, micro.inputs)
        return (result.loss if isinstance(result, LossOutput) else None), result

    def hidden(self, micro: MicroBatch) -> torch.Tensor:
        """hidden_NH: after the final norm, at the positions that predict the loss-bearing tokens."""
        body = body_of(self.model)
        if micro.layout is Layout.PACKED:
            return packed_states_at(body, micro.ids, micro.lengths, micro.predict_N)
        more = self._vision(micro) if is_vision(self.model) else {}
        states = body(input_ids=micro.ids, use_cache=False, **more).last_hidden_state
        return states.reshape(-1, states.shape[-1]).index_select(0, micro.predict_N)

    def _vision(self, micro: MicroBatch) -> dict[str, Any]:
        """Pictures and positions of the micro-batch's rows."""
        ids = micro.ids.cpu().numpy()
        rows = [ids[i, :length] for i, length in enumerate(micro.lengths)]
        media = micro.media or ((),) * len(rows)
        made = vision_rows(
            self.model, self.pictures, rows, media, ids.shape[1], keys=micro.keys, features=self.features
        )
        positions = {} if made.positions is None else {"position_ids": made.positions}
        return {**made.arguments, **positions}


def choose_layout(model: PreTrainedModel, wanted: Layout | None = None) -> Layout:
    """Packed if the model keeps packed rows apart, else padded. On a GPU only half precision is packed,
    which is what the variable-length kernel takes. On a CPU, rearranging rows for attention costs less than
    computing padding. A model that was loaded with another attention than `sdpa` keeps it, over padded rows.
    """
    if is_vision(model):  # packed attention knows neither pixels nor three rotary axes
        if wanted is Layout.PACKED:
            raise PolicyError(
                f"{type(model).__name__} reads pictures and trains on padded rows; leave layout out"
            )
        return Layout.PADDED
    weight = output_layer(model).weight
    pays = not weight.is_cuda or weight.dtype in (torch.float16, torch.bfloat16)
    pays = pays and model.config._attn_implementation in ("sdpa", VARLEN)
    if wanted is Layout.PADDED or (wanted is None and not pays):
        return Layout.PADDED
    if keeps_rows_apart(model):
        return Layout.PACKED
    if wanted is Layout.PACKED:
        raise PolicyError(
            f"{type(model).__name__} cannot train on packed rows: its layers let one row see another; use layout = 'padded'"
        )
    logger.warning("%s lets packed rows see each other; its rows are padded instead", type(model).__name__)
    return Layout.PADDED


@torch.no_grad()
def keeps_rows_apart(model: PreTrainedModel) -> bool:
    """Whether two packed rows give the hidden states that each gives alone. It is False for layers that
    ignore the row bounds (other attention code, convolutions, recurrent states), cap their attention
    scores, or have a window in their mask alone."""
    alone, packed = _probe_states(model)
    if packed is None:
        return False
    tolerance = 1e-4 if model.get_input_embeddings().weight.dtype == torch.float32 else 5e-2
    if not (alone - packed).abs().max() <= tolerance * max(1.0, float(alone.abs().max())):
        return False
    with short_windows(model) as windowed:
        if not windowed:
            return True
        short, packed = _probe_states(model)
    # Rounding moves packed states a little; without the window they equal those of long windows.
    return packed is not None and bool((packed - short).norm() <= (packed - alone).norm())


def _probe_states(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor | None]:
    """float32 [12, H]: the states of two rows, each alone, and packed; None if packed attention refuses them."""
    embedding = model.get_input_embeddings().weight
    ids = torch.arange(12, device=embedding.device) % embedding.shape[0]
    rows = (ids[:5], ids[5:])
    body = body_of(model)
    alone = torch.cat([body(input_ids=row[None], use_cache=False).last_hidden_state[0] for row in rows])
    with attention_for(model, Layout.PACKED):
        try:
            packed = packed_states(body, ids[None], tuple(len(row) for row in rows))[0]
        except (TypeError, ValueError):
            return alone.float(), None
    return alone.float(), packed.float()


@contextmanager
def attention_for(model: PreTrainedModel, layout: Layout) -> Iterator[None]:
    """Switches the model to packed attention, for the backward pass too (checkpointed layers run again
    there). Afterwards the model's own attention is restored, for engines that copy the model to generate.

    The config is set rather than the model, whose setter visits every module; `keeps_rows_apart` has shown
    that this model's layers follow its config."""
    before = model.config._attn_implementation
    if layout is Layout.PADDED or before == VARLEN:
        yield
        return
    model.config._attn_implementation = VARLEN
    try:
        yield
    finally:
        model.config._attn_implementation = before


def sampled_logprobs(head: StudentHead, inputs: LossInputs) -> torch.Tensor:
    """float32 [N]: log-probability of each written token, computed for a slice of tokens at a time."""
    rows = max(1, _HEAD_CHUNK_ELEMENTS // head.vocab_size)
    pieces = []
    for start in range(0, inputs.num_tokens, rows):
        logits_nV = logits_of(replace(head, hidden_NH=head.hidden_NH[start : start + rows]))
        token_n1 = inputs.token_ids_N[start : start + rows, None]
        pieces.append(logits_nV.gather(1, token_n1)[:, 0] - logits_nV.logsumexp(-1))
    return torch.cat(pieces) if pieces else head.hidden_NH.new_zeros(0, dtype=torch.float32)
