"""132 one-line functions to write: what is asked for, two examples that agents may see, and tests that they may not.

Invariant: the examples of a task are not among its tests, and no constant and no parameter alone passes all tests. It
does not know who writes the functions, or how their text is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

NAME = "f"
CONSTANTS = range(2, 14)


class Shape(NamedTuple):
    """One kind of function: `k` is the constant of the task."""

    name: str
    parameters: tuple[str, ...]
    wanted: str
    value: Callable[..., int]  # (k, *arguments)


SHAPES = (
    Shape("add", ("x",), "adds {k} to x", lambda k, x: x + k),
    Shape("times", ("x",), "multiplies x by {k}", lambda k, x: x * k),
    Shape("minus", ("x",), "subtracts {k} from x", lambda k, x: x - k),
    Shape("less", ("x",), "subtracts x from {k}", lambda k, x: k - x),
    Shape("rest", ("x",), "gives the remainder of x divided by {k}", lambda k, x: x % k),
    Shape("whole", ("x",), "divides x by {k} and rounds down", lambda k, x: x // k),
    Shape("larger", ("x",), "gives the larger of x and {k}", max),
    Shape("smaller", ("x",), "gives the smaller of x and {k}", min),
    Shape("sum", ("a", "b"), "adds a, b and {k}", lambda k, a, b: a + b + k),
    Shape("product", ("a", "b"), "multiplies a by b and adds {k}", lambda k, a, b: a * b + k),
    Shape("max", ("a", "b"), "gives the larger of a and b, plus {k}", lambda k, a, b: max(a, b) + k),
)
EXAMPLES = {1: ((1,), (9,)), 2: ((1, 2), (5, 3))}
CHECKS = {1: ((0,), (4,), (7,), (30,)), 2: ((0, 4), (6, 2), (3, 3), (9, 8))}


def tasks() -> Iterator[dict[str, Any]]:
    """Every shape with every constant, in one fixed order.

    Of each: `request` and `parameters`; `examples` and `checks` as [arguments, value]; `tests`, the checks as
    statements for the reward `code`, which also want a whole number and nothing that merely claims to equal it.
    """
    for shape in SHAPES:
        inputs = len(shape.parameters)
        for k in CONSTANTS:
            checks = [(list(given), shape.value(k, *given)) for given in CHECKS[inputs]]
            yield {
                "id": f"{shape.name}-{k}",
                "request": f"{NAME}({', '.join(shape.parameters)}) {shape.wanted.format(k=k)}",
                "parameters": list(shape.parameters),
                "examples": [[list(given), shape.value(k, *given)] for given in EXAMPLES[inputs]],
                "checks": [[given, value] for given, value in checks],
                "tests": [_statement(given, value) for given, value in checks],
            }


def call_to_text(arguments: list[int]) -> str:
    """As it is written in Python: `f(1, 2)`."""
    return f"{NAME}({', '.join(map(str, arguments))})"


def _statement(arguments: list[int], value: int) -> str:
    call = call_to_text(arguments)
    return f"assert type({call}) is int and {call} == {value}"
