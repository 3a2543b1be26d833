"""DAPO's dynamic sampling: fills a step and replaces prompts without a learning signal.

    cursor ──prompts──> produce ──> the plane evicts groups without a signal ──> a new prompt for each
                           ▲                                                              │
                           └──────────────────────────────────────────────────────────────┘

A prompt whose sessions all got the same reward has no advantage. The data plane checks a group when its last
session is rolled out and evicts it in the same transaction. Evicted rows are counted separately from dead
letters. New prompts come in the cursor's order and their number depends on rewards only, so a run repeats to
the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from understudy.dataplane.groups import GroupFilter, no_signal
from understudy.errors import DataError
from understudy.observability.report import many
from understudy.trainers.produce.produce import produce_step
from understudy.trainers.row_columns import PARTITION, training_columns
from understudy.trainers.system import Learner, Producer
from understudy.types.prompt import Prompt, split_key


def install_filters(producer: Producer) -> None:
    """Install the group filter in the plane, which keeps it until the process ends."""
    if producer.settings.rollout.filter_groups:
        producer.state.plane.filter_groups(PARTITION, GroupFilter(no_signal))


async def fill_step(producer: Producer, learner: Learner, step: int) -> dict[str, float]:
    """Produce `batch_size` prompts for this step, with refills if groups are filtered. Returns the refill
    metrics."""
    wanted, rollout = producer.settings.batch_size, producer.settings.rollout
    prompts = producer.cursor.take(wanted)
    await produce_step(producer, learner, prompts, step)
    if not rollout.filter_groups:
        return {}
    refills = 0
    while (missing := wanted - await _held_of(producer, prompts, step)) and refills < rollout.max_refills:
        producer.state.view.phase(f"step {step}: {many(missing, 'prompt')} had no signal, taking others")
        others = producer.cursor.take(missing)
        await produce_step(producer, learner, others, step)
        prompts += others
        refills += 1
    if missing == wanted:
        raise nothing_to_learn(step, len(prompts))
    if refills:
        producer.state.view.phase("")
    return refill_metrics(len(prompts) - (wanted - missing), refills)


async def _held_of(producer: Producer, prompts: Sequence[Prompt], step: int) -> int:
    """How many of these prompts have a complete row. Replacements that an earlier launch took are not among
    them until the cursor has given them again."""
    held = await prompts_held(producer, step)
    return sum(prompt.key in held for prompt in prompts)


def refill_metrics(filtered: int, refills: int) -> dict[str, float]:
    return {"rollout/filtered_prompts": float(filtered), "rollout/refills": float(refills)}


def removal_metrics(producer: Producer) -> dict[str, float]:
    """Rows removed since the last step, by reason: evicted (a group without signal, or one that lost a
    member) or dead-lettered."""
    metrics = {"rows/evicted": 0.0, "rows/dead_letters": 0.0}
    names = {"evicted": "rows/evicted", "dead": "rows/dead_letters"}
    for (kind, reason), count in sorted(producer.state.plane.take_removed(PARTITION).items()):
        metrics[names[kind]] += count
        metrics[f"{names[kind]}/{reason}"] = float(count)
    return metrics


def nothing_to_learn(step: int, taken: int) -> DataError:
    return DataError(
        f"step {step} has nothing to learn from: all sessions of each of {taken} prompts got the same reward. Raise "
        "rollout.n or rollout.temperature, choose other prompts, or set rollout.filter_groups = false"
    )


async def without_rows(producer: Producer, prompts: Sequence[Prompt]) -> int:
    """How many of these prompts have no row in flight: filtered, or failed in every session."""
    held = {split_key(key)[0] for key in await producer.state.plane.list(PARTITION)}
    return sum(prompt.key not in held for prompt in prompts)


async def prompts_held(producer: Producer, step: int) -> set[str]:
    """The prompts of this step that have a complete row."""
    rows, settings = await producer.state.plane.list(PARTITION), producer.settings
    fields = set(training_columns(settings.loss, settings.scored))
    complete = {key for key, row in rows.items() if row.tags.get("step") == step and fields <= {*row.columns}}
    return {split_key(key)[0] for key in complete}
