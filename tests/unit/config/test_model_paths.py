"""A model folder that is not there is told from a hub id by what lies beside the recipe."""

from pathlib import Path

import pytest

import understudy
from understudy.cli.main import main
from understudy.config import load_recipe
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
    assert load_recipe(written(folder, "models/mine")).student.model == "models/mine"


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
