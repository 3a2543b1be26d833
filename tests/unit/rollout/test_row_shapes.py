"""Rows as other projects write them, datasets of several sources, and rows that are refused with file and row."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from understudy.errors import DataError
from understudy.rollout.dataset import load_dataset
from understudy.rollout.sources import HubDataset, hub_dataset, rows_of, write_rows

CHAT = [{"role": "user", "content": "hi"}]


def write_jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def refused(row: dict[str, Any]) -> str:
    with pytest.raises(DataError) as raised:
        load_dataset([{"prompt": "fine"}, row])
    return str(raised.value)


def test_several_files_form_one_dataset_whose_rows_keep_their_file_and_line(tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "b.jsonl", {"prompt": "1"}, {"prompt": "2"})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "3"}]), tmp_path / "a.parquet")
    dataset = load_dataset([first, str(tmp_path / "a.parquet")])
    assert [row["prompt"] for row in dataset.rows] == ["1", "2", "3"]
    assert dataset.place(1) == f"{first}, line 2" and dataset.place(2) == f"{tmp_path / 'a.parquet'}, row 1"
    swapped = load_dataset([str(tmp_path / "a.parquet"), first])
    assert len({dataset.fingerprint, swapped.fingerprint, load_dataset(first).fingerprint}) == 3


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"properties": parameters}}}


UNIFIED = [
    {
        "messages": CHAT,
        "tools": [tool("add", a={"type": "integer", "enum": [1, None]})],
        "extra": {"kept": None, "also": 1},
    },
    {
        "messages": [
            *CHAT,
            {"role": "assistant", "tool_calls": [{"function": {"name": "find", "arguments": {"text": "x"}}}]},
            {"role": "tool", "content": "y", "name": "find"},
        ],
        "tools": [tool("find", text={"type": "string"})],
    },
]
"""Rows whose objects have different keys. Parquet gives each object the keys of all rows, null where it had none."""


def test_parquet_nulls_for_keys_of_other_rows_are_removed_from_nested_objects(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist(UNIFIED)
    assert table.to_pylist()[0]["messages"][0]["tool_calls"] is None
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    for rows in (load_dataset(str(tmp_path / "rows.parquet")).rows, rows_of(table.to_pylist())):
        assert list(rows) == UNIFIED, "nulls that the row itself holds, in a column or in a list, are kept"


def test_a_tools_column_of_json_text_is_parsed() -> None:
    tools = [tool("add"), tool("find")]
    for text in (json.dumps(tools), json.dumps([json.dumps(one) for one in tools])):
        assert load_dataset([{"messages": CHAT, "tools": text}]).rows[0]["tools"] == tools
    assert load_dataset([{"messages": CHAT, "tools": '["add"]'}]).rows[0]["tools"] == ["add"]
    for none in ("", "null", None, [], "[]", {}):
        assert not load_dataset([{"messages": CHAT, "tools": none}]).rows[0]["tools"]
    assert load_dataset([{"prompt": "add 1", "tools": "a word"}]).rows[0]["tools"] == "a word"


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (5, "tools is a int"),
        ({"a": 1}, "tools is a dict"),
        ([None], "tools[0] is None"),
        (["add", 7], "tools[1] is 7"),
        ("add", "tools is the text 'add', no JSON (Expecting value"),
        ('{"a": 1}', "tools is a dict"),
        ("[null]", "tools[0] is None"),
        ("[" * 100_000, "tools is the text '[[[["),
        ("1" * 5000, "tools is the text '1111"),
    ],
)
def test_an_unusable_tools_column_is_refused_with_its_value(tools: Any, message: str) -> None:
    output = refused({"messages": CHAT, "tools": tools})
    assert f"data[1]: {message}" in output and "expected a list of function schemas" in output


def test_a_glob_reads_files_in_sorted_order_and_an_added_file_changes_the_fingerprint(tmp_path: Path) -> None:
    for name in ("2.jsonl", "1.jsonl"):
        write_jsonl(tmp_path / name, {"prompt": name})
    dataset = load_dataset(str(tmp_path / "*.jsonl"))
    assert [row["prompt"] for row in dataset.rows] == ["1.jsonl", "2.jsonl"]
    write_jsonl(tmp_path / "3.jsonl", {"prompt": "3"})
    assert load_dataset(str(tmp_path / "*.jsonl")).fingerprint != dataset.fingerprint
    with pytest.raises(DataError, match=r"data\.eval: no file matches .*\*\.parquet"):
        load_dataset(str(tmp_path / "*.parquet"), "data.eval")
    with pytest.raises(DataError, match=r"names .*1\.jsonl twice"):
        load_dataset([str(tmp_path / "*.jsonl"), str(tmp_path / "1.jsonl")])


def test_a_bad_row_names_its_file_among_several_files(tmp_path: Path) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", {"prompt": "a"})
    bad = write_jsonl(tmp_path / "bad.jsonl", {"prompt": "a"}, {"answer": "b"})
    with pytest.raises(DataError, match=r"bad\.jsonl, line 2 has no prompt"):
        load_dataset([good, bad])


def test_verl_rows_are_read_with_their_agent_name_and_ground_truth(tmp_path: Path) -> None:
    row = {
        "data_source": "openai/gsm8k", "prompt": CHAT, "ability": "math", "agent_name": "tool_agent",
        "reward_model": {"style": "rule", "ground_truth": "72"}, "extra_info": {"index": 0, "split": "train"},
    }  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "verl.parquet")
    prompt = load_dataset(tmp_path / "verl.parquet").prompt(0, key="k", epoch=0)
    assert prompt.messages == tuple(CHAT) and prompt.data_source == "openai/gsm8k"
    assert prompt.columns["agent"] == "tool" and prompt.columns["reward_model"]["ground_truth"] == "72"
    own = load_dataset([{"messages": CHAT, "agent_name": "single_turn_agent"}]).rows[0]
    assert own["agent"] == "single_turn"
    assert load_dataset([{"messages": CHAT, "agent_name": "other"}]).rows[0]["agent"] == "other"


def test_text_content_parts_of_a_message_are_joined_into_one_string() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": parts}]
    prompt = load_dataset([{"messages": messages}]).prompt(0, key="k", epoch=0)
    assert prompt.messages == (messages[0], {"role": "user", "content": "one two"})


def test_rows_with_unsupported_content_are_refused_with_the_field_named() -> None:
    clip = [{"type": "text", "text": "?"}, {"type": "video", "video": "a.mp4"}]
    message = refused({"messages": [{"role": "user", "content": clip}]})
    assert "data[1]: messages[0].content[1] is of type 'video'" in message
    assert "data[1] has videos (column `videos`)" in refused({"messages": CHAT, "videos": ["a.mp4"]})
    assert load_dataset([{"messages": CHAT, "images": []}])
    assert "data[1] has both `prompt` and `messages`" in refused({"messages": CHAT, "prompt": "hi"})
    assert "expected text or a list" in refused({"messages": [{"role": "user", "content": 3}]})
    assert "agent is 3" in refused({"prompt": "a", "agent": 3})


def test_a_message_without_content_is_refused() -> None:
    """A chat template would render missing content as an empty string or as "None", and the run would train on it."""
    for wrong in ({"role": "user", "contents": "hi"}, {"role": "user", "content": None, "contents": 1}):
        message = refused({"messages": [CHAT[0], wrong]})
        assert "data[1]: messages[1] has no content (its keys: role, " in message and "contents)" in message
    message = refused({"messages": json.dumps(CHAT)})
    assert "data[1]: messages is a string; expected a list of messages" in message
    called = [
        CHAT[0],
        {"role": "assistant", "content": None, "tool_calls": [{}]},
        {"role": "tool", "content": "4"},
    ]
    assert load_dataset([{"messages": called}]).prompt(0, key="k", epoch=0).messages == tuple(called)


def test_a_comma_separated_string_of_files_is_refused_with_the_list_to_write(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r'several sources are a list: \["a.jsonl", "b.jsonl"\]'):
        load_dataset("a.jsonl,b.jsonl")


def test_lone_surrogates_invalid_utf8_and_too_deep_nesting_are_refused_with_their_line(
    tmp_path: Path,
) -> None:
    path = tmp_path / "uni.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "ok"}]}\n{"prompt": "a\\ud83d"}\n')
    with pytest.raises(DataError, match=r"uni\.jsonl, line 2: prompt holds half of a character"):
        load_dataset(path)
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"uni\.jsonl, line 2 is not UTF-8"):
        load_dataset(path)
    path.write_text('{"prompt": "a", "x": ' + "[" * 100_000)
    with pytest.raises(DataError, match="nested too deeply"):
        load_dataset(path)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("openai/gsm8k", HubDataset("openai/gsm8k", None, None, None)),
        ("openai/gsm8k/main:test", HubDataset("openai/gsm8k", "main", None, "test")),
        ("a/b@e53f048:train[:500]", HubDataset("a/b", None, "e53f048", "train[:500]")),
        ("data/train.jsonl", None),
        ("./a/b", None),
        ("/a/b", None),
        ("data/*.parquet", None),
        ("prompts", None),
    ],
)
def test_hub_dataset_names_are_told_from_paths_and_parsed(source: str, expected: HubDataset | None) -> None:
    assert hub_dataset(source) == expected


def test_a_hub_dataset_without_the_datasets_extra_is_refused_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"needs the datasets extra: pip install .understudy\[datasets\]"):
        load_dataset("openai/gsm8k/main:train")


def test_rows_passed_as_objects_are_written_to_jsonl_and_wrong_objects_are_refused(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": None, "level": 1}, {"messages": CHAT, "score": 0.5}]
    write_rows(rows, tmp_path / "rows.jsonl")
    assert list(load_dataset(tmp_path / "rows.jsonl").rows) == [{"prompt": "a", "level": 1}, rows[1]]
    with pytest.raises(DataError, match=r"several splits \(train, test\)"):
        rows_of({"train": rows, "test": rows})
    for one in ({"prompt": ["a", "b"], "level": [1, 2]}, {"prompt": "a", "level": 1}):
        with pytest.raises(DataError, match=r"data is a dict \(prompt, level\); expected a list of rows"):
            rows_of(one)
    with pytest.raises(DataError, match="row 2: column `x` holds a object"):
        rows_of([{"prompt": "a"}, {"prompt": "b", "x": [object()]}])
