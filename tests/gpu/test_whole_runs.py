"""Whole runs on a device, in every configuration with a code path of its own there, compared with the host.

A step can be wrong without an error: a kernel without gradient leaves the loss equal and the gradient finite, but
most of the student untrained. So every run here is checked from the outside: each weight changed; each update's loss
and gradients equal those of the same rows, weights and loss on the host in float32; the engine generates with the
weights of the last step.

On the host (`cpu`) the engine takes the GPU's code paths with kernels in plain torch; on a GPU nothing is replaced.
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
        # The clip range is too wide to matter here ("clipped epochs" tests it in float32): at its edge the gradient
        # jumps, and one token that bfloat16 puts on the other side turns a mini-batch's gradient (cosines of 0.7 to
        # 0.98 with the default clip, above 0.99 without).
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
"""Configurations that `make test` runs on the host; the slow suite runs all."""
GPU_ONLY, HOST_ONLY = {"keys in eight bits"}, {"clipped epochs"}
LONG = {"compiled"}
"""Configurations that take a minute on a GPU too; `-m "gpu and not slow"` leaves them out."""


@dataclass(frozen=True)
class Tolerance:
    loss: float
    """Relative to the loss, or to 0.2 if that is larger: losses with advantages add up to nearly 0."""
    cosine: float
    length: float
    """How far the ratio of the gradients' norms may differ from 1."""
    logprob: float
    """Mean distance of the engine's logprobs."""

    @staticmethod
    def of(device: str, dtype: str) -> "Tolerance":
        if dtype != "float32":
            return Tolerance(loss=0.02, cosine=0.98, length=0.1, logprob=0.03)
        if device == "cuda":  # other kernels sum in another order
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
def test_a_run_changes_every_weight_with_losses_and_gradients_equal_to_the_host(
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
    tolerance = Tolerance.of(device, table["student"]["dtype"])
    # With a cache in eight bits the engine's logprobs differ more; stale weights would still differ much more.
    if table["rollout"].get("kv_cache") == "fp8":
        tolerance = replace(tolerance, logprob=2 * tolerance.logprob)

    assert run.steps == table["trainer"]["steps"] and watch.engine_modules_apart
    assert_every_weight_changed(watch.student)
    assert_updates_match_the_host(folder, watch.student, tolerance)
    if table["loss"] == {"topk": 16} and watch.student.policy.settings.lora is None:
        assert_first_update_matches_plain_transformers(folder, watch.student, tolerance)
    if watch.critic is not None:
        assert_every_weight_changed(watch.critic)
        assert_updates_match_the_host(folder, watch.critic, Tolerance.of(device, "float32"), critic=True)
    if "ema_decay" in table["trainer"]:
        assert_average_matches(watch.student, table["trainer"]["ema_decay"])
    assert_engine_has_the_newest_weights(folder, watch, tolerance)


@pytest.mark.parametrize("device", SLOW_HOST)
@pytest.mark.parametrize("prompts", ["short", "long"])
def test_two_runs_with_full_determinism_give_the_same_weights_to_the_bit(
    recipe: Callable[[str, str], dict[str, Any]],
    world: World,
    device: str,
    prompts: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With long prompts, several blocks of attention add to one gradient."""
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
def test_a_resumed_run_trains_and_generates_with_the_checkpoints_weights(
    recipe: Callable[[str, str], dict[str, Any]], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resume writes the restored weights into the tensors that engine and policy share, and restores the
    masters."""
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
    folder, tolerance = Path(table["student"]["model"]), Tolerance.of(device, table["student"]["dtype"])
    assert_every_weight_changed(watch.student)
    assert_updates_match_the_host(folder, watch.student, tolerance)
    assert_engine_has_the_newest_weights(folder, watch, tolerance)


@pytest.mark.parametrize("guards", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_a_run_fails_when_the_engine_shares_the_trained_modules(
    recipe: Callable[[str, str], dict[str, Any]], guards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Makes the mistake that these runs look for: the kernels refuse gradients; without that guard the update
    raises."""
    kernels_on_the_host(monkeypatch)
    monkeypatch.setattr(LoadedModel, "sharing_copy", lambda loaded: loaded)
    if guards == "off":
        for place in (fused_norm, fused_decode):
            monkeypatch.setattr(place, "refuse_gradients", lambda module: None)
    expected = (EngineError, "generates only") if guards == "on" else (PolicyError, "gradient reached only")
    with pytest.raises(expected[0], match=expected[1]):
        Runner(monkeypatch).train(recipe("cpu", "sync"))


def assert_every_weight_changed(watched: Watched) -> None:
    last = {name: tensor.detach().float().cpu() for name, tensor in watched.policy.model.named_parameters()}
    masters = masters_of(watched.policy)
    for name in watched.trained:
        assert float((last[name] - watched.first[name]).norm()) > 0, f"{name} did not change"
        dtype = watched.policy.optimizer.weights[name].dtype
        assert torch.equal(last[name], masters[name].to(dtype).float()), f"{name} is not its rounded master"
    matrices = [name for name in watched.trained if last[name].dim() == 2 and "embed" not in name]
    assert len(matrices) >= 14, "seven in each of two layers"


def assert_average_matches(watched: Watched, decay: float) -> None:
    average = watched.policy.average
    assert average is not None
    seen = [*(update.masters for update in watched.updates), masters_of(watched.policy)]
    for name, expected in seen[0].items():
        for masters in seen[1:]:
            expected = decay * expected + (1 - decay) * masters[name]
        torch.testing.assert_close(average.values[name].cpu(), expected, atol=1e-6, rtol=1e-5)


def assert_updates_match_the_host(
    folder: Path, watched: Watched, tolerance: Tolerance, *, critic: bool = False
) -> None:
    assert watched.updates
    for number, update in enumerate(watched.updates):
        host = again_on_the_host(folder, watched, update, critic=critic)
        assert host.result is not None
        assert_losses_agree(number, update, host.result.loss, tolerance)
        assert_gradients_agree(number, update, host.gradients, tolerance)


def assert_first_update_matches_plain_transformers(
    folder: Path, watched: Watched, tolerance: Tolerance
) -> None:
    loss, gradients = by_plain_transformers(folder, watched.updates[0])
    assert_losses_agree(0, watched.updates[0], loss, tolerance)
    assert_gradients_agree(0, watched.updates[0], gradients, tolerance)


def assert_losses_agree(number: int, update: Update, expected: float, tolerance: Tolerance) -> None:
    assert update.result is not None
    slack = tolerance.loss * max(abs(expected), 0.2)
    assert update.result.loss == pytest.approx(expected, abs=slack), f"update {number}"


def assert_gradients_agree(number: int, update: Update, gradients: Weights, tolerance: Tolerance) -> None:
    assert update.gradients.keys() == gradients.keys(), "a weight got no gradient"
    for name, expected in gradients.items():
        found, expected = update.gradients[name].flatten().double(), expected.flatten().double()
        where = f"update {number}: {name}"
        if (
            float(expected.norm()) == 0.0
        ):  # an adapter, or the body under a value head, before the other factor changed
            assert float(found.norm()) == 0.0, where
            continue
        likeness, ratio = float(cosine_similarity(found, expected, 0)), float(found.norm() / expected.norm())
        assert likeness > tolerance.cosine, f"{where} has another direction ({likeness:.5f})"
        assert abs(ratio - 1) < tolerance.length, f"{where} is {ratio:.4f} times as long"


def assert_engine_has_the_newest_weights(folder: Path, watch: Watch, tolerance: Tolerance) -> None:
    newest, stale = (mismatch(plain_model(folder, one), watch) for one in (watch.last, watch.stale))
    assert newest < tolerance.logprob, f"the engine writes with other weights than the trained ones: {newest}"
    assert stale > 3 * newest, f"{stale} from the weights before the run, {newest} from the newest"
