"""JSON and JSON Lines files as other programs write them: BOM, Windows line ends, one list per file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from understudy.errors import DataError
from understudy.rollout.dataset import load_dataset

ROWS = [{"prompt": "1+1="}, {"prompt": "Wie viel ist 2+2? Größer als 3?"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", LINES.encode()),
        ("rows.jsonl", b"\xef\xbb\xbf" + LINES.replace("\n", "\r\n").encode()),
        ("rows.json", LINES.encode()),
        ("rows.json", json.dumps(ROWS).encode()),
        ("rows.json", b"\xef\xbb\xbf\n  " + json.dumps(ROWS, indent=2).encode()),
    ],
    ids=["lines", "lines with BOM and CRLF", "lines named .json", "a list", "an indented list"],
)
def test_json_and_jsonl_files_give_the_same_rows_whatever_their_encoding_marks(
    tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    dataset = load_dataset(str(tmp_path / name), "data.train")
    assert [dict(row) for row in dataset.rows] == ROWS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"prompt": "a"}, {"prompt"', r"data.train: .*rows.json begins as a list but is not readable JSON"),
        ('[{"prompt": "a"}, 7]', r"rows.json, item 2 is an? int"),
        ("[]", "is empty"),
    ],
)
def test_an_unusable_json_list_is_refused_with_the_file_and_the_item(
    tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "rows.json").write_text(content)
    with pytest.raises(DataError, match=message):
        load_dataset(str(tmp_path / "rows.json"), "data.train")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_an_integer_longer_than_pythons_digit_limit_is_refused_with_its_file(
    tmp_path: Path, name: str
) -> None:
    lines = ['{"prompt": "a"}', '{"prompt": "b", "answer": %s}' % ("1" * 5000)]
    (tmp_path / name).write_text("\n".join(lines) if name == "rows.jsonl" else f"[{','.join(lines)}]")
    place = ", line 2 cannot be read" if name == "rows.jsonl" else " begins as a list"
    with pytest.raises(DataError, match=rf"data.eval: .*{name}{place}.*4300 digits"):
        load_dataset(str(tmp_path / name), "data.eval")
