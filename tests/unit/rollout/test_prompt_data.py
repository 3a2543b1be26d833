"""Datasets and the prompt cursor: errors name file and line; a restored cursor continues where it was saved."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.config import DataConfig, RolloutConfig
from understudy.errors import DataError
from understudy.planning.overlong import Overlong, PromptLimits, settle_overlong
from understudy.rollout.cursor import PromptCursor
from understudy.rollout.dataset import Dataset, load_dataset
from understudy.rollout.seeds import derive_seed, hash63

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1), "data_source": "add", "level": i % 3} for i in range(10)]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_jsonl_parquet_and_lists_hold_the_same_rows(tmp_path: Path) -> None:
    jsonl = load_dataset(write_jsonl(tmp_path / "a.jsonl", ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    parquet = load_dataset(str(tmp_path / "a.parquet"))
    assert list(jsonl.rows) == list(parquet.rows) == list(load_dataset(ROWS).rows) == ROWS


def test_every_column_reaches_the_prompt() -> None:
    prompt = load_dataset(ROWS).prompt(4, key="k", epoch=0)
    assert (prompt.text, prompt.messages, prompt.data_source, prompt.ordinal) == ("4+1=", (), "add", 4)
    assert prompt.columns == {"answer": "5", "level": 1}


@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_a_list_of_messages_is_a_chat(column: str) -> None:
    prompt = load_dataset([{column: [{"role": "user", "content": "hi"}]}]).prompt(0, key="k", epoch=0)
    assert prompt.text is None and prompt.messages == ({"role": "user", "content": "hi"},)


def test_parquet_rows_may_hold_chats_and_null_columns(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "a"}], "answer": None},
        {"messages": None, "prompt": "b"},
    ]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"prompt": None, "answer": None, **r} for r in rows]),
        tmp_path / "a.parquet",
    )
    dataset = load_dataset(tmp_path / "a.parquet")
    assert dataset.prompt(0, key="k", epoch=0).messages[0]["content"] == "a"
    assert dataset.prompt(1, key="k", epoch=0).text == "b"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", ["is empty"]),
        ('{"prompt": "a"}\n\n{"answer": "1"}\n', ["line 3", "no prompt", "answer"]),
        ('{"prompt": "a"}\n{"prompt": ""}\n', ["line 2", "`prompt` is empty"]),
        ('{"prompt": "a"}\n{"prompt": \n', ["line 2", "not JSON", "column"]),
        ("[1, 2]\n", ["line 1", "list"]),
        ('{"messages": [{"content": "hi"}]}\n', ["line 1", "messages[0]", "role"]),
        ('{"messages": [{"role": "assistant", "content": "b"}]}\n', ["line 1", "assistant"]),
        ('{"prompt": "a", "data_source": 3}\n', ["line 1", "data_source", "3"]),
        ('{"prompt": 7}\n', ["line 1", "int"]),
    ],
)
def test_a_bad_row_is_refused_with_its_file_and_line(tmp_path: Path, content: str, says: list[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(DataError) as raised:
        load_dataset(path)
    assert all(word in str(raised.value) for word in ["bad.jsonl", *says])


def test_a_missing_file_a_folder_an_unknown_format_and_a_torn_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load_dataset(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match="is a folder"):
        load_dataset(tmp_path)
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(DataError, match="csv"):
        load_dataset(tmp_path / "a.csv")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(DataError, match="parquet"):
        load_dataset(tmp_path / "a.parquet")


def test_importing_dataset_and_cursor_does_not_import_torch() -> None:
    code = "import understudy.rollout.dataset, understudy.rollout.cursor, understudy.engines.base, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def keys_and_ordinals(cursor: PromptCursor, count: int) -> list[tuple[str, int]]:
    return [(prompt.key, prompt.ordinal) for prompt in cursor.take(count)]


@given(
    size=st.integers(1, 12),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
    batches=st.lists(st.integers(0, 9), max_size=6),
    more=st.integers(1, 30),
)
def test_a_restored_cursor_issues_the_same_prompts_as_an_uninterrupted_one(
    size: int, seed: int, shuffle: bool, batches: list[int], more: int
) -> None:
    dataset = load_dataset([{"prompt": str(i)} for i in range(size)])
    whole = PromptCursor(dataset, seed, shuffle)
    expected = keys_and_ordinals(whole, sum(batches) + more)
    part = PromptCursor(dataset, seed, shuffle)
    taken = [pair for batch in batches for pair in keys_and_ordinals(part, batch)]
    resumed = PromptCursor(dataset, seed, shuffle)
    resumed.restore(json.loads(json.dumps(part.state())))
    assert taken + keys_and_ordinals(resumed, more) == expected
    assert resumed.state() == whole.state()


@given(size=st.integers(1, 40), seed=st.integers(0, 1000))
def test_every_epoch_issues_every_row_once(size: int, seed: int) -> None:
    cursor = PromptCursor(load_dataset([{"prompt": str(i)} for i in range(size)]), seed, shuffle=True)
    for epoch in range(3):
        prompts = cursor.take(size)
        assert sorted(prompt.ordinal for prompt in prompts) == list(range(size))
        assert [prompt.key for prompt in prompts] == [f"{epoch:05d}-{place:07d}" for place in range(size)]


def test_the_prompt_order_depends_on_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        cursor = PromptCursor(load_dataset(ROWS), seed, shuffle=True)
        cursor.take(epoch * len(ROWS))
        return [prompt.ordinal for prompt in cursor.take(len(ROWS))]

    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert order(0, 0) == order(0, 0) == [6, 4, 7, 3, 2, 1, 0, 9, 8, 5], (
        "the order is part of a run's identity"
    )


@pytest.mark.parametrize(
    ("dataset", "seed", "shuffle", "says"),
    [
        (load_dataset(ROWS[1:]), 1, True, "dataset"),
        (load_dataset(ROWS), 2, True, "seed"),
        (load_dataset(ROWS), 1, False, "shuffle"),
    ],
)
def test_a_cursor_state_of_another_dataset_seed_or_shuffle_is_refused(
    dataset: Dataset, seed: int, shuffle: bool, says: str
) -> None:
    state = PromptCursor(load_dataset(ROWS), 1, True).state()
    with pytest.raises(DataError, match=f"made with {says}"):
        PromptCursor(dataset, seed, shuffle).restore(state)


def test_derived_seeds_are_63_bits_and_differ_for_every_combination_of_inputs() -> None:
    seeds = {
        derive_seed(r, e, k, s, t)
        for r in range(3)
        for e in range(3)
        for k in ("a", "b")
        for s in range(4)
        for t in range(4)
    }
    assert len(seeds) == 3 * 3 * 2 * 4 * 4
    assert all(0 <= seed < 1 << 63 for seed in seeds) and max(seeds) > 1 << 61
    assert derive_seed(0, 0, "00000-0000000", 0, 0) == derive_seed(0, 0, "00000-0000000", 0, 0)
    assert hash63("ab", "c") != hash63("a", "bc")


@pytest.mark.parametrize("rule", ["drop", "truncate_left"])
def test_settling_ten_thousand_overlong_rows_takes_less_than_three_seconds(rule: str) -> None:
    """Looking up the overlong rows in a list once took half a minute for this size, and hours for a million rows."""
    rows, every = 40_000, 4
    dataset = load_dataset([{"prompt": str(number)} for number in range(rows)])
    data = DataConfig.model_validate({"train": "rows.jsonl", "overlong": rule, "max_prompt_tokens": 10})
    overlong = Overlong("data.train", rule, PromptLimits(10), dict.fromkeys(range(0, rows, every), 20))
    before = time.process_time()
    kept, _ = settle_overlong(overlong, dataset, data, RolloutConfig())
    assert time.process_time() - before < 3
    assert len(kept) == (rows - rows // every if rule == "drop" else rows)
    assert kept.prompt(0, key="k", epoch=0).text == ("1" if rule == "drop" else "0")
    assert [kept.prompt(i, key="k", epoch=0).max_tokens for i in (0, 1)] == (
        [None, None] if rule == "drop" else [10, None]
    )
