"""A model folder that is not there is told from a hub id by what lies beside the recipe."""

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
    """A recipe's folder with a model in it, which is not where the command runs."""
    for name in ("models/student", "student"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "students").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?"}\n')
    return tmp_path


def written(folder: Path, student: str, teacher: str = "Qwen/Qwen3-8B", more: str = "") -> Path:
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
def test_check_reports_a_missing_folder_with_the_nearest(
    folder: Path, name: str, suggested: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(written(folder, name))]) == 2
    output = capsys.readouterr().err
    assert f"student.model = '{(folder / name).resolve()}': no such folder" in output
    assert (
        (f"did you mean '{folder / suggested}'?" in output) if suggested else ("did you mean" not in output)
    )


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M", "openai-community/gpt2", "meta-llama/Llama-3.2-1B"]
)  # fmt: skip
def test_hub_ids_are_left_alone(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "qwen" / "Qwen3-0.6B").mkdir(parents=True)
    path = written(folder, name)
    assert load_recipe(path).student.model == name
    assert main(["check", str(path), "loss.topk=8"]) == 0, capsys.readouterr().err


def test_a_plain_name_is_told_where_the_hub_cannot_be_asked(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a mistyped folder far more often than a model such as gpt2, which a hub that answers would know."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    path = written(folder, "nothere")
    assert load_recipe(path).student.model == "nothere"
    assert main(["check", str(path), "loss.topk=8"]) == 2
    assert "student.model = 'nothere': no such folder here" in capsys.readouterr().err


def test_what_an_external_server_serves_is_no_folder(folder: Path) -> None:
    more = 'placement = "external"\nurls = ["http://h:1"]'
    assert load_recipe(written(folder, "gpt2", "models/studnt", more)).teachers["t"].model == "models/studnt"


def test_a_folder_beside_the_recipe_comes_before_one_where_the_command_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    assert load_recipe(written(folder, "models/student")).student.model == str(folder / "models/student")
    assert load_recipe(written(folder, "models/mine")).student.model == str(elsewhere / "models/mine")


def test_data_where_the_command_runs_is_found_from_elsewhere_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also if the recipe's folder has a folder of that name: a resume may come from any folder."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for name in (elsewhere / "data" / "mine.jsonl", folder / "data" / "other.jsonl"):
        name.parent.mkdir()
        name.write_text('{"prompt": "?"}\n')
    monkeypatch.chdir(elsewhere)
    path, mine = written(folder, "student"), str(elsewhere / "data" / "mine.jsonl")
    assert load_recipe(path, ["data.train=data/mine.jsonl"]).data.train == [mine]
    assert load_recipe(path, ["data.train=data/m*.jsonl"]).data.train == [mine]
    missing = load_recipe(path, ["data.train=data/none.jsonl"])
    assert missing.data.train == [str(folder / "data/none.jsonl")]


def test_a_link_that_alone_says_what_the_file_is_keeps_its_name(folder: Path) -> None:
    """The hub's cache and DVC link to files that are named by their hash."""
    blob, other = folder / "blobs" / "4f1c", folder / "far.jsonl"
    blob.parent.mkdir()
    for file in (blob, other):
        file.write_text('{"prompt": "?"}\n')
    (folder / "linked.jsonl").symlink_to(blob)
    (folder / "near.jsonl").symlink_to(other)
    path = written(folder, "student")
    for name in ("linked.jsonl", str(folder / "linked.jsonl"), "linked.*"):
        assert load_recipe(path, [f"data.train={name}"]).data.train == [str(folder / "linked.jsonl")]
    assert load_recipe(path, ["data.train=near.jsonl"]).data.train == [str(other)]


def test_the_home_folder_in_every_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell does not expand it in `key=~/folder`, and a run directory called `~` is easily removed with all the rest."""
    monkeypatch.setenv("HOME", str(folder))
    path = written(folder / "models", "~/student", "~/models/student")
    words = ["run.dir=~/runs/a", "run.python_path=['~/code', '.']", "data.train=~/rows.jsonl"]
    recipe = load_recipe(path, words)
    assert recipe.student.model == str(folder / "student")
    assert recipe.teachers["t"].model == str(folder / "models/student")
    assert recipe.data.train == [str(folder / "rows.jsonl")]
    assert read_tables(path, ["rollout.snapshots=~/s"])["rollout"]["snapshots"] == f"{folder}/s"
    assert recipe.run.dir == f"{folder}/runs/a"
    assert recipe.run.python_path == [f"{folder}/code", f"{folder}/models"]


def test_an_empty_name_is_not_the_recipes_own_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "config.json").write_text("{}")
    path = written(folder, "", "  ")
    path.write_text(path.read_text().replace("rows.jsonl", ""))
    assert main(["check", str(path)]) == 2
    output = capsys.readouterr().err
    assert "`student.model` = '': expected a hub id or the folder of a model" in output
    assert "`teachers.t.model` = '  ': expected a hub id or the folder of a model" in output
    assert "`data.train`: '' names no data; expected a jsonl or parquet file" in output


def test_distill_refuses_an_empty_name_of_data() -> None:
    with pytest.raises(ConfigError, match=r"^`data.train`: '' names no data"):
        understudy.distill(student="a/b", teacher="a/c", data="")
