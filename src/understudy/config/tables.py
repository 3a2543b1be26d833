"""The sections of a recipe, by name; `Recipe` adds the checks across them."""

from __future__ import annotations

from pydantic import Field

from understudy.config.base import Section
from understudy.config.critic import CriticConfig, ReferenceConfig
from understudy.config.data import DataConfig
from understudy.config.loss import LossConfig
from understudy.config.models import StudentConfig, TeacherConfig
from understudy.config.rollout import RolloutConfig
from understudy.config.trainer import ClusterConfig, DataPlaneConfig, RunConfig, TrainerConfig


class RecipeTables(Section):
    """Every section with its keys. Omitted sections have defaults."""

    student: StudentConfig
    teachers: dict[str, TeacherConfig] = Field(default={})
    data: DataConfig
    loss: LossConfig = LossConfig()
    critic: CriticConfig | None = None
    reference: ReferenceConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    dataplane: DataPlaneConfig = DataPlaneConfig()
    cluster: ClusterConfig = ClusterConfig()
    run: RunConfig = RunConfig()
