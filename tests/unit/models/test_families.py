"""For each family of models, trainer, teacher and hf engine equal a plain transformers forward, row by row."""

import pytest
import torch
from families import CONTEXT, FAMILIES, VOCAB, make
from plain_figures import generated, generation_error, gradient_error, rows_of, score_error

from understudy.errors import EngineError

torch.set_num_threads(1)

GRADIENT, NATS = 1e-5, 2e-5
"""Largest differences: of a gradient entry beside the largest of its weight, and of a log-probability."""
ORDINARY = [
    "qwen2", "qwen3", "qwen3-moe", "llama3-rope", "llama-yarn", "llama-dynamic", "mistral-window", "mixtral", "gemma2", "gemma3",
    "phi3", "gpt2", "gpt-neox", "olmo2", "cohere", "granite", "smollm3", "glm4", "seed-oss", "deepseek-v3", "gpt-oss", "lfm2",
    "mamba",
]  # fmt: skip
REST = sorted(FAMILIES.keys() - set(ORDINARY))


def check(name: str) -> None:
    family, model = FAMILIES[name], make(name)
    rows = rows_of((14, 23, 30, 9), VOCAB, shared=6)
    assert gradient_error(model, rows) < GRADIENT
    assert score_error(model, rows) < NATS
    prompts = rows_of((3, 9), VOCAB, seed=1)
    if family.refused_by_hf:
        with pytest.raises(
            EngineError, match=f'{family.refused_by_hf}.*use another engine .rollout.engine = "vllm"'
        ):
            generated(model, prompts, 4, CONTEXT)
    else:
        assert generation_error(model, prompts, 6, CONTEXT) < NATS


@pytest.mark.parametrize("name", ORDINARY)
def test_trainer_teacher_and_engine_equal_plain_transformers_for_common_families(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_trainer_teacher_and_engine_equal_plain_transformers_for_other_families(name: str) -> None:
    check(name)


def test_a_recurrent_state_is_refused_where_the_config_names_no_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As that of Mamba in older releases of transformers."""
    model = make("gpt2")
    monkeypatch.setattr(type(model), "_is_stateful", True, raising=False)
    with pytest.raises(EngineError, match="it has a recurrent state, and only"):
        generated(model, rows_of((3,), VOCAB), 1, CONTEXT)
