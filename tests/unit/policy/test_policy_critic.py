"""A value head in place of the language-model head, and the frozen reference model."""

from __future__ import annotations

import pytest
import torch
from small_student import gemma2, llama, qwen3, settings, varied_batch

from understudy.policy.critic import give_value_head, token_values
from understudy.policy.policy import Policy
from understudy.policy.reference import ReferenceModel


@pytest.mark.parametrize("make", [qwen3, llama, gemma2])
def test_the_value_of_a_token_is_read_at_the_position_that_predicts_it(make: type) -> None:
    model = give_value_head(make())
    batch = varied_batch(rows=5)
    critic = Policy(model, settings())
    assert float(critic.read(batch, token_values).values.abs().max()) == 0.0, "a new value head predicts 0"
    with torch.no_grad():
        model.lm_head.weight.normal_(generator=torch.Generator().manual_seed(1))
        model.lm_head.bias.fill_(0.5)
    found = critic.read(batch, token_values, 40)
    for row, (ids, mask) in enumerate(zip(batch.tokens, batch.loss_mask, strict=True)):
        with torch.no_grad():
            states = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
            values = (states @ model.lm_head.weight[0] + 0.5).tolist()
        expected = [values[t - 1] for t in range(1, len(ids)) if mask[t]]
        assert found[row].tolist() == pytest.approx(expected, abs=1e-4)


def test_give_value_head_does_not_change_a_tied_embedding() -> None:
    model, before = give_value_head(qwen3(tied=True)), qwen3(tied=True)
    assert torch.equal(model.get_input_embeddings().weight, before.get_input_embeddings().weight)
    assert model.lm_head.weight.shape == (1, 16)
    names = Policy(model, settings()).state().model
    assert "lm_head.weight" in names and "model.embed_tokens.weight" in names


def test_the_reference_model_gives_the_students_logprobs_bit_for_bit() -> None:
    """Equal weights must give a KL of exactly 0, or the KL penalty would have a gradient from the first step on."""
    batch = varied_batch()
    frozen = ReferenceModel(qwen3())
    own = Policy(qwen3(), settings()).logprobs(batch, 50)
    assert torch.equal(frozen.logprobs(batch, 50).values, own.values)
    assert not any(parameter.requires_grad for parameter in frozen.model.parameters())
    assert len(frozen.logprobs(varied_batch(rows=1), 50)) == 1
