"""The order of production: teachers are asked first, and rollouts are journalled while the teachers score."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from learning_rig import recipe_of

from understudy.dataplane.base import Retain
from understudy.dataplane.embedded import EmbeddedDataPlane
from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.errors import TeacherError
from understudy.observability.spans import Spans
from understudy.planning.resolved import resolve
from understudy.rollout.agents.single_turn import SingleTurn
from understudy.rollout.teacher_prompts import TeacherPrompts
from understudy.rollout.timing import BatchTimings
from understudy.trainers.call_batching import CallQueue
from understudy.trainers.produce.produce import produce_step
from understudy.trainers.produce.rollouts import LocalRollouts
from understudy.trainers.row_columns import PARTITION, SCORED
from understudy.trainers.system import Tally
from understudy.types.prompt import Prompt
from understudy.types.scores import ScoreItem, Signal, TeacherScores
from understudy.types.trajectory import StopReason, Trajectory

Score = Callable[[Sequence[ScoreItem]], Awaitable[list[TeacherScores]]]
PROMPTS = [
    Prompt(key=f"p{i}", ordinal=i, epoch=0, messages=({"role": "user", "content": "?"},), data_source="d")
    for i in range(6)
]


async def write(requests: Sequence[GenerateRequest]) -> list[Generation]:
    return [
        Generation(
            tokens=np.array([request.seed % 5, 2], np.int32),
            logprobs=np.array([-0.5, -0.25], np.float32),
            weight_versions=np.zeros(2, np.int32),
            stop_reason=StopReason.EOS,
        )
        for request in requests
    ]


def scores_of(item: ScoreItem) -> TeacherScores:
    count = len(item.positions)
    return TeacherScores(
        teacher="t",
        key=item.key,
        signal=Signal.SAMPLED,
        sampled_logprobs=np.full(count, -1.0, np.float32),
    )


class Loops:
    def of(self, prompt: Prompt) -> SingleTurn:
        return SingleTurn()


class Rewards:
    names = "none"

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Trajectory:
        return trajectory


NO_LEARNER: Any = SimpleNamespace(settings=resolve(recipe_of(), gpus=0).learn, policy=None, critic=None)
"""A learner without policy and critic, so that no rows are read ahead."""


def producer_of(plane: EmbeddedDataPlane, score: Score, deterministic: bool) -> Any:
    recipe = recipe_of(
        teachers={"t": {"model": "teacher"}},
        loss={"distill_coef": 1.0, "task_coef": 0.0, "kind": "k1", "signal": "sampled"},
        rollout={"n": 1, "max_batch": 4},
    )
    sampling, spans, timings = Sampling(max_new_tokens=6), Spans(None), BatchTimings()
    return SimpleNamespace(
        settings=replace(resolve(recipe, gpus=0).produce, deterministic=deterministic),
        renderer=SimpleNamespace(
            ahead=lambda prompts: None,
            render=lambda prompt: np.array([1, 3], np.int32),
            context=32,
            pictures=None,
        ),
        sampling=sampling,
        engine_queue=CallQueue("engine", write, 4),
        teachers=SimpleNamespace(
            gate=None,
            aligners={},
            prompts=TeacherPrompts({}, None, None),  # type: ignore[arg-type]  # none has a prompt of its own
            queues={"t": CallQueue("t", score, 3)},
            router=SimpleNamespace(route=lambda value: "t"),
        ),
        rollouts=LocalRollouts(Loops(), Rewards(), plane, sampling, spans, timings),  # type: ignore[arg-type]
        publish_gate=None,
        state=SimpleNamespace(
            plane=plane,
            spans=spans,
            timings=timings,
            tally=Tally(),
            run=SimpleNamespace(dead_letters="dead_letters.jsonl"),
            view=SimpleNamespace(note=lambda text: None),
        ),
    )


def with_plane(folder: Path, work: Callable[[EmbeddedDataPlane], Awaitable[None]]) -> None:
    async def main() -> None:
        plane = EmbeddedDataPlane.open(
            folder, max_rows=100, max_bytes=1 << 20, spill_bytes=1 << 20, retain=Retain.UNTIL_ACK
        )
        try:
            async with asyncio.timeout(20):
                await work(plane)
        finally:
            await plane.close()

    asyncio.run(main())


async def columns(plane: EmbeddedDataPlane) -> list[set[str]]:
    return [set(row.columns) for row in (await plane.list(PARTITION)).values()]


@pytest.mark.parametrize("deterministic", [True, False])
def test_rollouts_are_journalled_while_the_teacher_has_not_answered(
    tmp_path: Path, deterministic: bool
) -> None:
    async def work(plane: EmbeddedDataPlane) -> None:
        asked, speak = [], asyncio.Event()

        async def score(items: Sequence[ScoreItem]) -> list[TeacherScores]:
            asked.extend([(item.key, any("tokens" in row for row in await columns(plane))) for item in items])
            await speak.wait()
            return [scores_of(item) for item in items]

        step = asyncio.create_task(
            produce_step(producer_of(plane, score, deterministic), NO_LEARNER, PROMPTS, step=1)
        )
        while not all("tokens" in row for row in await columns(plane)) or len(asked) < len(PROMPTS):
            await asyncio.sleep(0.005)
        assert not step.done() and not any(SCORED in row for row in await columns(plane))
        if deterministic:  # the teacher was asked about the first batch before its rows were journalled
            assert not any(journalled for _, journalled in asked[:3])
        speak.set()
        await step
        assert all({"tokens", SCORED} <= row for row in await columns(plane))

    with_plane(tmp_path, work)


def test_a_row_that_no_teacher_can_score_is_journalled_and_becomes_a_dead_letter(tmp_path: Path) -> None:
    async def work(plane: EmbeddedDataPlane) -> None:
        puts: list[str] = []
        put = plane.put

        async def noting(partition: str, rows: Any, *more: Any, **others: Any) -> Any:
            puts.extend(rows)
            return await put(partition, rows, *more, **others)

        plane.put = noting  # type: ignore[method-assign]

        async def score(items: Sequence[ScoreItem]) -> list[TeacherScores]:
            if any(item.key.startswith("p0_") for item in items):
                raise TeacherError("what is this?")
            return [scores_of(item) for item in items]

        producer = producer_of(plane, score, deterministic=False)
        await produce_step(producer, NO_LEARNER, PROMPTS, step=1)
        assert producer.state.tally.dead_letters == 1
        held = await plane.list(PARTITION)
        assert len(held) == len(PROMPTS) - 1 and all(SCORED in row.columns for row in held.values())
        assert puts.count("p0_0_0") == 1  # it was journalled once, before it became a dead letter

    with_plane(tmp_path, work)


class FailsWhenCancelled:
    """A loop that turns its cancellation into a RuntimeError."""

    running = 0

    def of(self, prompt: Prompt) -> FailsWhenCancelled:
        return self

    async def run(self, prompt: Prompt, context: Any) -> list[Trajectory]:
        self.running += 1
        try:
            await asyncio.Event().wait()
        finally:
            raise RuntimeError("the episode was interrupted")


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_cancelled_sample_is_no_dead_letter_but_one_past_its_deadline_is(
    tmp_path: Path, deterministic: bool
) -> None:
    """This holds also if its loop raises another error on cancellation: the run may continue with the sample later."""

    async def work(plane: EmbeddedDataPlane) -> None:
        async def score(items: Sequence[ScoreItem]) -> list[TeacherScores]:
            return [scores_of(item) for item in items]

        producer = producer_of(plane, score, deterministic)
        producer.rollouts.loops = FailsWhenCancelled()
        step = asyncio.create_task(produce_step(producer, NO_LEARNER, PROMPTS, step=1))
        while producer.rollouts.loops.running < len(PROMPTS):
            await asyncio.sleep(0.005)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert producer.state.tally.dead_letters == 0 and len(await plane.list(PARTITION)) == len(PROMPTS)

        rollout = producer.settings.rollout.model_copy(update={"deadline_seconds": 0.05})
        producer.settings = replace(producer.settings, rollout=rollout)
        await produce_step(producer, NO_LEARNER, PROMPTS, step=1)
        assert producer.state.tally.dead_letters == len(PROMPTS)

    with_plane(tmp_path, work)


class TwoOutputs:
    """Session 0 fails at once; session 1 returns two outputs after 50 ms."""

    def of(self, prompt: Prompt) -> TwoOutputs:
        return self

    async def run(self, prompt: Prompt, context: Any) -> list[Trajectory]:
        if context.session == 0:
            raise RuntimeError("the environment broke")
        await asyncio.sleep(0.05)
        (first,) = await SingleTurn().run(prompt, context)
        return [first, replace(first, key=context.row_key(1))]


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("deterministic", [True, False])
def test_outputs_of_a_session_whose_group_was_dropped_are_not_stored(
    tmp_path: Path, deterministic: bool, refused: bool
) -> None:
    async def work(plane: EmbeddedDataPlane) -> None:
        async def score(items: Sequence[ScoreItem]) -> list[TeacherScores]:
            if refused:
                raise TeacherError("what is this?")
            return [scores_of(item) for item in items]

        producer = producer_of(plane, score, deterministic)
        rollout = producer.settings.rollout.model_copy(update={"n": 2, "group_failure": "drop_group"})
        producer.settings = replace(producer.settings, rollout=rollout)
        producer.rollouts.loops = TwoOutputs()
        await produce_step(producer, NO_LEARNER, PROMPTS[:2], step=1)
        assert await plane.list(PARTITION) == {} and producer.state.tally.dead_letters == 2

    with_plane(tmp_path, work)


def test_a_loop_that_returns_nothing_or_wrong_keys_is_a_dead_letter(tmp_path: Path) -> None:
    class Wrong:
        def of(self, prompt: Prompt) -> Wrong:
            return self

        async def run(self, prompt: Prompt, context: Any) -> list[Trajectory]:
            (first,) = await SingleTurn().run(prompt, context)
            return [] if prompt.key == "p0" else [replace(first, key=context.row_key(1))]

    async def work(plane: EmbeddedDataPlane) -> None:
        async def score(items: Sequence[ScoreItem]) -> list[TeacherScores]:
            return [scores_of(item) for item in items]

        producer = producer_of(plane, score, deterministic=True)
        producer.rollouts.loops = Wrong()
        await produce_step(producer, NO_LEARNER, PROMPTS[:2], step=1)
        assert await plane.list(PARTITION) == {}
        letters = (tmp_path / "dead_letters.jsonl").read_text()
        assert "returned 0 trajectories for session p0_0_0 (none)" in letters
        assert "returned 1 trajectories for session p1_0_0 (p1_0_1)" in letters

    with_plane(tmp_path, work)


class MisbehavingLoops:
    """p0 exits, p1 awaits a cancelled task, p2 returns an unknown stop reason; others ask for two drafts at once."""

    def of(self, prompt: Prompt) -> MisbehavingLoops:
        return self

    async def run(self, prompt: Prompt, context: Any) -> list[Trajectory]:
        if prompt.key == "p0":
            raise SystemExit(0)
        if prompt.key == "p1":
            task = asyncio.ensure_future(asyncio.sleep(10))
            task.cancel()
            await task
        (one,) = await SingleTurn().run(prompt, context)
        if prompt.key == "p2":
            return [replace(one, stop_reason="stop")]  # type: ignore[arg-type]
        tokens = context.renderer.render(prompt)
        await asyncio.gather(*(context.generate(tokens, context.sampling, turn) for turn in (1, 2)))
        return [one]


@pytest.mark.parametrize("deterministic", [True, False])
def test_loops_that_exit_cancel_or_return_invalid_rows_fail_only_their_own_rows(
    tmp_path: Path, deterministic: bool
) -> None:
    async def work(plane: EmbeddedDataPlane) -> None:
        async def score(items: Sequence[ScoreItem]) -> list[TeacherScores]:
            return [scores_of(item) for item in items]

        producer = producer_of(plane, score, deterministic)
        producer.rollouts.loops = MisbehavingLoops()
        await produce_step(producer, NO_LEARNER, PROMPTS, step=1)
        assert sorted(await plane.list(PARTITION)) == ["p3_0_0", "p4_0_0", "p5_0_0"]
        letters = (tmp_path / "dead_letters.jsonl").read_text()
        for reason in (
            "SystemExit: 0",
            "RuntimeError: CancelledError",
            "stop_reason = 'stop'; expected one of",
        ):
            assert reason in letters

    with_plane(tmp_path, work)
