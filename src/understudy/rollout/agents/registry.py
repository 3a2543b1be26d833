"""The registry of agent loops: the ones that ship, and a user's own by `"module:Class"`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Protocol

from understudy.errors import ConfigError, DataError
from understudy.rollout.agents.agent import AgentLoop, SessionRunner
from understudy.rollout.agents.openenv import OpenEnvLoop
from understudy.rollout.agents.single_turn import SingleTurn
from understudy.rollout.agents.tool_loop import ToolLoop
from understudy.rollout.agents.verifiers_env import VerifiersLoop
from understudy.rollout.agents.verifiers_v1 import VerifiersV1Loop
from understudy.rollout.loading import load_object
from understudy.rollout.timing import TimedLoop
from understudy.types.prompt import Prompt

LOOPS: dict[str, Callable[..., AgentLoop]] = {
    "single_turn": SingleTurn,
    "tool": ToolLoop,
    "verifiers": VerifiersLoop,
    "verifiers_v1": VerifiersV1Loop,
    "openenv": OpenEnvLoop,
}


def build_loop(name: str, options: Mapping[str, Any] | None = None) -> AgentLoop:
    """Makes the loop called `name`, or a user's `"module:Class"`, with `options` as keyword arguments."""
    make = LOOPS.get(name)
    if make is None:
        if ":" not in name:
            near = get_close_matches(name, LOOPS, n=1)
            hint = f'; did you mean "{near[0]}"?' if near else ""
            raise ConfigError(
                f'rollout.agent = "{name}" is not one of {", ".join(LOOPS)} or "module:Class"{hint}'
            )
        make = load_object(name, "rollout.agent")
    _known_options(name, make, options or {})
    try:
        loop = make(**(options or {}))
    except TypeError as error:
        raise ConfigError(
            f'rollout.agent = "{name}" cannot be made with options {dict(options or {})}: {error}'
        ) from error
    if not callable(getattr(loop, "run", None)):
        raise ConfigError(
            f'rollout.agent = "{name}" has no `run(prompt, context)`; see understudy.rollout.agents.agent.AgentLoop'
        )
    return loop


def _known_options(name: str, make: Callable[..., AgentLoop], options: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for options that the loop does not take, with the nearest one that it does."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # no signature: the call itself raises
        return
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return
    known = [one.name for one in parameters if one.kind is not inspect.Parameter.POSITIONAL_ONLY]
    problems = []
    for option in options:
        if option not in known:
            near = get_close_matches(option, known, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"it takes {', '.join(known) or 'none'}"
            problems.append(
                f'rollout.agent = "{name}" has no option `{option}` (rollout.agent_options); {hint}'
            )
    if problems:
        raise ConfigError(problems)


Schemas = Callable[[Prompt], Sequence[Mapping[str, Any]] | None]
"""Which tools a row's loop shows to the student, as function schemas."""


class Loops(Protocol):
    """Gives each row its loop: `LoopChoice` in this process, or `LoopWorkers`."""

    def of(self, prompt: Prompt) -> SessionRunner: ...

    async def close(self) -> None: ...


class LoopChoice:
    """Picks the loop of each row: its `agent` column if set, else the recipe's default. Each loop is made
    once.

    A row may only name loops that ship and those in `options`: the recipe decides which code runs, not the
    data."""

    def __init__(self, default: str, options: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._default, self._options = default, dict(options or {})
        self._made: dict[str, TimedLoop] = {}
        self.of_name(default)

    @staticmethod
    def known(default: str, options: Mapping[str, Any] | None = None) -> Collection[str]:
        """The loop names that rows may use."""
        return {*LOOPS, default, *(options or {})}

    def of_name(self, name: str) -> AgentLoop:
        if name not in self._made:
            self._made[name] = TimedLoop(build_loop(name, self._options.get(name)))
        return self._made[name]

    def of(self, prompt: Prompt) -> AgentLoop:
        name = prompt.columns.get("agent") or self._default
        known = self.known(self._default, self._options)
        if not isinstance(name, str) or name not in known:
            raise DataError(
                f"row {prompt.ordinal} asks for the agent loop {name!r}; rows may name {', '.join(sorted(known))}"
            )
        try:
            return self.of_name(name)
        except ConfigError as error:
            raise DataError(
                f"row {prompt.ordinal} asks for an agent that is not available: {error}"
            ) from error

    def schemas(self, prompt: Prompt) -> Sequence[Mapping[str, Any]] | None:
        """The tools that the row's loop shows to the student; None: the row's own `tools` column is used."""
        loop = self.of(prompt)
        own = getattr(loop.loop if isinstance(loop, TimedLoop) else loop, "schemas", None)
        found: Sequence[Mapping[str, Any]] | None = own(prompt) if own else None
        return found

    async def close(self) -> None:
        """Ends the loops' tool processes."""
        for loop in self._made.values():
            await loop.close()
