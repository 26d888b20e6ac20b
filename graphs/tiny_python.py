"""One line of Python that a model wrote -> an integer, by walking its syntax tree; nothing is executed.

Allowed are integers, the parameters, + - * // % **, comparisons, and/or/not, `x if c else y`, min, max and abs;
everything else is refused with a reason. Invariant: no text can loop, allocate much or reach another name: there are no
loops, attributes or definitions, a text has at most MAX_CHARACTERS characters, and no value exceeds MAX_VALUE in size.
It serves environments inside a graph; whole programs are run by the bridge's reward `code`, in a sandbox.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence

from graphs.first_line import first_line

MAX_CHARACTERS = 200
MAX_VALUE = 10**12
MAX_POWER = 8

# The characters that an expression needs, and no letter right after a digit (`1if`): Python's parser warns of those.
_READABLE = re.compile(r"[A-Za-z0-9_+\-*/%<>=!(), ]*")
_NUMBER_WITH_LETTERS = re.compile(r"\b[0-9]+[A-Za-z_]")
_EXPRESSION = re.compile(r"\breturn\b(.*)|\blambda\b[^:\n]*:(.*)")

_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
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
"""Name -> (minimum number of arguments, function); abs takes exactly one."""


class RefusedExpression(Exception):  # noqa: N818 - what a model wrote is no error of the program
    """The text has no value here; the message is the reason, a few words without anything from the text."""


def text_to_expression(text: str) -> str:
    """What follows the first `return` or `lambda ...:`; else the first line that is neither empty nor a fence."""
    if match := _EXPRESSION.search(text):
        return str(match[1] if match[1] is not None else match[2]).strip()
    return first_line(text)


def expression_to_value(expression: str, variables: Mapping[str, int]) -> int:
    """The value of an expression; `variables` maps each parameter to its argument.

    Raises:
        RefusedExpression: it is no expression of this subset of Python, or it has no value.
    """
    if len(expression) > MAX_CHARACTERS:
        raise RefusedExpression("too long")
    if not _READABLE.fullmatch(expression) or _NUMBER_WITH_LETTERS.search(expression):
        raise RefusedExpression("not an expression")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise RefusedExpression("not an expression") from None
    return _evaluate(tree.body, variables)


def pass_rate(expression: str, parameters: Sequence[str], checks: Sequence[tuple[Sequence[int], int]]) -> float:
    """The share of (arguments, expected value) that an expression gets right; one that is refused gets none."""
    passed = 0
    for arguments, expected in checks:
        try:
            passed += expression_to_value(expression, dict(zip(parameters, arguments, strict=True))) == expected
        except RefusedExpression:
            continue
    return passed / len(checks)


def _evaluate(node: ast.expr, variables: Mapping[str, int]) -> int:
    value = _evaluate_unbounded(node, variables)
    if abs(value) > MAX_VALUE:
        raise RefusedExpression("too large a number")
    return value


def _evaluate_unbounded(node: ast.expr, variables: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=bool() | int() as value):
            return int(value)
        case ast.Name(id=name) if name in variables:
            return variables[name]
        case ast.Name():
            raise RefusedExpression("a name that is not known")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, variables)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return int(not _evaluate(operand, variables))
        case ast.BinOp(left=left, op=op, right=right):
            return _apply_operator(op, _evaluate(left, variables), _evaluate(right, variables))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _evaluate(body if _evaluate(test, variables) else orelse, variables)
        case ast.BoolOp(op=op, values=operands):
            return _evaluate_until(operands, variables, stop_at=isinstance(op, ast.Or))
        case ast.Compare(left=left, ops=ops, comparators=rights):
            sides = [_evaluate(side, variables) for side in (left, *rights)]
            return int(all(_find_comparison(op)(a, b) for op, a, b in zip(ops, sides, sides[1:], strict=False)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            min_arguments, function = _FUNCTIONS[name]
            if len(arguments) < min_arguments or (min_arguments == 1 and len(arguments) > 1):
                raise RefusedExpression("a wrong number of arguments")
            return function(*(_evaluate(argument, variables) for argument in arguments))
    raise RefusedExpression("not an expression of numbers")


def _apply_operator(op: ast.operator, left: int, right: int) -> int:
    if isinstance(op, ast.Pow):
        if not 0 <= right <= MAX_POWER:
            raise RefusedExpression("too large a number")
        return int(left**right)
    if type(op) not in _OPERATORS:
        raise RefusedExpression("an operation that is not known")
    try:
        return _OPERATORS[type(op)](left, right)
    except ZeroDivisionError:
        raise RefusedExpression("a division by zero") from None


def _find_comparison(op: ast.cmpop) -> Callable[[int, int], bool]:
    if type(op) not in _COMPARISONS:
        raise RefusedExpression("a comparison that is not known")
    return _COMPARISONS[type(op)]


def _evaluate_until(operands: Sequence[ast.expr], variables: Mapping[str, int], *, stop_at: bool) -> int:
    """The value of `and` (stop_at=False) or `or` (stop_at=True): that of the first operand with this truth value."""
    value = 0
    for operand in operands:
        value = _evaluate(operand, variables)
        if bool(value) == stop_at:
            break
    return value
