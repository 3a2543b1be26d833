"""Rendering of prompts by chat templates, ahead or one by one; errors name the row."""

from datetime import date
from typing import Any

import numpy as np
import pytest
from chat_tokenizers import ENDS, FAMILIES, chat_tokenizer

from understudy.config.rollout import RolloutConfig
from understudy.errors import DataError
from understudy.rollout.render import Renderer
from understudy.types.prompt import Prompt

CHAT = ({"role": "user", "content": "What is 12 * (3 + 4)?"},)


def prompt(**fields: object) -> Prompt:
    return Prompt(**{"key": "00000-0000003", "ordinal": 3, "epoch": 0, "data_source": "", **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_prompt_is_tokenized_like_apply_chat_template(family: str) -> None:
    tokenizer = chat_tokenizer(family)
    ids = Renderer(tokenizer, context=500).render(prompt(messages=CHAT))
    assert ids.dtype == np.int32
    expected = tokenizer.apply_chat_template(list(CHAT), add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    assert ids.tolist() == expected
    assert (ids == tokenizer.bos_token_id).sum() == (1 if tokenizer.bos_token_id is not None else 0)


def test_a_text_prompt_is_rendered_without_a_chat_template() -> None:
    tokenizer = chat_tokenizer("chatml")
    ids = Renderer(tokenizer, context=500).render(prompt(text="12+34="))
    assert tokenizer.decode(ids.tolist()) == "12+34="


def test_tools_and_template_options_reach_the_template() -> None:
    tokenizer = chat_tokenizer("chatml")
    tool = {"type": "function", "function": {"name": "calculator", "parameters": {}}}
    ids = Renderer(tokenizer, context=900).render(prompt(messages=CHAT, columns={"tools": [tool]}))
    assert '"calculator"' in tokenizer.decode(ids.tolist())
    renderer = Renderer(
        tokenizer,
        context=900,
        template_options={"chat_template": "{{ mood }}{{ messages[0].content }}", "mood": "calm"},
    )
    assert tokenizer.decode(renderer.render(prompt(messages=CHAT)).tolist()).startswith("calmWhat")


LLAMA_DATE = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "Today: {{ date_string }}. {{ messages[0].content }}"
)


def test_a_template_that_asks_for_the_date_gets_the_date_fixed_for_the_run() -> None:
    """The templates of Llama 3 and SmolLM3 do this; after a resume on another day they would render other prompts."""
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = LLAMA_DATE

    def rendered(rollout: RolloutConfig, *, ahead: bool = False) -> str:
        renderer = Renderer(tokenizer, context=900, template_options=rollout.for_templates)
        one = prompt(messages=CHAT)
        if ahead:
            renderer.ahead([one])
            assert renderer._ready
        return str(tokenizer.decode(renderer.render(one).tolist()))

    begun = RolloutConfig(template_date="2024-07-26")
    for ahead in (False, True):
        assert rendered(begun, ahead=ahead).startswith("Today: 26 Jul 2024. What is")
    given = RolloutConfig(template_date="2024-07-26", template_options={"date_string": "once"})
    assert rendered(given).startswith("Today: once. ")
    assert rendered(RolloutConfig()).startswith(f"Today: {date.today():%d %b %Y}. ")
    with pytest.raises(ValueError, match=r"'26\.7\.2024' is not a date; expected one like '2026-11-19'"):
        RolloutConfig(template_date="26.7.2024")


def test_a_prompt_that_the_template_refuses_is_named_in_the_error() -> None:
    renderer = Renderer(chat_tokenizer("gemma"), context=500)
    with pytest.raises(DataError, match=r"00000-0000003.*roles are user and assistant"):
        renderer.render(prompt(messages=({"role": "system", "content": "x"},)))


def test_a_prompt_longer_than_the_context_is_refused_with_both_lengths() -> None:
    renderer = Renderer(chat_tokenizer("chatml"), context=20, reserve=8)
    with pytest.raises(DataError, match=r"00000-0000003 \(row 3\) has 30 tokens; the context is 20 and 8"):
        renderer.render(prompt(text="7" * 30))


def test_a_chat_prompt_is_refused_when_the_tokenizer_has_no_chat_template() -> None:
    tokenizer = chat_tokenizer("plain")
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        with pytest.raises(DataError, match="no chat template"):
            Renderer(tokenizer, context=50).render(prompt(messages=CHAT))
    finally:
        tokenizer.chat_template = template


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_rendered_ahead_equal_prompts_rendered_one_by_one(family: str) -> None:
    tokenizer = chat_tokenizer(family)
    tool = {"type": "function", "function": {"name": "calculator", "parameters": {}}}
    prompts = [
        prompt(key="a", messages=CHAT),
        prompt(key="b", messages=({"role": "user", "content": "Sort the letters of bca."},)),
        prompt(key="c", text="12+34="),
        prompt(key="d", messages=CHAT, columns={"tools": [tool]}),
    ]
    ready, alone = Renderer(tokenizer, context=900), Renderer(tokenizer, context=900)
    ready.ahead(prompts)
    for one in prompts:
        assert ready.render(one).tolist() == alone.render(one).tolist()
    assert ready.render(prompts[0]) is ready.render(prompts[0])
    assert ready.render(prompts[0], tools=[tool]).tolist() == alone.render(prompts[0], tools=[tool]).tolist()
    other = prompt(key="a", messages=prompts[1].messages)
    assert ready.render(other).tolist() == alone.render(other).tolist()


def test_a_bad_prompt_in_a_batch_rendered_ahead_fails_alone() -> None:
    renderer = Renderer(chat_tokenizer("chatml"), context=60)
    good, bad = prompt(key="a", messages=CHAT), prompt(key="b", messages=({"role": "user"},))
    long = prompt(key="c", messages=({"role": "user", "content": "letters " * 200},))
    renderer.ahead([good, bad, long])
    assert len(renderer.render(good))
    with pytest.raises(DataError, match="cannot be rendered"):
        renderer.render(bad)
    renderer.ahead([good, long])
    with pytest.raises(DataError, match="Shorten the prompt"):
        renderer.render(long)


def test_a_prompt_rendered_ahead_is_not_rendered_again_until_the_next_batch() -> None:
    tokenizer = chat_tokenizer("chatml")
    renderer = Renderer(tokenizer, context=900)
    first, second = prompt(key="a", messages=CHAT), prompt(key="b", messages=CHAT)
    renderer.ahead([first, second])
    ready = [renderer.render(one) for one in (first, second)]
    template = tokenizer.chat_template
    try:
        assert all(renderer.render(one) is kept for one, kept in zip((first, second), ready, strict=True))
        renderer.ahead([second])
        tokenizer.chat_template = None
        assert len(renderer.render(second))
        with pytest.raises(DataError, match="no chat template"):
            renderer.render(first)
    finally:
        tokenizer.chat_template = template


def test_truncation_keeps_the_last_tokens_of_a_prompt_that_is_too_long() -> None:
    tokenizer = chat_tokenizer("chatml")
    whole = Renderer(tokenizer, context=500).render(prompt(messages=CHAT))
    cut = Renderer(tokenizer, context=500, max_prompt=10, truncate=True)
    cut.ahead([chat := prompt(messages=CHAT)])
    assert cut.render(chat).tolist() == whole[-10:].tolist()
    room = Renderer(tokenizer, context=20, reserve=8, max_prompt=100, truncate=True)
    assert room.render(prompt(messages=CHAT)).tolist() == whole[-12:].tolist()
    with pytest.raises(DataError, match=r"data\.max_prompt_tokens is 10"):
        Renderer(tokenizer, context=500, max_prompt=10).render(prompt(messages=CHAT))


@pytest.mark.parametrize("family", [*FAMILIES, *ENDS])
def test_turn_end_is_the_token_with_which_the_template_ends_an_assistant_turn(family: str) -> None:
    tokenizer = chat_tokenizer(family)
    expected = tokenizer.convert_tokens_to_ids(ENDS.get(family, tokenizer.eos_token))
    assert Renderer(tokenizer, context=50).turn_end == expected


@pytest.mark.parametrize("family", ENDS)
def test_an_end_token_that_the_tokenizer_config_does_not_name_appears_once_between_turns(family: str) -> None:
    tokenizer = chat_tokenizer(family)
    renderer = Renderer(tokenizer, context=500)
    answered = [*CHAT, {"role": "assistant", "content": "84"}]
    after = ({"role": "user", "content": "Sure?"},)
    whole = tokenizer.apply_chat_template([*answered, *after], tokenize=False, add_generation_prompt=True)
    own = [*tokenizer.encode("84", add_special_tokens=False), renderer.turn_end]
    turns = [*renderer.render(prompt(messages=CHAT)).tolist(), *own]
    ids = [*turns, *renderer.after_turn("k", after, ended=True).tolist()]
    assert tokenizer.decode(ids).replace("<think>\n\n</think>\n\n", "") == whole
    cut = renderer.after_turn("k", after, ended=False).tolist()
    assert [*turns[:-1], *cut] == ids


@pytest.mark.parametrize("chosen", ["terse", "{% for m in messages %}<{{ m.content }}>{% endfor %}"])
def test_messages_after_a_turn_are_rendered_by_the_template_chosen_in_the_recipe(chosen: str) -> None:
    tokenizer = chat_tokenizer("chatml")
    terse = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "no", "terse": terse}
    renderer = Renderer(tokenizer, context=500, template_options={"chat_template": chosen})
    for tools in (None, [{"type": "function", "function": {"name": "less", "parameters": {}}}]):
        chat = [{"role": "user", "content": "Sure?"}, {"role": "user", "content": "Yes?"}]
        ids = renderer.after_turn("k", chat, ended=True, tools=tools)
        assert tokenizer.decode(ids) == "><Sure?><Yes?>"
    assert renderer.turn_end == tokenizer.eos_token_id, "this template writes no special token"


def test_templates_see_no_nulls_whatever_transformers_does_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of parquet have every key. Older releases of transformers give templates the nulls."""
    tokenizer, seen = chat_tokenizer("chatml"), list[Any]()
    own = tokenizer.apply_chat_template

    def apply(chats: Any, **options: Any) -> Any:
        seen.append(chats)
        return own(chats, **options)

    monkeypatch.setattr(tokenizer, "apply_chat_template", apply)
    chat = prompt(messages=tuple({**message, "tool_calls": None} for message in CHAT))
    renderer = Renderer(tokenizer, context=500)
    renderer.render(chat)
    renderer.ahead([chat])
    assert seen == [list(CHAT), [list(CHAT)]]
