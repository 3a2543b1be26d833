"""Arithmetic for models: + − * / // % **, brackets, and a few functions, exact on whole numbers.

Evaluates an expression's syntax tree; only the operations listed here are allowed. Imports only the standard
library, because the jailed child imports it without the package. Sizes are bounded, so that `9**9**9` is an
error at once.
"""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

LONGEST_EXPRESSION = 500
MOST_BITS = 4096

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "round": round,
    "min": min,
    "max": max,
    "sqrt": math.sqrt,
    "log": math.log,
    "exp": math.exp,
    "sin": math.sin,
    "cos": math.cos,
    "gcd": math.gcd,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression, for example 12 * (3 + 4)."""
    if len(expression) > LONGEST_EXPRESSION:
        raise ValueError(
            f"the expression has {len(expression)} characters; at most {LONGEST_EXPRESSION} are read"
        )
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError:
        raise ValueError(f"cannot read {expression!r} as arithmetic") from None
    value = _value(tree.body)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value)


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _combine(node.op, _value(node.left), _value(node.right))
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _FUNCTIONS
        and not node.keywords
    ):
        return _FUNCTIONS[node.func.id](*map(_value, node.args))
    raise ValueError(f"{ast.unparse(node)!r} is not arithmetic")


def _combine(op: ast.operator, left: int | float, right: int | float) -> int | float:
    if isinstance(op, ast.Pow) and isinstance(left, int) and isinstance(right, int):
        if right < 0:
            left = float(left)
        elif left.bit_length() * right > MOST_BITS:
            raise ValueError("the power is too large")
    result = _BINARY[type(op)](left, right)
    if isinstance(result, complex):
        raise ValueError("the result is not a real number")
    if isinstance(result, int) and result.bit_length() > MOST_BITS:
        raise ValueError("the result is too large")
    return result
