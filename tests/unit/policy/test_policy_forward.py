"""Every token is scored by the hidden state before it, whatever other rows are in the batch."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from small_student import (
    VOCAB,
    batch_of,
    cross_entropy,
    gemma2,
    llama,
    plain_loss,
    qwen3,
    settings,
    token_mean,
    varied_batch,
    windowed,
)
from torch import nn

from understudy.errors import LossInputError, PolicyError
from understudy.policy.assemble import Assembler
from understudy.policy.forward.forward import StudentForward, attention_for, choose_layout, keeps_rows_apart
from understudy.policy.forward.head import logits_of, verify_head
from understudy.policy.load import switch_off_dropout
from understudy.policy.microbatch import Layout
from understudy.policy.policy import Policy
from understudy.types.batch import Batch, BatchMeta
from understudy.types.batch_ref import RemoteBatch
from understudy.types.jagged import Jagged
from understudy.types.loss import LossInputs, StudentHead, TeacherHead

MODELS = {"qwen3": qwen3, "qwen3-untied": lambda: qwen3(tied=False), "llama": llama, "gemma2": gemma2}


def ready(name: str) -> nn.Module:
    model = MODELS[name]()
    switch_off_dropout(model)
    return model.train()


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradient_equal_a_plain_forward(name: str) -> None:
    batch = varied_batch()
    model, reference = ready(name), ready(name)
    policy = Policy(model, settings())
    expected = plain_loss(reference, batch)
    expected.backward()
    assembler = Assembler(batch, token_mean(batch)).hold()
    loss, _ = policy.forward(assembler.cut(list(range(len(batch))), Layout.PADDED), cross_entropy)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    for (which, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-5), which


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_packed_and_padded_layouts_give_the_same_loss_and_gradient(name: str) -> None:
    batch = varied_batch(seed=3)
    found = {}
    for layout in Layout:
        model = ready(name)
        forward = StudentForward(model)
        micro = Assembler(batch, token_mean(batch)).hold().cut([4, 0, 9, 2], layout)
        with attention_for(model, layout):
            loss, _ = forward(micro, cross_entropy)
            loss.backward()
        assert model.config._attn_implementation == "sdpa"
        found[layout] = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    for padded, packed in zip(found[Layout.PADDED], found[Layout.PACKED], strict=True):
        assert torch.allclose(padded, packed, atol=1e-5)


def test_packed_and_padded_layouts_give_the_same_loss_with_a_sliding_window() -> None:
    batch = varied_batch(seed=5)
    losses = []
    for layout in Layout:
        model = windowed()
        micro = Assembler(batch, token_mean(batch)).hold().cut(list(range(len(batch))), layout)
        with attention_for(model, layout):
            losses.append(StudentForward(model)(micro, cross_entropy)[0].item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert losses[0] == pytest.approx(plain_loss(windowed(), batch).item(), abs=1e-5)


def test_the_packed_layout_is_refused_for_a_model_that_would_mix_rows() -> None:
    """Gemma 2 caps its attention scores, which the packed attention does not. A layer may also mix neighbouring tokens."""
    assert choose_layout(ready("qwen3"), Layout.PACKED) is Layout.PACKED
    assert choose_layout(ready("qwen3")) is Layout.PACKED
    with pytest.raises(PolicyError, match="cannot train on packed rows"):
        choose_layout(gemma2(), Layout.PACKED)
    mixing = ready("qwen3")
    mixing.model.layers[0].register_forward_hook(
        lambda _module, _args, states: states + states.roll(1, dims=1)
    )
    assert not keeps_rows_apart(mixing)
    assert choose_layout(mixing, Layout.PADDED) is Layout.PADDED
    assert mixing.config._attn_implementation == "sdpa"


class PositionBody(nn.Module):
    """Its hidden state at position t is the one-hot vector of t, so a shift shows as a wrong index."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.positions = positions
        self.anchor = nn.Parameter(torch.ones(()))

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, **_: object
    ) -> object:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        hidden = nn.functional.one_hot(position_ids, self.positions).float() * self.anchor
        return type("Output", (), {"last_hidden_state": hidden})()


class PositionModel(nn.Module):
    """Has the interface of a causal language model; its logits tell the position they were computed at."""

    def __init__(self, positions: int = 64) -> None:
        super().__init__()
        self.body = PositionBody(positions)
        self.head = nn.Linear(positions, positions, bias=False)
        nn.init.eye_(self.head.weight)
        text = type("Config", (), {})()
        self.config = type(
            "Config", (), {"get_text_config": lambda self: text, "_attn_implementation": "sdpa"}
        )()

    def get_decoder(self) -> nn.Module:
        return self.body

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


@pytest.mark.parametrize("layout", Layout)
def test_each_token_is_predicted_from_the_position_before_it(layout: Layout) -> None:
    """Variable prompt lengths and several turns: the one-hot index that reaches the head must be t − 1."""
    masks = [
        [0, 1],
        [0, 0, 0, 1, 1, 0, 0, 1, 0, 1],
        [0, 1, 1, 1],
        [0, 0, 0, 0, 0, 1],
        [0, 1, 0, 1, 0, 1, 0, 1, 1],
    ]
    batch = batch_of(masks)
    rows = [3, 1, 4, 0, 2]
    expected = [t - 1 for row in rows for t, has_loss in enumerate(masks[row]) if has_loss]
    targets = [int(batch.tokens[row][t]) for row in rows for t, has_loss in enumerate(masks[row]) if has_loss]

    def positions(head: StudentHead, inputs: LossInputs) -> tuple[list[int], list[int]]:
        return logits_of(head).argmax(-1).tolist(), inputs.token_ids_N.tolist()

    micro = Assembler(batch, token_mean(batch)).hold().cut(rows, layout)
    assert StudentForward(PositionModel())(micro, positions)[1] == (expected, targets)  # type: ignore[arg-type]
    assert micro.inputs.positions_N.tolist() == [place for row in rows for place in range(sum(masks[row]))]
    assert micro.inputs.sequence_ids_N.tolist() == [
        i for i, row in enumerate(rows) for _ in range(sum(masks[row]))
    ]


def test_teacher_columns_stay_aligned_with_their_tokens() -> None:
    """Each value encodes its row and position, so a column that is shifted by one is detected."""
    masks = [[0, 1, 1], [0, 0, 1, 0, 1, 1], [0, 0, 0, 1]]
    batch = batch_of(masks)
    named = Jagged.from_rows(
        [
            torch.tensor([-float(10 * row + place + 1) for place in range(sum(m))])
            for row, m in enumerate(masks)
        ]
    )
    ids = Jagged(torch.arange(len(named.values) * 2).view(-1, 2) % VOCAB, named.offsets)
    pairs = Jagged(torch.stack([named.values - 3, named.values - 4], 1), named.offsets)
    full = Batch(
        batch.keys,
        batch.tokens,
        batch.loss_mask,
        batch.behaviour_logprobs,
        teacher_logprobs=named,
        teacher_ids=ids,
        teacher_topk_logprobs=pairs,
        advantages=named,
    )
    inputs = Assembler(full, token_mean(full), old_logprobs=named).hold().cut([2, 0, 1], Layout.PADDED).inputs
    want = torch.cat([named[2], named[0], named[1]])
    assert torch.equal(inputs.teacher_logprobs_N, want)
    assert torch.equal(inputs.old_logprobs_N, want)
    assert torch.equal(inputs.advantages_N, want)
    assert torch.equal(inputs.teacher_ids_NK, torch.cat([ids[2], ids[0], ids[1]]))
    assert torch.equal(inputs.teacher_logprobs_NK, torch.cat([pairs[2], pairs[0], pairs[1]]))


def test_an_unaligned_column_is_refused_by_name() -> None:
    batch = batch_of([[0, 1, 1], [0, 1]])
    short = Jagged.from_rows([torch.ones(1), torch.ones(1)])
    with pytest.raises(PolicyError, match=r"weights is not aligned.*row row-000 has 1 entries, expected 2"):
        Assembler(batch, short)
    with pytest.raises(PolicyError, match=r"weights is not aligned.*1 rows, expected 2"):
        Assembler(batch, [torch.ones(2)])


def test_a_loss_mask_on_the_first_token_is_refused() -> None:
    batch = batch_of([[0, 1], [1, 1]])
    with pytest.raises(PolicyError, match="row-001"):
        Assembler(batch, token_mean(batch)).hold()


def test_nan_in_the_loss_inputs_is_refused_with_the_key_of_the_row() -> None:
    batch = batch_of([[0, 1], [0, 1, 1]])
    batch.behaviour_logprobs.values[1] = float("nan")
    with pytest.raises(LossInputError, match=r"behaviour_logprobs_N holds nan.*row-000"):
        Assembler(batch, token_mean(batch)).hold().cut([0, 1], Layout.PADDED)


def test_missing_behaviour_logprobs_are_allowed_only_in_rows_from_the_data() -> None:
    """An answer from the data has none. A row that an engine generated must have all of them."""
    batch = batch_of([[0, 1], [0, 1, 1], [0, 1, 1]])
    batch.behaviour_logprobs.values.fill_(float("nan"))
    with pytest.raises(LossInputError, match=r"behaviour_logprobs_N holds nan.*row-000"):
        Assembler(batch, token_mean(batch)).hold().cut([0, 1, 2], Layout.PADDED)
    mixed = replace(batch, origins=("data", "student", "data"))
    with pytest.raises(LossInputError, match=r"behaviour_logprobs_N holds nan.*row-001"):
        Assembler(mixed, token_mean(mixed)).hold().cut([1], Layout.PADDED)
    mixed.behaviour_logprobs.values[2:5] = -1.0
    micro = Assembler(mixed, token_mean(mixed)).hold().cut([2, 1], Layout.PADDED)
    assert micro.inputs.given_N is not None
    assert micro.inputs.given_N.tolist() == [True, True, False, False]
    given = replace(batch, origins=("data",) * 3)
    assert Assembler(given, token_mean(given)).hold().cut([0], Layout.PADDED).inputs.given_N.tolist() == [
        True
    ]


def test_verify_head_refuses_a_model_whose_logits_differ_from_its_heads() -> None:
    model = ready("qwen3")
    verify_head(model)
    plain = model.forward

    def scaled(*args: object, **kwargs: object) -> object:
        output = plain(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    model.forward = scaled
    with pytest.raises(PolicyError, match="differs from the model's own logits"):
        verify_head(model)


def test_verify_head_names_weights_that_are_not_finite_as_the_reason() -> None:
    model = ready("qwen3")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(PolicyError, match="not finite in float32: its weights hold NaN or infinity"):
        verify_head(model)


def test_the_softcap_of_the_model_is_applied_to_the_logits_of_the_loss() -> None:
    head_of_gemma = StudentForward(gemma2())
    assert head_of_gemma.facts.softcap == 5.0
    batch = varied_batch(rows=2)
    _, logits = head_of_gemma(
        Assembler(batch, token_mean(batch)).hold().cut([0, 1], Layout.PADDED), lambda head, _: logits_of(head)
    )
    assert logits.abs().max() <= 5.0


def test_a_remote_batch_is_cut_into_the_same_micro_batches_as_a_local_one() -> None:
    """Compares every column, with rows held in another order than the batch's, and with hidden states of two teachers."""
    masks = [[0, 1, 1], [0, 0, 1, 0, 1], [0, 1], [0, 1, 1, 1]]
    batch = batch_of(masks)
    counts = batch.loss_lengths
    offsets = torch.tensor([0, *counts]).cumsum(0)

    def column(*width: int) -> Jagged:
        return Jagged(-1 - torch.rand(int(offsets[-1]), *width), offsets)

    names = ("teacher_logprobs", "advantages", "reference_logprobs", "values", "returns")
    made = batch.with_columns(**{name: column() for name in names})
    full = replace(made, teachers=("a", "b", "b", "a"), origins=("student", "data", "student", "data"))
    ids = Jagged(torch.arange(3).expand(int(offsets[-1]), 3).contiguous(), offsets)
    ratios = Jagged(-column().values, offsets)
    full = full.with_columns(teacher_hidden=column(4), teacher_topk_logprobs=column(3), teacher_ids=ids)
    full = full.with_columns(importance=ratios)
    old, heads = column(), {name: TeacherHead(weight_VH=torch.rand(5, 4)) for name in "ab"}

    class Source:
        def fetch(self, meta: BatchMeta) -> Batch:
            return full.select([full.keys.index(key) for key in meta.keys])

        def from_disk(self, meta: BatchMeta, reason: str) -> Batch:
            raise AssertionError(reason)

    meta = BatchMeta("train", full.keys, ("tokens", "teacher_hidden"))
    remote_batch = RemoteBatch(
        meta, tuple(map(len, masks)), counts, Source(), teachers=full.teachers, origins=full.origins
    )
    local = Assembler(full, token_mean(full), old, heads).hold()
    remote = Assembler(remote_batch, token_mean(full), old, heads)
    assert remote.groups() == local.groups() == ["a", "b", "b", "a"] and remote.rows_with_loss() == [
        0,
        1,
        2,
        3,
    ]
    remote.hold([3, 0, 1])
    for rows in ([0, 3], [1]):
        mine, theirs = (one.cut(rows, Layout.PACKED) for one in (remote, local))
        assert mine.keys == theirs.keys and mine.lengths == theirs.lengths
        assert torch.equal(mine.ids, theirs.ids) and torch.equal(mine.predict_N, theirs.predict_N)
        assert mine.inputs.teacher_head is theirs.inputs.teacher_head is heads[full.teachers[rows[0]]]
        for field in fields(mine.inputs):
            value, expected = getattr(mine.inputs, field.name), getattr(theirs.inputs, field.name)
            if isinstance(expected, torch.Tensor):
                assert torch.equal(value.nan_to_num(7), expected.nan_to_num(7)), field.name
    short = RemoteBatch(meta, (3, 5, 2, 5), counts, Source(), teachers=full.teachers)
    with pytest.raises(PolicyError, match="came with 4 tokens; the ledger has 5"):
        Assembler(short, token_mean(full)).hold([3])
