"""An agent loop with several outputs per session, some of them faulty on request, and the reward that goes with it."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.transcript import Transcript
from understudy.types.prompt import Prompt
from understudy.types.trajectory import Trajectory

TOO_LONG = 160
"""Tokens; the quickstart's models hold 128."""


class Outputs:
    """Generates `count` outputs per session. `trouble` maps "ordinal of the prompt/index of the output" to a
    fault: "long" is longer than the context, "strange" holds an id that the teacher refuses, "raise", "nan" and
    "hang" are what the reward does, "odd" is a metric that cannot be stored, "vast" a value that no worker can
    send."""

    def __init__(self, count: int = 2, trouble: Mapping[str, str] | None = None) -> None:
        self._count, self._trouble = count, dict(trouble or {})

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        outputs = []
        for index in range(self._count):
            transcript = Transcript(context.renderer.render(prompt))
            sampling = context.sampling_after(len(transcript))
            transcript.write(await context.generate(transcript.tokens, sampling, index))
            trouble = self._trouble.get(f"{prompt.ordinal}/{index}", "")
            outputs.append(_troubled(transcript.finish(context.row_key(index)), trouble))
        return outputs


def _troubled(one: Trajectory, trouble: str) -> Trajectory:
    more = {"long": np.full(TOO_LONG, 5, np.int32), "strange": np.array([60], np.int32)}.get(trouble)
    if trouble == "odd":
        return replace(one, metrics={"by_turn": {1: 2.0}})
    if trouble == "vast":
        return replace(one, extra={**one.extra, "number": {10**30: 1}})
    if more is None:
        return replace(one, extra={**one.extra, "trouble": trouble})
    n = len(more)
    return replace(
        one,
        tokens=np.concatenate([one.tokens, more]),
        loss_mask=np.concatenate([one.loss_mask, np.zeros(n, bool)]),
        behaviour_logprobs=np.concatenate([one.behaviour_logprobs, np.zeros(n, np.float32)]),
        weight_versions=np.concatenate([one.weight_versions, np.full(n, -1, np.int32)]),
    )


def reward(row: Mapping[str, Any], trajectory: Trajectory) -> float:
    trouble = trajectory.extra.get("trouble")
    if trouble == "raise":
        raise ValueError("no reward for this one")
    if trouble == "hang":
        time.sleep(3600)
    return float("nan") if trouble == "nan" else float(trajectory.tokens.sum() % 7)
