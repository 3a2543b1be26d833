"""What a run on a device does to its student, in every configuration that has a way of its own there.

A step can go wrong without looking wrong: a kernel that cannot be differentiated leaves the loss as it was and the gradient finite,
and most of the student untrained. So every run here is looked at from the outside: each weight moved; each update's loss and
gradient are those of the same rows, weights and loss on the host in float32; and the engine writes with the weights of the last step,
not with older ones.

On the host (`cpu`) the engine takes the GPU's ways with kernels in plain torch; on a GPU everything is as a user gets it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from device_runs import (
    Runner,
    Update,
    Watch,
    Watched,
    Weights,
    again_on_the_host,
    by_plain_transformers,
    kernels_on_the_host,
    masters_of,
    mismatch,
    plain_model,
    with_changes,
)
from device_world import TOKEN_VARIABLE, Teachers, World
from torch.nn.functional import cosine_similarity

from understudy.engines.local.kernels import fused as fused_decode
from understudy.engines.local.kernels import rms_norm as fused_norm
from understudy.errors import EngineError, PolicyError
from understudy.policy.microbatch import Layout
from understudy.trainers.models import LoadedModel

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SLOW_HOST = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=GPU)]
TASK = {"task_coef": 1.0, "distill_coef": 0.0}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "sync": {},
    "sync to the bit": {"run__determinism": "full", "student__model": "llama"},
    "fully async": {"trainer__mode": "fully_async", "trainer__steps": 3},
    "an engine of its own process": {"rollout__processes": 1},
    "keys in eight bits": {"rollout__kv_cache": "fp8"},
    "lora": {"student__lora": {"rank": 4, "alpha": 16.0}, "trainer__learning_rate": 2e-2},
    "gradient checkpointing": {"student__gradient_checkpointing": True},
    "compiled": {"student__compile": True},
    "padded": {"layout": Layout.PADDED},
    "packed": {"layout": Layout.PACKED},
    "float32": {"student__dtype": "float32", "student__model": "llama"},
    "8-bit moments": {"trainer__optimizer": "adamw_8bit"},
    "offload": {"trainer__offload_optimizer": True},
    "average": {"trainer__ema_decay": 0.9},
    "sampled": {"loss": {"signal": "sampled", "kind": "k3"}},
    "own candidates": {"loss": {"signal": "at_ids", "kind": "reverse_kl", "topk": 16}},
    "hidden": {"loss": {"signal": "hidden", "kind": "forward_kl"}},
    "critic": {"loss": {**TASK, "advantage": "gae"}, "critic": {"learning_rate": 3e-3}},
    "grpo and distillation": {"loss": {"task_coef": 1.0, "topk": 16}, "rollout__n": 2},
    "epochs": {
        # No clip within reach (that is "clipped epochs", in float32): at its edge a gradient is a step, and one token that bfloat16 puts on the other side turns
        # a mini-batch's gradient elsewhere (cosines of 0.7 to 0.98 with the default clip, above 0.99 without).
        "loss": {
            "task_coef": 1.0,
            "topk": 16,
            "correction": {"weigh": "token"},
            "clip_low": 1.0,
            "clip_high": 1e4,
        },
        "trainer__learning_rate": 1e-3,
        "rollout__n": 2,
        "trainer__epochs": 2,
        "trainer__mini_batch_size": 3,
    },
    "clipped epochs": {
        "loss": {"task_coef": 1.0, "topk": 16, "correction": {"weigh": "token"}},
        "rollout__n": 2,
        "trainer__epochs": 2,
        "trainer__mini_batch_size": 3,
    },
}
QUICK = {"sync"}
"""What every `make test` runs on the host; the slow suite runs all."""
GPU_ONLY, HOST_ONLY = {"keys in eight bits"}, {"clipped epochs"}
LONG = {"compiled"}
"""Those that take a minute on a GPU too; `-m "gpu and not slow"` leaves them out."""


@dataclass(frozen=True)
class Tolerance:
    loss: float
    """Of its own size, or of 0.2: losses with advantages add up to nearly 0."""
    cosine: float
    length: float
    """Of a gradient, against 1."""
    logprob: float
    """Mean distance of the engine's logprobs."""

    @staticmethod
    def of(device: str, dtype: str) -> "Tolerance":
        if dtype != "float32":
            return Tolerance(loss=0.02, cosine=0.98, length=0.1, logprob=0.03)
        if device == "cuda":  # other kernels, other sums
            return Tolerance(loss=1e-3, cosine=0.999, length=0.01, logprob=1e-3)
        return Tolerance(loss=1e-4, cosine=0.9999, length=1e-3, logprob=1e-4)


def cases() -> list[Any]:
    found = []
    for name in CONFIGURATIONS:
        slow = [] if name in QUICK else [pytest.mark.slow]
        if name not in GPU_ONLY:
            found.append(pytest.param("cpu", name, marks=slow, id=f"cpu-{name}"))
        on_gpu = [*GPU, pytest.mark.slow] if name in LONG else GPU
        if name not in HOST_ONLY:
            found.append(pytest.param("cuda", name, marks=on_gpu, id=f"cuda-{name}"))
    return found


@pytest.fixture
def recipe(world: World, teachers: Teachers, tmp_path: Path) -> Callable[[str, str], dict[str, Any]]:
    def make(device: str, name: str) -> dict[str, Any]:
        changes = {key: value for key, value in CONFIGURATIONS[name].items() if key != "layout"}
        family = changes.pop("student__model", "qwen3")
        dtype = "bfloat16" if device == "cuda" else "float32"
        table: dict[str, Any] = {
            "student": {"model": str(world.model(family)), "device": device, "dtype": dtype},
            "data": {"train": str(world.prompts), "reward": "device_runs:varied"},
            "loss": {"topk": 16},
            "rollout": {"max_new_tokens": 12, "max_batch": 16},
            "trainer": {"steps": 2, "batch_size": 8, "learning_rate": 3e-3, "micro_batch_tokens": 128},
            "run": {"dir": str(tmp_path / "run"), "threads": 1},
        }
        if changes.get("loss", {}).get("distill_coef") != 0.0:
            table["teachers"] = {
                "teacher": {
                    "model": str(world.model("teacher")),
                    "placement": "external",
                    "urls": [teachers.url(device)],
                    "token_env": TOKEN_VARIABLE,
                }
            }
        return with_changes(table, changes)

    return make


@pytest.mark.parametrize(("device", "name"), cases())
def test_a_run_trains_the_whole_student_as_the_host_would(
    recipe: Callable[[str, str], dict[str, Any]], device: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        kernels_on_the_host(monkeypatch)
    if name == "lora":
        pytest.importorskip("peft")
    table = recipe(device, name)
    layout = CONFIGURATIONS[name].get("layout")
    run, watch = Runner(monkeypatch).train(table, layout)
    folder = Path(table["student"]["model"])
    near = Tolerance.of(device, table["student"]["dtype"])
    # What writes is then not quite what is trained; old weights would be much further off.
    if table["rollout"].get("kv_cache") == "fp8":
        near = replace(near, logprob=2 * near.logprob)

    assert run.steps == table["trainer"]["steps"] and watch.engine_modules_apart
    every_weight_moved(watch.student)
    updates_are_those_of_the_host(folder, watch.student, near)
    if table["loss"] == {"topk": 16} and watch.student.policy.settings.lora is None:
        first_update_is_that_of_plain_transformers(folder, watch.student, near)
    if watch.critic is not None:
        every_weight_moved(watch.critic)
        updates_are_those_of_the_host(folder, watch.critic, Tolerance.of(device, "float32"), critic=True)
    if "ema_decay" in table["trainer"]:
        average_follows(watch.student, table["trainer"]["ema_decay"])
    the_engine_has_the_newest_weights(folder, watch, near)


@pytest.mark.parametrize("device", SLOW_HOST)
@pytest.mark.parametrize("prompts", ["short", "long"])
def test_full_determinism_repeats_every_weight_to_the_bit(
    recipe: Callable[[str, str], dict[str, Any]],
    world: World,
    device: str,
    prompts: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Long: so that several blocks of attention add to one gradient."""
    if device == "cpu":
        kernels_on_the_host(monkeypatch)
    table = recipe(device, "sync to the bit")
    if prompts == "long":
        changes = {"data__train": str(world.long_prompts), "trainer__micro_batch_tokens": 4096}
        table = with_changes(table, changes)
    found = []
    for name in ("one", "two"):
        again = with_changes(table, {"run__dir": f"{table['run']['dir']}-{name}"})
        found.append(Runner(monkeypatch).train(again)[1].last)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("device", SLOW_HOST)
def test_a_resumed_run_trains_and_writes_with_the_checkpoints_weights(
    recipe: Callable[[str, str], dict[str, Any]], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restored weights are written into the tensors that engine and policy share, masters and moments beside them."""
    if device == "cpu":
        kernels_on_the_host(monkeypatch)
    table, runner = recipe(device, "sync"), Runner(monkeypatch)
    _, before = runner.train(table)
    run, watch = runner.resume(Path(table["run"]["dir"]), "trainer.steps=3")
    (update,) = watch.student.updates
    assert run.steps == 3
    for name, weight in update.weights.items():
        assert torch.equal(weight, before.last[name]), name
        assert torch.equal(update.masters[name], masters_of(before.student.policy)[name]), name
    folder, near = Path(table["student"]["model"]), Tolerance.of(device, table["student"]["dtype"])
    every_weight_moved(watch.student)
    updates_are_those_of_the_host(folder, watch.student, near)
    the_engine_has_the_newest_weights(folder, watch, near)


@pytest.mark.parametrize("guards", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_an_engine_in_the_trained_modules_would_be_seen(
    recipe: Callable[[str, str], dict[str, Any]], guards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mistake these runs are here for, made on purpose: the kernels refuse to be trained; without that lock the step does."""
    kernels_on_the_host(monkeypatch)
    monkeypatch.setattr(LoadedModel, "sharing_copy", lambda loaded: loaded)
    if guards == "off":
        for place in (fused_norm, fused_decode):
            monkeypatch.setattr(place, "refuse_gradients", lambda module: None)
    expected = (EngineError, "generates only") if guards == "on" else (PolicyError, "gradient reached only")
    with pytest.raises(expected[0], match=expected[1]):
        Runner(monkeypatch).train(recipe("cpu", "sync"))


def every_weight_moved(watched: Watched) -> None:
    last = {name: tensor.detach().float().cpu() for name, tensor in watched.policy.model.named_parameters()}
    masters = masters_of(watched.policy)
    for name in watched.trained:
        assert float((last[name] - watched.first[name]).norm()) > 0, f"{name} is as it was"
        dtype = watched.policy.optimizer.weights[name].dtype
        assert torch.equal(last[name], masters[name].to(dtype).float()), f"{name} is not its master, rounded"
    matrices = [name for name in watched.trained if last[name].dim() == 2 and "embed" not in name]
    assert len(matrices) >= 14, "seven in each of two layers"


def average_follows(watched: Watched, decay: float) -> None:
    average = watched.policy.average
    assert average is not None
    seen = [*(update.masters for update in watched.updates), masters_of(watched.policy)]
    for name, expected in seen[0].items():
        for masters in seen[1:]:
            expected = decay * expected + (1 - decay) * masters[name]
        torch.testing.assert_close(average.values[name].cpu(), expected, atol=1e-6, rtol=1e-5)


def updates_are_those_of_the_host(
    folder: Path, watched: Watched, near: Tolerance, *, critic: bool = False
) -> None:
    assert watched.updates
    for number, update in enumerate(watched.updates):
        host = again_on_the_host(folder, watched, update, critic=critic)
        assert host.result is not None
        losses_agree(number, update, host.result.loss, near)
        gradients_agree(number, update, host.gradients, near)


def first_update_is_that_of_plain_transformers(folder: Path, watched: Watched, near: Tolerance) -> None:
    loss, gradients = by_plain_transformers(folder, watched.updates[0])
    losses_agree(0, watched.updates[0], loss, near)
    gradients_agree(0, watched.updates[0], gradients, near)


def losses_agree(number: int, update: Update, expected: float, near: Tolerance) -> None:
    assert update.result is not None
    slack = near.loss * max(abs(expected), 0.2)
    assert update.result.loss == pytest.approx(expected, abs=slack), f"update {number}"


def gradients_agree(number: int, update: Update, gradients: Weights, near: Tolerance) -> None:
    assert update.gradients.keys() == gradients.keys(), "a weight got no gradient"
    for name, expected in gradients.items():
        found, expected = update.gradients[name].flatten().double(), expected.flatten().double()
        where = f"update {number}: {name}"
        if (
            float(expected.norm()) == 0.0
        ):  # an adapter, or a value head's body, before its other half has moved
            assert float(found.norm()) == 0.0, where
            continue
        likeness, ratio = float(cosine_similarity(found, expected, 0)), float(found.norm() / expected.norm())
        assert likeness > near.cosine, f"{where} points elsewhere ({likeness:.5f})"
        assert abs(ratio - 1) < near.length, f"{where} is {ratio:.4f} times as long"


def the_engine_has_the_newest_weights(folder: Path, watch: Watch, near: Tolerance) -> None:
    newest, stale = (mismatch(plain_model(folder, one), watch) for one in (watch.last, watch.stale))
    assert newest < near.logprob, f"the engine writes with other weights than the trained ones: {newest}"
    assert stale > 3 * newest, f"{stale} from the weights before the run, {newest} from the newest"
