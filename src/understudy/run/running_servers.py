"""The running servers that a recipe names, for which the start of a run waits (`serving/start_wait.py`)."""

from __future__ import annotations

from collections.abc import Mapping

from understudy.assembly.teachers.clients import token_of
from understudy.config import TeacherConfig
from understudy.config.rollout import RolloutConfig
from understudy.planning.preflight import endpoints_of
from understudy.serving.endpoint import Endpoint
from understudy.serving.start_wait import Servers

_MODELS = "/v1/models"
_ENGINE_PATHS = {"vllm": "/health", "sglang": "/health"}
"""By engine. SGLang answers other routes before its model is loaded."""
_TEACHER_PATHS = {"auto": "/manifest", "native": "/manifest"}
"""By backend: what the teacher's client asks for first."""


def running_servers(teachers: Mapping[str, TeacherConfig], rollout: RolloutConfig) -> list[Servers]:
    found = []
    for name, teacher in teachers.items():
        if teacher.urls:
            token = token_of(name, teacher)
            endpoints = [Endpoint(url.rstrip("/").removesuffix("/v1"), token) for url in teacher.urls]
            found.append(
                Servers(f"teachers.{name}.urls", endpoints, _TEACHER_PATHS.get(teacher.backend, _MODELS))
            )
    if rollout.urls:
        path = _ENGINE_PATHS.get(rollout.engine, _MODELS)
        # All of them take the weights of step 0; with fixed weights a request goes to one that answers.
        found.append(Servers("rollout.urls", endpoints_of(rollout), path, all_needed=rollout.live_weights))
    return found
