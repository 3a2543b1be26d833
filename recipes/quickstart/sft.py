"""Supervised training and greedy grading of the quickstart models. Plain torch, no framework.

Shape letters: B problems, T tokens, V vocabulary.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from task import Problem
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

IGNORED = -100
WARMUP_STEPS = 50
MAX_NEW_TOKENS = 8
"""The longest answer is six letters and <eos>; one more shows a model that does not stop."""


@dataclass(frozen=True)
class Schedule:
    """How long and how hard one model is trained. Learning rate: short warm-up, then linear to zero."""

    steps: int
    rows_per_domain: dict[str, int]
    seed: int
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    clip: float = 1.0

    def rate(self, step: int) -> float:
        warmup = min(1.0, (step + 1) / WARMUP_STEPS)
        return self.learning_rate * warmup * (1.0 - step / self.steps)


@dataclass(frozen=True)
class Encoded:
    """Problems as right-padded tensors: `labels_BT[t]` is what the logits at `t` must predict."""

    tokens_BT: torch.Tensor
    labels_BT: torch.Tensor
    lengths_B: torch.Tensor

    def rows(self, index_B: torch.Tensor) -> "Encoded":
        return Encoded(self.tokens_BT[index_B], self.labels_BT[index_B], self.lengths_B[index_B])


def render_prompt(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> list[int]:
    chat = [{"role": "user", "content": problem.question}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def encode(tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> Encoded:
    """Loss only on the answer and its <eos>: the prompt is never the student's own writing."""
    prompts = [render_prompt(tokenizer, problem) for problem in problems]
    answers = [
        [*tokenizer.encode(problem.answer, add_special_tokens=False), tokenizer.eos_token_id]
        for problem in problems
    ]
    lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    tokens_BT = torch.full((len(problems), max(lengths)), tokenizer.pad_token_id)
    labels_BT = torch.full_like(tokens_BT, IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        tokens_BT[row, :end] = torch.tensor(prompt + answer)
        labels_BT[row, len(prompt) - 1 : end - 1] = torch.tensor(answer)
    return Encoded(tokens_BT, labels_BT, torch.tensor(lengths))


def _epochs(size: int, batch: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Row indices, `batch` at a time, each epoch in a new order; a short last batch is left out."""
    while True:
        yield from torch.randperm(size, generator=generator)[: size - size % batch].split(batch)


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: dict[str, list[Problem]],
    schedule: Schedule,
) -> None:
    """Runs exactly `schedule.steps` steps: no early stop, no checkpoint picked afterwards."""
    encoded = {name: encode(tokenizer, problems[name]) for name in schedule.rows_per_domain}
    generator = torch.Generator().manual_seed(schedule.seed)
    batches = {
        name: _epochs(len(encoded[name].tokens_BT), rows, generator)
        for name, rows in schedule.rows_per_domain.items()
    }
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=schedule.learning_rate, betas=(0.9, 0.98), weight_decay=schedule.weight_decay
    )
    model.train()
    started = time.monotonic()
    for step in range(schedule.steps):
        optimizer.param_groups[0]["lr"] = schedule.rate(step)
        loss_sum = torch.zeros(())
        label_count = 0
        for name, indices in batches.items():
            batch = encoded[name].rows(next(indices))
            longest = int(batch.lengths_B.max())
            logits_BTV = model(input_ids=batch.tokens_BT[:, :longest], use_cache=False).logits
            labels_BT = batch.labels_BT[:, :longest]
            loss_sum = loss_sum + torch.nn.functional.cross_entropy(
                logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            label_count += int((labels_BT != IGNORED).sum())
        loss = loss_sum / label_count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), schedule.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 50 == 0 or step + 1 == schedule.steps:
            seconds = time.monotonic() - started
            print(
                f"  step {step + 1:4d}/{schedule.steps}  loss {loss.item():.4f}  {seconds:.0f} s", flush=True
            )
    model.eval()


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
