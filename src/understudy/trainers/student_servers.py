"""Where the student's servers are, or with what they are started; importable without torch, so that `check` can look."""

from __future__ import annotations

import os
from collections.abc import Mapping

from understudy.config.rollout import RolloutConfig
from understudy.engines.replicas import Endpoint
from understudy.errors import ConfigError

PYTHON_VARIABLE = "UNDERSTUDY_VLLM_PYTHON"


def endpoints_of(rollout: RolloutConfig, environment: Mapping[str, str] = os.environ) -> list[Endpoint]:
    token = environment.get(rollout.token_env) if rollout.token_env else None
    if rollout.token_env and not token:
        raise ConfigError(
            f"rollout.token_env = {rollout.token_env!r}: that environment variable is empty; export the token"
        )
    return [Endpoint(url.rstrip("/"), key=token) for url in rollout.urls]


def vllm_python(rollout: RolloutConfig, environment: Mapping[str, str] = os.environ) -> str:
    """The interpreter to start vLLM with; vLLM lives in an environment of its own, so that its pins never fight ours."""
    python = rollout.vllm_python or environment.get(PYTHON_VARIABLE)
    if not python:
        raise ConfigError(
            "rollout.engine = 'vllm' starts vLLM in an environment of its own: set rollout.vllm_python (or the variable "
            f"{PYTHON_VARIABLE}) to that environment's interpreter, or give `urls` of running servers"
        )
    if not os.access(python, os.X_OK):
        raise ConfigError(f"rollout.vllm_python = {python!r} is not an interpreter that can be run")
    return python
