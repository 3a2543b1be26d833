"""The agent-loop protocol: takes a prompt and a generate function, returns one or more trajectories."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Protocol, TypeVar, cast

import numpy as np

from understudy.engines.base import Generation, Sampling
from understudy.errors import DataError
from understudy.rollout.render import Renderer
from understudy.types.prompt import Prompt, row_key
from understudy.types.trajectory import Origin, StopReason, Trajectory

LOGPROB_SLACK = 1e-2
"""How far rounding may put a log-probability above 0."""


class Generate(Protocol):
    """(tokens, sampling, turn) → what the student wrote. `turn` is part of the seed: number the generations
    of a session from 0, each with its own. `media`: the pictures of the tokens, if not `LoopContext.media`."""

    def __call__(
        self, tokens: np.ndarray, sampling: Sampling, turn: int, media: Sequence[str] | None = None
    ) -> Awaitable[Generation]: ...


@dataclass(frozen=True, slots=True)
class LoopContext:
    """The arguments of a loop for one session of one prompt."""

    generate: Generate
    renderer: Renderer
    sampling: Sampling
    """Its `max_new_tokens` is the budget of one turn."""
    prompt_key: str
    session: int
    """Which of the prompt's n rollouts this is."""
    context: int
    """The maximum length of a rollout in tokens."""
    max_generated: int | None = None
    """Tokens the student may write in all turns of one trajectory; None: limited by the context only."""
    media: list[str] = field(default_factory=list)
    """Hashes of the pictures in the session's tokens, in their order. It starts with those of the prompt; a
    loop that appends an observation with pictures appends their hashes here first."""
    given: str | None = None
    """The prompt's column with the answer, if `GivenAnswer` runs in place of the loop."""
    loop_returned: Callable[[int], None] | None = None
    """Called with the number of outputs when a worker starts to compute their rewards itself. Not called by
    loops."""

    def spent(self, generated: int) -> bool:
        """Whether the budget is used up by a trajectory in which the student wrote this many tokens."""
        return self.max_generated is not None and generated >= self.max_generated

    def sampling_after(self, length: int, generated: int = 0) -> Sampling:
        """The sampling of a turn that starts after `length` tokens, `generated` of which the student wrote.
        Its `max_new_tokens` is reduced to what is left of the context and of the trajectory's budget."""
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

    def pictures_in(
        self, key: str, tokens: np.ndarray, media: Sequence[str] | None = None
    ) -> tuple[str, ...]:
        """The pictures whose placeholders are in these tokens; `DataError` if they do not fit together."""
        reader = self.renderer.pictures
        return (
            ()
            if reader is None
            else reader.within(key, tokens, tuple(self.media if media is None else media))
        )


def check_ids(one: Trajectory, sampling: Sampling) -> None:
    """Raises `DataError` for a trajectory with an id that the student, a teacher, the critic or the reference
    has no token for. A prompt, a tool or a server without id limits can produce one. Only the row fails, not
    the run."""
    if sampling.usable is not None:
        sampling.usable.check(one.tokens, f"row {one.key}")


def check_kinds(one: Trajectory) -> None:
    """Raises `DataError` for a trajectory whose stop reason, origin or number of turns has no allowed value. Only the row
    fails."""
    for name, value, allowed in (
        ("stop_reason", one.stop_reason, StopReason),
        ("origin", one.origin, Origin),
    ):
        if value not in list(allowed):
            raise DataError(
                f"row {one.key} came with {name} = {value!r}; expected one of {', '.join(map(repr, map(str, allowed)))}"
            )
    if not isinstance(one.turns, Integral) or one.turns < 0:
        raise DataError(f"row {one.key} came with turns = {one.turns!r}; expected a whole number")


def check_streams(one: Trajectory, context: int) -> None:
    """Raises `DataError` for a trajectory that an update could not read. A loop that makes its trajectories itself
    can return one. Only the row fails, not the run."""
    drawn = one.loss_mask if one.loss_mask.dtype == bool else None
    wrong = ""
    if drawn is None or any(len(array.shape) != 1 for array in (one.tokens, drawn, one.behaviour_logprobs)):
        wrong = f"a loss mask of {one.loss_mask.dtype} {one.loss_mask.shape} for tokens {one.tokens.shape}; expected bool [T] for [T]"
    elif one.length > context:
        wrong = f"{one.length} tokens; the context is {context}"
    elif drawn[:1].any():
        wrong = "loss on its first token, which no token before it predicts"
    elif one.origin == Origin.STUDENT:
        logprobs = one.behaviour_logprobs[drawn]
        bad = logprobs[~(np.isfinite(logprobs) & (logprobs <= LOGPROB_SLACK))]
        if len(bad):
            wrong = f"behaviour_logprobs = {bad[0]:g} at a token that the student wrote; expected a finite number, at most 0"
    if wrong:
        raise DataError(f"row {one.key} came with {wrong}")


class AgentLoop(Protocol):
    """One way to attempt a prompt. `run` is called concurrently for many sessions.

    A run may return several trajectories (a sub-agent, a branch, a context reset); each is scored by the
    teacher and trained on. Their keys are `context.row_key(0)`, `context.row_key(1)`, …
    """

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]: ...


@dataclass(frozen=True, slots=True)
class LostOutput:
    """An output that a worker could not send to the run, and the reason."""

    key: str
    reason: str


class SessionRunner(Protocol):
    """Runs a loop in this process (any `AgentLoop`), or has a worker run it."""

    async def run(self, prompt: Prompt, context: LoopContext) -> Sequence[Trajectory | LostOutput]: ...


Returned = TypeVar("Returned", bound=Trajectory | LostOutput)


def checked_outputs(outputs: Sequence[Returned], context: LoopContext) -> Sequence[Returned]:
    """Checks that the keys of a loop's trajectories are those of outputs 0, 1, … of its session."""
    keys = [one.key for one in outputs]
    if not keys or sorted(keys) != sorted(context.row_key(index) for index in range(len(keys))):
        raise DataError(
            f"the agent loop returned {len(keys)} trajectories for session {context.row_key()} ({', '.join(keys) or 'none'}); "
            "expected one or more, with the keys context.row_key(0), context.row_key(1), …"
        )
    if context.renderer.pictures is None:
        return outputs
    return [_with_media(one, context) for one in outputs]


def _with_media(one: Returned, context: LoopContext) -> Returned:
    """The trajectory with the pictures of its tokens, if its loop did not name them."""
    if not isinstance(one, Trajectory):
        return one
    found = replace(one, media=context.pictures_in(one.key, one.tokens, one.media))
    return cast(Returned, found)
