"""Supervised training of a causal language model: how recipes make teachers and first students.

A plain loop for models that fit one device. It is used before a distillation run, and as a baseline for one.

Shape letters: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from understudy.policy.load import switch_off_router_noise

IGNORED = -100
_PRINT_EVERY = 50
Row = tuple[Sequence[int], Sequence[bool]]
"""Tokens, and for each whether it is trained."""


@dataclass(frozen=True)
class SupervisedSchedule:
    """How one model is trained. Learning rate: short warm-up, then linear to zero, or constant."""

    steps: int
    rows: Mapping[str, int]
    """Rows of each set of examples in a step."""
    seed: int
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    clip: float = 1.0
    warmup_steps: int = 50
    decay: Literal["linear", "none"] = "linear"

    def rate(self, step: int) -> float:
        warmup = min(1.0, (step + 1) / self.warmup_steps)
        return self.learning_rate * warmup * (1.0 - step / self.steps if self.decay == "linear" else 1.0)


@dataclass(frozen=True)
class Encoded:
    """Right-padded rows: `labels_BT[t]` is what the logits at `t` must predict."""

    tokens_BT: torch.Tensor
    labels_BT: torch.Tensor
    lengths_B: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens_BT)

    def rows(self, index_B: torch.Tensor) -> Encoded:
        """Some of the rows, cut to the longest of them."""
        longest = int(self.lengths_B[index_B].max())
        return Encoded(
            self.tokens_BT[index_B, :longest], self.labels_BT[index_B, :longest], self.lengths_B[index_B]
        )


def pad_rows(rows: Sequence[Row], pad_id: int) -> Encoded:
    """Loss only on the tokens marked as trained. Padding is on the right, where causal attention never
    looks."""
    lengths = [len(tokens) for tokens, _ in rows]
    tokens_BT = torch.full((len(rows), max(lengths)), pad_id)
    labels_BT = torch.full_like(tokens_BT, IGNORED)
    for index, (tokens, trained) in enumerate(rows):
        ids, mask = torch.tensor(tokens), torch.tensor(trained)
        tokens_BT[index, : len(ids)] = ids
        labels_BT[index, : len(ids) - 1] = torch.where(mask[1:], ids[1:], IGNORED)
    return Encoded(tokens_BT, labels_BT, torch.tensor(lengths))


def encode_chats(
    tokenizer: Any, chats: Sequence[tuple[Sequence[Mapping[str, Any]], str]], end: int
) -> Encoded:
    """(messages, answer) pairs by the tokenizer's own chat template; the answer and `end` after it are trained.

    `end` is the id with which rollouts end a turn of a chat (`rollout.render.answer_end`). It need not be the
    tokenizer's eos: a base model of Qwen has `<|endoftext|>`, and its template writes `<|im_end|>`.
    """
    rows: list[Row] = []
    for messages, answer in chats:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        answer_ids = [*tokenizer.encode(answer, add_special_tokens=False), end]
        rows.append(([*prompt, *answer_ids], [False] * len(prompt) + [True] * len(answer_ids)))
    return pad_rows(rows, tokenizer.pad_token_id)


def _epochs(size: int, batch: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Row indices, `batch` at a time, each epoch in a new order; a short last batch is left out."""
    while True:
        yield from torch.randperm(size, generator=generator)[: size - size % batch].split(batch)


def train(
    model: Any,
    encoded: Mapping[str, Encoded],
    schedule: SupervisedSchedule,
    after_step: Callable[[int], bool] | None = None,
    rows_at_once: int | None = None,
) -> int:
    """Runs `schedule.steps` steps, fewer only if `after_step(steps taken)` returns False; returns how many.

    The model is trained on the device it is on; on a GPU in bfloat16 over float32 weights. `rows_at_once`
    bounds the rows of one forward and backward, and so the memory; if not set, a step is one pass. Routers of experts add no
    noise, as in a distillation run.
    """
    generator = torch.Generator().manual_seed(schedule.seed)
    batches = {name: _epochs(len(encoded[name]), rows, generator) for name, rows in schedule.rows.items()}
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=schedule.learning_rate, betas=(0.9, 0.98), weight_decay=schedule.weight_decay
    )
    switch_off_router_noise(model)
    model.train()
    started, taken = time.monotonic(), 0
    for step in range(schedule.steps):
        optimizer.param_groups[0]["lr"] = schedule.rate(step)
        chosen = [(encoded[name], next(indices)) for name, indices in batches.items()]
        loss = _backward(model, chosen, rows_at_once)
        torch.nn.utils.clip_grad_norm_(model.parameters(), schedule.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        taken = step + 1
        if taken % _PRINT_EVERY == 0 or taken == schedule.steps:
            seconds = time.monotonic() - started
            print(f"  step {taken:4d}/{schedule.steps}  loss {loss.item():.4f}  {seconds:.0f} s", flush=True)
        if after_step is not None and not after_step(taken):
            break
    model.eval()
    return taken


def _backward(
    model: Any, chosen: Sequence[tuple[Encoded, torch.Tensor]], rows_at_once: int | None
) -> torch.Tensor:
    """Adds up the gradients of the mean cross-entropy over all trained tokens of the step; returns that mean."""
    labels = sum(int((examples.labels_BT[index_B] != IGNORED).sum()) for examples, index_B in chosen)
    if rows_at_once is None:
        loss = _summed_loss(model, [examples.rows(index_B) for examples, index_B in chosen]) / labels
        loss.backward()
        return loss.detach()
    total = torch.zeros(())
    for examples, index_B in chosen:
        for piece_B in index_B.split(rows_at_once):
            loss = _summed_loss(model, [examples.rows(piece_B)]) / labels
            loss.backward()
            total = total.to(loss.device) + loss.detach()
    return total


def _summed_loss(model: Any, batches: Sequence[Encoded]) -> torch.Tensor:
    device = next(model.parameters()).device
    narrow = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
    loss_sum = torch.zeros((), device=device)
    for batch in batches:
        with narrow:
            logits_BTV = model(input_ids=batch.tokens_BT.to(device), use_cache=False).logits
        loss_sum = loss_sum + torch.nn.functional.cross_entropy(
            logits_BTV.float().flatten(0, 1),
            batch.labels_BT.to(device).flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
    return loss_sum
