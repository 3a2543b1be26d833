"""Engines merge adapters themselves: into the base that they keep, and only if the trainer has the same base."""

import pytest
import torch
from torch import nn

from understudy.errors import EngineError
from understudy.nn.pretrained import sharing_copy
from understudy.weights.adapters import AdaptedModel, base_mark, is_of_adapters, packed_adapter, packed_mark

Named = list[tuple[str, torch.Tensor]]


def model(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 4, bias=False)).to(dtype)


def adapters(of: nn.Module, seed: int, scale: float = 2.0, rank: int = 2) -> Named:
    """Adapters for both linear layers, packed with the mark of their base."""
    random = torch.Generator().manual_seed(seed)
    packed: Named = [packed_mark(base_mark(of.named_parameters()))]
    for name, weight in of.named_parameters():
        if weight.dim() == 2:
            down = torch.randn(rank, weight.shape[1], generator=random)
            packed += packed_adapter(name, down, torch.randn(weight.shape[0], rank, generator=random), scale)
    return packed


@torch.no_grad()
def apply_update(adapted: AdaptedModel, into: nn.Module, packed: Named) -> None:
    """Copies the weights into the engine's tensors, except those that share their memory, as an engine does."""
    own = dict(into.named_parameters())
    for name, tensor in adapted.weights(packed):
        if own[name].data_ptr() != tensor.data_ptr():
            own[name].copy_(tensor)


def test_every_version_of_the_adapters_is_merged_into_the_original_base() -> None:
    """Merging into the previous version would accumulate a hundred roundings in bfloat16."""
    fresh, engine = model(torch.bfloat16), model(torch.bfloat16)
    adapted = AdaptedModel(engine)
    for seed in range(100):
        apply_update(adapted, engine, adapters(fresh, seed))
    last = dict(adapters(fresh, 99))
    for name, weight in fresh.named_parameters():
        if weight.dim() == 2:
            product = last[f"adapter:up:{name}"] @ last[f"adapter:down:{name}"]
            expected = (weight.float() + 2.0 * product).to(torch.bfloat16)
        else:
            expected = weight
        assert torch.equal(dict(engine.named_parameters())[name], expected), name
    apply_update(adapted, engine, adapters(fresh, 0, scale=0.0))
    assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), fresh.parameters(), strict=True))
    apply_update(adapted, engine, adapters(fresh, 1)[:1])  # an update without adapters restores the base
    assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), fresh.parameters(), strict=True))


def test_adapters_of_another_base_are_refused_before_anything_changes() -> None:
    engine = model()
    adapted = AdaptedModel(engine)
    before = [one.clone() for one in engine.parameters()]
    with pytest.raises(
        EngineError, match=r"other weights than this engine has loaded.*student\.lora\.publish"
    ):
        apply_update(adapted, engine, adapters(model(seed=1), 0))
    wrong = [(name, tensor[:, :1] if "up" in name else tensor) for name, tensor in adapters(engine, 0)]
    wrong += packed_adapter("2.weight", torch.zeros(2, 9), torch.zeros(4, 2), 1.0)
    with pytest.raises(EngineError, match=r"an adapter of \[4, 2\] × \[2, 9\] came for 2\.weight"):
        apply_update(adapted, engine, wrong)
    assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), before, strict=True))


def test_whole_weights_become_the_base_of_later_adapters() -> None:
    engine, other = model(), model(seed=3)
    adapted = AdaptedModel(engine)
    apply_update(adapted, engine, adapters(model(), 0))
    engine.load_state_dict(other.state_dict())
    adapted.replaced()
    apply_update(adapted, engine, adapters(other, 0, scale=0.0))
    assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), other.parameters(), strict=True))


def test_the_base_mark_depends_on_names_dtypes_shapes_and_every_bit_of_the_weights() -> None:
    weight = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    mark = base_mark([("a", weight), ("b", torch.ones(2))])
    assert base_mark([("b", torch.ones(2)), ("a", weight.clone())]) == mark
    others = [
        [("a", weight)],
        [("c", weight), ("b", torch.ones(2))],
        [("a", weight.double()), ("b", torch.ones(2))],
        [("a", weight[[1, 0, 2]]), ("b", torch.ones(2))],
        [("a", weight.reshape(4, 3)), ("b", torch.ones(2))],
        [("a", weight), ("b", torch.nextafter(torch.ones(2), torch.zeros(2)))],
    ]
    assert len({mark, *(base_mark(one) for one in others)}) == 1 + len(others)


def test_names_of_adapter_tensors_are_distinct_from_names_of_weights() -> None:
    assert all(is_of_adapters(name) for name, _ in adapters(model(), 0))
    assert not any(is_of_adapters(name) for name, _ in model().named_parameters())


def test_a_sharing_copy_keeps_the_base_and_shares_the_tensors_that_no_adapter_changes() -> None:
    """The copy computes with the base, whatever adapters arrive. Only adapted layers are held twice; tied weights stay tied."""
    engine = nn.Sequential(model(), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    engine[2].weight = engine[1].weight
    plain, before = sharing_copy(engine), [one.clone() for one in engine.parameters()]
    adapted = AdaptedModel(engine)
    adapted.keep_base(plain, {"0.0.weight"})
    theirs = dict(engine.named_parameters())
    for name, tensor in plain.named_parameters():
        assert (tensor.data_ptr() == theirs[name].data_ptr()) == (name != "0.0.weight"), name
        assert not tensor.requires_grad and theirs[name].requires_grad
    assert plain[2].weight is plain[1].weight
    assert plain[0][0].weight.data_ptr() == adapted._base["0.0.weight"].data_ptr(), (
        "the base weight that merging needs is held a second time"
    )
    mark = packed_mark(base_mark(engine.named_parameters()))

    def adapter(name: str, version: int) -> Named:
        rows, columns = theirs[name].shape
        return [mark, *packed_adapter(name, torch.ones(1, columns), torch.full((rows, 1), 1.0), version)]

    for version in (1, 2):
        apply_update(adapted, engine, adapter("0.0.weight", version))
        assert torch.equal(theirs["0.0.weight"], before[0] + version)
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), before, strict=True))
    with pytest.raises(EngineError, match=r"an adapter came for 0\.2\.weight, which a teacher"):
        apply_update(adapted, engine, adapter("0.2.weight", 3))
    with pytest.raises(EngineError, match=r"set student\.lora\.publish = 'adapter'"):
        adapted.replaced()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), before, strict=True))
