"""`attention`: which of transformers' implementations computes a model, and the error where it cannot."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make
from plain_figures import generated, gradient_error, rows_of, score_error
from transformers import Qwen3Config, Qwen3ForCausalLM

from understudy.assembly.critic import critic_of, reference_of
from understudy.assembly.engine_processes import HostSettings
from understudy.config import parse_recipe
from understudy.engines.hosted.process import parse_args as engine_arguments
from understudy.engines.local.engine import CacheLayout as EngineLayout
from understudy.engines.local.engine import HFEngine
from understudy.engines.local.scheduler import Batching
from understudy.errors import ConfigError, EngineError, PolicyError, TeacherError
from understudy.planning.models.config_checks import models_load
from understudy.planning.models.folder import ModelFolder
from understudy.planning.resolved import resolve
from understudy.policy.forward.forward import choose_layout
from understudy.policy.load import load_student
from understudy.policy.microbatch import Layout
from understudy.teacher.scoring import varlen
from understudy.teacher.scoring.model import FrozenModel, load_frozen
from understudy.teacher.scoring.scorer import Scorer
from understudy.teacher.scoring.warm_up import warm_up

ASSETS = Path(__file__).parents[3] / "src" / "understudy" / "assets" / "quickstart"
STUDENT = ASSETS / "models" / "student"


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with attention sinks, sliding windows and experts; transformers has no sdpa for it."""
    folder = tmp_path_factory.mktemp("models") / "gpt-oss"
    make("gpt-oss").save_pretrained(folder)
    return folder


def test_gpt_oss_loads_with_eager_attention_and_refuses_others_with_what_to_set(gpt_oss: Path) -> None:
    assert load_frozen(str(gpt_oss)).model.config._attn_implementation == "eager"
    message = (
        r"attention = 'sdpa': GptOssForCausalLM does not support .*; leave attention out, or set \"eager\"$"
    )
    with pytest.raises(TeacherError, match=message) as refused:
        load_frozen(str(gpt_oss), attention="sdpa")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400
    for kernel in (
        "flash_attention_2",
        "flash_attention_3",
    ):  # from the hub, where transformers finds no package
        with pytest.raises(PolicyError, match=f"attention = '{kernel}': .*set \"eager\"$"):
            load_student(str(gpt_oss), attention=kernel)


@pytest.mark.parametrize(
    ("attention", "fits"), [("auto", True), ("eager", True), ("sdpa", False), ("flash_attention_2", True)]
)
def test_check_refuses_an_attention_that_the_model_lacks(gpt_oss: Path, attention: Any, fits: bool) -> None:
    """With the same words as the loader."""
    message = "attention = 'sdpa': transformers has none for 'gpt_oss' models; leave attention out, or set \"eager\""
    tables: dict[str, Any] = {
        "student": {"model": str(gpt_oss), "attention": attention},
        "teachers": {"math": {"model": str(gpt_oss), "attention": attention}},
        "data": {"train": "rows.jsonl"},
    }
    folder = ModelFolder(gpt_oss)
    found = models_load(parse_recipe(tables), folder, {"math": folder})
    assert found == ([] if fits else [f"student.{message}", f"teachers.math.{message}"])


@pytest.mark.parametrize(
    ("name", "what"), [("lfm2", "conv layers"), ("mamba", "a recurrent state"), ("gemma2", ""), ("gpt2", "")]
)
def test_check_refuses_a_student_that_the_engine_cannot_generate_with(
    name: str, what: str, tmp_path: Path
) -> None:
    make(name).config.save_pretrained(tmp_path)
    tables: dict[str, Any] = {
        "student": {"model": str(tmp_path)},
        "teachers": {"math": {"model": "m"}},
        "data": {"train": "rows.jsonl"},
    }
    found = models_load(parse_recipe(tables), ModelFolder(tmp_path), {})
    message = f'rollout.engine = "hf" cannot generate with student.model = {str(tmp_path)!r} ({name!r}): it has {what}; '
    assert found == ([message + 'set rollout.engine = "vllm"'] if what else [])
    tables["rollout"] = {"engine": "vllm", "urls": ["http://127.0.0.1:1"]}
    assert models_load(parse_recipe(tables), ModelFolder(tmp_path), {}) == []


def test_varlen_attention_refuses_attention_sinks() -> None:
    """In half precision, the tolerance of the comparison at start is too wide to notice that sinks were left out."""
    heads = [torch.zeros(1, 2, 3, 8)] * 3
    bounds = {"cu_seq_lens_q": torch.tensor([0, 3]), "cu_seq_lens_k": torch.tensor([0, 3])}
    with pytest.raises(ValueError, match="no attention sinks"):
        varlen.varlen_attention(
            torch.nn.Module(), *heads, None, s_aux=torch.zeros(2), max_length_q=3, max_length_k=3, **bounds
        )


def test_an_attention_chosen_in_the_recipe_is_used_by_trainer_teacher_and_engine() -> None:
    """Over padded rows, all three equal a plain forward."""
    model: Any = load_student(str(STUDENT), attention="eager").model.eval()
    assert choose_layout(model) is Layout.PADDED
    assert choose_layout(load_student(str(STUDENT)).model) is Layout.PACKED
    calls = []
    layer = model.model.layers[0].self_attn
    layer.register_forward_hook(
        lambda module, given, result: calls.append(module.config._attn_implementation)
    )
    rows = rows_of((9, 21, 14), 44, shared=5)
    assert gradient_error(model, rows) < 1e-5
    assert score_error(model, rows) < 2e-5
    generated(model, rows[:1], 3, 64)
    frozen = FrozenModel(copy.deepcopy(model), "here", "float32", torch.device("cpu"), 128)
    scorer = Scorer("t", frozen)
    warm_up(scorer)
    assert frozen.model.config._attn_implementation == "eager"
    assert set(calls) == {"eager"} and len(calls) > 20


def test_an_engine_refuses_slots_for_a_model_whose_attention_was_chosen() -> None:
    shape = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 1}
    config = Qwen3Config(vocab_size=40, hidden_size=32, intermediate_size=32, **shape)
    model = Qwen3ForCausalLM._from_config(config, attn_implementation="eager")
    settings: dict[str, Any] = {"max_batch": 1, "device": "cpu", "pad_id": 0, "max_length": 32}
    with pytest.raises(EngineError, match="attention = 'eager' was chosen"):
        HFEngine(model, layout=EngineLayout.SLOTS, **settings)


def recipe_of(**changes: Any) -> Any:
    table: dict[str, Any] = {
        "student": {"model": str(STUDENT)},
        "teachers": {"t": {"model": str(ASSETS / "models" / "teacher-add")}},
        "data": {"train": str(ASSETS / "data" / "train.jsonl")},
    }
    for section, keys in changes.items():
        table[section] = {**table.get(section, {}), **keys}
    return parse_recipe(table)


def test_the_attention_key_is_checked_and_passed_to_engine_processes() -> None:
    with pytest.raises(ConfigError, match=r"`student.attention` = 'eagr'.*did you mean 'eager'"):
        recipe_of(student={"attention": "eagr"})
    with pytest.raises(ConfigError, match="`attention` belongs to processes that this run starts"):
        outside = {"model": "m", "placement": "external", "urls": ["http://h"], "attention": "eager"}
        recipe_of(teachers={"t": outside})
    host = HostSettings("m", "float32", "cpu", 1, 1, 8, 0, Batching.COMPOSED, False, attention="eager")
    assert engine_arguments(host.arguments("folder")).attention == "eager"


def test_critic_and_reference_use_the_students_attention_unless_they_have_their_own() -> None:
    gae = {"advantage": "gae", "task_coef": 1.0, "kl_coef": 0.1}
    sections: dict[str, Any] = {
        "data": {"reward": "understudy.rollout.rewards.builtin:exact_match"},
        "loss": gae,
    }
    recipe = recipe_of(student={"attention": "eager"}, reference={"attention": "sdpa"}, **sections)
    settings = resolve(recipe, gpus=0)
    assert settings.critic is not None and settings.reference is not None
    critic, reference = critic_of(settings.critic, None), reference_of(settings.reference, lanes=1)
    assert critic.policy.model.config._attn_implementation == "eager"
    assert reference.model.config._attn_implementation == "sdpa"
