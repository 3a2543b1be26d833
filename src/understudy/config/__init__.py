"""Recipes: strict pydantic models, importable without torch, and the one source of defaults."""

from understudy.config.critic import CriticConfig, ReferenceConfig
from understudy.config.data import DataConfig
from understudy.config.loss import CorrectionConfig, LossConfig
from understudy.config.models import LoraConfig, StudentConfig, TeacherConfig
from understudy.config.recipe import Recipe, load_recipe, parse_recipe
from understudy.config.rollout import RolloutConfig
from understudy.config.trainer import ClusterConfig, DataPlaneConfig, RunConfig, TrainerConfig

__all__ = [
    "ClusterConfig",
    "CorrectionConfig",
    "CriticConfig",
    "DataConfig",
    "DataPlaneConfig",
    "LoraConfig",
    "LossConfig",
    "Recipe",
    "ReferenceConfig",
    "RolloutConfig",
    "RunConfig",
    "StudentConfig",
    "TeacherConfig",
    "TrainerConfig",
    "load_recipe",
    "parse_recipe",
]
