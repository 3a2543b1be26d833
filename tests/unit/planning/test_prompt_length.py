"""`check` measures prompts as the run renders them, without importing transformers."""

from pathlib import Path

import pytest
from chat_tokenizers import chat_tokenizer
from safetensors.torch import save_file
from transformers import Qwen3Config

from understudy.config import parse_recipe
from understudy.planning.data_checks import prompt_length
from understudy.planning.models.folder import ModelFolder
from understudy.rollout.render import Renderer
from understudy.types.prompt import Prompt

TOOL = {"type": "function", "function": {"name": "less", "description": "a < b & c > 'd'", "parameters": {}}}


@pytest.mark.parametrize("family", ["chatml", "llama3"])
def test_tools_with_marks_of_html_have_the_length_they_are_rendered_with(family: str, tmp_path: Path) -> None:
    """Jinja's own `tojson` writes `<` as six characters."""
    tokenizer = chat_tokenizer(family)
    tokenizer.save_pretrained(tmp_path)
    Qwen3Config(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1).save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    recipe = parse_recipe({"student": {"model": str(tmp_path)}, "teachers": {"t": {"model": str(tmp_path)}}, "data": {"train": "rows.jsonl"}})  # fmt: skip
    row = {"messages": [{"role": "user", "content": "is 1 < 2?"}], "tools": [TOOL]}
    found = prompt_length(ModelFolder.open(str(tmp_path), "student.model"), recipe)(row)
    prompt = Prompt("k", 0, 0, "", messages=tuple(row["messages"]), columns=row)
    assert found is not None
    assert found.length == len(Renderer(tokenizer, context=2000).render(prompt, tools=row["tools"]))


def test_a_date_in_the_template_is_counted_as_the_run_writes_it(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = "{{ strftime_now('%A, %d %B %Y') }} {{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path)
    Qwen3Config(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1).save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    row = {"messages": [{"role": "user", "content": "?"}]}
    for date in ({"template_date": "2026-09-30"}, {}):
        recipe = parse_recipe({"student": {"model": str(tmp_path)}, "teachers": {"t": {"model": str(tmp_path)}}, "data": {"train": "rows.jsonl"}, "rollout": date})  # fmt: skip
        found = prompt_length(ModelFolder.open(str(tmp_path), "student.model"), recipe)(row)
        renderer = Renderer(tokenizer, context=2000, template_options=recipe.rollout.for_templates)
        assert found is not None
        assert found.length == len(renderer.render(Prompt("k", 0, 0, "", messages=tuple(row["messages"]))))
