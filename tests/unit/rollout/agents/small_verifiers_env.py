"""Two environments written with the `verifiers` package."""

import importlib.util
from typing import TYPE_CHECKING, Any

from datasets import Dataset

if TYPE_CHECKING or importlib.util.find_spec("verifiers.envs"):
    import verifiers as vf
else:  # 0.3
    import verifiers.legacy as vf

ROWS = [{"question": "What is 12 * 3?", "answer": "36"}, {"question": "What is 2 + 2?", "answer": "4"}]


def right(completion: Any, answer: str) -> float:
    return float(answer in (completion[-1]["content"] or ""))


def multiply(first: int, second: int) -> str:
    """Multiplies two numbers.

    Args:
        first: a number
        second: another
    """
    return str(int(first) * int(second))


class AskAgain(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [vf.UserMessage(content="Are you sure?")]


def load_environment(kind: str = "again") -> vf.Environment:
    rubric = vf.Rubric(funcs=[right])
    data = Dataset.from_list(ROWS)
    if kind == "tools":
        return vf.ToolEnv(dataset=data, tools=[multiply], rubric=rubric, max_turns=4)
    return AskAgain(dataset=data, rubric=rubric, max_turns=2)
