"""What a model wrote as one line of Python -> a number, without running Python: a calculator for whole numbers.

It knows the numbers, the parameters, + - * // % **, comparisons, and/or/not, `x if c else y`, and min, max and abs; all
else is refused with a reason. Invariants: no text can loop, allocate or reach a name that was not given: there are no
loops, attributes or definitions, texts have at most MOST_LETTERS letters, and values stay below MOST in size. It is for
environments inside a graph; whole programs belong into a sandbox, which the bridge's reward `code` has.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence

from graphs.first_line import first_line

MOST_LETTERS = 200
MOST = 10**12
MOST_POWER = 8

# Letters that an expression needs, and no digit run into a letter: nothing of it makes Python's reader warn.
_READABLE = re.compile(r"[A-Za-z0-9_+\-*/%<>=!(), ]*")
_NUMBER_WITH_LETTERS = re.compile(r"\b[0-9]+[A-Za-z_]")
_EXPRESSION = re.compile(r"\breturn\b(.*)|\blambda\b[^:\n]*:(.*)")

_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: Mapping[str, tuple[int, Callable[..., int]]] = {"min": (2, min), "max": (2, max), "abs": (1, abs)}
"""Name -> least number of arguments, and what it does; abs takes exactly one."""


class Refused(Exception):  # noqa: N818 - what a model wrote is no error of the program
    """The text has no value here; the message is the reason, a few words without anything from the text."""


def text_to_expression(text: str) -> str:
    """What follows the first `return` or `lambda ...:`, or else the first line that is not empty or a fence."""
    if found := _EXPRESSION.search(text):
        return str(found[1] if found[1] is not None else found[2]).strip()
    return first_line(text)


def expression_to_value(expression: str, names: Mapping[str, int]) -> int:
    """The value of an expression, with these parameters.

    Raises:
        Refused: it is no expression of this small language, or it has no value.
    """
    if len(expression) > MOST_LETTERS:
        raise Refused("too long")
    if not _READABLE.fullmatch(expression) or _NUMBER_WITH_LETTERS.search(expression):
        raise Refused("not an expression")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise Refused("not an expression") from None
    return _value(tree.body, names)


def passed_share(expression: str, parameters: Sequence[str], checks: Sequence[tuple[Sequence[int], int]]) -> float:
    """The share of (arguments, expected value) that an expression gets right; one that is refused gets none."""
    right = 0
    for arguments, expected in checks:
        try:
            right += expression_to_value(expression, dict(zip(parameters, arguments, strict=True))) == expected
        except Refused:
            continue
    return right / len(checks)


def _value(node: ast.expr, names: Mapping[str, int]) -> int:
    value = _unbounded(node, names)
    if abs(value) > MOST:
        raise Refused("too large a number")
    return value


def _unbounded(node: ast.expr, names: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=bool() | int() as value):
            return int(value)
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Name():
            raise Refused("a name that is not known")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, names)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return int(not _value(operand, names))
        case ast.BinOp(left=left, op=op, right=right):
            return _operation(op, _value(left, names), _value(right, names))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _value(body if _value(test, names) else orelse, names)
        case ast.BoolOp(op=op, values=values):
            return _first_that_decides(values, names, decides=isinstance(op, ast.Or))
        case ast.Compare(left=left, ops=ops, comparators=rights):
            sides = [_value(side, names) for side in (left, *rights)]
            return int(all(_comparison(op)(a, b) for op, a, b in zip(ops, sides, sides[1:], strict=False)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            least, function = _FUNCTIONS[name]
            if len(arguments) < least or (least == 1 and len(arguments) > 1):
                raise Refused("a wrong number of arguments")
            return function(*(_value(argument, names) for argument in arguments))
    raise Refused("not an expression of numbers")


def _operation(op: ast.operator, left: int, right: int) -> int:
    if isinstance(op, ast.Pow):
        if not 0 <= right <= MOST_POWER:
            raise Refused("too large a number")
        return int(left**right)
    if type(op) not in _OPERATIONS:
        raise Refused("an operation that is not known")
    try:
        return _OPERATIONS[type(op)](left, right)
    except ZeroDivisionError:
        raise Refused("a division by zero") from None


def _comparison(op: ast.cmpop) -> Callable[[int, int], bool]:
    if type(op) not in _COMPARISONS:
        raise Refused("a comparison that is not known")
    return _COMPARISONS[type(op)]


def _first_that_decides(values: Sequence[ast.expr], names: Mapping[str, int], *, decides: bool) -> int:
    value = 0
    for each in values:
        value = _value(each, names)
        if bool(value) == decides:
            break
    return value
