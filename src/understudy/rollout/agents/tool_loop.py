"""The multi-turn tool loop: the model calls tools and reads their results until it answers.

    prompt ─> generate ─> tool calls? ──no──> done
                 ▲            │ yes
                 └─ observe <─┘ run them in child processes, all calls of a turn concurrently

Only the observation is rendered, and appended by token. The model's tokens stay as the engine produced them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from understudy.errors import ConfigError, DataError
from understudy.media.pictures import STORED, PictureError, PictureLimits, check_picture, hashes_in
from understudy.media.processor import PictureReader
from understudy.media.store import hash_of
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.toolcalls import BadCall, ToolCall, parser_of
from understudy.rollout.agents.transcript import Transcript
from understudy.rollout.tools.base import Tool, ToolOutcome, ToolResult
from understudy.rollout.tools.library import build_tool
from understudy.rollout.tools.sandbox import Isolation, Sandbox
from understudy.rollout.user_code import awaited
from understudy.types.prompt import Prompt
from understudy.types.trajectory import FEEDBACK, StopReason, Trajectory


class ToolLoop:
    """The loop named "tool". Its arguments are the recipe's `rollout.agent_options.tool`.

    tools             names of shipped tools, `"module:function"`, or `Tool` objects
    format            how the model writes calls: hermes, llama3, json, or `"module:function"`
    max_turns         generations per episode; a call in the last one is not run
    max_calls         calls per turn that are run; the model gets an error for the rest
    tool_deadline_s   for one call;  turn_deadline_s  for all calls of a turn, queueing included
    tool_role         "tool", or "user" for chat templates without tool messages
    isolation         "namespaces", or "none" (see `understudy.rollout.tools.sandbox`)
    """

    def __init__(
        self,
        tools: Sequence[str | Tool] = ("calculator",),
        *,
        format: str = "hermes",
        max_turns: int = 8,
        max_calls: int = 8,
        tool_deadline_s: float = 10.0,
        turn_deadline_s: float = 30.0,
        tool_role: str = "tool",
        isolation: str = "namespaces",
        memory_mb: int = 512,
    ) -> None:
        if isolation not in list(Isolation):
            raise ConfigError(f'isolation = "{isolation}": expected one of {", ".join(Isolation)}')
        sandbox = Sandbox(Isolation(isolation), memory_mb)
        built = [build_tool(tool, sandbox) if isinstance(tool, str) else tool for tool in tools]
        self._tools = {tool.name: tool for tool in built}
        self._parse = parser_of(format)
        self._max_turns, self._max_calls = max_turns, max_calls
        self._tool_deadline_s, self._turn_deadline_s = tool_deadline_s, turn_deadline_s
        self._tool_role = tool_role

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        if prompt.text is not None:
            raise DataError(
                f"prompt {prompt.key} is plain text, and the tool loop reads chats: tools are told to the student by its chat "
                "template. Give the row `messages` instead of `prompt`"
            )
        tools, schemas = self._tools_of(prompt), self.schemas(prompt)
        transcript = Transcript(context.renderer.render(prompt, tools=schemas))
        results: list[ToolResult] = []
        tool_seconds, stop_reason = 0.0, None
        for turn in range(self._max_turns):
            sampling = context.sampling_after(len(transcript), transcript.generated)
            generation = await context.generate(transcript.tokens, sampling, turn)
            transcript.write(generation)
            cut_short = generation.stop_reason in (StopReason.LENGTH, StopReason.ABORTED)
            if cut_short or turn + 1 == self._max_turns:
                break
            calls = self._parse(context.renderer.decode(generation.tokens))
            if not calls:
                break
            start = time.perf_counter()
            new = await self._run_all(calls, tools)
            tool_seconds += time.perf_counter() - start
            ended = generation.stop_reason is StopReason.EOS
            new = [stored(_encodable(result), context.renderer.pictures) for result in new]
            results += new
            messages = self._messages(calls, new)
            observation = context.renderer.after_turn(prompt.key, messages, ended=ended, tools=schemas)
            if context.spent(transcript.generated) or len(transcript) + len(observation) >= context.context:
                stop_reason = StopReason.LENGTH
                break
            transcript.observe(observation)
            context.media.extend(hashes_in(messages))
        metrics = {"tool/calls": float(len(results))} | {
            f"tool/{outcome}": float(sum(result.outcome is outcome for result in results))
            for outcome in ToolOutcome
        }
        extra: dict[str, Any] = {"seconds": {"tool": tool_seconds}}
        if results:
            extra[FEEDBACK] = results[-1].text
        return [transcript.finish(context.row_key(), stop_reason=stop_reason, metrics=metrics, extra=extra)]

    def schemas(self, prompt: Prompt) -> list[dict[str, Any]]:
        """The schemas of the row's tools, for the chat template."""
        return [tool.schema for tool in self._tools_of(prompt).values()]

    def _tools_of(self, prompt: Prompt) -> Mapping[str, Tool]:
        """The loop's tools, or those that the row's `tools` column (names or schemas) selects."""
        wanted = prompt.columns.get("tools")
        if not wanted:
            return self._tools
        names = [
            tool if isinstance(tool, str) else (tool.get("function") or tool).get("name") for tool in wanted
        ]
        if missing := [name for name in names if name not in self._tools]:
            raise DataError(
                f"prompt {prompt.key} asks for the tool {missing[0]!r}; this run has {', '.join(self._tools)}. "
                "Add it to the tool loop's tools"
            )
        return {name: self._tools[name] for name in names}

    async def _run_all(
        self, calls: Sequence[ToolCall | BadCall], tools: Mapping[str, Tool]
    ) -> list[ToolResult]:
        async def run(index: int, call: ToolCall | BadCall) -> ToolResult:
            if isinstance(call, BadCall):
                return ToolResult(ToolOutcome.ERROR, call.reason)
            if index >= self._max_calls:
                return ToolResult(ToolOutcome.ERROR, f"not run: at most {self._max_calls} calls a turn")
            if call.name not in tools:
                known = ", ".join(tools)
                return ToolResult(ToolOutcome.ERROR, f"there is no tool {call.name!r}; there is {known}")
            return await awaited(tools[call.name].call(call.arguments, deadline_s=self._tool_deadline_s))

        tasks = [asyncio.ensure_future(run(i, call)) for i, call in enumerate(calls)]
        try:
            await asyncio.wait(tasks, timeout=self._turn_deadline_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        late = ToolResult(
            ToolOutcome.TIMEOUT, f"the turn's tools were stopped after {self._turn_deadline_s:g} s"
        )
        return [late if task.cancelled() else task.result() for task in tasks]

    def _messages(
        self, calls: Sequence[ToolCall | BadCall], results: Sequence[ToolResult]
    ) -> list[dict[str, Any]]:
        messages = []
        for call, result in zip(calls, results, strict=True):
            text = result.text if result.outcome is ToolOutcome.OK else f"Error: {result.text}"
            message: dict[str, Any] = {"role": self._tool_role, "content": _content(result, text)}
            if self._tool_role == "tool" and isinstance(call, ToolCall):
                message["name"] = _without_surrogates(call.name)
            messages.append(message)
        if self._tool_role == "user":  # templates without tools expect one message per turn
            return [{"role": "user", "content": _joined([message["content"] for message in messages])}]
        return messages

    async def close(self) -> None:
        """Ends the tools' child processes."""
        for tool in self._tools.values():
            if hasattr(tool, "close"):
                await tool.close()


def stored(result: ToolResult, pictures: PictureReader | None) -> ToolResult:
    """The result with its pictures in the run's store; an error for the model if one cannot be used."""
    if not result.images:
        return result
    if pictures is None:
        return replace(result, images=(), text=f"{result.text}\n(pictures were left out: text only)".strip())
    try:
        for data in result.images:
            check_picture(data, "the tool's picture", PictureLimits())
    except PictureError as error:
        return ToolResult(ToolOutcome.ERROR, str(error), result.seconds)
    for data in result.images:
        pictures.store.put(data)
    return result


def _encodable(result: ToolResult) -> ToolResult:
    text = _without_surrogates(result.text)
    return result if text == result.text else replace(result, text=text)


def _without_surrogates(text: str) -> str:
    """The text with "?" for halves of surrogate pairs, which JSON can spell and no tokenizer reads."""
    return text.encode("utf-8", "replace").decode()


def _content(result: ToolResult, text: str) -> str | list[dict[str, Any]]:
    """Text, or parts with the pictures before it."""
    if not result.images:
        return text
    shown = [{"type": "image", "image": STORED + hash_of(data)} for data in result.images]
    return [*shown, {"type": "text", "text": text}]


def _joined(contents: Sequence[str | list[dict[str, Any]]]) -> str | list[dict[str, Any]]:
    """The contents of several messages as one, a line each."""
    if all(isinstance(one, str) for one in contents):
        return "\n".join(map(str, contents))
    parts: list[dict[str, Any]] = []
    for one in contents:
        parts += [{"type": "text", "text": "\n"}] if parts else []
        parts += [{"type": "text", "text": one}] if isinstance(one, str) else one
    return parts
