"""The running teachers of a run: pools and launchers. Replicas join and leave during the run."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec

from understudy.assembly.teachers.following import FollowingReplicas
from understudy.assembly.teachers.launchers import EngineTeachers, LocalTeachers, VLLMTeachers
from understudy.errors import TeacherError
from understudy.serving.endpoint import Endpoint
from understudy.teacher.pool.launch import ReplicaSpec
from understudy.teacher.pool.pool import TeacherPool
from understudy.teacher.replica.in_process import LoraBaseTeacher
from understudy.types.loss import TeacherHead

TeacherLauncher = LocalTeachers | VLLMTeachers | LoraBaseTeacher | EngineTeachers


@dataclass(frozen=True, slots=True)
class Teachers:
    """The teachers of a run. Used on the event loop."""

    pools: dict[str, TeacherPool]
    heads: dict[str, TeacherHead] = field(default_factory=dict)
    """Output heads by teacher, if rows carry hidden states. A head is fetched once."""
    launchers: dict[str, TeacherLauncher] = field(default_factory=dict)
    """Launchers by teacher. External teachers have none."""
    tokens: dict[str, str | None] = field(default_factory=dict)
    """The bearer token of each external teacher's servers."""

    @property
    def following(self) -> dict[str, FollowingReplicas]:
        """The replicas of teachers that follow the student, by teacher."""
        found = {name: launcher.following for name, launcher in self.launchers.items()}
        return {name: one for name, one in found.items() if one is not None}

    def manifests(self) -> dict[str, dict[str, Any]]:
        """Each teacher's manifest and its scores of the fixed tokens, for checkpoints."""
        return {
            name: {**msgspec.to_builtins(pool.manifest), "fixed_scores": pool.fixed_scores}
            for name, pool in self.pools.items()
        }

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self.pools.values()))
        for replicas in self.following.values():
            await replicas.close()

    async def add(self, teacher: str, url: str | None = None) -> str:
        """Adds a replica to a running run: a new process, or the server at `url`. Returns its name."""
        pool = self._pool(teacher)
        taken, launcher = {int(replica) for replica in pool.replicas}, self.launchers.get(teacher)
        if isinstance(launcher, EngineTeachers):  # replica i sits in engine process i
            name = str(min(set(range(len(taken) + 1)) - taken))
        else:
            name = str(max(taken, default=-1) + 1)
        if url is None and teacher not in self.launchers:
            raise TeacherError(f"teacher {teacher} is external: say where its new replica answers (--url)")
        if url is not None and teacher in self.launchers:
            raise TeacherError(f"teacher {teacher} runs processes of this machine; leave the address out")
        endpoint = None if url is None else Endpoint(url, self.tokens.get(teacher))
        try:
            await pool.add(ReplicaSpec(name, endpoint))
        except BaseException:
            if teacher in self.launchers:
                self.launchers[teacher].forget(name)
            raise
        return name

    async def remove(self, teacher: str, replica: str) -> None:
        """Removes a replica. Its requests are finished, or sent to another replica."""
        await self._pool(teacher).remove(replica)
        if teacher in self.launchers:
            self.launchers[teacher].forget(replica)

    def _pool(self, teacher: str) -> TeacherPool:
        if teacher not in self.pools:
            raise TeacherError(
                f"no teacher {teacher!r} in this run; teachers are {', '.join(self.pools) or 'none'}"
            )
        return self.pools[teacher]
