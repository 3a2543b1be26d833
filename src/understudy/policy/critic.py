"""The critic: a language model whose head gives one value per token instead of logits.

Everything else is the same: micro-batches, float32 masters, refusal of broken rows, checkpoints. So a critic
is a `Policy` over such a model. The value for token t comes from position t − 1, as its logits would: it is
the value of the text before t.

Shape legend: N loss-bearing tokens, H hidden size.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from understudy.policy.forward.head import output_layer
from understudy.types.loss import LossInputs, StudentHead


def give_value_head(model: PreTrainedModel) -> PreTrainedModel:
    """Replaces the vocabulary head by a scalar head that starts at 0; an embedding that was tied to the old
    head stays."""
    before = output_layer(model)
    head = nn.Linear(before.in_features, 1, bias=True, device=before.weight.device, dtype=before.weight.dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    model.config.get_text_config().tie_word_embeddings = False
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(head)
    return model


def token_values(head: StudentHead, inputs: LossInputs) -> torch.Tensor:
    """float32 [N]: the plain product. A model's logit scale or soft cap does not apply to values."""
    return nn.functional.linear(head.hidden_NH, head.weight_VH, head.bias_V)[:, 0].float()
