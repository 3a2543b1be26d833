"""Rollouts of very different length: most prompts are tried once or twice, a few dozens of times, one try after another.

Each try is a trajectory of its own (an agent that begins again with an empty context), so a long rollout is a long
chain of generations, as in agentic work, over models whose context is short. How often a prompt is tried is drawn from
its key with P(tries ≥ x) ≈ x^−1.2, at most `LONGEST`: the same prompts are long in every run.
"""

from __future__ import annotations

from hashlib import blake2b

from understudy.rollout.agent import LoopContext
from understudy.rollout.transcript import Transcript
from understudy.types.prompt import Prompt
from understudy.types.trajectory import Trajectory

LONGEST = 48
_TAIL = 1.2


def tries_of(key: str) -> int:
    share = (int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") + 1) / 2**64
    return min(LONGEST, int(share ** (-1 / _TAIL)))


class LongTail:
    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        tokens = context.renderer.render(prompt)
        outputs = []
        # Evaluation asks once.
        tries = 1 if prompt.key.startswith("eval-") else tries_of(prompt.key)
        for index in range(tries):
            transcript = Transcript(tokens)
            transcript.write(await context.generate(tokens, context.sampling_after(len(tokens)), index))
            outputs.append(transcript.finish(context.row_key(index)))
        return outputs
