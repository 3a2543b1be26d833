"""Models with their own code (`trust_remote_code`): loaded only on request, and equal in trainer, teacher and
engine."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from own_code import ASSETS, write_house_model
from plain_figures import generation_error, gradient_error, plain_logprobs, rows_of, score_error
from transformers import AutoModelForCausalLM, dynamic_module_utils

from understudy.config import Recipe, parse_recipe
from understudy.engines.hosted.process import load_engine, parse_args
from understudy.errors import ConfigError, EngineError, PolicyError, TeacherError
from understudy.planning.preflight import preflight
from understudy.policy.load import load_student
from understudy.teacher.scoring.model import load_frozen

VOCAB, CONTEXT = 44, 128
ROWS = Path(__file__).parent / "three_rows.jsonl"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The model folder; the copies that transformers makes of its code go to a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")), raising=True
        )
        yield write_house_model(tmp_path_factory.mktemp("models") / "house")


def recipe_of(house: Path, **trusted: bool) -> Recipe:
    return parse_recipe(
        {
            "student": {"model": str(house), "trust_remote_code": trusted.get("student", False)},
            "teachers": {"t": {"model": str(house), "trust_remote_code": trusted.get("teacher", False)}},
            "data": {"train": str(ROWS)},
            "loss": {"topk": 8},
            "rollout": {"max_new_tokens": 8},
        }
    )


def test_teacher_student_and_engine_run_the_code_in_the_model_folder(house: Path) -> None:
    plain: Any = AutoModelForCausalLM.from_pretrained(house, trust_remote_code=True).eval()
    teacher = load_frozen(str(house), trust_remote_code=True).model
    student = load_student(str(house), trust_remote_code=True).model
    arguments = ["--model", str(house), "--max-length", "64", "--trust-remote-code"]
    engine, adapted = load_engine(parse_args(arguments))
    asyncio.run(engine.close())
    rows = rows_of((9, 40, 23), VOCAB)
    expected = plain_logprobs(plain, rows[0])
    for model in (teacher, student, adapted._model):
        assert type(model).__name__ == "HouseForCausalLM"
        torch.testing.assert_close(plain_logprobs(model.eval(), rows[0]), expected)
    without_code: Any = AutoModelForCausalLM.from_pretrained(ASSETS / "models" / "student").eval()
    assert abs(plain_logprobs(without_code, rows[0]) - expected).max() > 0.1, (
        "the code in the folder changes the log-probabilities"
    )
    assert score_error(plain, rows) < 2e-5
    assert gradient_error(plain, rows) < 2e-5
    assert generation_error(plain, rows[:2], 10, CONTEXT) < 2e-5


def test_without_trust_remote_code_a_one_line_refusal_says_what_to_set(house: Path) -> None:
    message = r"its code comes with the model \(auto_map in config.json\); set trust_remote_code = true"
    with pytest.raises(TeacherError, match=message) as refused:
        load_frozen(str(house))
    assert "\n" not in str(refused.value)
    with pytest.raises(PolicyError, match=message):
        load_student(str(house))
    with pytest.raises(EngineError, match=message):
        load_engine(parse_args(["--model", str(house), "--max-length", "64"]))


def test_check_names_the_trust_remote_code_keys_to_set_and_needs_no_revision_for_a_folder(
    house: Path,
) -> None:
    problems = preflight(recipe_of(house))
    assert len(problems) == 2
    for section, problem in zip(("student", "teachers.t"), problems, strict=True):
        assert problem.startswith(f"{section}.model = ") and "no model type 'house' of its own" in problem
        assert f"set {section}.trust_remote_code = true" in problem
    assert preflight(recipe_of(house, student=True, teacher=True)) == []


def test_trust_remote_code_with_a_hub_id_needs_a_revision(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="'org/model' is not a folder on this machine: pin it with `revision`"
    ):
        recipe_of(Path("org/model"), teacher=True)
    with pytest.raises(TeacherError, match="pin it with a revision"):
        load_frozen("org/model", trust_remote_code=True)


def test_code_in_the_folder_of_a_model_that_transformers_knows_is_ignored(
    house: Path, tmp_path: Path
) -> None:
    """Many folders on the hub still have the code they were published with."""
    known = write_house_model(tmp_path / "known")
    text = (known / "config.json").read_text().replace('"house"', '"qwen3"')
    (known / "config.json").write_text(text)
    assert preflight(recipe_of(known)) == []
    assert type(load_frozen(str(known)).model).__name__ == "Qwen3ForCausalLM"
