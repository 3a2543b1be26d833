"""Commands to a remote critic and its answers: numbers and errors survive encoding and decoding."""

import json
import math

import pytest
import torch
from learning_rig import batch_of, learner_of, recipe_of

from understudy.assembly.processes.critic import CriticCommands
from understudy.errors import CheckpointError, LossInputError, PolicyError, RankLost
from understudy.policy.checkpoints.state import PolicyState
from understudy.policy.ranks.wire import batch_columns, jagged_columns, jagged_from, pack, unpack
from understudy.trainers.critic.local import Critic
from understudy.trainers.critic.messages import (
    for_critic,
    parts,
    refusal_as_json,
    refusal_from,
    result_as_json,
    result_from,
    sizes,
)
from understudy.trainers.learn.prepare import with_advantages
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged


def critic_and_batch() -> tuple[Critic, Batch]:
    learner = learner_of(recipe_of(loss={"advantage": "gae"}, critic={"learning_rate": 1e-2}))
    critic, batch = learner.critic, batch_of()
    assert isinstance(critic, Critic)
    batch = batch.with_columns(values=critic.values(batch, 64))
    learnt = with_advantages(batch, "gae")
    assert isinstance(learnt, Batch)
    return critic, learnt


def weights_of(batch: Batch) -> Jagged:
    assert batch.returns is not None
    return Jagged(torch.full_like(batch.returns.values, 0.125), batch.returns.offsets)


def update(batch: Batch) -> bytes:
    facts, columns = batch_columns(for_critic(batch))
    columns |= jagged_columns("weights", weights_of(batch))
    return pack({"do": "update", "batch": facts, "max_tokens": 64, "ends_step": True}, columns)


def test_critic_updates_and_values_by_command_equal_those_by_direct_call() -> None:
    (direct_critic, batch), (command_critic, _) = critic_and_batch(), critic_and_batch()
    commands = CriticCommands(command_critic)
    facts, columns = batch_columns(for_critic(batch))
    _, found = unpack(commands.carry_out(pack({"do": "values", "batch": facts, "max_tokens": 64}, columns)))
    values = jagged_from("values", found)
    assert values is not None and torch.equal(values.values, direct_critic.values(batch, 64).values)
    expected = direct_critic.update(batch, weights_of(batch), 64, True)
    answer, _ = unpack(commands.carry_out(update(batch)))
    result = result_from(answer["result"])
    assert answer["step"] == direct_critic.policy.step == 1
    assert {**result_as_json(result), "seconds": 0} == {**result_as_json(expected), "seconds": 0}
    assert result.metrics == expected.metrics and result.row_losses == expected.row_losses
    answer, _ = unpack(commands.carry_out(pack({"do": "skip_step"}, {})))
    assert answer["step"] == 2


def test_a_critics_state_sent_in_parts_is_restored_in_full() -> None:
    critic, batch = critic_and_batch()
    critic.update(batch, weights_of(batch), 64, True)
    commands, fresh = CriticCommands(critic), critic_and_batch()[0]
    head, _ = unpack(commands.carry_out(pack({"do": "state"}, {})))
    gathered: dict[str, torch.Tensor] = {}
    cut = parts(head["bytes"], 4000)
    assert len(cut) > 3
    for names in cut:
        gathered |= unpack(commands.carry_out(pack({"do": "part", "names": names}, {})))[1]
    assert sizes(gathered) == head["bytes"]
    expected = critic.state()
    back = PolicyState.of_tensors(gathered, head["progress"])
    assert back.model.keys() == expected.model.keys() and back.optimizer.keys() == expected.optimizer.keys()
    there = CriticCommands(fresh)
    for name, tensor in back.tensors().items():
        there.carry_out(pack({"do": "take"}, {name: tensor}))
    answer, _ = unpack(there.carry_out(pack({"do": "load_state", "progress": dict(back.progress)}, {})))
    assert answer["step"] == 1
    for name, tensor in fresh.state().model.items():
        assert torch.equal(tensor, expected.model[name]), name
    one, other = (model.update(batch, weights_of(batch), 64, True) for model in (critic, fresh))
    assert one.loss == other.loss and one.grad_norm == other.grad_norm


def test_a_failed_critic_update_names_its_rows_and_leaves_the_weights_unchanged() -> None:
    critic, batch = critic_and_batch()
    before = {name: tensor.clone() for name, tensor in critic.state().model.items()}
    assert batch.returns is not None
    returns = Jagged(batch.returns.values.clone(), batch.returns.offsets)
    returns[1][:] = 1e30
    answer, _ = unpack(CriticCommands(critic).carry_out(update(batch.with_columns(returns=returns))))
    assert answer["refused"]["kind"] == "PolicyError" and "were not touched" in answer["refused"]["message"]
    assert answer["rows"]["keys"] == [batch.keys[1]] and answer["untouched"] and answer["step"] == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in critic.state().model.items())


@pytest.mark.parametrize("kind", [PolicyError, LossInputError, CheckpointError, RankLost])
def test_errors_of_the_critic_keep_their_type_over_the_wire(kind: type[Exception]) -> None:
    error = refusal_from(json.loads(json.dumps(refusal_as_json(kind("so it is")))))  # type: ignore[arg-type]
    assert type(error) is kind and str(error) == "so it is"


def test_out_of_memory_keeps_its_type_and_an_unknown_error_becomes_a_policy_error() -> None:
    full = refusal_from(refusal_as_json(torch.OutOfMemoryError("CUDA out of memory.")))
    assert isinstance(full, torch.OutOfMemoryError)
    for kind in ("Gone", "Sequence"):
        assert isinstance(refusal_from({"kind": kind, "message": "m"}), PolicyError)


def test_infinity_and_nan_survive_the_critics_wire_format() -> None:
    critic, batch = critic_and_batch()
    result = critic.update(batch, weights_of(batch), 64, True)
    sent = result_as_json(result) | {"loss": math.inf, "grad_norm": math.nan}
    back = result_from(unpack(pack({"result": sent}, {}))[0]["result"])
    assert back.loss == math.inf and math.isnan(back.grad_norm)
