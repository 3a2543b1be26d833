"""Models whose rotary embedding changes beyond a border length: a row's results do not depend on other rows."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_figures import generation_error, gradient_error, plain_logprobs, rows_of, score_error
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPTJConfig, Qwen3Config

from understudy.engines.local.engine import HFEngine
from understudy.errors import EngineError
from understudy.nn.rotary_border import rotary_border
from understudy.planning.models.folder import ModelFolder
from understudy.policy.load import context_of_config
from understudy.policy.policy import Policy
from understudy.policy.reference import ReferenceModel as FrozenPolicy
from understudy.policy.step import PolicySettings
from understudy.teacher.scoring.body import ScoringLayout

VOCAB, BORDER = 40, 24
LENGTHS = (5, 60, BORDER, 40, BORDER + 1, 13, BORDER - 1)


@pytest.fixture(scope="module")
def longrope() -> Any:
    """Phi-3's longrope: one set of factors up to 24 tokens, another one beyond."""
    torch.manual_seed(0)
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 5.0, 9.0, 14.0]}
    config = AutoConfig.for_model(
        "phi3",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        original_max_position_embeddings=BORDER,
        rope_parameters={"rope_type": "longrope", "rope_theta": 100.0, **factors},
        pad_token_id=0,
        initializer_range=0.4,
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("layout", [ScoringLayout.PADDED, ScoringLayout.PACKED])
def test_scores_of_a_row_do_not_depend_on_the_lengths_of_other_rows(
    longrope: Any, layout: ScoringLayout
) -> None:
    """Also if rows on both sides of the border have a common prefix, and if only the last token, which is not read, is
    beyond it."""
    rows = rows_of(LENGTHS, VOCAB, shared=12)
    assert score_error(longrope, rows, layout) < 2e-5


def test_plain_transformers_gives_a_short_row_beside_a_long_one_other_logprobs(longrope: Any) -> None:
    """Otherwise the other tests would prove nothing."""
    short, long = rows_of((10, 60), VOCAB)
    both = torch.zeros(2, 60, dtype=torch.int64)
    both[0, :10], both[1] = torch.from_numpy(short), torch.from_numpy(long)
    with torch.no_grad():
        batched = longrope(input_ids=both).logits[0, :9].log_softmax(-1)
    assert np.abs(np.asarray(batched) - plain_logprobs(longrope, short)).max() > 0.1


def test_the_gradient_of_a_row_does_not_depend_on_the_lengths_of_other_rows(longrope: Any) -> None:
    assert gradient_error(longrope, rows_of(LENGTHS, VOCAB)) < 2e-5


def test_policy_and_reference_with_longrope_use_one_lane(longrope: Any) -> None:
    assert Policy(copy.deepcopy(longrope), PolicySettings(lanes=2)).lanes.count == 1
    assert FrozenPolicy(copy.deepcopy(longrope), lanes=2).lanes.count == 1


def test_generation_below_the_border_equals_a_plain_forward(longrope: Any) -> None:
    prompts = rows_of((3, 12, 8), VOCAB)
    assert generation_error(longrope, prompts, BORDER - 12, BORDER) < 2e-5


def test_generation_that_may_cross_the_border_is_refused_with_what_to_set(longrope: Any) -> None:
    with pytest.raises(EngineError, match=rf"beyond {BORDER} tokens.*set rollout.context_length = {BORDER}"):
        HFEngine(copy.deepcopy(longrope), max_batch=2, device="cpu", pad_id=0, max_length=BORDER + 1)


@pytest.mark.parametrize(
    ("config", "border"),
    [
        ({"max_position_embeddings": 99}, None),
        ({"max_position_embeddings": 99, "rope_scaling": {"type": "linear", "factor": 2.0}}, None),
        ({"max_position_embeddings": 99, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, None),
        ({"max_position_embeddings": 99, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 99),
        (
            {
                "original_max_position_embeddings": 40,
                "rope_scaling": {"type": "longrope"},
                "max_position_embeddings": 99,
            },
            40,
        ),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 41}}, 41),
        ({"model_type": "phi3", "rope_scaling": {"type": "su"}, "original_max_position_embeddings": 42}, 42),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "yarn"}, "original_max_position_embeddings": 43},
            43,
        ),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default"},
                    "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 44},
                }
            },
            44,
        ),
    ],
)
def test_the_border_is_read_from_the_configuration(config: dict[str, Any], border: int | None) -> None:
    assert rotary_border(config) == border


@pytest.mark.parametrize("kind", [GPT2Config, GPTJConfig, Qwen3Config])
def test_plan_and_run_read_the_same_context_length(tmp_path: Path, kind: Any) -> None:
    """GPT-2 calls it `n_positions`."""
    name = kind.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    kind(**{name: 48}).save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert ModelFolder(tmp_path).context == context_of_config(loaded) == 48


def test_a_configuration_without_a_context_length_has_none_in_plan_and_2_to_the_30_in_a_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "max_position_embeddings": null}')
    assert ModelFolder(tmp_path).context is None
    assert context_of_config(AutoConfig.from_pretrained(tmp_path)) == 1 << 30
