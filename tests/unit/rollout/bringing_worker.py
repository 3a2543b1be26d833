"""A worker whose keeper brings tokens: what is written is a function of them, and of what the grant's address says to do."""

import asyncio
import os

import numpy as np

from understudy.engines.base import Generation, Sampling
from understudy.engines.remote_tokens import CallGivenUp, Grant, NotBrought
from understudy.engines.servers.worker_client import Leg
from understudy.rollout.render import Renderer
from understudy.rollout.workers import process as worker
from understudy.rollout.workers.messages import Setup
from understudy.types.prompt import Prompt
from understudy.types.trajectory import StopReason, Trajectory


def written(tokens: np.ndarray, sampling: Sampling, seed: int) -> Generation:
    n = min(int(tokens.sum() + seed) % 9 + 1, sampling.max_new_tokens)
    return Generation(
        np.arange(3, 3 + n, dtype=np.int32),
        np.full(n, -0.5, np.float32),
        np.arange(n, dtype=np.int32),
        StopReason.LENGTH,
    )


class Bringing:
    def __init__(self, setup: Setup, renderer: Renderer) -> None:
        self.errands: dict[str, object] = {}

    async def bring(self, grant: Grant, tokens: np.ndarray, sampling: Sampling, leg: Leg) -> Generation:
        match grant.url:
            case "die":
                os._exit(7)
            case "hang":
                await asyncio.Event().wait()
            case "unreachable":
                raise NotBrought("no way")
            case "given up":
                raise CallGivenUp("somebody knows why")
        return written(tokens, sampling, grant.seed)

    async def keep(self, prompt: Prompt, trajectories: list[Trajectory], ticket: int) -> bytes:
        (one,) = trajectories
        return one.tokens[one.loss_mask].tobytes() + f"|{os.getpid()}".encode()

    async def close(self) -> None:
        return


if __name__ == "__main__":
    worker.main(Bringing)  # type: ignore[arg-type]
