"""Produce: a prompt becomes complete rows in the data plane.

    prompt ──agent loop──> trajectories ──reward──┬──> teacher ──> scores ──┬──> journal
                                                  └──> journal ─────────────┘

The rollout is journalled while its teacher scores it. It is journalled even if the teacher fails, so an
outage loses no finished rollout. Scores are journalled after it (`row_journal.py`).

A session is one attempt at a prompt. Its agent loop returns one or several outputs, and each is a row:
`{prompt}_{session}_0`, `…_1`, …. A session whose loop fails (its template, its tool) becomes a dead letter
under the key of its output 0. An output whose reward or score fails becomes a dead letter alone. All outputs
of a session are journalled in one write, so a resume finds either none or all of them.

Rows and scores are held by reference (`types/references.py`): workers on other machines may have written
them (`rollouts.py`).
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from understudy.dataplane.base import GroupPolicy, RowInfo
from understudy.errors import ClusterError, DataError, LeaseLost
from understudy.observability.report import many
from understudy.rollout.teacher_prompts import SessionFacts
from understudy.teacher.route import score_mixture
from understudy.trainers.call_batching import BatchByArrival, BatchByKey, CallBatcher
from understudy.trainers.produce.aligned import aligned_scores, counted
from understudy.trainers.produce.failures import SampleFailed, reason_of, sample_fault
from understudy.trainers.produce.group_outputs import GroupOutputs
from understudy.trainers.produce.head_start import HeadStartTrigger, head_start_of
from understudy.trainers.produce.rollouts import FailedOutput, Output, RolledOut
from understudy.trainers.produce.row_journal import RowJournal, RowsToWrite
from understudy.trainers.produce.session import roll_out
from understudy.trainers.row_columns import PARTITION, SCORED, own_prompt_column, score_columns
from understudy.trainers.system import Learner, Producer
from understudy.types.prompt import Prompt, row_key, split_key, teacher_key_of
from understudy.types.references import RowRef, ScoreRef, ScoresRef
from understudy.types.scores import Signal
from understudy.types.trajectory import Trajectory

logger = logging.getLogger(__name__)

FAILED = "failed"
"""The tag of an output whose reward failed, until it becomes a dead letter. Its value is the reason."""


@dataclass(frozen=True, slots=True)
class _PendingSession:
    """A session to produce."""

    prompt: Prompt
    session: int
    held: Mapping[str, RowInfo]
    """Its rows in flight, which an earlier launch wrote."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What all sessions of a call of `produce_step` share."""

    number: int
    journal: RowJournal
    head_start: HeadStartTrigger | None
    groups: Mapping[str, GroupOutputs]
    """By prompt; empty if no teacher's prompt shows what became of its sessions."""


async def produce_step(
    producer: Producer,
    learner: Learner,
    prompts: Sequence[Prompt],
    step: int,
    batcher: CallBatcher | None = None,
) -> None:
    """Produce every session of these prompts. Rows that the journal already holds are reused.

    `batcher` joins their calls with those of other producers. Without it, calls are joined among these prompts
    only, and the learner's first forward pass may start before the rows are scored (`produce/head_start.py`).
    """
    pending = await _issue(producer, prompts, step)
    sessions = len(prompts) * producer.settings.rollout.n
    head_start = head_start_of(learner, sessions) if batcher is None else None
    shared = _Step(step, RowJournal(producer.state.plane), head_start, _groups(producer, pending))
    async with asyncio.TaskGroup() as tasks:
        for members in _batches_by_key(producer, pending):
            own: CallBatcher = batcher or (
                BatchByKey(len(members)) if producer.settings.deterministic else BatchByArrival()
            )
            for one in members:
                tasks.create_task(_produce(producer, shared, one, own))


async def _issue(producer: Producer, prompts: Sequence[Prompt], step: int) -> list[_PendingSession]:
    """Enters the rows of these prompts into the ledger. Returns the sessions to produce: without those whose rows an
    earlier launch has settled."""
    sessions = [(prompt, session) for prompt in prompts for session in range(producer.settings.rollout.n)]
    keys = [row_key(prompt.key, session) for prompt, session in sessions]
    tags = {key: _tags(prompt, step) for key, (prompt, _) in zip(keys, sessions, strict=True)}
    # `reserved`: the plane has room for the rows of a step or window (`config/checks/capacity.py`). They must
    # not wait, least of all behind rows that are trained after them.
    with producer.state.spans.span("issue rows", step=step):
        issued = set(
            await producer.state.plane.issue(
                PARTITION, keys, step=step, group=_group_policy(producer), tags=tags, reserved=True
            )
        )
    producer.state.tally.issued += len(issued)
    if issued and not producer.settings.rollout.workers:
        producer.renderer.ahead(prompts)
    held = {} if len(issued) == len(keys) else _by_session(await producer.state.plane.list(PARTITION))
    return [
        _PendingSession(prompt, session, held.get((prompt.key, session), {}))
        for (prompt, session), key in zip(sessions, keys, strict=True)
        if key in issued or (prompt.key, session) in held
    ]


def _groups(producer: Producer, pending: Sequence[_PendingSession]) -> dict[str, GroupOutputs]:
    """The sessions of each prompt together, if a teacher's prompt shows what became of them."""
    if not producer.teachers.prompts.session_facts:
        return {}
    sessions = Counter(one.prompt.key for one in pending)
    solved_at = producer.settings.evaluation.solved_at
    return {key: GroupOutputs(count, producer.renderer, solved_at) for key, count in sessions.items()}


def _group_policy(producer: Producer) -> GroupPolicy:
    """Rows of one prompt, all sessions and their outputs, are claimed together. With one session per prompt,
    a failed output drops no other row."""
    rollout = producer.settings.rollout
    return GroupPolicy(rollout.group_failure) if rollout.n > 1 else GroupPolicy.TRAIN_REST


def _by_session(rows: Mapping[str, RowInfo]) -> dict[tuple[str, int], dict[str, RowInfo]]:
    """Rows in flight by (prompt, session), outputs in order."""
    found: dict[tuple[str, int], dict[str, RowInfo]] = {}
    for key in sorted(rows, key=split_key):
        prompt, session, _ = split_key(key)
        found.setdefault((prompt, session), {})[key] = rows[key]
    return found


def _batches_by_key(producer: Producer, pending: list[_PendingSession]) -> list[list[_PendingSession]]:
    """Sessions in sets of `rollout.max_batch` by key under full determinism, otherwise in one set.

    Each set's calls are batched together."""
    rollout = producer.settings.rollout
    size = rollout.max_batch if producer.settings.deterministic else max(len(pending), 1)
    if "solution" in producer.teachers.prompts.session_facts:
        # Sessions that wait for each other are in one set, so that its batches do not depend on another's speed.
        size = max(size // rollout.n, 1) * rollout.n
    return [pending[start : start + size] for start in range(0, len(pending), size)]


async def _produce(producer: Producer, step: _Step, pending: _PendingSession, batcher: CallBatcher) -> None:
    """Produces one session. The session's own faults become dead letters and are not raised."""
    prompt, session, held = pending.prompt, pending.session, pending.held
    group = step.groups.get(prompt.key)
    async with batcher.member():
        try:
            if held and all(_is_rolled_out(row) for row in held.values()):
                rolled_out = RolledOut(await _held_outputs(producer, held))
            else:
                tags_of = partial(_row_tags, producer, prompt, step.number)
                rolled_out = await roll_out(producer, prompt, session, batcher, tags_of, step.journal)
            outputs, durable = rolled_out.outputs, rolled_out.durable
            if group is not None:
                known = [await producer.rollouts.stored(key) for key, row in held.items() if _is_scored(row)]
                group.add(session, [*outputs, *known])
                if "solution" in producer.teachers.prompts.session_facts:
                    await group.complete(batcher)
            if step.head_start is not None and outputs:
                step.head_start.add(outputs)
            try:
                # One after another: a member of a `BatchByKey` may have one call at a time.
                for one in outputs:
                    facts = group.facts(session, one) if group and isinstance(one, Trajectory) else None
                    await _complete(producer, prompt, one, batcher, step.journal, durable, facts)
            finally:
                if durable is not None:
                    await durable
        except Exception as error:
            # None of the session's outputs is in the journal, so the key of its first output stands for it.
            await _dead_letter(producer, row_key(prompt.key, session), sample_fault(error))
        finally:
            if group is not None:
                group.add(session, [])


async def _complete(
    producer: Producer,
    prompt: Prompt,
    output: Output,
    batcher: CallBatcher,
    journal: RowJournal,
    durable: Awaitable[None] | None,
    facts: SessionFacts | None,
) -> None:
    """Adds the teacher's scores to an output. A failed output becomes a dead letter; the session's other
    outputs are unaffected.

    `durable` is done when the rollout is in the journal. There is no deadline: a teacher that does not answer is
    waited for.
    """
    scores, failure = None, output.error if isinstance(output, FailedOutput) else None
    if producer.teachers.router is not None and not isinstance(output, FailedOutput):
        try:
            async with _gate(producer):
                scores = await _score(producer, prompt, output, batcher, facts)
        except Exception as error:
            failure = sample_fault(error)
    if durable is not None:
        await durable
    if failure is not None:
        await _dead_letter(producer, output.key, failure)
    elif scores is not None:
        own = _prompt_columns(producer, prompt, scores.teacher, facts)
        await scores.record(
            lambda arrays: journal.put(lambda: RowsToWrite({output.key: {**score_columns(arrays), **own}}))
        )


def _prompt_columns(
    producer: Producer, prompt: Prompt, teacher: str, facts: SessionFacts | None
) -> dict[str, Any]:
    """What the row's teachers read, if it cannot be made again from the row alone."""
    prompts = producer.teachers.prompts
    names = [name for name in teacher.split("+") if facts is not None and prompts.shows_session(name)]
    return {own_prompt_column(name): prompts.ids(name, prompt, facts) for name in names}


def _gate(producer: Producer) -> AbstractAsyncContextManager[None]:
    """While a row is inside, no teacher takes new weights: all its scores are of one version."""
    gate = producer.teachers.gate
    return nullcontext() if gate is None else gate.enter()


async def _score(
    producer: Producer, prompt: Prompt, row: RowRef, batcher: CallBatcher, facts: SessionFacts | None
) -> ScoresRef:
    """Scores from the row's teacher, or from its mixture of teachers."""
    assert producer.teachers.router is not None
    weights = prompt.columns.get(producer.settings.mixture_key)
    teacher = producer.teachers.router.route(routing_value(producer, prompt)) if weights is None else None
    item = _score_item(producer, row)

    async def ask(teacher: str, wanted: ScoreRef) -> ScoresRef:
        if (aligner := producer.teachers.aligners.get(teacher)) is not None:
            own = producer.teachers.prompts.ids(teacher, prompt, facts)
            assert own is not None
            return await aligned_scores(aligner, row, own, wanted, partial(send, teacher))
        return await send(teacher, producer.teachers.prompts.request(teacher, prompt, wanted, facts))

    async def send(teacher: str, wanted: ScoreRef) -> ScoresRef:
        with producer.state.spans.span("score", key=item.key, teacher=teacher) as about:
            scores: ScoresRef = await batcher.call(producer.teachers.queues[teacher], item.key, wanted)
            about["replica"] = scores.replica
        return scores

    with producer.state.timings.during(item.key, "score"):
        if teacher is not None:
            scores = await ask(teacher, item)
        else:
            scores = await score_mixture(producer.teachers.router, item, weights or {}, ask)
    return await counted(scores) if producer.teachers.aligners else scores


def _score_item(producer: Producer, row: RowRef) -> ScoreRef:
    """The request to the teacher for this rollout."""
    loss = producer.settings.loss
    if loss.signal == "at_ids" and not row.candidates:
        raise DataError(
            f"row {row.key} came without candidate_ids, which loss.signal = 'at_ids' needs; build trajectories with "
            "understudy.rollout.agents.transcript.Transcript, or use loss.signal = 'topk'"
        )
    return row.to_score(Signal(loss.signal), loss.topk if loss.signal == "topk" else 0)


def routing_value(producer: Producer, prompt: Prompt) -> Any:
    column = producer.settings.teacher_key
    return prompt.data_source if column == "data_source" else teacher_key_of(prompt.columns.get(column))


async def _dead_letter(producer: Producer, key: str, error: Exception) -> None:
    """Dead-letters a row. The run ends when there are more than `trainer.max_dead_letters` allows."""
    reason = reason_of(error)
    logger.warning("dead letter %s: %s", key, reason)
    try:
        await producer.state.plane.dead_letter(
            PARTITION, key, reason, {"trace": traceback.format_exception(error)[-6:]}
        )
    except LeaseLost:
        return  # its group was removed already, and this row with it
    producer.state.tally.dead_letters += 1
    allowed = producer.settings.dead_letters_allowed
    if producer.state.tally.dead_letters > allowed:
        raise ClusterError(
            f"{many(producer.state.tally.dead_letters, 'row')} failed, more than trainer.max_dead_letters = {producer.settings.max_dead_letters} allows; "
            f"the last: {reason}. See {producer.state.run.dead_letters}"
        )
    if producer.state.tally.dead_letters == 1:
        producer.state.view.note(
            f"row {key} failed and was set aside ({reason}); see {producer.state.run.dead_letters}"
        )


def _is_scored(row: RowInfo) -> bool:
    return SCORED in row.columns and FAILED not in row.tags


def _is_rolled_out(row: RowInfo) -> bool:
    return "tokens" in row.columns or FAILED in row.tags


async def _held_outputs(producer: Producer, held: Mapping[str, RowInfo]) -> list[Output]:
    """The outputs of a session that an earlier launch journalled and did not complete."""
    outputs: list[Output] = []
    for key, row in held.items():
        if FAILED in row.tags:
            outputs.append(FailedOutput(key, SampleFailed(str(row.tags[FAILED]))))
        elif producer.teachers.router is None or SCORED in row.columns:
            continue
        else:
            outputs.append(await producer.rollouts.stored(key))
    return outputs


def _tags(prompt: Prompt, step: int) -> dict[str, Any]:
    """The tags that claims select rows by. After a resume the journal may hold rows of several steps."""
    return {"step": step, "data_source": prompt.data_source}


def _row_tags(
    producer: Producer, prompt: Prompt, step: int, reward: float | None, failed: str = ""
) -> dict[str, Any]:
    """`_tags` of a finished row, with its reward if groups are filtered, or the reason if it failed."""
    tags = _tags(prompt, step)
    if failed:
        tags[FAILED] = failed
    elif producer.settings.rollout.filter_groups and reward is not None:
        tags["reward"] = reward
    return tags
