"""Supervised training of the calculator models on whole conversations. Plain torch, no framework.

Shape letters: B conversations, T tokens, V vocabulary.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from problems import Turn
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

IGNORED = -100
WARMUP_STEPS = 50
"""At most; a short training warms up over a fifth of its steps."""


@dataclass(frozen=True)
class Schedule:
    """How long one model is trained. Learning rate: short warm-up, then linear to zero."""

    steps: int
    rows: dict[str, int]
    """Conversations of each kind in a step."""
    seed: int
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    clip: float = 1.0

    def rate(self, step: int) -> float:
        warmup = min(1.0, (step + 1) / min(WARMUP_STEPS, 1 + self.steps // 5))
        return self.learning_rate * warmup * (1.0 - step / self.steps)


@dataclass(frozen=True)
class Encoded:
    """Right-padded conversations: `labels_BT[t]` is what the logits at `t` must predict."""

    tokens_BT: torch.Tensor
    labels_BT: torch.Tensor
    lengths_B: torch.Tensor

    def rows(self, index_B: torch.Tensor) -> "Encoded":
        longest = int(self.lengths_B[index_B].max())
        return Encoded(
            self.tokens_BT[index_B, :longest], self.labels_BT[index_B, :longest], self.lengths_B[index_B]
        )


def encode(tokenizer: PreTrainedTokenizerFast, conversations: Sequence[Sequence[Turn]]) -> Encoded:
    """Loss on the assistant's good turns and their <eos>, on nothing else."""
    eos, user, assistant, tool = (
        tokenizer.convert_tokens_to_ids(token) for token in ("<eos>", "<user>", "<assistant>", "<tool>")
    )
    marks = {"user": user, "assistant": assistant, "tool": tool}
    rows: list[tuple[list[int], list[bool]]] = []
    for turns in conversations:
        tokens, trained = [tokenizer.bos_token_id], [False]
        for turn in turns:
            said = tokenizer.encode(turn.content, add_special_tokens=False)
            said += [eos] if turn.role == "assistant" else []
            tokens += [marks[turn.role], *said]
            trained += [False, *[turn.trained] * len(said)]
        rows.append((tokens, trained))
    lengths = [len(tokens) for tokens, _ in rows]
    tokens_BT = torch.full((len(rows), max(lengths)), tokenizer.pad_token_id)
    labels_BT = torch.full_like(tokens_BT, IGNORED)
    for row, (tokens, trained) in enumerate(rows):
        ids, mask = torch.tensor(tokens), torch.tensor(trained)
        tokens_BT[row, : len(ids)] = ids
        labels_BT[row, : len(ids) - 1] = torch.where(mask[1:], ids[1:], IGNORED)
    return Encoded(tokens_BT, labels_BT, torch.tensor(lengths))


def _epochs(size: int, batch: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Row indices, `batch` at a time, each epoch in a new order; a short last batch is left out."""
    while True:
        yield from torch.randperm(size, generator=generator)[: size - size % batch].split(batch)


def train(model: Qwen3ForCausalLM, encoded: dict[str, Encoded], schedule: Schedule) -> None:
    """Runs exactly `schedule.steps` steps: no early stop, no checkpoint picked afterwards."""
    generator = torch.Generator().manual_seed(schedule.seed)
    batches = {
        name: _epochs(len(encoded[name].tokens_BT), rows, generator) for name, rows in schedule.rows.items()
    }
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=schedule.learning_rate, betas=(0.9, 0.98), weight_decay=schedule.weight_decay
    )
    model.train()
    started = time.monotonic()
    for step in range(schedule.steps):
        optimizer.param_groups[0]["lr"] = schedule.rate(step)
        loss_sum, label_count = torch.zeros(()), 0
        for name, indices in batches.items():
            batch = encoded[name].rows(next(indices))
            logits_BTV = model(input_ids=batch.tokens_BT, use_cache=False).logits
            loss_sum = loss_sum + torch.nn.functional.cross_entropy(
                logits_BTV.flatten(0, 1), batch.labels_BT.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            label_count += int((batch.labels_BT != IGNORED).sum())
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
