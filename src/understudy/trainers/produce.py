"""The first verb: a prompt becomes complete rows in the data plane.

    prompt ──agent loop──> trajectories ──reward──┬──> teacher ──> scores ──┬──> journal
                                                  └──> journal ─────────────┘

The rollout is journalled while its teacher reads it and whatever the teacher says, so an outage never costs a finished
rollout; scores are journalled after it (`row_journal.py`). A sample that
fails (its template, its reward, its tool, its score) becomes a dead letter with the reason; the run goes on.

Where workers on other machines write rows themselves (`far_writing.py`), the same steps are taken for rows known by name.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np

from understudy.dataplane.base import GroupPolicy, RowInfo
from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.engines.far import PATIENCE_S, Bearer, FarRequest
from understudy.errors import ClusterError, DataError, DataPlaneError, EngineError, LeaseLost
from understudy.rollout.agent import LoopContext
from understudy.rollout.seeds import derive_seed
from understudy.teacher.score import score_mixture
from understudy.trainers.ahead import Ahead, ahead_of
from understudy.trainers.batches import CANDIDATES, SCORED, finite, rollout_columns, score_columns
from understudy.trainers.far_mixture import score_far_mixture
from understudy.trainers.far_scoring import FarScoreItem, FarScores
from understudy.trainers.far_writing import FarRow, RowWorkers
from understudy.trainers.gather import Arrivals, Cohort, Gather
from understudy.trainers.row_journal import TURNS, RowJournal, Written
from understudy.trainers.system import PARTITION, System
from understudy.types.batch import BatchMeta
from understudy.types.prompt import Prompt, row_key
from understudy.types.scores import ScoreItem, Signal, TeacherScores
from understudy.types.trajectory import StopReason, Trajectory

logger = logging.getLogger(__name__)

_INFRASTRUCTURE = (ClusterError, DataPlaneError, EngineError)
"""Not one sample's fault: these end the run."""


async def produce_step(
    system: System, prompts: Sequence[Prompt], step: int, gather: Gather | None = None
) -> None:
    """Produce every session of these prompts; whatever the journal already holds is reused as it is.

    `gather` joins their calls with those of prompts produced elsewhere; without one they are joined among themselves, and the
    student may read them before they are judged (`ahead.py`).
    """
    samples = [(prompt, session) for prompt in prompts for session in range(system.recipe.rollout.n)]
    keys = [row_key(prompt.key, session) for prompt, session in samples]
    group = GroupPolicy(system.recipe.rollout.group_failure) if system.recipe.rollout.n > 1 else None
    tags = {key: _tags(prompt, step) for key, (prompt, _) in zip(keys, samples, strict=True)}
    # A step's rows, or a window's, have their room already (`config/capacity.py`): they stand in no line, least of all behind rows
    # that are trained after them.
    with system.spans.span("issue rows", step=step):
        issued = set(
            await system.plane.issue(PARTITION, keys, step=step, group=group, tags=tags, reserved=True)
        )
    system.tally.issued += len(issued)
    if issued and not system.recipe.rollout.workers:
        system.renderer.ahead(prompts)
    held = {} if len(issued) == len(keys) else await system.plane.list(PARTITION)
    waiting = [
        (prompt, session, held.get(key))
        for (prompt, session), key in zip(samples, keys, strict=True)
        if key in issued or key in held
    ]
    ahead = ahead_of(system, len(samples)) if gather is None else None
    journal = RowJournal(system.plane)
    try:
        async with asyncio.TaskGroup() as tasks:
            for members in _cohorts(system, waiting):
                own: Gather = gather or (Cohort(len(members)) if system.deterministic else Arrivals())
                for prompt, session, row in members:
                    tasks.create_task(_produce(system, prompt, session, step, row, own, journal, ahead))
    finally:
        if ahead is not None:
            ahead.over()


def _cohorts(system: System, samples: list[Any]) -> list[list[Any]]:
    """Under full determinism samples are grouped by key; each group generates and is scored as one."""
    size = system.recipe.rollout.max_batch if system.deterministic else max(len(samples), 1)
    return [samples[start : start + size] for start in range(0, len(samples), size)]


async def _produce(
    system: System,
    prompt: Prompt,
    session: int,
    step: int,
    held: RowInfo | None,
    gather: Gather,
    journal: RowJournal,
    ahead: Ahead | None,
) -> None:
    """One sample's whole path; never raises for what is this sample's own fault."""
    key = row_key(prompt.key, session)
    async with gather.member():
        try:
            safe: Awaitable[None] | None = None
            if held is None or "tokens" not in held.columns:
                trajectories = await _roll_out(system, prompt, session, step, gather)
                safe = _journal(system, journal, prompt, trajectories, step)
            elif SCORED not in held.columns:
                trajectories = [await _held(system, key)]
            else:
                return
            if ahead is not None:
                ahead.saw(trajectories)
            try:
                if system.router is not None:
                    # One after another: a member of a cohort waits for one thing at a time. No deadline here: a teacher
                    # that is away is waited for, and its rows are safe in the journal.
                    for one in trajectories:
                        await _score(system, prompt, one, gather, journal, safe)
            finally:
                if safe is not None:
                    await safe
        except _INFRASTRUCTURE:
            raise
        except Exception as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                # It was given up, and something in its loop could not bear that: no fault of the sample's.
                raise asyncio.CancelledError from error
            await _bury(system, key, error)


def _journal(
    system: System,
    journal: RowJournal,
    prompt: Prompt,
    trajectories: Sequence[Trajectory | FarRow],
    step: int,
) -> Awaitable[None] | None:
    """Makes a sample's rollouts durable, in a moment: teachers are asked first. None where whoever made them has done so.

    Where its group was taken out meanwhile (a sibling failed, or there was no signal), the rollouts are dropped. The sample
    still goes on to its teacher: whether it was quicker than its sibling must not decide what else is scored with it.
    """
    own = [one for one in trajectories if isinstance(one, Trajectory)]
    if not own:
        return None

    def write() -> Written:
        return Written(
            {one.key: rollout_columns(one) for one in own},
            {one.key: _row_tags(system, prompt, step, one.reward) for one in own},
        )

    return journal.put(write, turns=TURNS if system.router is not None else 1)


async def _roll_out(
    system: System, prompt: Prompt, session: int, step: int, gather: Gather
) -> Sequence[Trajectory | FarRow]:
    """The sample's own loop and reward, within `rollout.deadline_seconds` of its own time."""
    key = row_key(prompt.key, session)
    clock = asyncio.timeout(system.recipe.rollout.deadline_seconds)

    def seed(turn: int) -> int:
        return derive_seed(system.recipe.run.seed, prompt.epoch, prompt.key, session, turn)

    async def ask(request: GenerateRequest) -> Generation:
        with _Stopped(clock):
            result: Generation = await gather.call(system.engine_lane, request.key, request)
        return result

    async def generate(tokens: np.ndarray, sampling: Sampling, turn: int) -> Generation:
        return await ask(GenerateRequest(f"{key}/{turn}", tokens, sampling, seed(turn), session=key))

    async def generate_far(length: int, most: int, turn: int, bearer: Bearer) -> Generation:
        patience = system.recipe.rollout.deadline_seconds or PATIENCE_S
        return await ask(FarRequest.of(f"{key}/{turn}", length, most, seed(turn), key, bearer, patience))

    workers = system.row_workers
    context = LoopContext(
        generate=generate,
        renderer=system.renderer,
        sampling=system.sampling,
        prompt_key=prompt.key,
        session=session,
        context=system.renderer.context,
        max_generated=system.recipe.rollout.max_trajectory_tokens,
        generate_far=generate_far if workers is not None and workers.bring_tokens else None,
    )
    gate = system.turnstile.rollout() if system.turnstile else nullcontext()
    if workers is not None:
        async with gate, clock:
            return await _roll_out_far(system, workers, prompt, context, step)
    async with gate, clock:
        with system.spans.span("rollout", key=key):
            trajectories = await system.loops.of(prompt).run(prompt, context)
        for one in trajectories:
            system.timings.add(one.key, one.extra.get("seconds", {}))
        with system.spans.span("reward", key=key), system.timings.during(key, "reward"):
            judged = [finite(await system.rewards.judge(prompt, trajectory)) for trajectory in trajectories]
    return judged


async def _roll_out_far(
    system: System, workers: RowWorkers, prompt: Prompt, context: LoopContext, step: int
) -> Sequence[FarRow]:
    """The same by a worker that judges and writes what its loop made, and sends names."""
    with system.spans.span("rollout", key=context.row_key()):
        return await workers.roll_out(
            prompt,
            context,
            lambda row: _row_tags(system, prompt, step, row.reward),
            system.timings.add,
        )


class _Stopped:
    """A sample's deadline does not run while it waits for the engine: in a cohort it waits for the others too. A class, because
    a step has hundreds of them and a generator costs several times as much."""

    __slots__ = ("_clock", "_left")

    def __init__(self, clock: asyncio.Timeout) -> None:
        self._clock = clock

    def __enter__(self) -> None:
        due = self._clock.when()
        self._left = None if due is None else due - asyncio.get_running_loop().time()
        if due is not None:  # else stopped already, by another branch of the same loop
            self._clock.reschedule(None)

    def __exit__(self, *raised: object) -> None:
        if self._left is not None:
            self._clock.reschedule(asyncio.get_running_loop().time() + self._left)


async def _score(
    system: System,
    prompt: Prompt,
    trajectory: Trajectory | FarRow,
    gather: Gather,
    journal: RowJournal,
    safe: Awaitable[None] | None,
) -> None:
    """Ask the row's teacher, or its mixture of them, as soon as this rollout is there, and journal the answer once the rollout
    is `safe`."""
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
            scores = await ask(teacher, item)
        elif isinstance(item, FarScoreItem):
            assert system.far_scoring is not None
            shares = system.router.mixture(weights or {})
            scores = await score_far_mixture(system.far_scoring, item, shares, ask)
        else:
            scores = await score_mixture(system.router, item, weights or {}, ask)
    if safe is not None:
        await safe
    if isinstance(scores, FarScores):
        assert system.row_workers is not None
        with suppress(LeaseLost):  # its group was taken out meanwhile
            await system.row_workers.plane.adopt(PARTITION, {item.key: scores.written})
    else:
        await journal.put(lambda: Written({item.key: score_columns(scores)}))


def _score_item(system: System, trajectory: Trajectory | FarRow) -> ScoreItem:
    """What the teacher is asked about this rollout."""
    loss = system.recipe.loss
    lacks = trajectory.candidates == 0 if isinstance(trajectory, FarRow) else trajectory.candidate_ids is None
    if loss.signal == "at_ids" and lacks:
        raise DataError(
            f"row {trajectory.key} came without candidate_ids, which loss.signal = 'at_ids' needs; build trajectories with "
            "understudy.rollout.transcript.Transcript, or use loss.signal = 'topk'"
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
    """One bad sample is data, not a crash; too many of them stop the run."""
    reason = (
        f"{type(error).__name__}: {error}"
        if not isinstance(error, TimeoutError)
        else "rollout.deadline_seconds ran out"
    )
    logger.warning("dead letter %s: %s", key, reason)
    try:
        await system.plane.dead_letter(
            PARTITION, key, reason, {"trace": traceback.format_exception(error)[-6:]}
        )
    except LeaseLost:
        return  # its group was taken out already, and this row with it
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


async def _held(system: System, key: str) -> Trajectory | FarRow:
    """A rollout that an earlier launch journalled and did not get scored."""
    if system.row_workers is not None:
        return await system.row_workers.stored(key, with_candidates=system.sampling.candidates > 0)
    return await _stored(system, key)


async def _stored(system: System, key: str) -> Trajectory:
    """A rollout as it lies in the plane."""
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
    """What rows are chosen by: after a resume the journal may hold rows of several steps."""
    return {"step": step, "data_source": prompt.data_source}


def _row_tags(system: System, prompt: Prompt, step: int, reward: float | None) -> dict[str, Any]:
    """The same once a row is there: its reward too, where groups are looked at."""
    tags = _tags(prompt, step)
    if system.recipe.rollout.filter_groups and reward is not None:
        tags["reward"] = reward
    return tags
