"""The tool loop over several chat formats: trained tokens are the engine's own, and the text follows the template."""

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from chat_tokenizers import FAMILIES, chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.engines.base import Generation, Sampling
from understudy.errors import ConfigError, DataError
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.tool_loop import ToolLoop
from understudy.rollout.render import Renderer
from understudy.rollout.tools.base import ToolOutcome, ToolResult
from understudy.types.prompt import Prompt
from understudy.types.trajectory import StopReason, Trajectory

CONTEXT = 4000
TOOL_ROLE = {"gemma": "user"}
"""Families whose template has no tool role, and the role used instead."""


class Echo:
    """A tool that runs in this process. Sandboxes are tested in `tools/`."""

    def __init__(
        self, answer: Callable[[Mapping[str, Any]], str] = lambda arguments: str(arguments.get("text", ""))
    ) -> None:
        self.answer = answer
        self.seen: list[Mapping[str, Any]] = []

    name = "echo"
    schema: ClassVar[dict[str, Any]] = {
        "type": "function",
        "function": {
            "name": "echo",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
        },
    }

    async def call(self, arguments: Mapping[str, Any], *, deadline_s: float) -> ToolResult:
        self.seen.append(arguments)
        if arguments.get("text") == "hang":
            await asyncio.sleep(1000)
        return ToolResult(ToolOutcome.OK, self.answer(arguments))


class Script:
    """Stands in for the engine: generates prepared texts, split into tokens at random places."""

    def __init__(
        self, tokenizer: Any, texts: Sequence[str], seed: int = 0, stop: StopReason = StopReason.EOS
    ) -> None:
        self.tokenizer, self.texts, self.stop = tokenizer, list(texts), stop
        self.random = random.Random(seed)
        self.asked: list[np.ndarray] = []
        self.generations: list[Generation] = []
        self.budgets: list[int] = []

    def odd_tokens(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            size = self.random.randint(1, 4)
            ids += self.tokenizer(text[:size], add_special_tokens=False)["input_ids"]
            text = text[size:]
        return ids

    async def generate(self, tokens: np.ndarray, sampling: Sampling, turn: int) -> Generation:
        assert turn == len(self.generations)
        ids = self.odd_tokens(self.texts[turn])
        stop = self.stop if turn == len(self.texts) - 1 else StopReason.EOS
        if stop is StopReason.EOS:
            ids.append(self.tokenizer.eos_token_id)
        logprobs = np.array([-self.random.random() for _ in ids], np.float32)
        generation = Generation(np.array(ids, np.int32), logprobs, np.full(len(ids), turn, np.int32), stop)
        self.asked.append(tokens)
        self.generations.append(generation)
        self.budgets.append(sampling.max_new_tokens)
        return generation


NAME = __name__


def raises(text: str) -> list[Any]:
    """A user-defined call format whose parser must not be called."""
    raise AssertionError(f"{text!r} was parsed")


def call(text: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'echo', 'arguments': {'text': text}})}\n</tool_call>"


def play(
    family: str,
    texts: Sequence[str],
    *,
    tool: Echo | None = None,
    context: int = CONTEXT,
    seed: int = 0,
    stop: StopReason = StopReason.EOS,
    columns: dict[str, Any] | None = None,
    question: str = "What?",
    max_generated: int | None = None,
    **options: Any,
) -> tuple[Trajectory, Script]:
    tokenizer = chat_tokenizer(family)
    script = Script(tokenizer, texts, seed, stop)
    tool = tool or Echo()
    loop = ToolLoop([tool], tool_role=TOOL_ROLE.get(family, "tool"), isolation="none", **options)  # type: ignore[list-item]
    prompt = Prompt(
        "00000-0000000", 0, 0, "", messages=({"role": "user", "content": question},), columns=columns or {}
    )
    loop_context = LoopContext(
        script.generate,
        Renderer(tokenizer, context=context),
        Sampling(500),
        prompt.key,
        0,
        context,
        max_generated,
    )
    (trajectory,) = asyncio.run(loop.run(prompt, loop_context))
    return trajectory, script


def check_streams(trajectory: Trajectory, script: Script) -> None:
    """Every generated token, in order, with its logprob and version; nothing else is marked as generated."""
    written = trajectory.loss_mask
    assert trajectory.tokens[written].tolist() == [int(i) for g in script.generations for i in g.tokens]
    assert trajectory.behaviour_logprobs[written].tolist() == [
        float(x) for g in script.generations for x in g.logprobs
    ]
    assert trajectory.weight_versions[written].tolist() == [
        int(v) for g in script.generations for v in g.weight_versions
    ]
    assert (
        np.isnan(trajectory.behaviour_logprobs[~written]).all()
        and (trajectory.weight_versions[~written] == -1).all()
    )
    for asked, generation in zip(script.asked, script.generations, strict=True):
        grown = [*asked.tolist(), *generation.tokens.tolist()]
        assert trajectory.tokens[: len(grown)].tolist() == grown, (
            "the row does not hold the tokens of this request"
        )


# Ordinary text: without the formats' special tokens, and without the leading and trailing space that templates trim.
WORDS = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"], exclude_characters="<|[]>{}"),
    min_size=1,
    max_size=12,
)
PROSE = WORDS.map(str.strip).filter(bool)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(question=PROSE, calls=st.lists(PROSE, min_size=1, max_size=3), answer=PROSE, seed=st.integers(0, 99))
def test_tool_loop_text_equals_the_templates_rendering_of_the_conversation(
    family: str, question: str, calls: list[str], answer: str, seed: int
) -> None:
    """One call per turn, then an answer. The decoded tokens equal the template's own rendering of the messages."""
    texts = [*map(call, calls), answer]
    if family == "chatml":  # a thinking model
        texts = [f"<think>\nhm {i}\n</think>\n\n{text}" for i, text in enumerate(texts)]
    trajectory, script = play(family, texts, question=question, seed=seed)
    check_streams(trajectory, script)
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for text, result in zip(texts, [*calls, None], strict=True):
        messages.append({"role": "assistant", "content": text})
        if result is not None:
            messages.append({"role": TOOL_ROLE.get(family, "tool"), "content": result})
    tokenizer = chat_tokenizer(family)
    whole = tokenizer.apply_chat_template(messages, tokenize=False, tools=[Echo.schema])
    # The row ends with the student's end-of-turn token; a template may add a line break of its own after it, or
    # (the plain family) not write the token at all.
    text = tokenizer.decode(trajectory.tokens.tolist())
    if family == "plain":
        assert text.replace("</s>", "") == whole.removesuffix("\n")
    elif family == "mistral":  # its template puts a space before every answer, which the model did not write
        assert text.replace(" ", "") == whole.replace(" ", "")
    else:
        assert text == whole.removesuffix("\n")


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=15, deadline=None)
@given(results=st.lists(st.text(max_size=20), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_token_streams_stay_aligned_for_any_text_a_tool_returns(
    family: str, results: list[str], seed: int
) -> None:
    answers = iter(results * 3)
    trajectory, script = play(
        family,
        [call("a") + call("b"), call("c"), "done"],
        tool=Echo(lambda arguments: next(answers)),
        seed=seed,
    )
    check_streams(trajectory, script)
    assert trajectory.turns == 3 and trajectory.metrics["tool/calls"] == 3


def test_retokenizing_the_scripted_text_gives_other_tokens_than_the_scripted_engine() -> None:
    """The tests above would detect retokenization: the scripted engine's tokens are not the tokenizer's own."""
    tokenizer = chat_tokenizer("chatml")
    trajectory, _ = play("chatml", ["The answer is 42. Let me think about it step by step."])
    written = trajectory.tokens[trajectory.loss_mask].tolist()
    assert written != tokenizer(tokenizer.decode(written))["input_ids"]


def test_the_templates_separator_after_the_students_end_token_is_kept() -> None:
    trajectory, _ = play("chatml", [call("42"), "done"])
    text = chat_tokenizer("chatml").decode(trajectory.tokens.tolist())
    assert (
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        in text
    )


def test_after_turn_adds_the_end_token_when_the_turn_lacks_it() -> None:
    tokenizer = chat_tokenizer("chatml")
    renderer = Renderer(tokenizer, context=CONTEXT)
    message = [{"role": "tool", "content": "x"}]
    open_ids = renderer.after_turn("k", message, ended=False)
    assert open_ids[0] == tokenizer.eos_token_id
    assert open_ids[1:].tolist() == renderer.after_turn("k", message, ended=True).tolist()


def test_results_of_several_calls_in_one_turn_keep_the_order_of_the_calls() -> None:
    tool = Echo()
    trajectory, _ = play(
        "llama3",
        ["; ".join(json.dumps({"name": "echo", "parameters": {"text": t}}) for t in ("one", "two")), "done"],
        tool=tool,
        format="llama3",
    )
    text = chat_tokenizer("llama3").decode(trajectory.tokens.tolist())
    assert [seen["text"] for seen in tool.seen] == ["one", "two"]
    assert text.index('{"output": "one"}') < text.index('{"output": "two"}')


@pytest.mark.parametrize(
    ("written", "says", "options"),
    [
        ('<tool_call>{"name": "abacus", "arguments": {}}</tool_call>', "no tool 'abacus'; there is echo", {}),
        ("<tool_call>{oops}</tool_call>", "not JSON", {}),
        (call("hang"), "stopped after 0.2 s", {"turn_deadline_s": 0.2}),
        (call("a") + call("b"), "at most 1 calls", {"max_calls": 1}),
    ],
)
def test_a_failed_tool_call_is_reported_to_the_model_as_an_error(
    written: str, says: str, options: dict[str, Any]
) -> None:
    trajectory, script = play("chatml", [written, "done"], **options)
    check_streams(trajectory, script)
    assert "Error: " in (text := chat_tokenizer("chatml").decode(trajectory.tokens.tolist())) and says in text
    assert trajectory.metrics["tool/error"] + trajectory.metrics["tool/timeout"] == 1


@pytest.mark.parametrize("family", ["chatml", "llama3"])
def test_a_lone_surrogate_in_a_tool_call_or_result_becomes_a_question_mark(family: str) -> None:
    asked = call("x").replace('"echo"', '"\\ud83d"') + call("a") if family == "chatml" else call("a")
    trajectory, script = play(family, [asked, "done"], tool=Echo(lambda arguments: "\ud83d ok"))
    check_streams(trajectory, script)
    assert "? ok" in chat_tokenizer(family).decode(trajectory.tokens.tolist())
    assert trajectory.extra["feedback"] == "? ok"


def test_a_tool_call_with_an_integer_of_thousands_of_digits_gets_an_error_reply() -> None:
    text = call("1").replace('"1"', "1" * 4400)
    trajectory, _ = play("chatml", [text, "done"], context=8000)
    assert "Error: the tool call cannot be read" in chat_tokenizer("chatml").decode(
        trajectory.tokens.tolist()
    )


def test_a_turn_cut_at_its_length_limit_is_not_parsed_for_tool_calls() -> None:
    trajectory, _ = play("llama3", [f"{NAME}:raises"], format=f"{NAME}:raises", stop=StopReason.LENGTH)
    assert trajectory.turns == 1


def test_the_tool_loop_stops_at_max_turns_max_generated_the_context_and_a_cut_turn() -> None:
    trajectory, script = play("chatml", [call("a"), call("b"), call("c")], max_turns=3)
    assert trajectory.turns == 3 and trajectory.metrics["tool/calls"] == 2 and trajectory.loss_mask[-1]
    trajectory, script = play("chatml", [call("a"), "done"], max_generated=300)
    assert script.budgets == [300, 300 - len(script.generations[0].tokens)]
    trajectory, script = play("chatml", [call("x" * 300), "never said"], context=520)
    assert trajectory.stop_reason is StopReason.LENGTH and trajectory.turns == 1 and trajectory.loss_mask[-1]
    trajectory, script = play("chatml", [call("a")], stop=StopReason.LENGTH)
    assert trajectory.stop_reason is StopReason.LENGTH and trajectory.metrics["tool/calls"] == 0


def test_the_tools_column_selects_tools_and_an_unknown_tool_is_refused() -> None:
    assert play("chatml", ["done"], columns={"tools": ["echo"]})[0].turns == 1
    assert play("chatml", ["done"], columns={"tools": [Echo.schema]})[0].turns == 1
    with pytest.raises(DataError, match="asks for the tool 'abacus'; this run has echo"):
        play("chatml", ["done"], columns={"tools": ["abacus"]})


def test_a_template_without_a_tool_role_refuses_a_tool_message() -> None:
    with pytest.raises(DataError, match="roles are user and assistant"):
        Renderer(chat_tokenizer("gemma"), context=CONTEXT).after_turn(
            "k", [{"role": "tool", "content": "x"}], ended=True
        )


WITH_TOOLS = """\
{%- for tool in tools -%}{{ '<tool>' + tool['function']['name'] + '</tool>' }}{%- endfor -%}
{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '=' + message['content'] + '<|im_end|>' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant=' }}{%- endif -%}
"""
"""A template for chats with tools; it fails when no tools are given."""


@pytest.mark.parametrize("columns", [{}, {"tools": ["echo"]}])
def test_prompt_and_tool_results_are_both_rendered_by_the_tool_use_template(
    columns: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": WITH_TOOLS}
    monkeypatch.setattr(f"{__name__}.chat_tokenizer", lambda family: tokenizer)
    trajectory, script = play("chatml", [call("42"), "done"], columns=columns)
    check_streams(trajectory, script)
    assert tokenizer.decode(trajectory.tokens.tolist()) == (
        f"<tool>echo</tool><|im_start|>user=What?<|im_end|><|im_start|>assistant={call('42')}<|im_end|>"
        "<|im_start|>tool=42<|im_end|><|im_start|>assistant=done<|im_end|>"
    )


def test_tool_loop_refuses_unknown_isolation_and_format() -> None:
    with pytest.raises(ConfigError, match="namespaces, none"):
        ToolLoop(isolation="docker")
    with pytest.raises(ConfigError, match="hermes"):
        ToolLoop(format="xml", isolation="none")
