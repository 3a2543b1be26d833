"""Supervised training: its labels, its steps, its learning rate and its end."""

import pytest
import torch
from chat_tokenizers import ENDS, FAMILIES, chat_tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from understudy.policy.supervised import (
    IGNORED,
    Encoded,
    SupervisedSchedule,
    encode_chats,
    pad_rows,
    train,
)
from understudy.rollout.render import answer_end, turn_end
from understudy.trainers.models import stop_ids

PAD = 0


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    return LlamaForCausalLM(config)


def examples() -> Encoded:
    """After [1, x] comes x + 1, then 2."""
    rows = [([1, x, x + 1, 2], [False, False, True, True]) for x in range(3, 15)]
    return pad_rows(rows, PAD)


def test_labels_are_shifted_by_one_and_set_only_for_trained_tokens() -> None:
    encoded = pad_rows([([1, 5, 6, 2], [False, False, True, True]), ([1, 7], [False, True])], PAD)
    assert encoded.tokens_BT.tolist() == [[1, 5, 6, 2], [1, 7, PAD, PAD]]
    assert encoded.labels_BT.tolist() == [[IGNORED, 6, 2, IGNORED], [7, IGNORED, IGNORED, IGNORED]]
    assert encoded.rows(torch.tensor([1])).tokens_BT.tolist() == [[1, 7]]


@pytest.mark.parametrize("stops_there", [True, False])
@pytest.mark.parametrize("family", [*FAMILIES, *ENDS])
def test_a_trained_answer_ends_with_the_templates_end_token_if_generation_stops_at_it(
    family: str, stops_there: bool
) -> None:
    """The eos of Qwen's base models and of Gemma 3 is not the token that their template writes at the end of a turn.
    Qwen's instruct models stop at both."""
    tokenizer, model = chat_tokenizer(family), tiny()
    eos, written = tokenizer.eos_token_id, turn_end(tokenizer)
    model.generation_config = GenerationConfig(eos_token_id=[eos, written] if stops_there else eos)
    end = answer_end(tokenizer, stop_ids(model, tokenizer), written)
    expected = tokenizer.convert_tokens_to_ids(ENDS.get(family, tokenizer.eos_token)) if stops_there else eos
    labels_BT = encode_chats(tokenizer, [([{"role": "user", "content": "2+2?"}], "4")], end).labels_BT
    trained = labels_BT[labels_BT != IGNORED].tolist()
    assert trained == [*tokenizer.encode("4", add_special_tokens=False), expected]
    assert answer_end(tokenizer, stop_ids(model, tokenizer)) == eos, "plain text does not end with eos"


def test_training_teaches_the_model_its_examples() -> None:
    model, encoded = tiny(), examples()
    with torch.no_grad():
        logprobs = model(input_ids=encoded.tokens_BT).logits.log_softmax(-1)
    before = -torch.stack([logprobs[:, 1].gather(1, encoded.tokens_BT[:, 2:3]), logprobs[:, 2, 2:3]]).mean()
    taken = train(
        model,
        {"all": encoded},
        SupervisedSchedule(60, {"all": 12}, seed=1, learning_rate=1e-2, warmup_steps=5),
    )
    assert taken == 60 and not model.training
    predicted = model(input_ids=encoded.tokens_BT).logits.argmax(-1)
    assert before > 2.0 and predicted[:, 1].tolist() == encoded.tokens_BT[:, 2].tolist()


def test_training_ends_when_the_callback_returns_false() -> None:
    seen: list[int] = []

    def continue_training(step: int) -> bool:
        seen.append(step)
        return step < 3

    assert (
        train(tiny(), {"all": examples()}, SupervisedSchedule(50, {"all": 4}, seed=1), continue_training) == 3
    )
    assert seen == [1, 2, 3]


def test_a_step_over_several_micro_batches_gives_the_weights_of_one_micro_batch() -> None:
    whole, pieces = tiny(), tiny()
    schedule = SupervisedSchedule(3, {"all": 12}, seed=1, learning_rate=1e-2, warmup_steps=1)
    train(whole, {"all": examples()}, schedule)
    train(pieces, {"all": examples()}, schedule, rows_at_once=5)
    for one, other in zip(whole.parameters(), pieces.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_the_learning_rate_warms_up_and_then_decays_or_stays_constant() -> None:
    falling = SupervisedSchedule(100, {}, seed=0, learning_rate=1.0, warmup_steps=10)
    flat = SupervisedSchedule(100, {}, seed=0, learning_rate=1.0, warmup_steps=10, decay="none")
    assert falling.rate(0) == 0.1 and falling.rate(99) < 0.011 and falling.rate(50) == 0.5
    assert flat.rate(0) == 0.1 and flat.rate(50) == flat.rate(99) == 1.0
