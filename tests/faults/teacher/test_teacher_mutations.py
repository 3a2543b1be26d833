"""Mutations of the teacher's protections: each is removed in a copy of the package, and a test of it must fail.

A mutation names the text it replaces; when the code moves on, the mutation fails loudly and is rewritten with it.
"""

from pathlib import Path

import pytest
from mutations import Mutation, assert_test_fails

FAULTS = "faults/teacher/test_teacher_faults.py"
pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


MUTATIONS = {
    "no retry": Mutation(
        "teacher/pool/pool.py",
        "        self._totals.retries += 1\n",
        "        raise error\n",
        f"{FAULTS}::test_no_row_is_lost_when_replicas_are_killed[0]",
    ),
    "no restart": Mutation(
        "teacher/pool/supervisor.py",
        "                await self._restart(replica)\n",
        "                replica.health.retire()\n",
        f"{FAULTS}::test_no_row_is_lost_when_replicas_are_killed[0]",
    ),
    "no deadline": Mutation(
        "serving/client.py",
        "scope.reschedule(asyncio.get_running_loop().time() + seconds)",
        "scope.reschedule(asyncio.get_running_loop().time() + 3600)",
        f"{FAULTS}::test_a_suspended_replica_is_ejected_within_two_deadlines[0]",
    ),
    "health by /health": Mutation(
        "teacher/pool/supervisor.py",
        "    async def _probe(self, replica: Replica) -> None:\n",
        "    async def _probe(self, replica: Replica) -> None:\n"
        "        assert replica.client is not None and await replica.client.health()\n"
        "        return\n",
        f"{FAULTS}::test_a_replica_whose_scoring_hangs_while_health_answers_is_ejected[0]",
        also=("teacher/pool/health.py", "self.streak >= self.rules.eject_after", "False"),
    ),
    "give up when no replica is left": Mutation(
        "teacher/pool/pool.py",
        "            self._pause()\n        pause =",
        "            self._pause()\n            raise TeacherUnavailable('nobody left')\n        pause =",
        f"{FAULTS}::test_the_pool_pauses_while_all_replicas_are_down_and_then_resumes[0-1.5]",
    ),
    "no validation": Mutation(
        "teacher/clients/native.py",
        "        check_reply(request, reply, sender)\n",
        "",
        f"{FAULTS}::test_every_kind_of_wrong_reply_is_caught",
    ),
    "candidates are not checked": Mutation(
        "teacher/clients/validate.py",
        "    if any(request.k_N):\n",
        "    if False:\n",
        f"{FAULTS}::test_every_kind_of_wrong_reply_is_caught",
    ),
    "no canary": Mutation(
        "teacher/pool/pool.py",
        "        return await self._canary.checked(scores, self.name, replica.name)\n",
        "        return scores[:-1]\n",
        "unit/teacher/test_teacher_pool.py",
    ),
    "the echo is not checked": Mutation(
        "teacher/clients/validate.py",
        "    _check_echo(request, reply, wrong)\n    rows_P",
        "    rows_P",
        "unit/teacher/test_teacher_validate.py",
    ),
    "readmission without a probe": Mutation(
        "teacher/pool/integrity.py",
        "    teacher = expected.manifest.teacher\n",
        "    return\n    teacher = expected.manifest.teacher\n",
        "unit/teacher/test_teacher_pool.py",
    ),
    "the last one is ejected too": Mutation(
        "teacher/pool/supervisor.py",
        "        return any(other.health.usable for other in self.replicas.values() if other is not replica)\n",
        "        return True\n",
        "unit/teacher/test_teacher_pool.py",
    ),
    "a fast failure looks idle": Mutation(
        "teacher/pool/balance.py",
        "        self._debt = min(2 * self.debt(now) + tokens, MOST_DEBT)\n",
        "        self._debt = 0.0\n",
        "unit/teacher/test_teacher_health.py",
    ),
    "shifted by one": Mutation(
        "teacher/scoring/scorer.py",
        "request.positions_P[wanted] - 1",
        "np.maximum(request.positions_P[wanted] - 2, 0)",
        "unit/teacher/test_teacher_scorer.py",
    ),
    "no token": Mutation(
        "serving/http.py",
        'if not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):',
        'if not headers.get(b"authorization"):',
        "contract/teacher/test_teacher_server.py",
    ),
    "siblings see each other's tails": Mutation(
        "teacher/scoring/packing.py",
        "before = (prefix_at, group.shared) if group.shared else None",
        "before = (prefix_at, at - prefix_at) if group.shared else None",
        "unit/teacher/test_teacher_scorer.py",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_test_fails_when_the_protection_it_covers_is_removed(name: str, tmp_path: Path) -> None:
    assert_test_fails(name, MUTATIONS[name], tmp_path)
