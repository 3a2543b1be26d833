"""Lengths of rendered prompts: what teachers and engines need to know of them, measured once."""

import asyncio
import json
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chat_tokenizers import chat_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from understudy.assembly.engines import longest_request
from understudy.assembly.teachers.prompts import aligners_of
from understudy.assembly.teachers.student_facts import once_longest_prompt, prompt_lengths
from understudy.config import DataConfig, RolloutConfig, parse_recipe
from understudy.planning.resolved import resolve
from understudy.rollout.dataset import Dataset, load_dataset
from understudy.rollout.render import Renderer
from understudy.trainers.models import LoadedModel, load_model
from understudy.trainers.prompt_data import PromptData

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
    """600 rows, more than are rendered in one batch: chats, plain text, and one that no template can render."""
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


def test_an_aligner_uses_the_end_token_that_the_recipes_chat_template_writes() -> None:
    """The student has several stop tokens. The one that its template writes is aligned with the teacher's."""
    ours, theirs = chat_tokenizer("chatml"), chat_tokenizer("llama3")
    ours.chat_template = {"default": ours.chat_template, "other": "{{ messages[-1].content }}<|endoftext|>"}
    ends = {name: int(ours.convert_tokens_to_ids(name)) for name in ("<|im_end|>", "<|endoftext|>")}
    student: Any = SimpleNamespace(tokenizer=ours, stop_ids=sorted(ends.values()))
    for chosen, end in (("default", "<|im_end|>"), ("other", "<|endoftext|>")):
        rollout = RolloutConfig(template_options={"chat_template": chosen})
        (found,) = aligners_of(rollout, student, {"t": theirs}, None).values()
        assert found._ends.student_own == ends[end]
        assert found._ends.teacher == theirs.convert_tokens_to_ids("<|eot_id|>")


def longest_by_hand(tokenizer: PreTrainedTokenizerBase, dataset: Dataset, room: int, tail: str) -> int:
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
def test_the_longest_prompt_is_the_longest_one_that_fits_the_context(
    tokenizer: PreTrainedTokenizerBase, prompts: Dataset, room: int, aloud: bool
) -> None:
    renderer = Renderer(tokenizer, context=room + 8, reserve=8, template_options={"aloud": aloud})
    tail = " said aloud, and at length=" if aloud else "="
    assert max(prompt_lengths(renderer, prompts)) == longest_by_hand(tokenizer, prompts, room, tail)


def test_prompts_are_rendered_once_when_several_teachers_ask_for_the_longest(
    tokenizer: PreTrainedTokenizerBase, prompts: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = Renderer(tokenizer, context=1000)
    rendered: list[int] = []
    ahead = renderer.ahead
    monkeypatch.setattr(renderer, "ahead", lambda some: (rendered.append(len(some)), ahead(some))[1])

    async def ask_three_times() -> list[int]:
        longest = once_longest_prompt(
            renderer, prompts, lambda teacher, row: (teacher in row) or teacher == "all"
        )
        return [*await asyncio.gather(longest("all"), longest("prompt")), await longest("all")]

    every, plain, again = asyncio.run(ask_three_times())
    assert every == again > plain == 7, "a teacher counts only its own rows"
    assert sum(rendered) == len(prompts)


def test_an_engine_on_a_gpu_reserves_memory_for_the_longest_row_and_not_for_the_whole_context(
    prompts: Dataset,
) -> None:
    """With a context of 32,768 tokens, 64 rows would reserve 120 GB of keys and values, however short the prompts."""
    student = load_model(str(STUDENT), device="cpu")
    student.tokenizer.chat_template = TEMPLATE
    on_gpu = replace(student, device=torch.device("cuda"))

    def measured(on: LoadedModel, **rollout: Any) -> int | None:
        settings = resolve(
            parse_recipe(
                {
                    "student": {"model": "s"}, "teachers": {"t": {"model": "m"}}, "data": {"train": "d.jsonl"},
                    "rollout": {"max_new_tokens": 7, **rollout},
                }
            ), 0,
        ).engine  # fmt: skip
        return longest_request(settings, DataConfig(train="d.jsonl"), on, PromptData(prompts, None))

    longest = longest_by_hand(student.tokenizer, prompts, student.context - 7, "=")
    assert measured(on_gpu) == longest + 7
    assert measured(student) is None
    assert measured(on_gpu, context_length=student.context) is None
    assert measured(on_gpu, agent="tool") is None
    prompts.rows[400]["agent"] = "tool"
    assert measured(on_gpu) is None
