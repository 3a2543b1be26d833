"""Measures a model's accuracy and its KL to its teacher, with the trainer's own engine and rewards.

One engine per architecture; weights are copied in, so many checkpoints of one student are graded without
loading a model again.

Shape letters: B rows, T tokens, V vocabulary.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from understudy.engines.base import Sampling
from understudy.rollout.agents.registry import LoopChoice
from understudy.rollout.dataset import load_dataset
from understudy.rollout.render import Renderer
from understudy.rollout.rewards.rewards import Rewards, load_reward
from understudy.trainers.evaluation.evaluate import eval_prompts, measures
from understudy.trainers.evaluation.evaluator import Evaluator
from understudy.trainers.models import copy_weights, load_model
from understudy.types.prompt import Prompt
from understudy.types.trajectory import Trajectory

GSM8K = "understudy.rollout.rewards.builtin:gsm8k"
MAX_BATCH = 256
_DEADLINE_SECONDS = 600.0
"""Of one answer and its reward."""
_ROWS_AT_ONCE = 32
"""Rows whose logits over the whole vocabulary are held at once."""


def read_prompts(path: Path, count: int | None = None) -> list[Prompt]:
    return eval_prompts(load_dataset(path), count)


class Grader:
    """A model folder with an engine around it."""

    def __init__(
        self, folder: Path, max_new_tokens: int, context: int, max_batch: int = MAX_BATCH, reward: str = GSM8K
    ) -> None:
        on_gpu = torch.cuda.is_available()
        loaded = load_model(str(folder), dtype="bfloat16" if on_gpu else "float32")
        self.model, self.device = loaded.model.eval(), loaded.device
        self._engine = loaded.copy().engine(max_batch, max_length=context)
        self._loops = asyncio.Runner()
        renderer = Renderer(loaded.tokenizer, context=context, reserve=max_new_tokens)
        self.decode, self._version = renderer.decode, 0
        self._evaluator = Evaluator(
            self._engine,
            LoopChoice("single_turn", {}),
            Rewards([load_reward(reward)], renderer),
            renderer,
            Sampling(max_new_tokens, loaded.stop_ids),
            context,
            max_batch,
            deadline_seconds=_DEADLINE_SECONDS,
        )

    def take(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Sets the weights that are measured from now on."""
        copy_weights(self.model, weights)
        self._version += 1
        own = list(self.model.named_parameters())
        self._loops.run(self._engine.update_weights(self._version, own))

    def answers(self, prompts: Sequence[Prompt]) -> list[Trajectory]:
        """Greedy answers."""
        return self._loops.run(self._evaluator.greedy(prompts))

    def accuracy(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Accuracy of greedy answers: `accuracy`, and `accuracy/SOURCE` for each data source."""
        return measures(prompts, self.answers(prompts), [], 1.0)

    @torch.inference_mode()
    def distance(self, teachers: Mapping[str, Any], prompts: Sequence[Prompt]) -> float:
        """KL(student ‖ teacher) per token, exact over the vocabulary, on one answer per prompt that the
        student samples at temperature 1. Each prompt has its own seed. Teachers are chosen by data source;
        the teacher named "" scores prompts of all remaining sources."""
        samples = [one[0] for one in self._loops.run(self._evaluator.sampled(prompts, 1))]
        scored: dict[str, list[Trajectory]] = {}
        for prompt, row in zip(prompts, samples, strict=True):
            scored.setdefault(prompt.data_source if prompt.data_source in teachers else "", []).append(row)
        total, count = 0.0, 0
        for source, rows in scored.items():
            rows.sort(key=lambda row: len(row.tokens))
            for start in range(0, len(rows), _ROWS_AT_ONCE):
                piece = rows[start : start + _ROWS_AT_ONCE]
                summed, tokens = self._summed_divergence(teachers[source], piece)
                total, count = total + summed, count + tokens
        return total / count

    def _summed_divergence(self, teacher: Any, rows: Sequence[Trajectory]) -> tuple[float, int]:
        longest = max(len(row.tokens) for row in rows)
        tokens_BT = torch.zeros((len(rows), longest), dtype=torch.long)
        written_BT = torch.zeros((len(rows), longest), dtype=torch.bool)
        for index, row in enumerate(rows):
            tokens_BT[index, : len(row.tokens)] = torch.from_numpy(row.tokens).long()
            written_BT[index, : len(row.tokens)] = torch.from_numpy(row.loss_mask)
        predicted_BT = written_BT[:, 1:].to(self.device)
        ours_NV, theirs_NV = (
            model(input_ids=tokens_BT.to(self.device), use_cache=False)
            .logits[:, :-1][predicted_BT]
            .float()
            .log_softmax(-1)
            for model in (self.model, teacher)
        )
        divergence_N = (ours_NV.exp() * (ours_NV - theirs_NV)).sum(-1)
        return float(divergence_N.double().sum()), len(divergence_N)

    def close(self) -> None:
        self._loops.run(self._engine.close())
        self._loops.close()
