"""Supervised training and greedy grading of the quickstart models.

Shape letters: B problems, T tokens.
"""

import torch
from task import Problem
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from understudy.policy.supervised import Encoded, SupervisedSchedule, encode_chats
from understudy.policy.supervised import train as train_supervised

MAX_NEW_TOKENS = 8
"""The longest answer is six letters and <eos>; one more shows a model that does not stop."""


def render_prompt(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> list[int]:
    chat = [{"role": "user", "content": problem.question}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def encode(tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> Encoded:
    """Loss only on the answer and its <eos>: the student does not write the prompt."""
    chats = [([{"role": "user", "content": problem.question}], problem.answer) for problem in problems]
    return encode_chats(tokenizer, chats, tokenizer.eos_token_id)


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: dict[str, list[Problem]],
    schedule: SupervisedSchedule,
) -> None:
    """Runs exactly `schedule.steps` steps: no early stop, no checkpoint picked afterwards."""
    train_supervised(model, {name: encode(tokenizer, problems[name]) for name in schedule.rows}, schedule)


@torch.inference_mode()
def greedy_answers(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[Problem]
) -> list[str]:
    """What the model writes, special tokens left out of the text."""
    prompts = [render_prompt(tokenizer, problem) for problem in problems]
    padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    written_BT = model.generate(
        input_ids=padded["input_ids"],
        attention_mask=padded["attention_mask"],
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
    )[:, padded["input_ids"].shape[1] :]
    return tokenizer.batch_decode(written_BT, skip_special_tokens=True)


def accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> float:
    answers = greedy_answers(model, tokenizer, problems)
    right = sum(answer == problem.answer for answer, problem in zip(answers, problems, strict=True))
    return right / len(problems)
