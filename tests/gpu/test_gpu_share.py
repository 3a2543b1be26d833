"""Work on a share of a GPU's multiprocessors gives what it gives on all of them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from device_world import World

from understudy.config.recipe import parse_recipe
from understudy.engines.gpu_share import GpuShare
from understudy.errors import ConfigError, EngineError
from understudy.teacher.model import load_frozen
from understudy.teacher.protocol import request_of
from understudy.teacher.scorer import Scorer
from understudy.types.scores import ScoreItem, Signal

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
on_gpu = pytest.mark.parametrize("share", [pytest.param(share, marks=GPU) for share in (0.3, 0.6, 0.75)])


def test_all_of_a_device_is_no_share_of_it() -> None:
    with GpuShare("cpu", 1.0, "student.gpu_share").inside():
        assert torch.ones(2).sum() == 2


def test_a_share_of_a_cpu_is_refused() -> None:
    with pytest.raises(EngineError, match=r"student.gpu_share = 0.5 is a share of a GPU"):
        GpuShare("cpu", 0.5, "student.gpu_share")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"student": {"gpu_share": 0.5}}, "needs trainer.mode = 'fully_async'"),
        ({"student": {"gpu_share": 0.0}}, "greater than 0"),
        (
            {"student": {"gpu_share": 0.5}, "trainer": {"mode": "fully_async", "ranks": 2}},
            "trained in one process",
        ),
        (
            {"student": {"gpu_share": 0.5, "device": "cpu"}, "trainer": {"mode": "fully_async"}},
            "student.device = 'cpu'",
        ),
        ({"teachers": {"gpu_share": 0.5, "tensor_parallel": 2}}, "a replica in one process"),
        (
            {"teachers": {"gpu_share": 0.5, "placement": "external", "urls": ["http://h:1"]}},
            "`gpu_share` belongs to processes that this run starts",
        ),
    ],
)
def test_a_recipe_that_cannot_share_is_told_why(changes: dict, said: str, tmp_path: Path) -> None:
    table = {
        "student": {"model": "student"},
        "teachers": {"t": {"model": "teacher"}},
        "data": {"train": str(tmp_path / "prompts.jsonl")},
        "run": {"dir": str(tmp_path / "run")},
    }
    for section, keys in changes.items():
        own = table.setdefault(section, {})
        (own["t"] if section == "teachers" else own).update(keys)
    with pytest.raises(ConfigError, match=said):
        parse_recipe(table)


@on_gpu
def test_layers_and_their_gradients(share: float) -> None:
    """Widths at which the library takes the kernels it takes in training, several waves of them."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        *(torch.nn.Linear(a, b, device="cuda", dtype=torch.bfloat16) for a, b in ((1024, 3072), (3072, 1024)))
    )
    states = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16)

    def learn() -> list[torch.Tensor]:
        net.zero_grad()
        net(states).float().square().mean().backward()
        return [one.grad.clone() for one in net.parameters() if one.grad is not None]

    everywhere = learn()
    part = GpuShare("cuda", share, "student.gpu_share")
    for _ in range(3):
        with part.inside():
            here = learn()
        for found, expected in zip(here, everywhere, strict=True):
            torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-6)


@on_gpu
def test_a_teachers_verdict(share: float, world: World) -> None:
    def scorer() -> Scorer:
        return Scorer("t", load_frozen(str(world.model("teacher")), dtype="bfloat16", device="cuda"))

    rng = np.random.default_rng(0)
    items = [
        ScoreItem(
            str(i),
            rng.integers(100, 1000, n).astype(np.int32),
            np.arange(1, n, dtype=np.int32),
            Signal.TOPK,
            8,
        )
        for i, n in enumerate((40, 64, 64, 9))
    ]
    whole, narrow = scorer(), scorer()
    whole.warm_up()
    everywhere = whole.score(request_of(items))
    with GpuShare("cuda", share, "gpu_share").inside():
        narrow.warm_up()
        here = narrow.score(request_of(items))
    np.testing.assert_allclose(here.sampled_P, everywhere.sampled_P, atol=0.02)
