"""A teacher's own prompt, from a template over the row's columns or from a column, rendered like the student's."""

from typing import Any

import numpy as np
import pytest
from chat_tokenizers import chat_tokenizer

from understudy.config.models import TeacherConfig
from understudy.errors import ConfigError, DataError
from understudy.rollout.agents.registry import LoopChoice
from understudy.rollout.dataset import load_dataset
from understudy.rollout.render import Renderer
from understudy.rollout.teacher_prompts import TeacherPrompt, TeacherPrompts
from understudy.types.prompt import Prompt
from understudy.types.scores import ScoreItem, Signal
from understudy.types.usable_ids import UsableIds

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "12+34="}]
PLAIN: dict[str, Any] = {"prompt": "12+34=", "answer": "46", "data_source": "add"}
CHATTED: dict[str, Any] = {"messages": CHAT, "answer": "46"}


def teacher_prompt(**keys: Any) -> TeacherPrompt:
    config = TeacherConfig(model="m", **keys)
    return TeacherPrompt("math", config.prompt, config.prompt_column)


def prompt_of(row: dict[str, Any], key: str = "00000-0000000") -> Prompt:
    return load_dataset([row]).prompt(0, key=key, epoch=0)


def content_of(row: dict[str, Any], **keys: Any) -> Any:
    """The teacher's prompt, asserted to be the same for a row (as in `check`) and for a prompt (as in a run)."""
    by_row, by_prompt = teacher_prompt(**keys).of_row(row), teacher_prompt(**keys).of(prompt_of(row))
    content = by_prompt.text if by_prompt.text is not None else list(by_prompt.messages)
    assert (by_row.get("messages") or by_row.get("prompt")) == content
    assert by_prompt.key == "00000-0000000" and by_prompt.columns.get("answer") == row.get("answer")
    return content


def test_a_text_template_replaces_a_plain_prompt() -> None:
    assert (
        content_of(PLAIN, prompt="{{ prompt }} (the answer is {{ answer }})\n")
        == "12+34= (the answer is 46)\n"
    )
    assert content_of(PLAIN, prompt="{{ data_source }}") == "add"


def test_a_text_template_replaces_the_last_user_message_of_a_chat() -> None:
    talk = [*CHAT, {"role": "assistant", "content": "46"}, {"role": "user", "content": "Sure?"}]
    assert content_of(CHATTED, prompt="{{ prompt }} Hint: {{ answer }}") == [
        CHAT[0],
        {"role": "user", "content": "12+34= Hint: 46"},
    ]
    found = content_of({**CHATTED, "messages": talk}, prompt="{{ messages[1].content }} {{ prompt }}")
    assert found == [*talk[:3], {"role": "user", "content": "12+34= Sure?"}]
    with pytest.raises(DataError, match="the row's chat has none; give a list of messages"):
        content_of({"messages": CHAT[:1]}, prompt="x")


def test_a_template_of_messages_replaces_the_whole_prompt() -> None:
    messages = [
        {"role": "system", "content": "The answer is {{ answer }}."},
        {"role": "user", "content": "{{ prompt }}"},
    ]
    expected = [
        {"role": "system", "content": "The answer is 46."},
        {"role": "user", "content": "12+34="},
    ]
    assert content_of(CHATTED, prompt=messages) == expected == content_of(PLAIN, prompt=messages)


def test_prompt_column_may_hold_text_or_messages_and_refuses_other_values() -> None:
    assert content_of({**PLAIN, "hint": "say 46"}, prompt_column="hint") == "say 46"
    assert content_of({**CHATTED, "hint": "say 46"}, prompt_column="hint")[-1]["content"] == "say 46"
    assert content_of({**CHATTED, "hint": CHAT[1:]}, prompt_column="hint") == CHAT[1:]
    for wrong, problem in ((None, "is missing or empty"), ("", "is missing or empty"), (7, "is a int")):
        with pytest.raises(DataError, match=f"teachers.math.prompt_column = 'hint': the column {problem}"):
            teacher_prompt(prompt_column="hint").of_row({**PLAIN, "hint": wrong})
    with pytest.raises(DataError, match=r"messages\[0\] is 'x'"):
        teacher_prompt(prompt_column="hint").of_row({**PLAIN, "hint": ["x"]})


@pytest.mark.parametrize("row", [PLAIN, {**PLAIN, "feedback": None}], ids=["missing", "null"])
def test_a_column_missing_in_the_row_is_named_with_the_columns_present(row: dict[str, Any]) -> None:
    with pytest.raises(
        DataError,
        match=r"teachers.math.prompt: 'feedback' is undefined; the row has answer, data_source, prompt",
    ):
        teacher_prompt(prompt="{{ prompt }}{{ feedback }}").of_row(row)
    assert (
        content_of(row, prompt="{{ prompt }}{% if feedback is defined %}{{ feedback }}{% endif %}")
        == "12+34="
    )


def test_prompt_templates_run_in_the_jinja_sandbox() -> None:
    with pytest.raises(DataError, match="SecurityError"):
        teacher_prompt(prompt="{{ prompt.__class__.__mro__ }}").of_row(PLAIN)
    with pytest.raises(DataError, match="SecurityError"):
        teacher_prompt(prompt="{{ messages.append(1) }}").of_row(CHATTED)
    with pytest.raises(DataError, match="cannot be rendered: ZeroDivisionError"):
        teacher_prompt(prompt="{{ 1 // 0 }}").of_row(PLAIN)
    with pytest.raises(ConfigError, match=r"teachers.math.prompt is not a Jinja template"):
        teacher_prompt(prompt="{{ prompt")


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"prompt": "x", "prompt_column": "y"}, "`prompt` and `prompt_column` are both set"),
        ({"prompt": ""}, "an empty `prompt`"),
        ({"prompt": [{"role": "user"}]}, "a message with the keys role; expected role and content"),
    ],
)
def test_conflicting_or_malformed_teacher_prompt_settings_are_refused(keys: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        TeacherConfig(model="m", **keys)


TOOLS = [{"type": "function", "function": {"name": "look", "description": "looks", "parameters": {}}}]


def request_of(teacher: str, row: dict[str, Any], key: str = "00000-0000000_0_0", **more: Any) -> ScoreItem:
    tokenizer = chat_tokenizer("chatml")
    renderer = Renderer(tokenizer, context=1 << 20, reserve=0)
    prompts = TeacherPrompts(
        {"math": teacher_prompt(prompt="{{ prompt }} Hint: {{ answer }}")}, renderer, **more
    )
    prompt, written = prompt_of(row), np.array([7, 8, 9], np.int32)
    tokens = np.concatenate([renderer.render(prompt), written])
    positions = np.arange(len(tokens) - 3, len(tokens), dtype=np.int32)
    asked = prompts.request(teacher, prompt, ScoreItem(key, tokens, positions, Signal.SAMPLED))
    assert isinstance(asked, ScoreItem)
    return asked


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["without tools", "with tools"])
def test_a_scoring_request_holds_the_teachers_prompt_and_the_students_generated_ids(
    tools: Any,
) -> None:
    loops = LoopChoice("single_turn")
    row = {**CHATTED, **({"tools": tools} if tools else {})}
    asked = request_of("math", row, schemas=loops.schemas)
    hinted = {**row, "messages": [CHAT[0], {"role": "user", "content": "12+34= Hint: 46"}]}
    ids = Renderer(chat_tokenizer("chatml"), context=1 << 20).render(prompt_of(hinted))
    assert asked.tokens.tolist() == [*ids.tolist(), 7, 8, 9]
    assert asked.positions.tolist() == [len(ids), len(ids) + 1, len(ids) + 2]


def test_a_teacher_without_its_own_prompt_scores_the_students_prompt() -> None:
    asked = request_of("code", CHATTED, schemas=lambda prompt: None)
    assert "Hint" not in chat_tokenizer("chatml").decode(asked.tokens.tolist())


def test_a_row_whose_teacher_prompt_cannot_be_built_fails_with_a_data_error() -> None:
    with pytest.raises(DataError, match="row 00000-0000000_0_1 is not the first output of its session"):
        request_of("math", CHATTED, "00000-0000000_0_1", schemas=lambda prompt: None)
    with pytest.raises(
        DataError,
        match=r"prompt 00000-0000000 of teachers.math: token id .* is no token of the models of this run",
    ):
        request_of("math", CHATTED, schemas=lambda prompt: None, usable=UsableIds(3))
    with pytest.raises(DataError, match="'answer' is undefined"):
        request_of("math", {"messages": CHAT}, schemas=lambda prompt: None)
