"""Training on two or four ranks gives the result of one process."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_child import break_a_step, run_rank, train, watch_rows
from small_student import cross_entropy, qwen3, settings, token_mean, varied_batch

from understudy.errors import PolicyError
from understudy.policy.checkpoints.checkpoint import CheckpointStore
from understudy.policy.microbatch import Layout
from understudy.policy.plan import plan_step
from understudy.policy.policy import Policy
from understudy.policy.ranks.shard import deal_rows, join
from understudy.policy.ranks.wire import batch_columns, batch_from, pack, unpack
from understudy.types.jagged import Jagged

FORKS = multiprocessing.get_context("forkserver")
# One fork server serves the whole test process, so every test module that uses it preloads the same list.
FORKS.set_forkserver_preload(
    ["torch.distributed.fsdp", "safetensors.torch"]
    + [f"transformers.models.{name}.modeling_{name}" for name in ("qwen3", "llama", "gemma2")]
)


def on_ranks(size: int, folder: Path, job: str, **options: Any) -> list[Any]:
    """Runs a job on `size` processes and returns their answers, ordered by rank."""
    (folder / "rendezvous").unlink(missing_ok=True)
    pipes, children = [], []
    for rank in range(size):
        reader, writer = FORKS.Pipe(duplex=False)
        child = FORKS.Process(target=run_rank, args=(rank, size, str(folder), job, options, writer))
        child.start()
        writer.close()
        pipes.append(reader)
        children.append(child)
    try:
        answers = [
            pipe.recv() if pipe.poll(100) else pytest.fail(f"rank {i} is silent")
            for i, pipe in enumerate(pipes)
        ]
    finally:
        for child in children:
            child.join(timeout=20)
            child.kill()
    return answers


def assert_same(found: list[Any], expected: list[Any], tolerance: float) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        for value, right in zip(mine[:5], theirs[:5], strict=True):
            assert value == pytest.approx(right, abs=tolerance, rel=tolerance)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_give_the_losses_of_one_process(tmp_path: Path, size: int) -> None:
    (tmp_path / "alone").mkdir()
    expected = train(None, str(tmp_path / "alone"), steps=3)
    answers = on_ranks(size, tmp_path, "train", steps=3)
    for lines in answers:
        assert_same(lines, expected, 1e-5)
    one = CheckpointStore(tmp_path / "alone" / "checkpoints").load().policy
    many = CheckpointStore(tmp_path / "checkpoints").load().policy
    assert one.model.keys() == many.model.keys() and one.optimizer.keys() == many.optimizer.keys()
    for name, tensor in one.model.items():
        assert torch.allclose(tensor, many.model[name], atol=1e-4), name


def test_weights_are_gathered_one_operation_at_a_time(tmp_path: Path) -> None:
    """Over NCCL a grouped operation ends the trainer with SIGABRT if another rank is lost (see `whole`). With three ranks
    most weights have shards of unequal length."""
    for weights, collectives in on_ranks(3, tmp_path, "gather_weights"):
        assert collectives == {"c10d._allgather_base_": weights} and weights > 10


@pytest.mark.parametrize("size", [2, 4])
def test_token_watch_columns_of_every_rank_reach_rank_0(tmp_path: Path, size: int) -> None:
    keys = list(varied_batch().keys[::2])
    expected = watch_rows(None, str(tmp_path), keys)
    found = on_ranks(size, tmp_path, "watch_rows", keys=keys)[0]
    assert found.keys() == expected.keys() == set(keys)
    for key, columns in expected.items():
        assert found[key].keys() == columns.keys()
        for name, column in columns.items():
            assert found[key][name] == pytest.approx(column, abs=1e-4), (key, name)


def test_a_batch_with_fewer_rows_than_ranks_gives_the_losses_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    expected = train(None, str(tmp_path / "alone"), steps=2, rows=1)
    for lines in on_ranks(2, tmp_path, "train", steps=2, rows=1):
        assert_same(lines, expected, 1e-5)


def test_a_run_can_be_resumed_with_another_number_of_ranks(tmp_path: Path) -> None:
    """Two ranks save and one process resumes, then one process saves and two ranks resume."""
    (tmp_path / "alone").mkdir()
    uninterrupted = train(None, str(tmp_path / "alone"), steps=4)
    on_ranks(2, tmp_path, "train", steps=2)
    rest = train(None, str(tmp_path), steps=1, resume=True)
    last = on_ranks(2, tmp_path, "train", steps=1, resume=True)
    assert_same([*rest, *last[0]], uninterrupted[2:], 1e-4)


def saved(folder: Path) -> dict[str, torch.Tensor]:
    state = CheckpointStore(folder / "checkpoints").load().policy
    return {**state.model, **state.optimizer}


def assert_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]


OFFLOAD, PACKED = {"offload": True, "grad_clip": 0.5}, {"kind": "adamw_8bit", "grad_clip": 0.5}
BOTH = {**OFFLOAD, **PACKED}


@pytest.mark.parametrize(
    ("size", "adamw", "dtype"),
    [
        (2, BOTH, "float32"),
        pytest.param(2, OFFLOAD, "float32", marks=pytest.mark.slow),
        pytest.param(2, PACKED, "float32", marks=pytest.mark.slow),
        pytest.param(3, BOTH, "float32", marks=pytest.mark.slow),
        pytest.param(2, OFFLOAD, "bfloat16", marks=pytest.mark.slow),
        pytest.param(2, PACKED, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_an_offloaded_or_8_bit_optimizer_on_several_ranks_gives_the_steps_of_one_process(
    tmp_path: Path, size: int, adamw: dict[str, Any], dtype: str
) -> None:
    """Losses agree up to the order of sums, also with clipped gradients. A stopped run resumes bit for bit, and with another
    number of ranks. Blocks of 8-bit moments are those of the whole tensor, so their scales agree as closely as moments do."""
    folders = [tmp_path / name for name in ("alone", "uninterrupted", "stopped")]
    for folder in folders:
        folder.mkdir()
    alone, uninterrupted, stopped = folders
    options = {"dtype": dtype, "adamw": adamw}
    expected = train(None, str(alone), steps=3, **options)
    for lines in on_ranks(size, uninterrupted, "train", steps=3, **options):
        if dtype == "float32":
            assert_same(lines, expected, 1e-4)
        else:
            assert [line[0] for line in lines] == pytest.approx([line[0] for line in expected], rel=2e-2)
    on_ranks(size, stopped, "train", steps=2, **options)
    one, many = saved(alone), saved(uninterrupted)
    assert one.keys() == many.keys() and all(one[name].shape == many[name].shape for name in one)
    far = [
        name for name in one if "codes" not in name and not torch.allclose(one[name], many[name], atol=1e-3)
    ]
    assert dtype != "float32" or not far
    on_ranks(size, stopped, "train", steps=1, resume=True, **options)
    assert_bits(saved(stopped), many)
    # One rank resumes from the checkpoint of several.
    rest = train(None, str(stopped), steps=1, resume=True, **options)
    uninterrupted_rest = train(None, str(alone), steps=1, resume=True, **options)
    assert rest[0][0] == pytest.approx(uninterrupted_rest[0][0], rel=2e-2 if dtype == "bfloat16" else 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("adamw", [None, BOTH])
def test_adapters_on_two_ranks_give_the_losses_of_one_process(
    tmp_path: Path, adamw: dict[str, Any] | None
) -> None:
    pytest.importorskip("peft")
    (tmp_path / "alone").mkdir()
    expected = train(None, str(tmp_path / "alone"), steps=3, lora=True, adamw=adamw)
    for lines in on_ranks(2, tmp_path, "train", steps=3, lora=True, adamw=adamw):
        assert_same(lines, expected, 1e-5)


@pytest.mark.slow
def test_half_precision_ranks_keep_float32_masters(tmp_path: Path) -> None:
    """bfloat16 rounds differently in each grouping of rows, so losses agree only to its resolution."""
    (tmp_path / "alone").mkdir()
    expected = train(None, str(tmp_path / "alone"), steps=2, dtype="bfloat16")
    for lines in on_ranks(2, tmp_path, "train", steps=2, dtype="bfloat16"):
        assert [line[0] for line in lines] == pytest.approx([line[0] for line in expected], rel=2e-2)
    state = CheckpointStore(tmp_path / "checkpoints").load().policy
    for name, tensor in state.model.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(state.optimizer[f"master/{name}"].to(torch.bfloat16), tensor)
    train(None, str(tmp_path), steps=1, dtype="bfloat16", resume=True)


@pytest.mark.parametrize("where", ["loss", pytest.param("gradient", marks=pytest.mark.slow)])
def test_a_non_finite_step_is_refused_on_all_ranks_and_leaves_weights_unchanged(
    tmp_path: Path, where: str
) -> None:
    alone = break_a_step(None, str(tmp_path), where)
    answers = on_ranks(2, tmp_path, "break_a_step", where=where)
    for message, caught, untouched in answers:
        assert untouched and "The weights were not touched" in message
        assert set(alone[1]) <= set(caught)
        assert where == "gradient" or caught == alone[1]


def test_the_other_ranks_follow_the_commands_of_the_leading_policy(tmp_path: Path) -> None:
    """The caller uses one policy. After a refused batch and a return to a checkpoint all ranks are at the same step."""
    (tmp_path / "alone").mkdir()
    uninterrupted = [line[0] for line in train(None, str(tmp_path / "alone"), steps=2)]
    losses, followed = on_ranks(2, tmp_path, "lead_and_follow", steps=3)
    assert losses[:2] == pytest.approx(uninterrupted, abs=1e-5)
    assert followed == 3


@pytest.mark.parametrize("who", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_the_leader_reports_within_seconds_that_a_single_rank_failed(tmp_path: Path, who: int) -> None:
    """The other rank waits in a collective that never ends; the leader must not wait with it."""
    (messages, seconds), _ = on_ranks(2, tmp_path, "fail_alone", who=who)
    assert messages[0].startswith(f"rank {who} cannot use this") and seconds < 25
    assert ("on rank 1 of 2" in messages[0]) == (who == 1)
    assert messages[1] == messages[0] if who == 1 else "failed alone" in messages[1], (
        "the broken process group was used again"
    )


def test_the_leader_closes_without_an_error_when_a_rank_has_already_exited(tmp_path: Path) -> None:
    """All steps are taken and saved by then, so the leader neither waits for the rank's exit nor raises."""
    seconds, _ = on_ranks(2, tmp_path, "gone_at_the_end")
    assert seconds < 10


def test_a_batch_is_unchanged_after_packing_and_unpacking() -> None:
    batch = varied_batch()
    total = int(batch.loss_mask.values.sum())
    column = token_mean(batch)
    rich = replace(
        batch,
        rewards=tuple([float("nan")] + [0.5] * (len(batch) - 1)),
        teachers=("t",) * len(batch),
        origins=("data",) + ("student",) * (len(batch) - 1),
        teacher_ids=Jagged(torch.arange(total * 3).view(total, 3), column.offsets),
        teacher_hidden=Jagged(torch.randn(total, 4).to(torch.bfloat16), column.offsets),
    )
    plain, tensors = batch_columns(rich)
    head, received = unpack(pack({"batch": plain}, tensors))
    again = batch_from(head["batch"], received)
    assert (
        again.keys == rich.keys and again.teachers == rich.teachers and again.rewards[1:] == rich.rewards[1:]
    )
    assert again.rewards[0] != again.rewards[0] and again.origins == rich.origins
    assert again.teacher_logprobs is None
    for name in ("tokens", "loss_mask", "teacher_ids", "teacher_hidden"):
        sent, got = getattr(rich, name), getattr(again, name)
        assert torch.equal(sent.values, got.values) and sent.values.dtype == got.values.dtype
        assert torch.equal(sent.offsets, got.offsets)


def test_deal_rows_balances_tokens_over_ranks_and_does_not_depend_on_the_order_of_rows() -> None:
    lengths = [5, 1, 9, 9, 2, 7, 3]
    keys = list("gfedcba")
    shares = deal_rows(range(7), lengths, keys, 3)
    assert sorted(row for share in shares for row in share) == list(range(7))
    loads = [sum(lengths[row] for row in share) for share in shares]
    assert max(loads) - min(loads) <= 2
    turned = [6, 0, 3, 5, 1, 4, 2]
    again = deal_rows(range(7), [lengths[i] for i in turned], [keys[i] for i in turned], 3)
    assert [[keys[row] for row in share] for share in shares] == [
        [keys[turned[row]] for row in share] for share in again
    ]
    assert deal_rows([0], [4], ["a"], 3) == [[0], [], []]


def test_the_plan_gives_every_rank_the_same_number_of_passes() -> None:
    lengths, keys, names = [10, 10, 10, 3, 3], list("abcde"), [""] * 5
    plans = [plan_step(range(5), lengths, keys, names, 10, Layout.PADDED, rank, 2) for rank in range(2)]
    assert plans[0].rounds == plans[1].rounds == max(len(plan.mine) for plan in plans)
    passes = [list(plan.passes()) for plan in plans]
    counted = sorted(row for plan in passes for group, counts in plan if counts for row in group)
    assert counted == list(range(5))
    assert {tuple(group) for plan in passes for group, counts in plan if not counts} <= {(3,)}


def test_the_plan_never_puts_rows_of_different_groups_into_one_pass() -> None:
    plan = plan_step(range(4), [3, 3, 3, 3], list("abcd"), ["x", "y", "x", "y"], 100, Layout.PADDED)
    assert plan.mine == [[0, 2], [1, 3]]


def test_a_rank_outside_the_group_is_refused() -> None:
    with pytest.raises(PolicyError, match="rank = 2 of 2 ranks"):
        join(2, 2, "tcp://127.0.0.1:1")


def losses_of_one_rank(steps: int = 3) -> list[float]:
    """What the job `rows_by_name` computes, on one rank with a local batch."""
    policy, batch, losses = Policy(qwen3(), settings()), varied_batch(), []
    part = batch.select([4, 0, 9])
    for _ in range(steps):
        old = policy.logprobs(batch, 40)
        losses.append(policy.update(batch, cross_entropy, token_mean(batch), 40).loss)
        result = policy.update(part, cross_entropy, token_mean(part), 40, old_logprobs=old.select([4, 0, 9]))
        losses += [result.loss, *result.row_losses, *old.values.tolist()]
    return losses


def test_ranks_fetch_only_their_own_rows_of_a_remote_batch(tmp_path: Path) -> None:
    (losses, sent, mine, brought), theirs = on_ranks(2, tmp_path, "rows_by_name")
    assert losses == pytest.approx(losses_of_one_rank(), abs=1e-5) and not brought
    batch = varied_batch()
    lengths = batch.tokens.lengths.tolist()
    shares = deal_rows(range(len(batch)), lengths, batch.keys, 2)
    shortest = batch.keys[min(range(len(batch)), key=lambda row: (lengths[row], batch.keys[row]))]
    for share, fetched in zip(shares, (mine, theirs), strict=True):
        wanted = {batch.keys[row] for row in share}
        assert wanted <= set(fetched[0]) <= wanted | {shortest}, "its share, and the row of its dummy passes"
        assert len(fetched) == 9, "a rank fetched more than once for a command"
    columns = sum(tensor.nbytes for tensor in batch_columns(batch)[1].values())
    assert sent < 1500 < columns, "the leader sent more than keys and one weight per row"


@pytest.mark.parametrize("who", [0, 1])
def test_the_leader_sends_the_rows_when_a_rank_cannot_fetch_them(tmp_path: Path, who: int) -> None:
    (losses, _, mine, brought), theirs = on_ranks(2, tmp_path, "rows_by_name", fails_on=who)
    assert losses == pytest.approx(losses_of_one_rank(), abs=1e-5), (
        "losses differ after the leader began to send rows"
    )
    assert len(brought) == 6 and len((mine, theirs)[who]) == 9
    expected = "the queue is gone" if who == 0 else "1 other rank(s) cannot use their rows"
    assert set(brought) == {expected}
