"""The single-turn agent loop: one prompt, one answer."""

from __future__ import annotations

from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.transcript import Transcript
from understudy.types.prompt import Prompt
from understudy.types.trajectory import Trajectory


class SingleTurn:
    """Renders the prompt, generates once."""

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        transcript = Transcript(context.renderer.render(prompt))
        transcript.write(
            await context.generate(transcript.tokens, context.sampling_after(len(transcript)), 0)
        )
        return [transcript.finish(context.row_key())]
