"""`check` measures prompts as the run renders them, without importing transformers."""

import json
from contextlib import AsyncExitStack
from copy import copy
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
from chat_tokenizers import chat_tokenizer
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen3Config

from understudy.assembly.teachers.prompts import teacher_prompts_of
from understudy.config import parse_recipe
from understudy.errors import DataError
from understudy.planning.data_checks import prompt_length
from understudy.planning.models.folder import ModelFolder
from understudy.rollout.render import Renderer
from understudy.types.prompt import Prompt

TOOL = {"type": "function", "function": {"name": "less", "description": "a < b & c > 'd'", "parameters": {}}}


CHAT = [{"role": "user", "content": "What is 1 + 2?"}]


def saved_model(tokenizer: Any, folder: Path) -> ModelFolder:
    """A model folder with this tokenizer, complete enough to measure prompts."""
    tokenizer.save_pretrained(folder)
    Qwen3Config(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1).save_pretrained(folder)
    save_file({}, folder / "model.safetensors")
    return ModelFolder.open(str(folder), "student.model")


def measured_and_rendered(folder: ModelFolder, row: dict[str, Any], **rollout: Any) -> tuple[int, int]:
    """Length of the row's prompt as `check` measures it, and as the run renders it."""
    recipe = parse_recipe({"student": {"model": "s"}, "teachers": {"t": {"model": "t"}}, "data": {"train": "d.jsonl"}, "rollout": rollout})  # fmt: skip
    found = prompt_length(folder, recipe)(row)
    assert found is not None
    renderer = Renderer(AutoTokenizer.from_pretrained(folder.path), context=4000, template_options=recipe.rollout.template_options)  # fmt: skip
    columns = {name: value for name, value in row.items() if name != "messages"}
    prompt = Prompt("k", 0, 0, "", messages=tuple(row["messages"]), columns=columns)
    return found.length, len(renderer.render(prompt))


@pytest.mark.parametrize("family", ["chatml", "llama3"])
def test_tools_with_html_characters_are_measured_as_rendered(family: str, tmp_path: Path) -> None:
    """Jinja's own `tojson` writes `<` as six characters; that of transformers does not."""
    row = {"messages": [{"role": "user", "content": "is 1 < 2?"}], "tools": [TOOL]}
    measured, rendered = measured_and_rendered(saved_model(chat_tokenizer(family), tmp_path), row)
    assert measured == rendered


@pytest.mark.parametrize("kind", ["truncation", "padding"])
def test_truncation_and_padding_saved_in_tokenizer_json_do_not_change_the_measured_length(
    kind: str, tmp_path: Path
) -> None:
    """Fine-tuning saves both in tokenizer.json; transformers applies them only on request."""
    folder = saved_model(chat_tokenizer("chatml"), tmp_path)
    whole = measured_and_rendered(folder, {"messages": CHAT})
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(3) if kind == "truncation" else tokenizer.enable_padding(length=100)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    measured, rendered = measured_and_rendered(folder, {"messages": CHAT})
    assert measured == rendered == whole[0]


GENERATION = (
    "{% set mark = 'outside ' %}{% for m in messages %}{% if m.role == 'assistant' -%}"
    "{% generation %}{% set mark = 'inside ' %}{{ m.content }}{{ loop.index }}{% if loop.last %}!{% endif %}<|im_end|>{% endgeneration %}"
    "{% else %}{{ mark }}{{ m.content }}{% endif %}{% endfor %}{{ mark }}"
)


def test_a_template_with_the_generation_tag_is_measured_as_rendered(tmp_path: Path) -> None:
    """SmolLM3, Phi-4 and TRL's training templates use this tag, which transformers adds to Jinja."""
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = GENERATION
    chat = [*CHAT, {"role": "assistant", "content": "3"}, *CHAT]
    measured, rendered = measured_and_rendered(saved_model(tokenizer, tmp_path), {"messages": chat})
    assert measured == rendered == len(tokenizer("outside What is 1 + 2?32<|im_end|>outside What is 1 + 2?outside ")["input_ids"])  # fmt: skip


def test_a_template_that_cannot_be_compiled_is_refused_with_its_line(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = "{{ messages[0].content }}\n{% unknown %}"
    folder = saved_model(tokenizer, tmp_path)
    message = rf"the chat template of the student \({tmp_path}\) is not Jinja .*: Encountered unknown tag 'unknown'.*\(line 2\)"
    with pytest.raises(DataError, match=message):
        measured_and_rendered(folder, {"messages": CHAT})


def test_a_message_key_with_a_null_value_is_absent_in_the_template(tmp_path: Path) -> None:
    """Llama 3.1's template takes the length of the calls if `'tool_calls' in message`."""
    tokenizer = copy(chat_tokenizer("llama3"))
    tokenizer.chat_template = "{% for m in messages %}{% if 'tool_calls' in m %}{{ m.tool_calls | length }} calls{% endif %}{{ m.content }}{% endfor %}"
    measured, rendered = measured_and_rendered(
        saved_model(tokenizer, tmp_path), {"messages": [{**CHAT[0], "tool_calls": None}]}
    )
    assert measured == rendered


NAMED = {
    "default": "{{ messages[0].content }}",
    "tool_use": "{{ (tools or []) | length }} tools: {{ messages[0].content }}",
    "rag": "{{ documents }}",
}


@pytest.mark.parametrize("as_files", [True, False])
@pytest.mark.parametrize("tools", [None, [], [TOOL]])
def test_named_templates_are_selected_by_whether_the_row_has_tools(
    tmp_path: Path, as_files: bool, tools: list[Any] | None
) -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = NAMED
    folder = saved_model(tokenizer, tmp_path)
    assert (tmp_path / "additional_chat_templates" / "tool_use.jinja").is_file()
    if not as_files:
        as_one_list(tmp_path, NAMED)
    assert dict(folder.chat_templates) == NAMED and folder.chat_template == NAMED["default"]
    measured, rendered = measured_and_rendered(folder, {"messages": CHAT, "tools": tools})
    assert (
        measured == rendered == len(tokenizer(("1 tools: " if tools else "") + "What is 1 + 2?")["input_ids"])
    )


def as_one_list(folder: Path, templates: dict[str, str]) -> None:
    """Writes the templates into tokenizer_config.json, as older releases of transformers do."""
    rmtree(folder / "additional_chat_templates", ignore_errors=True)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": name, "template": one} for name, one in templates.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_named_templates_without_a_default_are_refused(tmp_path: Path) -> None:
    folder = saved_model(chat_tokenizer("chatml"), tmp_path)
    as_one_list(tmp_path, {name: one for name, one in NAMED.items() if name != "default"})
    with pytest.raises(
        DataError, match="the tokenizer has none named `default`, only rag, tool_use; rename one"
    ):
        measured_and_rendered(folder, {"messages": CHAT})


@pytest.mark.parametrize("as_files", [True, False])
@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ("default", "What is 1 + 2?"),
        ("tool_use", "0 tools: What is 1 + 2?"),
        ("terse", "Q: What is 1 + 2?"),
        ("<{{ messages[0].content }}>{{ chat_template }}", "<What is 1 + 2?>"),
    ],
)
def test_a_template_chosen_in_the_recipe_is_used_with_and_without_tools(
    tmp_path: Path, as_files: bool, chosen: str, text: str
) -> None:
    """`rollout.template_options.chat_template` may be a name or the text of a template."""
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = {**NAMED, "terse": "Q: {{ messages[0].content }}"}
    folder = saved_model(tokenizer, tmp_path)
    if not as_files:
        as_one_list(tmp_path, tokenizer.chat_template)
    for tools in (None, [TOOL]):
        measured, rendered = measured_and_rendered(
            folder, {"messages": CHAT, "tools": tools}, template_options={"chat_template": chosen}
        )
        seen = text.replace("0 tools", "1 tools") if tools else text
        assert measured == rendered == len(tokenizer(seen)["input_ids"])


def test_a_template_of_the_recipe_is_used_when_the_tokenizer_has_none(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = None
    options = {"chat_template": "Q: {{ messages[0].content }}"}
    measured, rendered = measured_and_rendered(
        saved_model(tokenizer, tmp_path), {"messages": CHAT}, template_options=options
    )
    assert measured == rendered == len(tokenizer("Q: What is 1 + 2?")["input_ids"])


@pytest.mark.parametrize("chosen", ["terze", "", 7])
def test_a_chosen_template_that_the_tokenizer_lacks_is_refused(tmp_path: Path, chosen: Any) -> None:
    """transformers would render the name itself as a template, the same tokens for every row."""
    tokenizer = chat_tokenizer("chatml")
    options = {"chat_template": chosen}
    folder = saved_model(tokenizer, tmp_path / "one")
    message = rf"rollout\.template_options\.chat_template = {chosen!r} is not a template, and the tokenizer of the student has"
    with pytest.raises(DataError, match=f"{message} no templates with names"):
        measured_and_rendered(folder, {"messages": CHAT}, template_options=options)
    tokenizer.chat_template = NAMED
    folder = saved_model(tokenizer, tmp_path / "several")
    with pytest.raises(DataError, match=f"{message} default, rag, tool_use; give one of its names"):
        measured_and_rendered(folder, {"messages": CHAT}, template_options=options)
    with pytest.raises(
        DataError, match=r"rollout\.template_options\.chat_template is not Jinja .*unknown tag"
    ):
        measured_and_rendered(folder, {"messages": CHAT}, template_options={"chat_template": "{% unknown %}"})


def test_a_teacher_with_another_tokenizer_keeps_its_own_template(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = "own: {{ messages[0].content }}{{ mood }}"
    folder = saved_model(tokenizer, tmp_path)
    options = {"chat_template": "{{ messages[0].content }}", "mood": " calm"}
    recipe = parse_recipe({"student": {"model": "s"}, "teachers": {"t": {"model": "t"}}, "data": {"train": "d.jsonl"}, "rollout": {"template_options": options}})  # fmt: skip
    found = prompt_length(folder, recipe, owner="teachers.t", own_template=True)({"messages": CHAT})
    seen = "own: What is 1 + 2? calm"
    assert found is not None and found.length == len(tokenizer(seen)["input_ids"])
    prompts = teacher_prompts_of(recipe.teachers, recipe.rollout, chat_tokenizer("llama3"), {"t": tokenizer}, None, AsyncExitStack())  # fmt: skip
    ids = prompts.ids("t", Prompt("k", 0, 0, "", messages=tuple(CHAT)))
    assert ids is not None and tokenizer.decode(ids) == seen


def test_a_date_in_the_template_is_measured_as_the_run_renders_it(tmp_path: Path) -> None:
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
