"""An agent loop with long-tailed lengths: most prompts get one or two tries, a few get sixteen.

Each try is a trajectory of its own (the agent begins again with an empty context). After it an environment
takes `ANSWER_SECONDS` to reject the answer, as a test run or a web page would. So a long rollout is a long
chain of generations and waits, as in agentic work, over models whose context is short. The number of tries
is drawn from the prompt's key with P(tries ≥ x) ≈ x^−1.2, at most `LONGEST`: the same prompts are long in
every run, sync or async.
"""

from __future__ import annotations

import asyncio
from hashlib import blake2b

from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.transcript import Transcript
from understudy.types.prompt import Prompt
from understudy.types.trajectory import Trajectory

LONGEST = 16
ANSWER_SECONDS = 0.2
_TAIL = 1.2


def tries_of(key: str) -> int:
    share = (int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") + 1) / 2**64
    return min(LONGEST, int(share ** (-1 / _TAIL)))


class LongTail:
    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        tokens = context.renderer.render(prompt)
        outputs = []
        # Evaluation makes one try, without waiting for the environment.
        asked_once = prompt.key.startswith("eval-")
        for index in range(1 if asked_once else tries_of(prompt.key)):
            transcript = Transcript(tokens)
            transcript.write(await context.generate(tokens, context.sampling_after(len(tokens)), index))
            outputs.append(transcript.finish(context.row_key(index)))
            if not asked_once:
                await asyncio.sleep(ANSWER_SECONDS)
        return outputs
