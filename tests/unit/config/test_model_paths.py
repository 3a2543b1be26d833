"""Paths in recipes: model folders and hub ids, data files, links, the home folder, empty paths."""

from pathlib import Path

import pytest

import understudy
from understudy.cli.main import main
from understudy.config import load_recipe
from understudy.config.recipe import read_tables
from understudy.errors import ConfigError

RECIPE = """
[student]
model = "{student}"
[teachers.t]
model = "{teacher}"
{more}
[data]
train = "rows.jsonl"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recipe's folder with a model in it; commands run in another folder."""
    for name in ("models/student", "student"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "students").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?"}\n')
    return tmp_path


def write_recipe(folder: Path, student: str, teacher: str = "Qwen/Qwen3-8B", more: str = "") -> Path:
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(student=student, teacher=teacher, more=more))
    return path


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("models/studnt", "models/student"),
        ("modls/student", "models/student"),
        ("modls/studnt", "models/student"),
        ("./models/studnt", "models/student"),
        ("studnt", "student"),
        ("../nowhere-near-anything/x", None),
    ],
)
def test_check_reports_a_missing_model_folder_and_suggests_the_nearest(
    folder: Path, name: str, suggested: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(write_recipe(folder, name))]) == 2
    output = capsys.readouterr().err
    assert f"student.model = '{(folder / name).resolve()}': no such folder" in output
    assert (
        (f"did you mean '{folder / suggested}'?" in output) if suggested else ("did you mean" not in output)
    )


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M", "openai-community/gpt2", "meta-llama/Llama-3.2-1B"]
)  # fmt: skip
def test_a_hub_id_is_not_taken_for_a_missing_folder(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "qwen" / "Qwen3-0.6B").mkdir(parents=True)
    path = write_recipe(folder, name)
    assert load_recipe(path).student.model == name
    assert main(["check", str(path), "loss.topk=8"]) == 0, capsys.readouterr().err


def test_a_name_without_a_slash_is_reported_as_a_missing_folder_when_the_hub_is_offline(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a name is far more often a mistyped folder than a hub model such as gpt2, which a reachable hub
    would know."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    path = write_recipe(folder, "nothere")
    assert load_recipe(path).student.model == "nothere"
    assert main(["check", str(path), "loss.topk=8"]) == 2
    assert "student.model = 'nothere': no such folder here" in capsys.readouterr().err


def test_the_model_of_an_external_teacher_is_not_checked_as_a_folder(folder: Path) -> None:
    more = 'placement = "external"\nurls = ["http://h:1"]'
    assert (
        load_recipe(write_recipe(folder, "gpt2", "models/studnt", more)).teachers["t"].model
        == "models/studnt"
    )


def test_a_model_folder_is_looked_up_beside_the_recipe_before_the_working_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    assert load_recipe(write_recipe(folder, "models/student")).student.model == str(folder / "models/student")
    assert load_recipe(write_recipe(folder, "models/mine")).student.model == str(elsewhere / "models/mine")


def test_data_found_in_the_working_directory_are_stored_with_an_absolute_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A resume may run in any folder. This holds even if the recipe's folder has a folder of that name."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for name in (elsewhere / "data" / "mine.jsonl", folder / "data" / "other.jsonl"):
        name.parent.mkdir()
        name.write_text('{"prompt": "?"}\n')
    monkeypatch.chdir(elsewhere)
    path, mine = write_recipe(folder, "student"), str(elsewhere / "data" / "mine.jsonl")
    assert load_recipe(path, ["data.train=data/mine.jsonl"]).data.train == [mine]
    assert load_recipe(path, ["data.train=data/m*.jsonl"]).data.train == [mine]
    missing = load_recipe(path, ["data.train=data/none.jsonl"])
    assert missing.data.train == [str(folder / "data/none.jsonl")]


def test_a_symbolic_link_to_a_file_without_an_extension_is_not_resolved(folder: Path) -> None:
    """The hub's cache and DVC link to files that are named by their hash, so only the link's name has the extension."""
    blob, other = folder / "blobs" / "4f1c", folder / "far.jsonl"
    blob.parent.mkdir()
    for file in (blob, other):
        file.write_text('{"prompt": "?"}\n')
    (folder / "linked.jsonl").symlink_to(blob)
    (folder / "near.jsonl").symlink_to(other)
    path = write_recipe(folder, "student")
    for name in ("linked.jsonl", str(folder / "linked.jsonl"), "linked.*"):
        assert load_recipe(path, [f"data.train={name}"]).data.train == [str(folder / "linked.jsonl")]
    assert load_recipe(path, ["data.train=near.jsonl"]).data.train == [str(other)]


def test_a_tilde_is_expanded_in_every_path_of_a_recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell does not expand it in `key=~/folder`. And a run directory named `~` invites a user to remove the home
    folder."""
    monkeypatch.setenv("HOME", str(folder))
    path = write_recipe(folder / "models", "~/student", "~/models/student")
    words = ["run.dir=~/runs/a", "run.python_path=['~/code', '.']", "data.train=~/rows.jsonl"]
    recipe = load_recipe(path, words)
    assert recipe.student.model == str(folder / "student")
    assert recipe.teachers["t"].model == str(folder / "models/student")
    assert recipe.data.train == [str(folder / "rows.jsonl")]
    assert read_tables(path, ["rollout.snapshots=~/s"])["rollout"]["snapshots"] == f"{folder}/s"
    assert recipe.run.dir == f"{folder}/runs/a"
    assert recipe.run.python_path == [f"{folder}/code", f"{folder}/models"]


def test_an_empty_path_is_refused_and_not_taken_for_the_folder_of_the_recipe(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "config.json").write_text("{}")
    path = write_recipe(folder, "", "  ")
    path.write_text(path.read_text().replace("rows.jsonl", ""))
    assert main(["check", str(path)]) == 2
    output = capsys.readouterr().err
    assert "`student.model` = '': expected a hub id or the folder of a model" in output
    assert "`teachers.t.model` = '  ': expected a hub id or the folder of a model" in output
    assert "`data.train`: '' names no data; expected a jsonl or parquet file" in output


def test_distill_refuses_an_empty_data_path() -> None:
    with pytest.raises(ConfigError, match=r"^`data.train`: '' names no data"):
        understudy.distill(student="a/b", teacher="a/c", data="")
