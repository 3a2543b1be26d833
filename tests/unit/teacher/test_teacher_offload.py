"""Layers offloaded to host memory: equal scores to the bit, one copy per layer and forward, into a free block."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from teacher_rig import random_items, write_model

from understudy.config import parse_recipe
from understudy.errors import ConfigError, TeacherError
from understudy.planning.models.folder import ModelFolder
from understudy.planning.processes import offloaded_bytes, plan_processes
from understudy.planning.seating import seat
from understudy.planning.teacher_checks import offloads_fit
from understudy.serving.bind import StartError
from understudy.teacher.protocol import ScoreReply, request_of
from understudy.teacher.replica.assemble import build_worker
from understudy.teacher.replica.server import check_place, parse_args
from understudy.teacher.scoring.body import ScoringLayout
from understudy.teacher.scoring.model import FrozenModel, load_frozen, plain_logprobs, weights_sha256
from understudy.teacher.scoring.offload import Offload, offloaded
from understudy.teacher.scoring.scorer import Scorer, ScorerOptions
from understudy.teacher.scoring.warm_up import warm_up
from understudy.types.scores import Signal

LAYERS = 5


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "deep", "qwen3", num_hidden_layers=LAYERS)


def scores(frozen: FrozenModel, layout: ScoringLayout = ScoringLayout.PADDED) -> ScoreReply:
    """Scores with transformers' own forward: the fast CPU forward sums in another order and refuses hooks."""
    scorer = Scorer("t", frozen, ScorerOptions(layout=layout, max_batch_tokens=64))
    scorer.body.cpu_forward = lambda longest: None  # type: ignore[method-assign]
    warm_up(scorer)
    items = [*random_items(6, 1, Signal.TOPK, 4), *random_items(3, 2, Signal.SAMPLED)]
    return scorer.score(request_of(items))


def assert_same_bits(one: ScoreReply, other: ScoreReply) -> None:
    assert one.sampled_P.tobytes() == other.sampled_P.tobytes()
    assert one.logprobs.tobytes() == other.logprobs.tobytes() and one.ids.tobytes() == other.ids.tobytes()


@pytest.mark.parametrize("wanted", ["1", "2", "3", "all"])
@pytest.mark.parametrize("layout", [ScoringLayout.PADDED, ScoringLayout.PACKED])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_with_offloaded_layers_equal_scores_without_to_the_bit(
    deep: Path, wanted: str, layout: ScoringLayout, dtype: str
) -> None:
    whole = load_frozen(str(deep), dtype=dtype)
    moved = offloaded(load_frozen(str(deep), dtype=dtype), wanted, "cpu")
    assert weights_sha256(moved.model) == weights_sha256(whole.model)
    assert_same_bits(scores(whole, layout), scores(moved, layout))
    assert weights_sha256(moved.model) == weights_sha256(whole.model), (
        "after a forward the weights must be on the host again"
    )


class OffloadEvents:
    """Records which layer is copied when, and whether each layer computes from a device block or from host memory."""

    def __init__(self, frozen: FrozenModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        self.blocks: set[int] = set()
        copied = Offload._copy

        def copy_and_note(offload: Offload, number: int) -> None:
            copied(offload, number)
            self.blocks |= {block.data_ptr() for block in offload._blocks}
            self.events.append(("copy", number))

        monkeypatch.setattr(Offload, "_copy", copy_and_note)
        for number, layer in enumerate(frozen.body.layers):
            layer.register_forward_hook(lambda module, *_, number=number: self._computed(module, number))

    def _computed(self, layer: Any, number: int) -> None:
        storage = layer.self_attn.q_proj.weight.untyped_storage().data_ptr()
        self.events.append(("from its block" if storage in self.blocks else "from the host", number))


def test_every_offloaded_layer_is_copied_once_and_during_the_layer_before_it(
    deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = load_frozen(str(deep))
    offload_events = OffloadEvents(
        frozen, monkeypatch
    )  # its hooks must run before those that move a layer back
    offloaded(frozen, "3", "cpu")
    for _ in range(2):
        plain_logprobs(frozen, random_items(1, 3, Signal.SAMPLED)[0])
        assert offload_events.events == [
            ("copy", 0), ("from the host", 0), ("from the host", 1), ("copy", 1), ("from its block", 2), ("copy", 2),
            ("from its block", 3), ("from its block", 4),
        ]  # fmt: skip
        offload_events.events.clear()
    assert len(offload_events.blocks) == 2


def test_scores_after_a_failed_forward_equal_those_before(deep: Path) -> None:
    item = random_items(1, 3, Signal.SAMPLED)[0]
    frozen = offloaded(load_frozen(str(deep)), "all", "cpu")
    before = plain_logprobs(frozen, item)
    failing = frozen.body.layers[2].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        plain_logprobs(frozen, item)
    failing.remove()
    assert plain_logprobs(frozen, item).tobytes() == before.tobytes()


def test_updated_weights_reach_the_host_copies_of_offloaded_layers(deep: Path) -> None:
    moved = offloaded(load_frozen(str(deep)), "all", "cpu")
    scorer = Scorer("t", moved)
    other = copy.deepcopy(load_frozen(str(deep)))
    with torch.no_grad():
        for weight in other.model.parameters():
            weight.mul_(1.01)
    scorer.take_weights(1, list(other.model.named_parameters()))
    item = random_items(1, 3, Signal.SAMPLED)[0]
    assert plain_logprobs(moved, item).tobytes() == plain_logprobs(other, item).tobytes()


def test_layers_of_different_sizes_share_the_blocks(tmp_path: Path) -> None:
    """A model with dense layers and one layer of experts."""
    folder = write_model(
        tmp_path / "mixed",
        "qwen3_moe",
        num_hidden_layers=3,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        mlp_only_layers=[0, 2],
    )
    whole, moved = load_frozen(str(folder)), offloaded(load_frozen(str(folder)), "all", "cpu")
    item = random_items(1, 3, Signal.SAMPLED)[0]
    np.testing.assert_array_equal(plain_logprobs(whole, item), plain_logprobs(moved, item))


def test_offloading_more_layers_than_the_model_has_is_refused(deep: Path) -> None:
    with pytest.raises(TeacherError, match=rf"offload = 6: .* has {LAYERS} layers; lower it, or set 'all'"):
        offloaded(load_frozen(str(deep)), "6", "cpu")


def recipe(model: str = "m", **teacher: Any) -> Any:
    table = {"student": {"model": model}, "data": {"train": "d.jsonl"}}
    return parse_recipe({**table, "teachers": {"t": {"model": model, **teacher}}})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tensor_parallel": 2}, "tensor_parallel = 2 is set"),
        ({"quantize": "int8"}, "quantize = 'int8' is set"),
        ({"compile": True}, "compile = true is set"),
        ({"device": "cpu"}, "device = 'cpu' is set"),
        ({"backend": "vllm"}, "`offload` = 'all' belongs to native replicas"),
        ({"placement": "external", "urls": ["http://h:1"]}, "`offload` belongs to processes that this run starts"),
        ({"offload": -1}, "offload"),
        ({"offload": "some"}, "offload"),
    ],
)  # fmt: skip
def test_offload_is_refused_together_with_settings_that_exclude_it(
    keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(**{"offload": "all", **keys})


def test_check_refuses_an_offload_of_more_layers_than_the_model_has(deep: Path) -> None:
    folders = {"t": ModelFolder.open(str(deep), "m")}
    assert offloads_fit(recipe(offload=5).teachers, folders) == []
    assert offloads_fit(recipe(offload=6).teachers, folders) == [
        f"teachers.t.offload = 6: the model has {LAYERS} layers; lower it, or set 'all'"
    ]


@pytest.mark.parametrize("offload", [2, "all"])
def test_the_plan_counts_device_and_host_bytes_of_offloaded_layers(deep: Path, offload: Any) -> None:
    plain, moved = recipe(str(deep)), recipe(str(deep), offload=offload)
    process, before = (plan_processes(one, seat(one, 2))[-1] for one in (moved, plain))
    layer = ModelFolder.open(str(deep), "m").layer_parameters[0] * 4
    count = LAYERS if offload == "all" else offload
    assert process.bytes is not None and before.bytes is not None and before.host_bytes == 0
    assert before.bytes - process.bytes == (count - 2) * layer, "the blocks hold two layers on the device"
    assert count * layer <= process.host_bytes < 2 * count * layer
    kept = offloaded(load_frozen(str(deep)), str(offload), "cpu").body.layers[-1]
    assert sum(weight.nbytes for weight in kept.parameters()) == layer
    assert plan_processes(moved, seat(moved, 0))[-1].host_bytes == 0
    assert offloaded_bytes(recipe(str(deep), offload=1).teachers["t"])[0] == 0


def test_a_cpu_replica_ignores_offload_and_invalid_offload_arguments_are_refused(deep: Path) -> None:
    arguments = ["--model", str(deep), "--name", "t", "--device", "cpu", "--offload", "all"]
    worker, *_ = build_worker(parse_args(arguments))
    assert not any(layer._forward_pre_hooks for layer in worker.scorer.frozen.body.layers)
    for wrong, message in (
        (["--offload", "x"], "a number of layers, or all"),
        (["--compile"], "leave one of the two"),
    ):
        with pytest.raises(StartError, match=message):
            check_place(parse_args([*arguments, *wrong]))
