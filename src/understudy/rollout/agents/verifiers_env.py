"""Environments of the `verifiers` package (0.1.14 to 0.3) as an agent loop (extra `verifiers`).

    [rollout]
    agent = "verifiers"
    [rollout.agent_options.verifiers]
    env = "my-environment"            # what verifiers.load_environment takes

The environment sends the messages and computes the reward; the run's own engine generates the model's turns,
by token. Rows come from the environment too: `understudy.rollout.agents.verifiers_env.write_rows(env, path)`
writes them to a file for `data.train`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from understudy.errors import ConfigError, DataError
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.conversations import Answer, Conversations, NoRoom
from understudy.rollout.agents.toolcalls import parser_of
from understudy.types.prompt import Prompt
from understudy.types.trajectory import StopReason, Trajectory

_THEIR_COLUMNS = ("answer", "info", "example_id")


def _part(name: str = "") -> Any:
    """A module of the package's environments: `verifiers` up to 0.2, `verifiers.legacy` in 0.3."""
    root = "verifiers" if importlib.util.find_spec("verifiers.envs") else "verifiers.legacy"
    if root == "verifiers.legacy" and importlib.util.find_spec(root) is None:
        version = importlib.metadata.version("verifiers")
        raise ConfigError(
            f'rollout.agent = "verifiers": verifiers {version} has tasksets and harnesses in place of environments; expected 0.1.14 to 0.3 (pip '
            'install "understudy[verifiers]"), or rollout.agent = "verifiers_v1" for a taskset'
        )
    return importlib.import_module(f"{root}.{name}" if name else root)


def load_environment(env: str, env_args: Mapping[str, Any] | None = None) -> Any:
    try:
        return _part().load_environment(env, **(env_args or {}))
    except ImportError as error:
        raise ConfigError(
            f'rollout.agent = "verifiers" needs the package of that name and the environment {env!r}: {error}; '
            'pip install "understudy[verifiers]" and the environment'
        ) from error


def write_rows(env: str, path: Path, env_args: Mapping[str, Any] | None = None) -> int:
    """Writes the environment's training problems as rows for `data.train`; returns how many."""
    rows = load_environment(env, env_args).get_dataset().to_list()
    with path.open("w") as file:
        for row in rows:
            kept = {name: row[name] for name in _THEIR_COLUMNS if row.get(name) is not None}
            line = {"messages": row["prompt"], "data_source": row.get("task") or env, **kept}
            file.write(json.dumps(line, default=str) + "\n")
    return len(rows)


class VerifiersLoop:
    """The loop named "verifiers". Its arguments are the recipe's `rollout.agent_options.verifiers`.

    env, env_args   the environment's name and its arguments
    format          how the model writes tool calls: hermes, llama3, json, or `"module:function"`
    """

    def __init__(
        self, env: str, env_args: Mapping[str, Any] | None = None, *, format: str = "hermes"
    ) -> None:
        self._env = load_environment(env, env_args)
        self._parse = parser_of(format)

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        conversations = Conversations(prompt, context)
        messages = [{"role": "user", "content": prompt.text}] if prompt.text else list(prompt.messages)
        problem = {
            "prompt": [dict(message) for message in messages],
            "example_id": prompt.columns.get("example_id", prompt.ordinal),
            **{name: prompt.columns[name] for name in ("answer", "info") if name in prompt.columns},
        }
        client = _client_over(conversations, self._parse)
        outcome = await self._env.run_rollout(problem, client, model="student", sampling_args={})
        if client.failure is not None:  # the environment would count it as a bad answer of the model
            raise client.failure
        if outcome.get("error"):
            raise DataError(f"{context.row_key()}: the environment ended with {_words(outcome['error'])}")
        metrics = {
            f"env/{name}": float(value)
            for name, value in (outcome.get("metrics") or {}).items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        return conversations.finish(reward=float(outcome["reward"]), metrics=metrics)

    async def close(self) -> None:
        await self._env._teardown()


def _client_over(conversations: Conversations, parse: Any) -> Any:
    """A `verifiers` client whose model is the student. Defined here because its base class is in the
    extra."""
    clients: Any = _part("clients.client")
    errors: Any = _part("errors")

    class StudentClient(clients.Client):
        def __init__(self) -> None:
            super().__init__(conversations)
            self.failure: Exception | None = None

        def setup_client(self, config: Any) -> Conversations:
            return conversations

        async def to_native_tool(self, tool: Any) -> dict[str, Any]:
            function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
            return {"type": "function", "function": function}

        async def to_native_prompt(self, messages: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
            return [_plain(message) for message in messages], {}

        async def get_native_response(
            self,
            prompt: Sequence[Mapping[str, Any]],
            model: str,
            sampling_args: Mapping[str, Any],
            tools: Sequence[Mapping[str, Any]] | None = None,
            **_: Any,
        ) -> Answer:
            most = sampling_args.get("max_completion_tokens") or sampling_args.get("max_tokens")
            try:
                return await conversations.answer(prompt, tools=tools, max_new_tokens=most, parse=parse)
            except NoRoom as error:
                raise errors.OverlongPromptError(str(error)) from error
            except Exception as error:
                self.failure = self.failure or error
                raise

        async def raise_from_native_response(self, response: Answer) -> None:
            """Never raises: the environment evaluates the answer."""

        async def from_native_response(self, response: Answer) -> Any:
            return _response(response)

        async def close(self) -> None:
            """Nothing to close: the run owns the engine."""

    return StudentClient()


def _response(answer: Answer) -> Any:
    types: Any = _part("types")
    tool_calls = [types.ToolCall(id=call["id"], **call["function"]) for call in answer.tool_calls]
    cut = answer.stop_reason in (StopReason.LENGTH, StopReason.ABORTED)
    message = types.ResponseMessage(
        content=answer.content,
        tool_calls=tool_calls or None,
        finish_reason="length" if cut else "tool_calls" if tool_calls else "stop",
        is_truncated=cut,
    )
    usage = types.Usage(
        prompt_tokens=answer.prompt_tokens,
        reasoning_tokens=0,
        completion_tokens=answer.new_tokens,
        total_tokens=answer.prompt_tokens + answer.new_tokens,
    )
    return types.Response(
        id="student", created=int(time.time()), model="student", usage=usage, message=message
    )


def _plain(message: Any) -> dict[str, Any]:
    """A message as the chat template expects it. Content in parts is joined into one text."""
    content = message.content
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else part.model_dump() for part in content]
        if any("text" not in part for part in parts):
            raise DataError("the environment sends something other than text; this student reads text only")
        content = "".join(part["text"] for part in parts)
    plain = {"role": "user" if message.role == "text" else message.role, "content": content or ""}
    if message.role == "assistant" and message.tool_calls:
        plain["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return plain


def _words(error: Any) -> str:
    return str(error.get("error_chain_str") or error) if isinstance(error, dict) else str(error)
