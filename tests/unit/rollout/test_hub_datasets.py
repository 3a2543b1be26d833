"""Hub datasets and `datasets.Dataset` objects, read with the real library (extra `understudy[datasets]`)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from understudy.errors import DataError
from understudy.rollout.dataset import load_dataset
from understudy.rollout.sources import HubDataset, _read_hub, rows_of, write_rows

datasets = pytest.importorskip("datasets")
ROWS = [{"messages": [{"role": "user", "content": text}], "answer": text} for text in ("a", "b", "c")]


def test_a_datasets_dataset_object_is_converted_to_rows_and_a_dataset_dict_is_refused(tmp_path: Path) -> None:
    whole = datasets.Dataset.from_list([*ROWS, {**ROWS[0], "answer": None}])
    assert rows_of(whole) == [*ROWS, {"messages": ROWS[0]["messages"]}]
    write_rows(whole, tmp_path / "rows.jsonl")
    assert list(load_dataset(tmp_path / "rows.jsonl").rows) == rows_of(whole)
    with pytest.raises(DataError, match=r"several splits \(train\); give one of them"):
        rows_of(datasets.DatasetDict(train=whole))


def test_a_hub_dataset_is_read_by_split_and_its_digest_depends_on_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local folder stands in for the hub: the library accepts its path as a dataset name."""
    (tmp_path / "org" / "name").mkdir(parents=True)
    for split in ("train", "test"):
        rows = ROWS if split == "train" else ROWS[:1]
        lines = [json.dumps(row) + "\n" for row in rows]
        (tmp_path / "org" / "name" / f"{split}.jsonl").write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    name = "org/name"
    found, digest = _read_hub(name, HubDataset(name, None, None, None), "data.train")
    assert found == [(f"{name}, row {number}", row) for number, row in enumerate(ROWS, start=1)]
    assert _read_hub(name, HubDataset(name, None, None, "train"), "data.eval") == (found, digest)
    fewer, other = _read_hub(name, HubDataset(name, None, None, "train[:2]"), "data.train")
    assert len(fewer) == 2 and other != digest
    with pytest.raises(DataError, match=r"data\.eval = 'org/name': name the split"):
        _read_hub(name, HubDataset(name, None, None, None), "data.eval")
    with pytest.raises(DataError, match=r"data\.train = 'org/name' cannot be had from the hub: .*nosplit"):
        _read_hub(name, HubDataset(name, None, None, "nosplit"), "data.train")


def test_reading_rows_of_the_datasets_library_does_not_import_torch() -> None:
    code = (
        "import sys, datasets; from understudy.rollout.sources import rows_of\n"
        "rows_of(datasets.Dataset.from_list([{'prompt': 'a'}])); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
