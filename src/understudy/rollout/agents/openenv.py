"""Environments that speak OpenEnv's protocol, as an agent loop. Needs no package of OpenEnv's.

    [rollout]
    agent = "openenv"
    [rollout.agent_options.openenv]
    url = "http://127.0.0.1:8000"       # a running environment server
    action = "message"                  # the field of its action that takes the student's text

A session is a WebSocket connection, in which the environment keeps its state:

    loop                                          environment
    {"type": "reset", "data": {"seed": 17}}  ──>
                                             <──  {"type": "observation", "data": {"observation": {…}, "reward": null, "done": false}}
    {"type": "step", "data": {"message": …}} ──>  the student's turn; the next observation is the next user message
    {"type": "close"}                        ──>
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Mapping
from typing import Any

import aiohttp
import jinja2
import jinja2.sandbox

from understudy.errors import ConfigError, DataError
from understudy.observability.redact import redact_text
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.conversations import Conversations, NoRoom
from understudy.types.prompt import Prompt
from understudy.types.trajectory import Trajectory

_FULL = "CAPACITY_REACHED"
_FULL_SECONDS = 0.2
_CONNECT_SECONDS = 30.0
_LARGEST = 1 << 26


class OpenEnvLoop:
    """The loop named "openenv". Its arguments are the recipe's `rollout.agent_options.openenv`.

    url          the environment server
    action       the field of the environment's action that gets the student's text
    observation  a Jinja template over the observation's fields that gives the user message
    max_turns    turns of the student at most

    `reset` gets the row's column `reset` (a table) and, unless that has one, the row's number as `seed`. The row's
    reward is the sum of the steps' rewards.
    """

    def __init__(
        self, url: str, action: str = "message", *, observation: str | None = None, max_turns: int = 8
    ) -> None:
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ConfigError(
                f"rollout.agent_options.openenv.url = {redact_text(url)!r}; expected the address of a server, such as 'http://127.0.0.1:8000'"
            )
        self._url = "ws" + url.removeprefix("http") if url.startswith("http") else url
        self._url = self._url.rstrip("/").removesuffix("/ws") + "/ws"
        self._shown = redact_text(self._url)
        self._action, self._max_turns = action, max_turns
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
        try:
            self._template = None if observation is None else environment.from_string(observation)
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"rollout.agent_options.openenv.observation is not a Jinja template: {error}"
            ) from None
        self._http: aiohttp.ClientSession | None = None

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        conversations = Conversations(prompt, context)
        socket, seen = await self._reset(prompt)
        rewards: list[float] = []
        messages = self._first(prompt, seen)
        try:
            while not seen["done"] and len(rewards) < self._max_turns:
                try:
                    answer = await conversations.answer(messages)
                except NoRoom:
                    break
                seen = await self._ask(socket, "step", {self._action: answer.text})
                rewards.append(seen["reward"])
                reply = {"role": "assistant", "content": answer.text}
                messages = [
                    *messages,
                    reply,
                    {"role": "user", "content": self._observed(seen["observation"])},
                ]
            await socket.send_json({"type": "close"})
        finally:
            await socket.close()
        metrics = {"env/steps": float(len(rewards)), "env/done": float(seen["done"])}
        return conversations.finish(reward=math.fsum(rewards), metrics=metrics)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def _reset(self, prompt: Prompt) -> tuple[aiohttp.ClientWebSocketResponse, dict[str, Any]]:
        """A new session of the environment; waits while the server holds as many as it may."""
        given = prompt.columns.get("reset") or {}
        if not isinstance(given, Mapping):
            raise DataError(
                f"prompt {prompt.key}: reset is a {type(given).__name__}; expected a table of arguments for the environment's reset"
            )
        if self._http is None:
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(connect=_CONNECT_SECONDS))
        while True:
            try:
                socket = await self._http.ws_connect(self._url, max_msg_size=_LARGEST)
            except (aiohttp.ClientError, OSError) as error:
                raise DataError(
                    f"prompt {prompt.key}: no environment answers at {self._shown} ({redact_text(str(error))}); start it, or set "
                    "rollout.agent_options.openenv.url"
                ) from error
            try:
                return socket, await self._ask(socket, "reset", {"seed": prompt.ordinal, **given})
            except _Full:
                await socket.close()
                await asyncio.sleep(_FULL_SECONDS)
            except BaseException:
                await socket.close()
                raise

    async def _ask(
        self, socket: aiohttp.ClientWebSocketResponse, kind: str, data: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Sends one message; returns observation, reward and done."""
        # A server that refuses a session says why and closes: the reason is still to be read.
        with contextlib.suppress(aiohttp.ClientError, ConnectionError):
            await socket.send_json({"type": kind, "data": data})
        message = await socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise DataError(f"the environment at {self._shown} closed the session at `{kind}`")
        answer = json.loads(message.data)
        content = answer.get("data") or {}
        if answer.get("type") == "error":
            if content.get("code") == _FULL:
                raise _Full
            raise DataError(
                f"the environment at {self._shown} refused `{kind}`: {content.get('message', 'no reason given')} "
                f"({content.get('code', 'no code')})"
            )
        reward = content.get("reward")
        return {
            "observation": content.get("observation") or {},
            "reward": 0.0 if reward is None else float(reward),
            "done": bool(content.get("done")),
        }

    def _first(self, prompt: Prompt, seen: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The row's messages, with the first observation at the end of the last user message."""
        messages = [{"role": "user", "content": prompt.text}] if prompt.text else list(prompt.messages)
        shown = self._observed(seen["observation"])
        if messages[-1]["role"] != "user":
            return [*messages, {"role": "user", "content": shown}]
        return [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}\n\n{shown}".strip()}]

    def _observed(self, observation: Mapping[str, Any]) -> str:
        """The template, or the observation's only text, or all of it as JSON."""
        try:
            if self._template is not None:
                return self._template.render(observation)
        except jinja2.TemplateError as error:
            fields = ", ".join(sorted(observation))
            raise DataError(
                f"rollout.agent_options.openenv.observation: {error}; the observation has {fields}"
            ) from None
        texts = [value for value in observation.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(observation, ensure_ascii=False)


class _Full(Exception):
    """The server holds as many sessions as it may."""
