"""An engine may replace code in its modules; the trained modules keep theirs, and share only tensors with the
engine's."""

import asyncio
import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from understudy.assembly.engines import open_engine, publisher_of
from understudy.assets import quickstart_model
from understudy.config import Recipe, parse_recipe
from understudy.engines.local import engine as hf
from understudy.engines.local.engine import HFEngine
from understudy.engines.local.kernels import attention as decode_attention
from understudy.engines.local.kernels.fused import fuse_decoding
from understudy.engines.local.kernels.rms_norm import fuse_norms
from understudy.engines.local.slots import SlotPool
from understudy.errors import EngineError
from understudy.nn.pretrained import sharing_copy
from understudy.planning.resolved import EngineSettings, resolve
from understudy.policy.forward.attention import VARLEN
from understudy.policy.forward.forward import attention_for
from understudy.policy.microbatch import Layout
from understudy.policy.policy import Policy
from understudy.policy.step import PolicySettings
from understudy.trainers.models import LoadedModel, load_model
from understudy.weights.publish import CopiedWeights, SharedWeights


class Silent:
    def phase(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines on the CPU use slots and put the decode kernels into their modules."""
    monkeypatch.setattr(hf, "KERNEL_DEVICES", {"cpu"})
    monkeypatch.setattr(decode_attention, "kernel_fits", lambda *_: True)
    yield


@pytest.fixture
def student() -> LoadedModel:
    return load_model(str(quickstart_model("student")), device="cpu")


RECIPE: Recipe = parse_recipe(
    {
        "student": {"model": "s"},
        "teachers": {"t": {"model": "m"}},
        "data": {"train": "d.jsonl"},
        "rollout": {"max_batch": 4},
    }
)


def settings_of(shared: bool) -> EngineSettings:
    return replace(resolve(RECIPE, gpus=0).engine, shares_tensors=shared)


def open_now(student: LoadedModel, *, shared: bool) -> HFEngine:
    engine = asyncio.run(
        open_engine(settings_of(shared), student, None, Silent())  # type: ignore[arg-type]
    )
    assert isinstance(engine, HFEngine)
    return engine


def replaced_forwards(model: Any) -> list[str]:
    """The modules whose `forward` was replaced."""
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "copied"])
def test_an_engine_shares_tensors_with_the_trained_model_and_never_modules(
    student: LoadedModel, shared: bool
) -> None:
    engine = open_now(student, shared=shared)
    policy = Policy(student.model, PolicySettings())
    publisher = publisher_of(settings_of(shared), policy, engine)
    assert isinstance(publisher, SharedWeights if shared else CopiedWeights)
    assert replaced_forwards(engine._model) and not replaced_forwards(policy.model), (
        "only the engine's modules have kernels"
    )
    trained_modules = {id(module) for module in policy.model.modules()}
    assert not trained_modules & {id(module) for module in engine._model.modules()}
    assert engine._model.config is not policy.model.config
    trained, used = dict(policy.model.named_parameters()), dict(engine._model.named_parameters())
    assert trained.keys() == used.keys()
    assert all((trained[name].data_ptr() == used[name].data_ptr()) is shared for name in trained)
    assert all(module.training for module in policy.model.modules())
    assert not any(module.training for module in engine._model.modules())


def test_a_training_forward_through_an_engines_modules_raises(student: LoadedModel) -> None:
    """Before, an engine made over the very modules that are trained went unnoticed."""
    student.engine(max_batch=4)
    model = student.model.train()
    with pytest.raises(EngineError, match="generates only"):
        model(input_ids=torch.arange(3, 9)[None])
    for layer in model.model.layers:  # wherever a gradient begins
        with pytest.raises(EngineError, match="generates only"):
            layer.mlp(torch.zeros(1, 2, model.config.hidden_size))
        with pytest.raises(EngineError, match="generates only"):
            layer.self_attn(torch.zeros(1, 2, model.config.hidden_size))


@pytest.mark.parametrize("fuse", [fuse_norms, fuse_decoding])
def test_fusing_kernels_into_a_model_in_training_mode_raises(student: LoadedModel, fuse: Any) -> None:
    assert student.model.training
    with pytest.raises(EngineError, match="training mode"):
        fuse(student.model)
    assert not replaced_forwards(student.model)
    assert fuse(student.model.eval()) > 0 and replaced_forwards(student.model)


def test_a_copy_of_an_engines_model_runs_its_own_modules(student: LoadedModel) -> None:
    """A function bound to its module would still run the original module after a copy."""
    model = student.model.eval()
    fuse_norms(model)
    fuse_decoding(model)
    for twin in (copy.deepcopy(model), sharing_copy(model)):
        for name in replaced_forwards(twin):
            module = twin.get_submodule(name)
            assert module.forward.__self__ is module


def test_the_attention_of_trainer_and_engine_can_be_changed_independently(student: LoadedModel) -> None:
    """The trainer changes its attention for every update, while an engine's thread may be within a step."""
    engine, copied = open_now(student, shared=True), open_now(student, shared=False)
    before = engine._model.config._attn_implementation
    with attention_for(student.model, Layout.PACKED):
        assert student.model.config._attn_implementation == VARLEN
        assert {one._model.config._attn_implementation for one in (engine, copied)} == {before}
    for one in (engine, copied):
        one._model.set_attn_implementation("eager")
    assert student.model.config._attn_implementation == before


def test_sharing_the_same_parameters_again_keeps_the_slot_pool(student: LoadedModel) -> None:
    """A second pool beside the first may not fit, and the engine would fall back to the slow layout."""
    engine = open_now(student, shared=True)
    pool = engine._pool
    assert pool is not None
    engine.share_parameters_with(student.model)
    assert engine._pool is pool
    other = load_model(str(quickstart_model("student")), device="cpu").model
    engine.share_parameters_with(other)
    assert engine._pool is not pool
    assert next(engine._model.parameters()) is next(other.parameters())


def test_recorded_steps_are_dropped_when_a_weight_moves_in_memory(student: LoadedModel) -> None:
    engine = open_now(student, shared=True)
    pool = engine._pool
    assert isinstance(pool, SlotPool)

    def publish(version: int) -> None:
        asyncio.run(engine.update_weights(version, ()))

    pool._steps[4, 1] = object()  # type: ignore[assignment]  # stands for a recorded step
    weight = student.model.model.norm.weight
    with torch.no_grad():
        weight.mul_(2.0)
    publish(1)
    assert pool._steps, "writing into a weight does not move it"
    weight.data = weight.data.clone()
    publish(2)
    assert not pool._steps, "a graph would read the old memory of the weight"
