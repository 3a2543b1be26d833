"""Rows in TRL's formats: prompt-only, prompt-completion and messages, plain and conversational."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from understudy.config import parse_recipe
from understudy.errors import DataError
from understudy.planning.data_checks import check_rows
from understudy.planning.overlong import PromptLimits
from understudy.planning.teacher_checks import answers_given
from understudy.rollout.dataset import load_dataset
from understudy.types.prompt import Prompt

USER = {"role": "user", "content": "What colour is the sky?"}
ANSWER = {"role": "assistant", "content": "It is blue."}


def read(row: dict[str, Any]) -> Prompt:
    return load_dataset([row]).prompt(0, key="k", epoch=0)


def recipe(**rollout: Any) -> Any:
    return parse_recipe(
        {
            "student": {"model": "org/s"},
            "teachers": {"t": {"model": "org/t"}},
            "data": {"train": "rows.jsonl"},
            "rollout": {"off_policy": 0.5, **rollout},
        }
    )


@pytest.mark.parametrize(
    ("row", "text", "messages", "completion"),
    [
        ({"prompt": "The sky is"}, "The sky is", (), None),
        ({"prompt": "The sky is", "completion": " blue."}, "The sky is", (), " blue."),
        ({"prompt": [USER]}, None, (USER,), None),
        ({"prompt": [USER], "completion": [ANSWER]}, None, (USER,), [ANSWER]),
        ({"prompt": [USER], "completion": "It is blue."}, None, (USER,), "It is blue."),
        ({"messages": [USER]}, None, (USER,), None),
        ({"messages": [USER, ANSWER]}, None, (USER,), "It is blue."),
        (
            {"messages": [USER, ANSWER, USER, ANSWER]},
            None,
            (USER, ANSWER, USER),
            "It is blue.",
        ),
    ],
)
def test_every_trl_row_format_is_read_from_lists_jsonl_and_parquet(
    tmp_path: Path, row: dict[str, Any], text: str | None, messages: tuple[Any, ...], completion: Any
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    for source in ([row], tmp_path / "rows.jsonl", tmp_path / "rows.parquet"):
        prompt = load_dataset(source).prompt(0, key="k", epoch=0)
        assert (prompt.text, prompt.messages) == (text, messages)
        assert prompt.columns.get("completion") == completion


def test_a_dataset_of_the_datasets_library_gives_messages_and_completion(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason='pip install "understudy[datasets]"')
    rows = datasets.Dataset.from_list([{"prompt": [USER], "completion": [ANSWER]}])
    prompt = load_dataset(rows.to_list()).prompt(0, key="k", epoch=0)
    assert prompt.messages == (USER,) and prompt.columns["completion"] == [ANSWER]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [ANSWER]}, "nothing left to answer"),
        ({"messages": [USER, ANSWER, ANSWER]}, "nothing left to answer"),
        ({"messages": [USER, ANSWER], "completion": "blue"}, "has a `completion` too"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{}]}]}, r"not an answer in text \(a message with tool calls\)"),
        ({"prompt": "", "answer": "blue"}, "`prompt` is empty"),
        ({"messages": []}, "`messages` is empty"),
        ({"text": "The sky is blue."}, r"has no prompt \(columns: text\)"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_read_is_refused_with_the_reason(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(row)


@pytest.mark.parametrize(
    "row", [{"messages": [USER, ANSWER]}, {"prompt": [USER], "completion": [ANSWER]}, {"prompt": "a", "completion": "b"}]
)  # fmt: skip
def test_completions_are_used_as_given_answers_when_answer_column_names_them(row: dict[str, Any]) -> None:
    dataset = load_dataset([row])
    assert answers_given(recipe(answer_column="completion"), dataset) == []
    (message,) = answers_given(recipe(), dataset)
    assert "no text in the column 'answer' (missing or empty)" in message
    assert "rollout.answer_column = 'completion'" in message


def test_a_completion_of_several_messages_is_refused_as_an_answer() -> None:
    (message,) = answers_given(
        recipe(answer_column="completion"),
        load_dataset([{"prompt": [USER], "completion": [ANSWER, ANSWER]}]),
    )
    assert "'completion' (2 messages, expected one)" in message


def test_check_notes_how_many_chats_end_with_an_assistant_message() -> None:
    dataset = load_dataset([{"messages": [USER, ANSWER]}, {"messages": [USER]}])
    found = check_rows(recipe(), dataset, "data.train", PromptLimits(None), None, lambda _: None)
    (note,) = found.notes
    assert note.startswith("data.train: 1 of 2 chats end with an assistant message")
