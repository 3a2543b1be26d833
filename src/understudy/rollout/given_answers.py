"""Off-policy rows: the answer comes with the data, and the student reads it instead of writing one.

    tokens [prompt │ answer, end of turn]   loss on the answer; no behaviour logprobs, no weight version

Which sessions take the given answer is drawn by hash, so it depends neither on order nor on timing.
"""

from __future__ import annotations

import numpy as np

from understudy.engines.base import Sampling
from understudy.errors import DataError
from understudy.rollout.render import Renderer
from understudy.rollout.seeds import hash63
from understudy.types.prompt import Prompt
from understudy.types.trajectory import StopReason, Trajectory

OFF_POLICY = "off_policy"
"""The metric that labels each row of a run with given answers: 1.0 or 0.0."""


def takes_given_answer(run_seed: int, prompt: Prompt, session: int, share: float) -> bool:
    drawn = hash63("off_policy", run_seed, prompt.epoch, prompt.key, session)
    return drawn < share * 2.0**63


def given_answer(prompt: Prompt, column: str, key: str, renderer: Renderer, sampling: Sampling) -> Trajectory:
    """The row's own answer as a trajectory, cut at `max_new_tokens`. Raises `DataError` if the row has none."""
    text = prompt.columns.get(column)
    if not isinstance(text, str) or not text:
        raise DataError(
            f"prompt {prompt.key}: rollout.off_policy takes the answer from the column {column!r}, which "
            f"{'is missing or empty' if not text else f'is a {type(text).__name__}'}; expected text"
        )
    start = renderer.render(prompt)
    tokenizer = renderer.tokenizer
    end = tokenizer.eos_token_id if tokenizer.eos_token_id in sampling.stop_ids else sampling.stop_ids[0]
    answer = [*tokenizer.encode(text, add_special_tokens=False), end]
    whole = len(answer) <= sampling.max_new_tokens
    answer = answer[: sampling.max_new_tokens]
    tokens = np.concatenate([start, np.array(answer, np.int32)]).astype(np.int32)
    return Trajectory(
        key=key,
        tokens=tokens,
        loss_mask=np.arange(len(tokens)) >= len(start),
        behaviour_logprobs=np.full(len(tokens), np.nan, np.float32),
        weight_versions=np.full(len(tokens), -1, np.int32),
        stop_reason=StopReason.EOS if whole else StopReason.LENGTH,
        metrics={OFF_POLICY: 1.0},
    )
