"""`rollout.processes`: valid and contradictory settings."""

from typing import Any

import pytest

from understudy.config.rollout import RolloutConfig


def test_the_engine_is_in_the_trainers_process_by_default() -> None:
    assert RolloutConfig().processes == 0
    assert RolloutConfig(processes=2, devices=["0", "1"]).devices == ["0", "1"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"processes": 1, "engine": "vllm"}, "`processes` belong to engine = 'hf'.*`replicas`"),
        ({"processes": 2, "devices": ["0"]}, "1 devices for 2 processes"),
        ({"processes": 1, "devices": ["2,3"]}, "'2,3' for an engine process, which computes on one GPU"),
        ({"devices": ["0"]}, "`devices` belongs to vLLM servers"),
        ({"processes": -1}, "greater than or equal to 0"),
    ],
)
def test_contradictory_process_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutConfig(**settings)
