"""Given answers: the row's own answer becomes the trajectory, and no engine writes (`rollout.off_policy`).

    tokens [prompt │ answer, end of turn]   loss on the answer; origin "data"; no logprobs, no weight version

A hash decides which sessions take the given answer, so neither order nor timing changes it.
"""

from __future__ import annotations

import numpy as np

from understudy.errors import DataError
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.dataset import answer_text
from understudy.rollout.render import answer_end
from understudy.rollout.seeds import hash63
from understudy.types.prompt import Prompt
from understudy.types.trajectory import Origin, StopReason, Trajectory


def takes_given_answer(run_seed: int, prompt: Prompt, session: int, share: float) -> bool:
    return hash63("off_policy", run_seed, prompt.epoch, prompt.key, session) < share * 2.0**63


class GivenAnswer:
    """The loop of a session whose answer is in the column `LoopContext.given`. It never generates."""

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        start = context.renderer.render(prompt)
        most = context.sampling_after(len(start)).max_new_tokens
        written = context.renderer.turn_end if prompt.text is None else None
        end = answer_end(context.renderer.tokenizer, context.sampling.stop_ids, written)
        answer = np.array([*self._text_ids(prompt, context), end], np.int32)
        tokens = np.concatenate([start, answer[:most]]).astype(np.int32)
        return [
            Trajectory(
                key=context.row_key(),
                tokens=tokens,
                loss_mask=np.arange(len(tokens)) >= len(start),
                behaviour_logprobs=np.full(len(tokens), np.nan, np.float32),
                weight_versions=np.full(len(tokens), -1, np.int32),
                stop_reason=StopReason.EOS if len(answer) <= most else StopReason.LENGTH,
                origin=Origin.DATA,
            )
        ]

    def _text_ids(self, prompt: Prompt, context: LoopContext) -> list[int]:
        assert context.given is not None
        try:
            text = answer_text(prompt.columns.get(context.given))
        except ValueError as error:
            raise DataError(
                f"prompt {prompt.key}: rollout.off_policy takes the answer from the column {context.given!r}, which is {error}; "
                "expected text, or a list with one assistant message"
            ) from None
        ids: list[int] = context.renderer.tokenizer.encode(text, add_special_tokens=False)
        return ids
