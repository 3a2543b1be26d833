"""An agent loop of two turns for runs on a cluster, with a few tokens of an environment between them."""

import numpy as np

from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.transcript import Transcript
from understudy.types.prompt import Prompt
from understudy.types.trajectory import Trajectory


class TwoTurns:
    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        transcript = Transcript(context.renderer.render(prompt))
        transcript.write(
            await context.generate(transcript.tokens, context.sampling_after(len(transcript)), 0)
        )
        transcript.observe(np.array([5, 6, 7], np.int32))
        transcript.write(
            await context.generate(transcript.tokens, context.sampling_after(len(transcript)), 1)
        )
        return [transcript.finish(context.row_key())]
