"""A chat template that does not end, or takes too much memory, fails its prompt within a few seconds."""

from __future__ import annotations

import threading
import time

import psutil
import pytest
from chat_tokenizers import chat_tokenizer

from understudy.errors import DataError
from understudy.rollout import template_deadline
from understudy.rollout.render import Renderer
from understudy.rollout.template_deadline import TemplateTimeout, within
from understudy.types.prompt import Prompt

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{{ '' }}{% endfor %}{% endfor %}"
GROWING = """
{%- set ns = namespace(x=['xxxxxxxxxx']) -%}
{%- for i in range(99999) -%}{%- set ns.x = ns.x + ['x' * 50000 ~ i] -%}{%- endfor -%}
"""
PROMPT = Prompt("00000-0000003", 3, 0, "", messages=({"role": "user", "content": "hello"},))


@pytest.fixture(autouse=True)
def _short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_deadline, "TEMPLATE_SECONDS", 0.3)


def test_an_endless_chat_template_fails_its_prompt_with_a_data_error() -> None:
    tokenizer = chat_tokenizer("chatml")
    original = tokenizer.chat_template
    renderer = Renderer(tokenizer, context=500)
    tokenizer.chat_template = ENDLESS
    started = time.monotonic()
    renderer.ahead([PROMPT])
    with pytest.raises(DataError, match=r"00000-0000003 cannot be rendered .* did not end within 0\.3 s"):
        renderer.render(PROMPT)
    assert time.monotonic() - started < 30  # without the deadline the template would never end
    tokenizer.chat_template = original
    assert "hello" in tokenizer.decode(renderer.render(PROMPT).tolist())


def test_a_chat_template_that_exceeds_the_memory_limit_fails_its_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template_deadline, "TEMPLATE_SECONDS", 60.0)
    monkeypatch.setattr(template_deadline, "TEMPLATE_BYTES", 200 << 20)
    tokenizer = chat_tokenizer("chatml")
    renderer = Renderer(tokenizer, context=500)
    tokenizer.chat_template = GROWING
    before = psutil.Process().memory_info().rss
    with pytest.raises(DataError, match=r"cannot be rendered .* it took more than 200 MB of memory"):
        renderer.render(PROMPT)
    assert psutil.Process().memory_info().rss - before < 2 << 30


def test_memory_allocated_by_another_thread_does_not_fail_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_deadline, "TEMPLATE_BYTES", 100 << 20)
    held: list[bytearray] = []
    other = threading.Thread(target=lambda: held.append(bytearray(b"1") * (200 << 20)))
    with within(20):
        time.sleep(0.6)  # uses no CPU time
        other.start()
        time.sleep(0.6)
    other.join()
    assert len(held[0]) == 200 << 20


def test_a_deadline_that_expires_as_its_block_ends_does_not_interrupt_later_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of different lengths end just before, at or after their deadline; deadlines still work afterwards."""
    monkeypatch.setattr(template_deadline, "_LOOK_SECONDS", 0.0)
    time.sleep(0.3)  # lets the watching thread pick up the shorter interval
    late = 0
    for n in range(200):  # from shorter than the deadline to longer
        try:
            with within(0.006):
                ends = time.monotonic() + n * 0.0001
                while time.monotonic() < ends:
                    sum(range(1000))
        except TemplateTimeout:
            late += 1
    time.sleep(0.05)
    with within(5):
        total = sum(range(1000))
    assert total == 499500 and 0 < late < 200
    with pytest.raises(TemplateTimeout), within(0.05):
        while True:
            pass


def test_a_deadline_interrupts_only_the_thread_that_exceeds_it() -> None:
    ended: list[str] = []

    def late() -> None:
        try:
            with within(0.1):
                while True:
                    pass
        except TemplateTimeout as error:
            ended.append(str(error))

    thread = threading.Thread(target=late, daemon=True)
    thread.start()
    with within(20):
        thread.join(10)
    assert ended == ["it did not end within 0.3 s"]


def test_time_in_which_the_thread_does_not_run_does_not_count_toward_the_deadline() -> None:
    """For example in a process that is stopped for a while."""
    begun = time.monotonic()
    with within(0.3):
        time.sleep(1.0)
    assert time.monotonic() - begun >= 1.0, "the block ran to its end"
