"""The agent-loop protocol: a prompt and a way to generate go in, one trajectory or several come out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from understudy.engines.base import Generation, Sampling
from understudy.engines.remote_tokens import Bearer
from understudy.errors import DataError
from understudy.rollout.render import Renderer
from understudy.types.prompt import Prompt, row_key
from understudy.types.trajectory import Trajectory

Generate = Callable[[np.ndarray, Sampling, int], Awaitable[Generation]]
"""(tokens, sampling, turn) → what the student wrote. `turn` names the randomness: give each generation of a session
its own, counted from 0."""

FarGenerate = Callable[[int, int, int, Bearer], Awaitable[Generation]]
"""(how many tokens, how many more at most, turn, who has them) → how many were written."""


@dataclass(frozen=True, slots=True)
class LoopContext:
    """What a loop is given for one session of one prompt."""

    generate: Generate
    renderer: Renderer
    sampling: Sampling
    """Its `max_new_tokens` is the budget of one turn."""
    prompt_key: str
    session: int
    """Which of the prompt's n rollouts this is."""
    context: int
    """The longest sequence a rollout may be."""
    max_generated: int | None = None
    """Tokens the student may write in all turns of one trajectory; None leaves that to the context."""
    generate_far: FarGenerate | None = None
    """The same where the loop runs in a worker that brings tokens to the engine itself; never a loop's to call."""
    judging: Callable[[int], None] | None = None
    """Told, where a worker judges the outputs itself, how many there are when it begins to; never a loop's to call."""

    def spent(self, generated: int) -> bool:
        """Whether a trajectory in which the student wrote this many tokens may have no more."""
        return self.max_generated is not None and generated >= self.max_generated

    def sampling_after(self, length: int, generated: int = 0) -> Sampling:
        """The sampling of a turn that starts after `length` tokens, `generated` of them the student's own: its budget shrinks to
        what is left of the context and of the trajectory."""
        room = self.context - length
        if room < 1:
            raise DataError(
                f"{self.row_key()} has {length} tokens; the context is {self.context}, so no token can follow"
            )
        if self.max_generated is not None:
            room = min(room, max(self.max_generated - generated, 1))
        if room >= self.sampling.max_new_tokens:
            return self.sampling
        return replace(self.sampling, max_new_tokens=room)

    def row_key(self, index: int = 0) -> str:
        """The key of this session's `index`-th trajectory."""
        return row_key(self.prompt_key, self.session, index)


def check_ids(one: Trajectory, sampling: Sampling) -> None:
    """`DataError` for a trajectory with an id that the student or a model beside it has no token for: a prompt, a tool or a server that
    cannot be told may bring one in. The row fails, not the run."""
    usable = sampling.usable
    at = None if usable is None else usable.first_unusable(one.tokens)
    if usable is not None and at is not None:
        raise DataError(
            f"row {one.key}: token id {one.tokens[at]} at position {at} has no token for the student or for a model beside it (teacher, "
            f"critic, reference); ids that all of them have are below {usable.limit}"
        )


class AgentLoop(Protocol):
    """One way to attempt a prompt.

    Several trajectories may come out of one run (a sub-agent, a branch, a context reset): each is scored by the
    teacher and trained on. Their keys are `context.row_key(0)`, `context.row_key(1)`, …
    """

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]: ...


def checked_outputs(outputs: list[Trajectory], context: LoopContext) -> list[Trajectory]:
    """What a loop returned, whose keys must be those of outputs 0, 1, … of its session."""
    keys = [one.key for one in outputs]
    if not keys or sorted(keys) != sorted(context.row_key(index) for index in range(len(keys))):
        raise DataError(
            f"the agent loop returned {len(keys)} trajectories for session {context.row_key()} ({', '.join(keys) or 'none'}); "
            "expected one or more, with the keys context.row_key(0), context.row_key(1), …"
        )
    return outputs
