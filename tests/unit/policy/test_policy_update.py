"""An update is the same however the batch is split, ordered or laid out, and a failed one changes nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from small_student import (
    batch_of,
    cross_entropy,
    plain_loss,
    poisoned,
    qwen3,
    settings,
    token_mean,
    varied_batch,
)

from understudy.errors import CheckpointError, PolicyError
from understudy.nn import compiled_layers
from understudy.policy.load import switch_off_dropout
from understudy.policy.microbatch import Layout
from understudy.policy.optim.adamw import AdamWSettings
from understudy.policy.optim.schedule import Schedule, ScheduleKind
from understudy.policy.policy import Policy
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged
from understudy.types.loss import LossInputs, LossOutput, StudentHead


def gradients(policy: Policy, batch: Batch, max_tokens: int) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of one update, taken just before the optimizer uses them."""
    caught: list[torch.Tensor] = []
    step = policy.optimizer.step

    def catch(learning_rate: float, grad_norm: float) -> None:
        caught.extend(
            master.grad.clone() for master in policy.optimizer.masters.values() if master.grad is not None
        )
        step(learning_rate, grad_norm)

    policy.optimizer.step = catch  # type: ignore[method-assign]
    loss = policy.update(batch, cross_entropy, token_mean(batch), max_tokens).loss
    return loss, caught


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("max_tokens", [1, 37, 64, 10_000])
def test_split_and_layout_do_not_change_loss_or_gradient(max_tokens: int, layout: Layout) -> None:
    batch = varied_batch(seed=2)
    expected_loss, expected = gradients(Policy(qwen3(), settings()), batch, 10_000)
    loss, found = gradients(Policy(qwen3(), settings(layout=layout)), batch, max_tokens)
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_the_order_of_rows_does_not_change_a_bit() -> None:
    """Micro-batches are composed by length and key, so a shuffled batch gives the same bits."""
    batch = varied_batch(seed=4)
    shuffled = batch.select([7, 2, 11, 0, 5, 12, 1, 9, 3, 10, 4, 8, 6])
    one, other = Policy(qwen3(), settings()), Policy(qwen3(), settings())
    assert gradients(one, batch, 50)[0] == gradients(other, shuffled, 50)[0]
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_update_equals_plain_adamw() -> None:
    batch = varied_batch()
    model, reference = qwen3(tied=False), qwen3(tied=False)
    switch_off_dropout(reference)
    policy = Policy(model, settings(adamw=AdamWSettings(weight_decay=0.1, grad_clip=0.5)))
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in reference.parameters() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in reference.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    for _ in range(3):
        optimizer.zero_grad()
        loss = plain_loss(reference, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        result = policy.update(batch, cross_entropy, token_mean(batch), 64)
        assert result.loss == pytest.approx(loss.item(), abs=1e-5)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=2e-5)


def test_the_update_result_reports_steps_learning_rates_losses_and_token_counts() -> None:
    batch = varied_batch()
    schedule = Schedule(ScheduleKind.LINEAR, peak=1e-2, total_steps=4)
    policy = Policy(qwen3(), settings(schedule=schedule))
    first = policy.update(batch, cross_entropy, token_mean(batch), 64)
    second = policy.update(batch, cross_entropy, token_mean(batch), 64)
    assert (first.step, second.step, policy.step) == (0, 1, 2)
    assert (first.learning_rate, second.learning_rate) == (1e-2, pytest.approx(0.75e-2))
    assert second.loss < first.loss
    assert first.tokens == int(batch.tokens.offsets[-1])
    assert first.loss_tokens == int(batch.loss_mask.values.sum()) == sum(first.row_tokens)
    assert first.micro_batches > 1
    assert first.metrics["nll"].result() == pytest.approx(first.loss, abs=1e-5)
    assert sum(first.row_losses) / first.loss_tokens == pytest.approx(first.loss, abs=1e-5)
    assert set(first.seconds) == {"ahead", "prepare", "compute", "optimizer"}
    alone = Policy(qwen3(), settings()).update(
        batch.select([3]), cross_entropy, token_mean(batch.select([3]))
    )
    assert first.row_losses[3] == pytest.approx(alone.row_losses[0], abs=1e-4)


def test_a_row_without_loss_tokens_does_not_change_the_loss() -> None:
    batch = batch_of([[0, 1, 1], [0, 0, 1, 1], [0, 0]])
    whole, part = Policy(qwen3(), settings()), Policy(qwen3(), settings())
    one = whole.update(batch, cross_entropy, token_mean(batch))
    other = part.update(batch.select([0, 1]), cross_entropy, token_mean(batch.select([0, 1])))
    assert one.loss == other.loss
    assert one.row_losses[2] == 0.0


def test_logprobs_equal_a_plain_forward() -> None:
    batch, model = varied_batch(), qwen3()
    policy = Policy(model, settings())
    found = policy.logprobs(batch, max_tokens_per_microbatch=40)
    warm = policy.logprobs(batch, temperature=2.0)
    model.eval()
    for row, (ids, mask) in enumerate(zip(batch.tokens, batch.loss_mask, strict=True)):
        logits_TV = model(input_ids=ids[None], use_cache=False).logits[0].float()
        places = mask.nonzero()[:, 0]
        for temperature, values in ((1.0, found[row]), (2.0, warm[row])):
            logprobs_TV = (logits_TV / temperature).log_softmax(-1)
            assert torch.allclose(values, logprobs_TV[places - 1, ids[places]], atol=1e-5)


def test_gradient_checkpointing_does_not_change_loss_or_gradient() -> None:
    batch = varied_batch()
    expected, kept = gradients(Policy(qwen3(), settings()), batch, 64)
    loss, found = gradients(
        Policy(qwen3(), settings(gradient_checkpointing=True, layout=Layout.PACKED)), batch, 64
    )
    assert loss == pytest.approx(expected, abs=1e-6)
    for mine, theirs in zip(found, kept, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(Layout))
def test_compiled_layers_do_not_change_loss_or_gradient_norm(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers are traced, differentiated and run as a graph. Generating code takes minutes on a CPU: GPU tests do it."""
    monkeypatch.setattr(compiled_layers, "BACKEND", "aot_eager")
    batch, found = varied_batch(rows=20), []
    for compile_layers in (False, True):
        policy = Policy(qwen3(), replace(settings(layout=layout), compile=compile_layers))
        results = [
            policy.update(batch, cross_entropy, token_mean(batch), budget) for budget in (64, 100, 4096)
        ]
        found.append([(result.loss, result.grad_norm) for result in results])
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_non_finite_step_leaves_the_state_unchanged_and_names_the_rows(where: str) -> None:
    batch = varied_batch()
    bad_token = int(batch.tokens[5][batch.loss_mask[5]][0])
    culprits = {
        key
        for key, ids, mask in zip(batch.keys, batch.tokens, batch.loss_mask, strict=True)
        if (ids[mask] == bad_token).any()
    }
    assert 0 < len(culprits) < len(batch)
    seen: list[tuple[Batch, str]] = []
    policy = Policy(qwen3(), settings(), on_bad_rows=lambda bad: seen.append((bad.rows, bad.reason)))
    policy.update(batch, cross_entropy, token_mean(batch))
    before = policy.state().detached()
    with pytest.raises(PolicyError, match="The weights were not touched") as caught:
        policy.update(batch, poisoned(where, bad_token), token_mean(batch), 64)
    after = policy.state()
    assert before.progress["step"] == after.progress["step"] == 1
    for name, tensor in {**before.model, **before.optimizer}.items():
        assert torch.equal(tensor, {**after.model, **after.optimizer}[name]), name
    assert {key for key in batch.keys if key in str(caught.value)} == culprits
    assert set(seen[0][0].keys) == culprits and seen[0][1] == str(caught.value)
    clean = policy.update(batch, cross_entropy, token_mean(batch), 64)
    assert math.isfinite(clean.loss)


def test_an_objective_that_raises_leaves_no_gradient_behind() -> None:
    def broken(head: StudentHead, inputs: LossInputs) -> LossOutput:
        if 3 in inputs.token_ids_N:
            raise ValueError("no")
        return cross_entropy(head, inputs)

    batch = varied_batch()
    fresh, policy = Policy(qwen3(), settings()), Policy(qwen3(), settings())
    with pytest.raises(ValueError, match="no"):
        policy.update(batch, broken, token_mean(batch), 1)
    assert (
        policy.update(batch, cross_entropy, token_mean(batch)).grad_norm
        == fresh.update(batch, cross_entropy, token_mean(batch)).grad_norm
    )


def test_an_update_whose_gradient_reaches_only_the_embeddings_is_refused() -> None:
    """A norm without a backward pass (an inference kernel) cuts the gradient off from every layer below it."""
    policy = Policy(qwen3(), settings())
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    norm = policy.model.model.norm
    plain = norm.forward
    norm.forward = lambda hidden: plain(hidden.detach())
    batch = varied_batch()
    with pytest.raises(PolicyError, match=r"reached only 2 of \d+ weights, none of model\.layers\.0"):
        policy.update(batch, cross_entropy, token_mean(batch))
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.model.state_dict().items())
    norm.forward = plain
    policy.update(batch, cross_entropy, token_mean(batch))


def test_batches_without_loss_with_too_long_rows_or_unknown_ids_are_refused() -> None:
    policy = Policy(qwen3(), settings())
    empty = batch_of([[0, 0], [0, 0, 0]])
    with pytest.raises(PolicyError, match="none of the 2 rows"):
        policy.update(empty, cross_entropy, token_mean(batch_of([[0, 0], [0, 0, 0]])))
    long = batch_of([[0, 1], [0] + [1] * 64])
    with pytest.raises(PolicyError, match="row-001 has 65 tokens, the student's context holds 64"):
        policy.update(long, cross_entropy, token_mean(long))
    foreign = batch_of([[0, 1]])
    foreign.tokens.values[0] = 99
    with pytest.raises(PolicyError, match="token ids run from"):
        policy.update(foreign, cross_entropy, token_mean(foreign))


def test_low_precision_weights_have_float32_masters() -> None:
    """An update far below bfloat16's resolution is lost in the weights and kept in the masters."""
    batch = varied_batch()
    model = qwen3(dtype=torch.bfloat16)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    policy = Policy(model, settings(schedule=Schedule(peak=1e-6), adamw=AdamWSettings(weight_decay=0.0)))
    for _ in range(3):
        policy.update(batch, cross_entropy, token_mean(batch), 64)
    for name, parameter in model.named_parameters():
        master = policy.optimizer.masters[name]
        assert master.dtype == torch.float32 and parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, master.to(torch.bfloat16))
        moved = (master - start[name].float()).abs().max()
        assert 0 < moved < 1e-5
    big = model.get_parameter("model.norm.weight")
    assert torch.equal(big, start["model.norm.weight"])


def test_low_precision_gradients_are_accumulated_in_float32() -> None:
    """Many micro-batches of bfloat16 gradients must give the sum that one float32 accumulator gives."""
    batch = varied_batch(rows=40)
    reference_loss, reference = gradients(Policy(qwen3(), settings()), batch, 10_000)
    loss, found = gradients(Policy(qwen3(dtype=torch.bfloat16), settings()), batch, 1)
    assert all(grad.dtype == torch.float32 for grad in found)
    assert loss == pytest.approx(reference_loss, rel=2e-2)
    mine, theirs = (torch.cat([grad.flatten() for grad in grads]) for grads in (found, reference))
    assert torch.nn.functional.cosine_similarity(mine, theirs, dim=0) > 0.995


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offloaded_optimizer_makes_the_same_steps(dtype: torch.dtype) -> None:
    """With masters on the host and a restart in the middle the weights are the same to the bit."""
    plain = Policy(qwen3(dtype=dtype), settings())
    offloaded = [
        Policy(qwen3(dtype=dtype), settings(adamw=AdamWSettings(weight_decay=0.1, offload=True)))
        for _ in range(2)
    ]
    for seed in range(3):
        batch = varied_batch(seed=seed)
        plain.update(batch, cross_entropy, token_mean(batch), 64)
        current = offloaded[0] if seed < 2 else offloaded[1]
        current.update(batch, cross_entropy, token_mean(batch), 64)
        if seed == 1:
            offloaded[1].load_state(offloaded[0].state().detached())
    for mine, theirs in zip(plain.model.parameters(), offloaded[1].model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_state_of_another_model_is_refused() -> None:
    policy = Policy(qwen3(), settings())
    state = Policy(qwen3(tied=False), settings()).state()
    with pytest.raises(CheckpointError, match=r"unknown \['lm_head.weight'\]"):
        policy.load_state(state)
    half = Policy(qwen3(dtype=torch.bfloat16), settings()).state()
    with pytest.raises(CheckpointError, match="resume with the model and dtype"):
        policy.load_state(half)


def test_loss_weights_may_be_given_as_one_tensor_per_row() -> None:
    batch = varied_batch()
    whole: Jagged = token_mean(batch)
    one = Policy(qwen3(), settings()).update(batch, cross_entropy, whole)
    other = Policy(qwen3(), settings()).update(batch, cross_entropy, list(whole))
    assert one.loss == other.loss
