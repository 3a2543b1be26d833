"""An agent loop whose tool runs code that tries to harm the run, in the sandbox that a model's own code gets."""

from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.transcript import Transcript
from understudy.rollout.tools.base import ToolOutcome
from understudy.rollout.tools.library import PythonTool
from understudy.rollout.tools.sandbox import Sandbox
from understudy.types.prompt import Prompt
from understudy.types.trajectory import Trajectory

CODE = {
    "hang": "while True: pass",
    "deaf": "import signal, time\nfor one in (1, 2, 15): signal.signal(one, signal.SIG_IGN)\ntime.sleep(600)",
    "memory": "x = [b'x' * (1 << 20) for _ in range(10_000)]",
    "forks": "import os\nwhile True: os.fork()",
    "kill": "import os, signal\nos.kill(-1, signal.SIGKILL)\nos.kill(os.getppid(), signal.SIGKILL)\nraise SystemExit(1)",
}
"""Programs that cannot succeed in the sandbox."""
_ENDLESS = "print(chr(27) + '[2J' + chr(0) + chr(0x202e))\nwhile True: print('x' * 4096)"
"""Writes control characters, then more output than the tool reads."""
_EVERY = 8
"""Of this many sessions, one runs harmful code and one writes output without end."""


class Hostile:
    def __init__(self) -> None:
        self._tool = PythonTool(Sandbox(memory_mb=256))

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        number, rest = divmod(prompt.ordinal, _EVERY)
        if rest == 0:
            name = list(CODE)[number % len(CODE)]
            result = await self._tool.call({"code": CODE[name]}, deadline_s=0.7)
            if result.outcome is ToolOutcome.OK:
                raise RuntimeError(f"the tool {name!r} ended well: {result.text[:200]}")
        elif rest == 1:
            result = await self._tool.call({"code": _ENDLESS}, deadline_s=5.0)
            if len(result.text) > 20_000:
                raise RuntimeError(f"the tool's output has {len(result.text):,} characters")
        transcript = Transcript(context.renderer.render(prompt))
        sampling = context.sampling_after(len(transcript))
        transcript.write(await context.generate(transcript.tokens, sampling, 0))
        return [transcript.finish(context.row_key(0))]
