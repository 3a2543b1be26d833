"""A single operation of a chat template cannot take all memory; ordinary templates render as in Jinja's own sandbox."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from chat_tokenizers import FAMILIES, chat_tokenizer
from jinja2.sandbox import ImmutableSandboxedEnvironment

import understudy
from understudy.errors import DataError
from understudy.rollout.render import Renderer
from understudy.rollout.template_bounds import BoundedEnvironment
from understudy.types.prompt import Prompt

PROMPT = Prompt("00000-0000003", 3, 0, "", messages=({"role": "user", "content": "hello"},))
BIG = "{% set b = 'x' * 16000000 %}"
NESTED = "{% set n = namespace(a=['x']) %}{% for i in range(40) %}{% set n.a = [n.a, n.a] %}{% endfor %}"

HOSTILE = {
    "text repeated": "{{ 'x' * 10**10 }}",
    "list repeated": "{{ [0] * 10**10 }}",
    "repeated the other way": "{{ 10**10 * 'x' }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "product": "{% set n = namespace(a=3**999) %}{% for i in range(40) %}{% set n.a = n.a * n.a %}{% endfor %}{{ n.a > 1 }}",
    "range": "{{ range(10**10)|list }}",
    "width": "{{ '%10000000000d' % 1 }}",
    "width under a name": "{{ '%((a))10000000000s' % {'(a)': 'x'} }}",
    "width as argument": "{{ '%*d' % (10**10, 1) }}",
    "precision": "{{ '%.10000000000f' % 1.5 }}",
    "often formatted": BIG + "{{ ('%(a)s' * 100000) % {'a': b} }}",
    "filter format": "{{ '%10000000000d'|format(1) }}",
    "format": "{{ '{:>10000000000}'.format('x') }}",
    "format of a format": "{{ '{:>{}}'.format('x', 10**10) }}",
    "often in a format": BIG + "{{ ('{0}' * 100000).format(b) }}",
    "format_map": "{{ '{a:>10000000000}'.format_map({'a': 'x'}) }}",
    "filter center": "{{ 'x'|center(10**10) }}",
    "center": "{{ 'x'.center(10**10) }}",
    "attr": "{{ ('x'|attr('ljust'))(10**10) }}",
    "by its name": "{{ 'x'['rjust'](10**10) }}",
    "zfill": "{{ 'x'.zfill(10**10) }}",
    "bytes": "{{ 'x'.encode().zfill(10**10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**10) }}",
    "replace": BIG + "{{ b.replace('x', b) }}",
    "filter replace": BIG + "{{ b|replace('', b) }}",
    "translate": BIG + "{{ b.translate({120: b}) }}",
    "join": BIG + "{{ b.join('x' * 1000) }}",
    "filter join": BIG + "{{ ([b] * 1000)|join }}",
    "mapped": "{{ ['x']|map('center', 10**10)|join }}",
    "indent": "{{ 'x\ny'|indent(10**10) }}",
    "wordwrap": BIG + "{{ b|wordwrap(1, wrapstring=b) }}",
    "batch": "{{ [1]|batch(10**10, 0)|list }}",
    "round": "{{ 5|round(-10**9) }}",
    "tojson": "{{ [1]|tojson(indent=10**10) }}",
    "to_bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "sum": BIG + "{{ ([b|list] * 1000)|sum(start=[]) }}",
    "plus": BIG + "{{ b + b }}",
    "tilde": BIG + "{{ b ~ b }}",
    "block": BIG + "{% set c %}{% for i in range(1000) %}{{ b }}{% endfor %}{% endset %}",
    "output": BIG + "{% for i in range(1000) %}{{ b }}{% endfor %}",
    "macro": BIG + "{% macro m() %}{{ b }}{{ b }}{% endmacro %}{{ m()|length }}",
    "nested": NESTED + "{{ n.a }}",
    "nested, tilde": NESTED + "{{ n.a ~ '' }}",
    "nested, json": NESTED + "{{ n.a|tojson }}",
    "nested, raised": NESTED + "{{ raise_exception(n.a) }}",
    "nested names": "{% set n = namespace(a=1) %}{% for i in range(40) %}{% set n.a = namespace(a=n.a, b=n.a) %}{% endfor %}{{ n }}",
}


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_single_template_operation_that_would_exhaust_memory_is_refused(template: str) -> None:
    tokenizer = chat_tokenizer("plain")
    original = tokenizer.chat_template
    tokenizer.chat_template = template
    before, started = psutil.Process().memory_info().rss, time.process_time()
    try:
        with pytest.raises(
            DataError, match=r"00000-0000003 cannot be rendered .*(at once|bits|not taken|Range too big)"
        ):
            Renderer(tokenizer, context=500).render(PROMPT)
    finally:
        tokenizer.chat_template = original
    assert psutil.Process().memory_info().rss - before < 700 << 20
    assert time.process_time() - started < 8


TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "a < b & 'c'", "parameters": {"x": [1, 2.5, None, True]}},
}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": " Is 1 < 2 && é?\tyes\r\nno "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."},
    {"role": "user", "content": "And 50% of {0} *bold* %s?"},
]
EVERYDAY = """
{%- set n = namespace(a='', l=[], k=0) -%}
{%- macro say(x, y='!') %}<{{ x }}{{ y }}>{% endmacro -%}
{%- macro framed(x) %}[{{ x }}{{ caller() }}]{% endmacro -%}
{%- for m in messages -%}
{%- set n.a = n.a + m.role ~ ':' ~ m.content|trim ~ loop.index -%}
{%- set n.l = n.l + [m.content.split()] -%}
{%- set n.k = n.k + loop.index * 2 ** 3 -%}
{{ say(m.role) }}{{ say(m.content|e, y=m.content|upper) }}{% call framed(1) %}c{{ m.role }}{% endcall %}
{%- endfor -%}
{{ n.a }}|{{ n.l }}|{{ n.k }}|{{ n }}|{{ missing }}|{{ none }}|{{ 1.50 }}|{{ [1, 'a', {'b': (2, 3)}] }}|{{ tools|tojson(indent=2) }}
{{ '%s-%5.2f-%-8s|' % ('a', 2.345, n.k) }}{{ '%(a)s' % {'a': 'b%'} }}{{ 'ID 1700000000 %s'|format('x') }}{{ 7 % 4 }}{{ '%d%%' % 50 }}
{{ '{} {:>8} {x!r:^9}'.format(1700000000, 'b', x='c') }}{{ '{a}{{}}'.format_map({'a': 1}) }}{{ 'a'.center(9, '*') }}{{ 'b'|center(7) }}
{{ '-' * 10 }}{{ 3 * 'ab' }}{{ [0] * 3 }}{{ 2 ** 10 }}{{ 2 ** -1 }}{{ 2 ** 0.5 }}{{ 10 ** 10 * 3 }}{{ 'x'.zfill(4) }}{{ 'a\tb'.expandtabs(4) }}
{{ ', '.join(['a', 'b']) }}{{ ['a', 1, none]|join('-') }}{{ messages|map(attribute='role')|join(' ') }}{{ messages|join(',', attribute='role') }}
{{ ', '.join(messages|map(attribute='role')) }}{{ [1, 2, 3]|sum }}{{ messages|map(attribute='content')|map('length')|sum }}{{ [[1], [2]]|sum(start=[]) }}
{{ 'banana'.replace('a', 'o') }}{{ 'banana'|replace('a', 'o', 2) }}{{ 12|replace(1, 3) }}{{ 'b\nc'|indent(2, true) }}{{ 'b c d'|wordwrap(1) }}
{{ [1, 2, 3]|batch(2, 0)|list }}{{ 2.567|round(1) }}{{ 25|round(-1, 'floor') }}{{ (5).to_bytes(2, 'big') }}{{ ('<b>'|e) ~ '<i>' }}{{ ('<b>'|e) + '<i>' }}
{{ 'abc'.translate({97: 'x'}) }}{{ range(5)|list }}{{ {'a': 1}.items()|list }}{{ {'a': 1}.items() }}{{ 'é'.encode() }}{{ [1]|string }}{{ 'a b'|title|truncate(3) }}
{% filter upper %}block {{ 1 ~ 2 }}{% endfilter %}{% set c %}captured {{ n.k }}{% endset %}{{ c }}{{ 'x' if c is string else 'y' }}{{ ['b', 'a']|sort|tojson }}
"""
ASSETS = [*(Path(understudy.__file__).parent / "assets").rglob("chat_template.jinja")]
ORDINARY = {
    **{name: kind["template"] for name, kind in FAMILIES.items()},
    **{path.parent.name: path.read_text() for path in ASSETS},
    "everyday": EVERYDAY,
}


@pytest.mark.parametrize("template", ORDINARY.values(), ids=ORDINARY.keys())
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["", "tools"])
def test_ordinary_templates_render_as_in_jinjas_own_sandbox(
    template: str, tools: list[dict[str, Any]] | None
) -> None:
    assert ASSETS

    def rendered(kind: type[ImmutableSandboxedEnvironment], own_json: bool) -> str:
        environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        if own_json:  # as transformers does
            environment.filters["tojson"] = lambda x, indent=None: json.dumps(x, indent=indent)
        return environment.from_string(template).render(
            messages=CHAT, tools=tools, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
        )

    for own_json in (False, True):
        assert rendered(BoundedEnvironment, own_json) == rendered(ImmutableSandboxedEnvironment, own_json)
