"""Bounds for single operations of a chat template: `{{ 'x' * 10**10 }}` would take all memory before any watch could look.

`BoundedEnvironment` is Jinja's sandbox. An operation that could make more than `MOST_AT_ONCE` characters or items is refused
before it runs, with its name. A template that stays within the bounds renders to the same text. Memory that grows over many
operations is bounded by `template_deadline.py`. What is made by less than a fixed factor (`split`, `list`, `encode`) is not
counted; its input was.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from string import Formatter
from types import FunctionType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from understudy.rollout.template_date import NOW, strftime_now

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 1 << 24
"""Characters or items of one text or list: more than any context holds."""
MOST_BITS = 1 << 12
"""Of an integer."""
_EACH = 32
"""Characters that each value in a list counts beside its own: counting takes time, so there may be 524,288 of them."""
_CONTAINERS: Any = (
    list,
    tuple,
    set,
    frozenset,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
_SEQUENCES = (str, bytes, list, tuple)
_WIDTH = re.compile(r"(?<=[%#\- +).])\d+(?=[.a-zA-Z%])")
_STAR = re.compile(r"%[^%a-zA-Z]*\*")
_SANDBOX = "ImmutableSandboxedEnvironment"
_CONCAT = "~"
"""The name of the filter in place of Jinja's operator, which has no hook."""


class TooLargeAtOnce(jinja2.TemplateError):
    """A single operation of the template would make a text, a list or a number that is too large."""


def bound_chat_templates() -> None:
    """From here on transformers compiles the chat templates of this process in a `BoundedEnvironment`."""
    module: Any = importlib.import_module("transformers.utils.chat_template_utils")
    if getattr(module, _SANDBOX, None) is BoundedEnvironment:
        return
    if not hasattr(module, _SANDBOX):  # not part of its public interface
        logger.warning(
            "this release of transformers compiles chat templates elsewhere; their single operations are not bounded"
        )
        return
    setattr(module, _SANDBOX, BoundedEnvironment)
    for one in vars(module).values():
        if hasattr(one, "cache_clear"):  # templates that were compiled before
            one.cache_clear()


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Not for autoescaping, where `~` escapes what it joins."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_printed, **options)
        self.globals = _Globals(self.globals)
        plain, self.filters = self.filters, _Filters()
        for name, function in plain.items():
            self.filters[name] = function
        self.filters[_CONCAT] = lambda items: self.concat(str(_printed(item)) for item in items)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed: nodes.Template = _WithoutConcat().visit(super()._parse(source, name, filename))
        parsed.set_environment(self)
        return parsed

    @staticmethod
    def concat(texts: Iterable[str]) -> str:
        """Joins what a template, a macro or a block has written."""
        kept, total = [], 0
        for text in texts:
            total += len(text)
            _check("the text", total)
            kept.append(text)
        return "".join(kept)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        match operator:
            case "+" if isinstance(left, _SEQUENCES) and isinstance(right, _SEQUENCES):
                _check("`+`", len(left) + len(right))
            case "*":
                _check_product(left, right)
            case "**" if isinstance(left, int) and isinstance(right, int):
                _check_bits("`**`", left.bit_length() * right if abs(left) > 1 else 0)
            case "%" if isinstance(left, (str, bytes)):
                _check("`%`", _percent_size(left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, (str, bytes, int)) and (size := _METHODS.get(method.__name__)) is not None:
            args = _listed(args)
            _check(method.__name__, size(owner, *args, **kwargs))
        elif isinstance(method, FunctionType):  # raise_exception writes what it is given
            _weight("a call", [*args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)


class _Globals(dict[str, Any]):
    """Globals by name; transformers puts its own `strftime_now` in here."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, strftime_now if name == NOW else value)


class _Filters(dict[str, Any]):
    """Filters by name, each with its bound; transformers puts its own `tojson` in here."""

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        size = _FILTERS.get(name)
        super().__setitem__(name, function if size is None else _bounded(name, function, size))


class _WithoutConcat(NodeTransformer):
    """`a ~ b` becomes `[a, b]|~`."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        listed = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(listed, _CONCAT, [], [], None, None, lineno=node.lineno)


def _bounded(name: str, function: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
    # Jinja passes the environment or the context before the value, to filters that ask for it.
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = _listed(args[first:])
        _check(name, size(*given, **kwargs))
        return function(*args[:first], *given, **kwargs)

    return checked


def _listed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Iterators can be read only once."""
    return tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)


def _check(what: str, size: int) -> None:
    if size > MOST_AT_ONCE:
        raise TooLargeAtOnce(
            f"{what} would make more than {MOST_AT_ONCE:,} characters or items at once, the most that a template may"
        )


def _check_bits(what: str, bits: int) -> None:
    if bits > MOST_BITS:
        raise TooLargeAtOnce(
            f"{what} would make an integer of more than {MOST_BITS:,} bits, the most that a template may"
        )


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits("`*`", left.bit_length() + right.bit_length())
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, _SEQUENCES) and isinstance(count, int):
            _check("`*`", len(sequence) * count)


def _weight(what: str, value: Any) -> int:
    """About how long the value is as text. Lists that hold one another many times are long, and small in memory."""
    total = 0
    rest: list[Any] = [value]
    while rest:
        one = rest.pop()
        total += _EACH
        if isinstance(one, (str, bytes)):
            total += len(one)
        elif isinstance(one, int):
            total += one.bit_length() // 3
        elif isinstance(one, Mapping):
            rest.extend(one)
            rest.extend(one.values())
        elif isinstance(one, _CONTAINERS):
            rest.extend(one)
        elif isinstance(one, Namespace):
            rest.append(one._Namespace__attrs)
        _check(what, total)
    return total


def _printed(value: Any) -> Any:
    """Jinja calls this with every value that becomes text."""
    if not isinstance(value, str):
        _weight("the text of a value", value)
    return value


def _percent_size(form: str | bytes, given: Any) -> int:
    """Of `form % given`."""
    form = form if isinstance(form, str) else form.decode("latin-1")
    values = (
        list(given.values())
        if isinstance(given, Mapping)
        else list(given)
        if isinstance(given, tuple)
        else [given]
    )
    widths = sum(int(width) for width in _WIDTH.findall(form))
    if _STAR.search(form):
        widths += sum(abs(value) for value in values if isinstance(value, int))
    return len(form) + widths + _repeated(form.count("%"), values)


def _format_size(form: str, *args: Any, **kwargs: Any) -> int:
    """Of `form.format(*args, **kwargs)`."""
    fields = [(field, spec or "") for _, field, spec, _ in Formatter().parse(form) if field is not None]
    if any("{" in spec for _, spec in fields):
        raise TooLargeAtOnce("format: a width that is itself a field is not taken in a template")
    widths = sum(int(width) for _, spec in fields for width in re.findall(r"\d+", spec))
    return len(form) + widths + _repeated(len(fields), [*args, *kwargs.values()])


def _repeated(count: int, values: list[Any]) -> int:
    return count * max((_weight("a format", value) for value in values), default=0) if count else 0


def _replace_size(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    text, old, new = (one if isinstance(one, bytes) else str(one) for one in (text, old, new))
    return len(text) + text.count(old) * len(new)


def _join_size(separator: Any, items: Any, **_: Any) -> int:
    sizes = (len(one) if isinstance(one, str) else _weight("join", one) for one in items)
    return sum(sizes) + len(items) * len(separator)


def _round_size(value: Any, precision: int = 0, *_: Any, **__: Any) -> int:
    _check_bits("round", 4 * abs(precision))
    return 0


def _json_size(value: Any, *args: Any, **kwargs: Any) -> int:
    widths = [
        len(one) if isinstance(one, str) else int(one)
        for one in (*args, *kwargs.values())
        if isinstance(one, (str, int))
    ]
    return _weight("tojson", value) * (1 + max(widths, default=0))


def _translate_size(text: str, table: Any) -> int:
    made = table.values() if isinstance(table, Mapping) else table
    return len(text) * max((len(one) for one in made if isinstance(one, str)), default=1)


def _indent_size(text: str, width: int | str = 4, *_: Any, **__: Any) -> int:
    return len(text) + (len(text.splitlines()) + 1) * (len(width) if isinstance(width, str) else width)


def _wrapped_size(
    text: str, width: int = 79, breaks: bool = True, wrapstring: str | None = None, *_: Any, **__: Any
) -> int:
    return len(text) * (1 + len(wrapstring or "\n"))


_METHODS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(["center", "ljust", "rjust"], lambda text, width, *_: max(len(text), width)),
    "zfill": lambda text, width: max(len(text), width),
    "expandtabs": lambda text, tabsize=8: (
        len(text) + text.count("\t" if isinstance(text, str) else b"\t") * tabsize
    ),
    "replace": _replace_size,
    "join": _join_size,
    "translate": _translate_size,
    "format": _format_size,
    "format_map": lambda form, mapping: _format_size(form, *mapping.values()),
    "to_bytes": lambda number, length=1, *_, **__: length,
}
"""By the method's name: the most characters that it makes of its owner and arguments."""

_FILTERS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(
        ["capitalize", "e", "escape", "forceescape", "lower", "pprint", "safe", "string", "striptags", "sum", "title",
         "trim", "truncate", "upper", "urlencode", "urlize", "wordcount", "xmlattr"],
        lambda value, *_, **__: 0 if isinstance(value, str) else _weight("the text of a value", value),
    ),
    "batch": lambda value, linecount, *_, **__: linecount,
    "center": lambda value, width=80: max(_weight("center", value), width),
    "format": lambda form, *args, **kwargs: _percent_size(str(form), kwargs or args),
    "indent": _indent_size,
    "join": lambda items, d="", *_, **__: _join_size(str(d), items),
    "replace": _replace_size,
    "round": _round_size,
    "tojson": _json_size,
    "wordwrap": _wrapped_size,
}  # fmt: skip
"""By the filter's name: the most characters or items that it makes of its value and arguments."""
