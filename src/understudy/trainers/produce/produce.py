"""Produce: a prompt becomes complete rows in the data plane.

    prompt ──agent loop──> trajectories ──reward──┬──> teacher ──> scores ──┬──> journal
                                                  └──> journal ─────────────┘

The rollout is journalled while its teacher scores it. It is journalled even if the teacher fails, so an
outage loses no finished rollout. Scores are journalled after it (`row_journal.py`).

A session is one attempt at a prompt. Its agent loop returns one or several outputs, and each is a row:
`{prompt}_{session}_0`, `…_1`, …. A session whose loop fails (its template, its tool) becomes a dead letter
under the key of its output 0. An output whose reward or score fails becomes a dead letter alone. All outputs
of a session are journalled in one write, so a resume finds either none or all of them.

If workers on other machines write rows themselves (`remote_rows/rollouts.py`), the same steps are taken for
rows known by key.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from understudy.dataplane.base import GroupPolicy, RowInfo, split_key
from understudy.errors import ClusterError, DataError, LeaseLost
from understudy.teacher.route import score_mixture
from understudy.trainers.call_batching import Arrivals, Cohort, Gather
from understudy.trainers.produce.failures import SampleFailed, own_fault, reason_of
from understudy.trainers.produce.head_start import Ahead, ahead_of
from understudy.trainers.produce.row_journal import TURNS, RowJournal, Written
from understudy.trainers.produce.session import Failed, Output, roll_out, roll_out_far
from understudy.trainers.remote_rows.mixture import score_far_mixture
from understudy.trainers.remote_rows.rollouts import FarRow
from understudy.trainers.remote_rows.scoring import FarScoreItem, FarScores
from understudy.trainers.row_columns import CANDIDATES, SCORED, rollout_columns, score_columns
from understudy.trainers.system import PARTITION, System
from understudy.types.batch import BatchMeta
from understudy.types.prompt import Prompt, row_key
from understudy.types.scores import ScoreItem, Signal, TeacherScores
from understudy.types.trajectory import StopReason, Trajectory

logger = logging.getLogger(__name__)

FAILED = "failed"
"""The tag of an output whose reward failed, until it becomes a dead letter. Its value is the reason."""


async def produce_step(
    system: System, prompts: Sequence[Prompt], step: int, gather: Gather | None = None
) -> None:
    """Produce every session of these prompts. Rows that the journal already holds are reused.

    `gather` joins their calls with those of other producers. Without it, calls are joined among these prompts
    only, and the student's first forward pass may start before the rows are scored (`produce/head_start.py`).
    """
    samples = [(prompt, session) for prompt in prompts for session in range(system.recipe.rollout.n)]
    keys = [row_key(prompt.key, session) for prompt, session in samples]
    tags = {key: _tags(prompt, step) for key, (prompt, _) in zip(keys, samples, strict=True)}
    # `reserved`: the plane has room for the rows of a step or window (`config/checks/capacity.py`). They must
    # not wait, least of all behind rows that are trained after them.
    with system.spans.span("issue rows", step=step):
        issued = set(
            await system.plane.issue(
                PARTITION, keys, step=step, group=_group_policy(system), tags=tags, reserved=True
            )
        )
    system.tally.issued += len(issued)
    if issued and not system.recipe.rollout.workers:
        system.renderer.ahead(prompts)
    held = {} if len(issued) == len(keys) else _by_session(await system.plane.list(PARTITION))
    waiting = [
        (prompt, session, held.get((prompt.key, session), {}))
        for (prompt, session), key in zip(samples, keys, strict=True)
        if key in issued or (prompt.key, session) in held
    ]
    ahead = ahead_of(system, len(samples)) if gather is None else None
    journal = RowJournal(system.plane)
    try:
        async with asyncio.TaskGroup() as tasks:
            for members in _cohorts(system, waiting):
                own: Gather = gather or (Cohort(len(members)) if system.deterministic else Arrivals())
                for prompt, session, rows in members:
                    tasks.create_task(_produce(system, prompt, session, step, rows, own, journal, ahead))
    finally:
        if ahead is not None:
            ahead.over()


def _group_policy(system: System) -> GroupPolicy:
    """Rows of one prompt, all sessions and their outputs, are claimed together. With one session per prompt,
    a failed output drops no other row."""
    rollout = system.recipe.rollout
    return GroupPolicy(rollout.group_failure) if rollout.n > 1 else GroupPolicy.TRAIN_REST


def _by_session(rows: Mapping[str, RowInfo]) -> dict[tuple[str, int], dict[str, RowInfo]]:
    """Rows in flight by (prompt, session), outputs in order."""
    found: dict[tuple[str, int], dict[str, RowInfo]] = {}
    for key in sorted(rows, key=split_key):
        prompt, session, _ = split_key(key)
        found.setdefault((prompt, session), {})[key] = rows[key]
    return found


def _cohorts(system: System, samples: list[Any]) -> list[list[Any]]:
    """Samples in groups of `rollout.max_batch` by key under full determinism, otherwise in one group.

    Each group's calls are batched together."""
    size = system.recipe.rollout.max_batch if system.deterministic else max(len(samples), 1)
    return [samples[start : start + size] for start in range(0, len(samples), size)]


async def _produce(
    system: System,
    prompt: Prompt,
    session: int,
    step: int,
    held: Mapping[str, RowInfo],
    gather: Gather,
    journal: RowJournal,
    ahead: Ahead | None,
) -> None:
    """Produces one session. `held`: its rows in flight. The session's own faults become dead letters and are
    not raised."""
    async with gather.member():
        outputs: Sequence[Output]
        safe: Awaitable[None] | None = None
        try:
            if held and all(_is_rolled_out(row) for row in held.values()):
                outputs = await _held_outputs(system, held)
            else:
                outputs = await _roll_out(system, prompt, session, step, gather)
                safe = _journal(system, journal, prompt, outputs, step)
            if ahead is not None and outputs:
                ahead.saw(outputs)
            try:
                # One after another: a member of a cohort may have one call at a time.
                for one in outputs:
                    await _complete(system, prompt, one, gather, journal, safe)
            finally:
                if safe is not None:
                    await safe
        except Exception as error:
            # None of the session's outputs is in the journal, so the key of its first output stands for it.
            await _bury(system, row_key(prompt.key, session), own_fault(error))


async def _roll_out(
    system: System, prompt: Prompt, session: int, step: int, gather: Gather
) -> Sequence[Output]:
    if system.row_workers is None:
        return await roll_out(system, prompt, session, gather)

    def tags_of(key: str, reward: float | None, failed: str) -> Mapping[str, Any]:
        return _row_tags(system, prompt, step, reward, failed)

    return await roll_out_far(system, system.row_workers, prompt, session, gather, tags_of)


async def _complete(
    system: System,
    prompt: Prompt,
    output: Output,
    gather: Gather,
    journal: RowJournal,
    safe: Awaitable[None] | None,
) -> None:
    """Adds the teacher's scores to an output. A failed output becomes a dead letter; the session's other
    outputs are unaffected.

    `safe` is done when the rollout is in the journal. There is no deadline: a teacher that does not answer is
    waited for.
    """
    scores, failure = None, output.error if isinstance(output, Failed) else None
    if system.router is not None and not isinstance(output, Failed):
        try:
            scores = await _score(system, prompt, output, gather)
        except Exception as error:
            failure = own_fault(error)
    if safe is not None:
        await safe
    if failure is not None:
        await _bury(system, output.key, failure)
    elif isinstance(scores, FarScores):
        assert system.row_workers is not None
        with suppress(LeaseLost):  # its group was removed meanwhile
            await system.row_workers.plane.adopt(PARTITION, {output.key: scores.written})
    elif scores is not None:
        await journal.put(lambda: Written({output.key: score_columns(scores)}))


def _journal(
    system: System, journal: RowJournal, prompt: Prompt, outputs: Sequence[Output], step: int
) -> Awaitable[None] | None:
    """Makes all outputs of a session durable in one write, so that a resume finds all of them or none.

    The write comes a few turns later, because requests to teachers go first. None if a worker has written the
    rows. A failed output has no columns and a tag with the reason, so a resume dead-letters it too. If its
    group was removed meanwhile (a sibling failed, or there was no signal), the session's rows are dropped. It
    is scored all the same: its speed relative to its siblings must not decide what else is in its teacher's
    batch.
    """
    if system.row_workers is not None:
        return None

    def write() -> Written:
        rows, tags = {}, {}
        for one in outputs:
            if isinstance(one, Trajectory):
                rows[one.key] = rollout_columns(one)
                tags[one.key] = _row_tags(system, prompt, step, one.reward)
            elif isinstance(one, Failed):
                rows[one.key] = {}
                tags[one.key] = _row_tags(system, prompt, step, None, reason_of(one.error))
        return Written(rows, tags)

    return journal.put(write, turns=TURNS if system.router is not None else 1)


async def _score(
    system: System, prompt: Prompt, trajectory: Trajectory | FarRow, gather: Gather
) -> TeacherScores:
    """Scores from the row's teacher, or from its mixture of teachers."""
    assert system.router is not None
    weights = prompt.columns.get(system.recipe.data.mixture_key)
    teacher = system.router.route(routing_value(system, prompt)) if weights is None else None
    item = _score_item(system, trajectory)

    async def ask(teacher: str, wanted: ScoreItem) -> TeacherScores:
        with system.spans.span("score", key=item.key, teacher=teacher):
            scores: TeacherScores = await gather.call(system.teacher_lanes[teacher], item.key, wanted)
        return scores

    with system.timings.during(item.key, "score"):
        if teacher is not None:
            return await ask(teacher, item)
        if isinstance(item, FarScoreItem):
            assert system.far_scoring is not None
            shares = system.router.mixture(weights or {})
            return await score_far_mixture(system.far_scoring, item, shares, ask)
        return await score_mixture(system.router, item, weights or {}, ask)


def _score_item(system: System, trajectory: Trajectory | FarRow) -> ScoreItem:
    """The request to the teacher for this rollout."""
    loss = system.recipe.loss
    lacks = trajectory.candidates == 0 if isinstance(trajectory, FarRow) else trajectory.candidate_ids is None
    if loss.signal == "at_ids" and lacks:
        raise DataError(
            f"row {trajectory.key} came without candidate_ids, which loss.signal = 'at_ids' needs; build trajectories with "
            "understudy.rollout.agents.transcript.Transcript, or use loss.signal = 'topk'"
        )
    k = loss.topk if loss.signal == "topk" else 0
    if isinstance(trajectory, FarRow):
        return FarScoreItem.of(trajectory, Signal(loss.signal), k)
    return ScoreItem(
        trajectory.key,
        trajectory.tokens,
        trajectory.positions,
        Signal(loss.signal),
        k=k,
        ids=trajectory.candidate_ids,
    )


def routing_value(system: System, prompt: Prompt) -> Any:
    column = system.recipe.data.teacher_key
    return prompt.data_source if column == "data_source" else prompt.columns.get(column)


async def _bury(system: System, key: str, error: Exception) -> None:
    """Dead-letters a row. The run ends when there are more than `trainer.max_dead_letters` allows."""
    reason = reason_of(error)
    logger.warning("dead letter %s: %s", key, reason)
    try:
        await system.plane.dead_letter(
            PARTITION, key, reason, {"trace": traceback.format_exception(error)[-6:]}
        )
    except LeaseLost:
        return  # its group was removed already, and this row with it
    system.tally.dead_letters += 1
    allowed = max(
        system.recipe.trainer.max_dead_letters
        * system.recipe.trainer.steps
        * system.recipe.trainer.batch_size
        * system.recipe.rollout.n,
        1,
    )
    if system.tally.dead_letters > allowed:
        raise ClusterError(
            f"{system.tally.dead_letters} rows failed, more than trainer.max_dead_letters = {system.recipe.trainer.max_dead_letters} allows; "
            f"the last: {reason}. See {system.run.dead_letters}"
        )
    if system.tally.dead_letters == 1:
        system.view.note(f"row {key} failed and was set aside ({reason}); see {system.run.dead_letters}")


def _is_rolled_out(row: RowInfo) -> bool:
    return "tokens" in row.columns or FAILED in row.tags


async def _held_outputs(system: System, held: Mapping[str, RowInfo]) -> list[Output]:
    """The outputs of a session that an earlier launch journalled and did not complete."""
    outputs: list[Output] = []
    for key, row in held.items():
        if FAILED in row.tags:
            outputs.append(Failed(key, SampleFailed(str(row.tags[FAILED]))))
        elif system.router is None or SCORED in row.columns:
            continue
        elif system.row_workers is not None:
            candidates = system.sampling.candidates > 0
            outputs.append(await system.row_workers.stored(key, with_candidates=candidates))
        else:
            outputs.append(await _stored(system, key))
    return outputs


async def _stored(system: System, key: str) -> Trajectory:
    """A rollout read from the data plane."""
    streams = ("tokens", "loss_mask", "behaviour_logprobs", "weight_versions")
    own = (CANDIDATES,) if system.sampling.candidates else ()
    columns = await system.plane.get(BatchMeta(PARTITION, (key,)), (*streams, *own, "stop_reason"))
    tokens, mask, logprobs, versions = (np.asarray(columns[name][0]) for name in streams)
    return Trajectory(
        key,
        tokens,
        mask,
        logprobs,
        versions,
        StopReason(str(columns["stop_reason"][0])),
        candidate_ids=np.asarray(columns[CANDIDATES][0]) if own else None,
    )


def _tags(prompt: Prompt, step: int) -> dict[str, Any]:
    """The tags that claims select rows by. After a resume the journal may hold rows of several steps."""
    return {"step": step, "data_source": prompt.data_source}


def _row_tags(
    system: System, prompt: Prompt, step: int, reward: float | None, failed: str = ""
) -> dict[str, Any]:
    """`_tags` of a finished row, with its reward if groups are filtered, or the reason if it failed."""
    tags = _tags(prompt, step)
    if failed:
        tags[FAILED] = failed
    elif system.recipe.rollout.filter_groups and reward is not None:
        tags["reward"] = reward
    return tags
