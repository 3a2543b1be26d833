"""Agent loops over a real engine: trajectories hold exactly the tokens that the engine generated."""

from typing import Any

import numpy as np
import pytest
from chat_tokenizers import chat_tokenizer
from recording_engine import CONTEXT, attempt

from understudy.engines.base import Sampling
from understudy.errors import ConfigError, DataError
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.registry import LoopChoice, build_loop
from understudy.rollout.agents.transcript import Transcript
from understudy.rollout.cursor import PromptCursor
from understudy.rollout.dataset import load_dataset
from understudy.types.prompt import Prompt
from understudy.types.trajectory import StopReason, Trajectory

TOKENIZER = chat_tokenizer("chatml")


class TwoTurns:
    """A user-defined loop: two turns with an observation between them, and a branch as a second trajectory."""

    def __init__(self, observation: tuple[int, ...] = (7, 8, 9)) -> None:
        self.observation = np.array(observation, np.int32)

    async def run(self, prompt: Prompt, context: LoopContext) -> list[Trajectory]:
        transcript = Transcript(context.renderer.render(prompt))
        transcript.write(await context.generate(transcript.tokens, context.sampling, 0))
        transcript.observe(self.observation)
        transcript.write(await context.generate(transcript.tokens, context.sampling, 1))
        branch = Transcript(context.renderer.render(prompt))
        branch.write(await context.generate(branch.tokens, context.sampling, 2))
        return [
            transcript.finish(context.row_key(0), extra={"kind": "main"}),
            branch.finish(context.row_key(1)),
        ]


def prompts(count: int, **columns: Any) -> list[Prompt]:
    rows = [{"prompt": f"{i} + {i} =", "data_source": "add", **columns} for i in range(count)]
    return PromptCursor(load_dataset(rows), seed=0, shuffle=False).take(count)


def test_single_turn_trajectories_hold_the_engines_tokens_logprobs_and_versions() -> None:
    results, engine = attempt(TOKENIZER, build_loop("single_turn"), prompts(4), session=3)
    for prompt, (trajectory,) in zip(prompts(4), results, strict=True):
        ((request, generation),) = engine.written[prompt.key]
        assert trajectory.key == f"{prompt.key}_3_0"
        assert trajectory.tokens.tolist() == [*request.tokens.tolist(), *generation.tokens.tolist()]
        assert trajectory.tokens[trajectory.loss_mask].tolist() == generation.tokens.tolist()
        assert trajectory.behaviour_logprobs[trajectory.loss_mask].tolist() == generation.logprobs.tolist()
        assert np.isnan(trajectory.behaviour_logprobs[~trajectory.loss_mask]).all()
        assert set(trajectory.weight_versions.tolist()) == {-1, 5}
        assert trajectory.stop_reason is generation.stop_reason


def test_a_two_turn_trajectory_masks_its_observation_and_a_branch_is_a_second_trajectory() -> None:
    name = f"{__name__}:TwoTurns"
    loop = LoopChoice("single_turn", {name: {}}).of(prompts(1, agent=name)[0])
    results, engine = attempt(TOKENIZER, loop, prompts(3))
    for prompt, (main, branch) in zip(prompts(3), results, strict=True):
        turns = engine.written[prompt.key]
        start = turns[0][0].tokens.tolist()
        first, second, third = (generation.tokens.tolist() for _, generation in turns)
        assert main.tokens.tolist() == [*start, *first, 7, 8, 9, *second]
        assert main.loss_mask.tolist() == [False] * len(start) + [True] * len(first) + [False] * 3 + [
            True
        ] * len(second)
        assert (main.turns, main.extra["kind"]) == (2, "main")
        assert branch.tokens.tolist() == [*start, *third] and branch.key.endswith("_0_1")


def test_max_new_tokens_is_reduced_to_the_room_left_in_the_context() -> None:
    (prompt,) = prompts(1)
    long = Prompt(prompt.key, 0, 0, "", text="7" * (CONTEXT - 3))
    ((trajectory,),), _ = attempt(TOKENIZER, build_loop("single_turn"), [long], sampling=Sampling(50))
    assert len(trajectory.tokens) == CONTEXT and trajectory.stop_reason is StopReason.LENGTH


def test_a_prompt_that_fills_the_context_is_refused_with_its_row() -> None:
    async def never(*args: Any) -> Any:
        raise AssertionError

    context = LoopContext(never, None, Sampling(5), "00000-0000000", 1, 10)  # type: ignore[arg-type]
    assert context.sampling_after(7).max_new_tokens == 3
    with pytest.raises(DataError, match="00000-0000000_1_0 has 10 tokens; the context is 10"):
        context.sampling_after(10)


def test_build_loop_finds_loops_by_name_and_refuses_wrong_names_and_options() -> None:
    assert isinstance(build_loop(f"{__name__}:TwoTurns", {"observation": (1,)}), TwoTurns)
    for name, options, says in (
        ("single_tern", None, 'did you mean "single_turn"'),
        ("os:getcwd", None, "has no `run"),
        ("nowhere.at.all:Loop", None, "cannot be imported"),
        ("single_turn", {"colour": "red"}, "no option `colour` .*; it takes none"),
        ("tool", {"tulz": ["calculator"]}, "no option `tulz` .*; it takes tools, format"),
        ("tool", {"tool": ["calculator"]}, "did you mean `tools`"),
        ("tool", {"max_calls": 3, "max_cals": 1}, "did you mean `max_calls`"),
        (f"{__name__}:TwoTurns", {"observatoin": (1,)}, "did you mean `observation`?"),
    ):
        with pytest.raises(ConfigError, match=says):
            build_loop(name, options)


@pytest.mark.parametrize("name", ["no_such_loop", "os:abort", f"{__name__}:TwoTurns"])
def test_a_row_that_asks_for_an_agent_loop_not_in_the_recipe_is_refused(name: str) -> None:
    (prompt,) = prompts(1, agent=name)
    with pytest.raises(
        DataError, match=f"row 0 asks for the agent loop '{name}'; rows may name openenv, single_turn, tool"
    ):
        LoopChoice("single_turn").of(prompt)
