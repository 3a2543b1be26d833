"""The teachers as the producer uses them (`TeacherParts`): router, call queues, prompts, aligners."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from understudy.assembly.inputs import Inputs
from understudy.assembly.teachers.prompts import aligners_of
from understudy.assembly.teachers.running import Teachers
from understudy.config import RolloutConfig
from understudy.planning.resolved import TeacherSettings
from understudy.teacher.pool.integrity import check_row
from understudy.teacher.pool.pool import TeacherPool
from understudy.teacher.route import TeacherRouter
from understudy.trainers.call_batching import BatchSplit, CallQueue
from understudy.trainers.pacing.publish_gate import PublishGate
from understudy.trainers.system import TeacherParts
from understudy.types.references import ScoreRef

_SEQUENCES_BY_ARRIVAL = 16
"""The most sequences in one scoring request without full determinism. Enough to keep the cost of requests
low, few enough that answers come soon."""
_TOKENS_BY_ARRIVAL = 16_384
"""The most tokens in such a request: as many as a replica's own batch has."""
_SEQUENCES_BY_KEY = 64
"""The sequences in one scoring request under full determinism. A constant, so that scores do not depend on
replica counts."""


def teacher_parts(
    teachers: Teachers,
    inputs: Inputs,
    settings: TeacherSettings,
    rollout: RolloutConfig,
    gate: PublishGate | None,
) -> TeacherParts:
    """`gate`: of teachers that follow the student."""
    return TeacherParts(
        teachers.pools,
        router_of(settings, teachers.pools),
        teacher_queues(teachers.pools, settings.deterministic),
        inputs.teacher_prompts,
        aligners_of(rollout, inputs.student, inputs.others, inputs.usable),
        teachers.manifests,
        gate,
    )


def router_of(settings: TeacherSettings, pools: Mapping[str, TeacherPool]) -> TeacherRouter | None:
    return TeacherRouter(pools, settings.routes, default=settings.default) if pools else None


def teacher_queues(pools: Mapping[str, TeacherPool], deterministic: bool) -> dict[str, CallQueue]:
    """The call queue of each teacher. Under full determinism requests are chunks composed by key. Otherwise
    samples are sent as they come, a few per request, and the replica batches them."""
    limit = _SEQUENCES_BY_KEY if deterministic else _SEQUENCES_BY_ARRIVAL
    return {
        name: CallQueue(
            f"score/{name}",
            pool.score,
            limit,
            BatchSplit(partial(_width, pool), _tokens, _TOKENS_BY_ARRIVAL),
            check=partial(_check_row, pool),
        )
        for name, pool in pools.items()
    }


def _width(pool: TeacherPool) -> int:
    return pool.width


def _check_row(pool: TeacherPool, item: ScoreRef) -> None:
    check_row(pool.manifest, item)


def _tokens(item: ScoreRef) -> int:
    return item.length
