"""Tasksets of `verifiers.v1` (the package from 0.3 on) as an agent loop.

    [rollout]
    agent = "verifiers_v1"
    [rollout.agent_options.verifiers_v1.env]       # the package's own [env] table
    taskset = { id = "my-taskset" }

A harness is a program that talks to a model over HTTP, so the student is served to it:

    harness ──> the package's interception server ──> endpoint of this loop ──> Conversations ──> the run's engine

Each session has an address of its own at the endpoint. Rows come from the taskset:
`understudy.rollout.agents.verifiers_v1.write_rows(env, path)` writes them to a file for `data.train`.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import math
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from understudy.errors import ConfigError, DataError
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.conversations import Conversations, NoRoom
from understudy.rollout.agents.toolcalls import parser_of
from understudy.types.prompt import Prompt
from understudy.types.trajectory import StopReason, Trajectory

_HERE = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
"""The agent of an `env` table without one: the chat program, on this machine."""


def load(env: Mapping[str, Any]) -> Any:
    """The package's environment of an `[env]` table."""
    name = (env.get("taskset") or {}).get("id")
    if not name:
        raise ConfigError(
            "rollout.agent_options.verifiers_v1.env has no taskset.id; expected { taskset = { id = 'my-taskset' } }"
        )
    try:
        loaders: Any = importlib.import_module("verifiers.v1.utils.loaders")
        base: Any = importlib.import_module("verifiers.v1.env").Env
        config_of: Any = importlib.import_module("verifiers.v1.utils.generic").concrete_type
        shape: Any = importlib.import_module("verifiers.v1.configs.env").EnvConfig
        kind = loaders.environment_class(name, env.get("id", ""))
        config = config_of(kind, shape, origin=base) or shape
        table = {"agent": _HERE, **env} if "agent" in config.model_fields else dict(env)
        return loaders.load_environment(config.model_validate(table))
    except ImportError as error:
        raise ConfigError(
            f'rollout.agent = "verifiers_v1" needs verifiers 0.3 or newer and the taskset {name!r}: {error}; pip install '
            '"understudy[verifiers-v1]" and the taskset'
        ) from error
    except ValueError as error:  # pydantic's
        raise ConfigError(f"rollout.agent_options.verifiers_v1.env: {error}") from error


def write_rows(env: Mapping[str, Any], path: Path, most: int = 10_000) -> int:
    """Writes the taskset's tasks as rows for `data.train`; returns how many."""
    tasks = list(itertools.islice(load(env).taskset, most))
    with path.open("w") as file:
        for number, task in enumerate(tasks):
            prompt = task.data.prompt
            shown = prompt if isinstance(prompt, str) else "(the taskset's own messages)"
            messages = [{"role": "user", "content": shown}]
            line = {"messages": messages, "data_source": env["taskset"]["id"], "task": number}
            file.write(json.dumps(line) + "\n")
    return len(tasks)


@dataclass(slots=True)
class _Session:
    conversations: Conversations
    failure: Exception | None = None
    full: bool = False
    """Whether the conversation ended because no token fits."""


class VerifiersV1Loop:
    """The loop named "verifiers_v1". Its arguments are the recipe's `rollout.agent_options.verifiers_v1`.

    env      the package's `[env]` table; without an agent, its chat program runs on this machine
    format   how the model writes tool calls: hermes, llama3, json, or `"module:function"`
    """

    def __init__(self, env: Mapping[str, Any], *, format: str = "hermes") -> None:
        self._env = load(env)
        self._parse = parser_of(format)
        self._coming: Iterator[Any] = iter(self._env.taskset)
        self._tasks: list[Any] = []
        self._sessions: dict[str, _Session] = {}
        self._serving: asyncio.Task[None] | None = None
        self._up: asyncio.Future[str] | None = None
        self._stop = asyncio.Event()

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        clients: Any = importlib.import_module("verifiers.v1.clients")
        task = self._task(prompt)
        name, session = secrets.token_hex(16), _Session(Conversations(prompt, context))
        self._sessions[name] = session
        try:
            url = f"{await self._served()}/{name}/v1"
            client = clients.EvalClientConfig(base_url=url, api_key_var="UNDERSTUDY_NO_KEY")
            episode = await self._env.run_episode(task, clients.ModelContext(model="student", client=client))
        finally:
            del self._sessions[name]
        if session.failure is not None:  # the environment would count it as a bad answer of the model
            raise session.failure
        if not episode.ok and not session.full:
            errors = [*episode.errors, *(one for trace in episode.traces for one in trace.errors)]
            reason = "; ".join(f"{one.type}: {one.message}" for one in errors) or "no reason given"
            raise DataError(f"{context.row_key()}: the environment ended with {reason}")
        rewards = [float(trace.reward) for trace in episode.traces]
        metrics = {
            f"env/{name}": float(value)
            for trace in episode.traces
            for name, value in {**_scores(trace), **trace.metrics}.items()
            if value is not None and math.isfinite(value)
        }
        return session.conversations.finish(reward=math.fsum(rewards), metrics=metrics)

    async def close(self) -> None:
        self._stop.set()
        if self._serving is not None:
            with suppress(asyncio.CancelledError):
                await self._serving

    def _task(self, prompt: Prompt) -> Any:
        number = prompt.columns.get("task")
        if not isinstance(number, int) or number < 0:
            raise DataError(
                f"prompt {prompt.key}: task is {number!r}; expected the number of a task, as verifiers_v1.write_rows writes it"
            )
        while len(self._tasks) <= number:
            try:
                self._tasks.append(next(self._coming))
            except StopIteration:
                raise DataError(
                    f"prompt {prompt.key}: task {number} of a taskset with {len(self._tasks)} tasks"
                ) from None
        return self._tasks[number]

    async def _served(self) -> str:
        """The address of the endpoint; starts it and the package's servers with the first session."""
        if self._up is None:
            self._up = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._serve(self._up))
        return await asyncio.shield(self._up)

    async def _serve(self, up: asyncio.Future[str]) -> None:
        """One task enters and leaves the package's servers: their scopes may not change tasks."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/{session}/v1/chat/completions", self._complete)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            async with self._env.serving():
                up.set_result(f"http://127.0.0.1:{runner.addresses[0][1]}")
                await self._stop.wait()
        except Exception as error:
            if up.done():
                raise
            up.set_exception(error)
        finally:
            await runner.cleanup()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        """A chat completion by the student. A failure is a 400, which no client repeats."""
        session = self._sessions.get(request.match_info["session"])
        if session is None:
            return _refused("this session is over")
        body = await request.json()
        most = body.get("max_completion_tokens") or body.get("max_tokens")
        try:
            answer = await session.conversations.answer(
                [_plain(message) for message in body["messages"]],
                tools=body.get("tools") or None,
                max_new_tokens=most,
                parse=self._parse,
            )
        except NoRoom as error:
            session.full = True
            return _refused(str(error), "context_length_exceeded")
        except Exception as error:
            session.failure = session.failure or error
            return _refused(str(error))
        message: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.tool_calls:
            message["tool_calls"] = [{"index": index, **call} for index, call in enumerate(answer.tool_calls)]
        cut = answer.stop_reason in (StopReason.LENGTH, StopReason.ABORTED)
        finish = "length" if cut else "tool_calls" if answer.tool_calls else "stop"
        usage = {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.new_tokens,
            "total_tokens": answer.prompt_tokens + answer.new_tokens,
        }
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": finish}
            return web.json_response(_completion("chat.completion", [choice], usage))
        choice = {"index": 0, "delta": message, "finish_reason": finish}
        events = [
            _completion("chat.completion.chunk", [choice], None),
            _completion("chat.completion.chunk", [], usage),
        ]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")


def _scores(trace: Any) -> dict[str, float]:
    """A trace's rewards by name, unweighted; one that was not computed is left out."""
    return {name: one.score for name, one in trace.rewards.items() if one is not None}


def _completion(kind: str, choices: list[Any], usage: Mapping[str, int] | None) -> dict[str, Any]:
    return {
        "id": "student",
        "object": kind,
        "created": int(time.time()),
        "model": "student",
        "choices": choices,
        "usage": usage,
    }


def _refused(message: str, code: str = "failed") -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "code": code}
    return web.json_response({"error": error}, status=400)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as the chat template expects it. Content in parts is joined into one text."""
    content = message.get("content")
    if isinstance(content, list):
        if any("text" not in part for part in content):
            raise DataError("the environment sends something other than text; this student reads text only")
        content = "".join(part["text"] for part in content)
    return {**message, "content": content or ""}
