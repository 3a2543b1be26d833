"""What became of a prompt's sessions, for teachers whose prompts show it (`session` in `teachers.NAME.prompt`).

    session 0 ──rolled out──┐
    session 1 ──rolled out──┼── all are: each is scored, and may show the others' right answer
    session 2 ──failed──────┘

Sessions wait for each other only if a prompt shows another session's answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from understudy.rollout.render import Renderer
from understudy.rollout.rewards.rewards import last_turn
from understudy.rollout.teacher_prompts import SessionFacts
from understudy.trainers.call_batching import CallBatcher
from understudy.trainers.produce.rollouts import Output
from understudy.types.trajectory import FEEDBACK, Trajectory


class GroupOutputs:
    """The outputs of one prompt's sessions. Used by the sessions' tasks on the event loop."""

    def __init__(self, sessions: int, renderer: Renderer, solved_at: float) -> None:
        """`sessions`: how many are produced. `solved_at`: the least reward of a right answer."""
        self._missing = sessions
        self._renderer, self._solved_at = renderer, solved_at
        self._outputs: dict[int, list[Trajectory]] = {}
        self._waiting: list[tuple[CallBatcher, asyncio.Future[None]]] = []

    def add(self, session: int, outputs: Sequence[Output]) -> None:
        """A session's outputs; none if it failed. Only the first call for a session counts."""
        if session in self._outputs:
            return
        self._outputs[session] = [one for one in outputs if isinstance(one, Trajectory)]
        self._missing -= 1
        if self._missing == 0:
            for batcher, waiting in self._waiting:
                if not waiting.done():
                    batcher.resume()  # before this session's next call: see `CallBatcher.resume`
                    waiting.set_result(None)

    async def complete(self, batcher: CallBatcher) -> None:
        """Returns when every session has been added."""
        if self._missing == 0:
            return
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append((batcher, waiting))
        batcher.pause()
        try:
            await waiting
        except asyncio.CancelledError:
            if waiting.cancelled():
                batcher.resume()
            raise

    def facts(self, session: int, row: Trajectory) -> SessionFacts:
        others = [
            one for number in sorted(self._outputs) if number != session for one in self._outputs[number]
        ]
        solved = [one for one in others if one.reward is not None and one.reward >= self._solved_at]
        return SessionFacts(
            text=self._text(row),
            reward=row.reward,
            feedback=str(row.extra.get(FEEDBACK, "")),
            solution=self._text(solved[0]) if solved else None,
        )

    def _text(self, row: Trajectory) -> str:
        return self._renderer.decode(last_turn(row))
