"""A small project that uses Understudy as a typed library; read by mypy and pyright, never run."""

from pathlib import Path
from typing import Any

import understudy
from understudy.errors import ConfigError
from understudy.rollout.agents.agent import LoopContext
from understudy.types.prompt import Prompt
from understudy.types.trajectory import Trajectory


def reward(row: dict[str, Any], text: str) -> float:
    return float(text.strip() == row["answer"])


def follow(step: understudy.Step) -> None:
    number: int = step.step
    print(number, step.metrics["actor/loss"])


class Loop:
    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        tokens = context.renderer.render(prompt)
        await context.generate(tokens, context.sampling, 0)
        return []


def main() -> Path:
    try:
        run: understudy.Run = understudy.distill(
            student="models/student",
            teacher="models/teacher",
            data=[{"prompt": "1+1=", "answer": "2"}],
            reward=reward,
            on_step=follow,
            trainer__steps=3,
        )
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    folder: Path = run.dir
    return folder
