"""What the prompts of a run ask of its teachers is measured as the run renders them, and once."""

import asyncio
import json
from importlib import resources
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from understudy.assembly.prompt_facts import once_longest_prompt, prompt_lengths
from understudy.rollout.dataset import Dataset, load_dataset
from understudy.rollout.render import Renderer

STUDENT = Path(str(resources.files("understudy.assets") / "quickstart" / "models" / "student"))
TEMPLATE = (
    "{% for m in messages %}{{ m.content if m.content is string else raise_exception('no text') }}{% endfor %}"
    "{% if aloud %} said aloud, and at length{% endif %}="
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    found = AutoTokenizer.from_pretrained(STUDENT)
    found.chat_template = TEMPLATE
    return found


@pytest.fixture
def prompts(tmp_path: Path) -> Dataset:
    """600 rows, more than are rendered in one go: chats, plain text, and one that no template can render."""
    rows = [
        {"prompt": "1" * (n % 9 + 1)}
        if n % 3 == 0
        else {"messages": [{"role": "user", "content": "1+" * (n % 41 + 1)}]}
        for n in range(1, 600)
    ]
    rows.append({"messages": [{"role": "user", "content": ["not", "text"]}]})
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_dataset(path)


def by_hand(tokenizer: PreTrainedTokenizerBase, dataset: Dataset, room: int, tail: str) -> int:
    lengths = []
    for row in dataset.rows:
        if "prompt" in row:
            lengths.append(len(tokenizer(row["prompt"])["input_ids"]))
        elif isinstance(row["messages"][0]["content"], str):
            text = row["messages"][0]["content"] + tail
            lengths.append(len(tokenizer(text, add_special_tokens=False)["input_ids"]))
    return max(length for length in lengths if length <= room)


@pytest.mark.parametrize("room", [1000, 40])
@pytest.mark.parametrize("aloud", [False, True])
def test_the_longest_of_those_that_fit(
    tokenizer: PreTrainedTokenizerBase, prompts: Dataset, room: int, aloud: bool
) -> None:
    renderer = Renderer(tokenizer, context=room + 8, reserve=8, template_options={"aloud": aloud})
    tail = " said aloud, and at length=" if aloud else "="
    assert max(prompt_lengths(renderer, prompts)) == by_hand(tokenizer, prompts, room, tail)


def test_several_teachers_ask_and_it_is_measured_once(
    tokenizer: PreTrainedTokenizerBase, prompts: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = Renderer(tokenizer, context=1000)
    rendered: list[int] = []
    ahead = renderer.ahead
    monkeypatch.setattr(renderer, "ahead", lambda some: (rendered.append(len(some)), ahead(some))[1])

    async def asked() -> list[int]:
        longest = once_longest_prompt(
            renderer, prompts, lambda teacher, row: (teacher in row) or teacher == "all"
        )
        return [*await asyncio.gather(longest("all"), longest("prompt")), await longest("all")]

    every, plain, again = asyncio.run(asked())
    assert every == again > plain == 7, "each teacher's own rows count"
    assert sum(rendered) == len(prompts)
