"""132 tasks to write a one-line function: the request, two examples that agents may see, and tests that they may not.

Invariant: the examples of a task are not among its tests; neither a constant nor a parameter alone passes all tests,
nor does the function of another task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

FUNCTION_NAME = "f"
CONSTANTS = range(2, 14)


class Shape(NamedTuple):
    """One kind of function, of its parameters and the constant `k` of the task."""

    name: str
    parameters: tuple[str, ...]
    description: str  # with {k}
    function: Callable[..., int]  # (k, *arguments) -> value


SHAPES = (
    Shape("add", ("x",), "adds {k} to x", function=lambda k, x: x + k),
    Shape("times", ("x",), "multiplies x by {k}", function=lambda k, x: x * k),
    Shape("minus", ("x",), "subtracts {k} from x", function=lambda k, x: x - k),
    Shape("less", ("x",), "subtracts x from {k}", function=lambda k, x: k - x),
    Shape("rest", ("x",), "gives the remainder of x divided by {k}", function=lambda k, x: x % k),
    Shape("whole", ("x",), "divides x by {k} and rounds down", function=lambda k, x: x // k),
    Shape("larger", ("x",), "gives the larger of x and {k}", function=max),
    Shape("smaller", ("x",), "gives the smaller of x and {k}", function=min),
    Shape("sum", ("a", "b"), "adds a, b and {k}", function=lambda k, a, b: a + b + k),
    Shape("product", ("a", "b"), "multiplies a by b and adds {k}", function=lambda k, a, b: a * b + k),
    Shape("max", ("a", "b"), "gives the larger of a and b, plus {k}", function=lambda k, a, b: max(a, b) + k),
)
EXAMPLE_ARGUMENTS = {1: ((1,), (9,)), 2: ((1, 2), (5, 3))}
CHECK_ARGUMENTS = {1: ((0,), (7,), (10,), (99,)), 2: ((0, 4), (6, 2), (3, 3), (9, 8))}


def tasks() -> Iterator[dict[str, Any]]:
    """Every shape with every constant, in one fixed order.

    Each has `request` and `parameters`; `examples` and `checks` as [arguments, value]; and `tests`, the checks as
    statements for the reward `code`, which also test the type: another object could define `==` as always true.
    """
    for shape in SHAPES:
        arity = len(shape.parameters)
        for k in CONSTANTS:
            examples = [(list(arguments), shape.function(k, *arguments)) for arguments in EXAMPLE_ARGUMENTS[arity]]
            checks = [(list(arguments), shape.function(k, *arguments)) for arguments in CHECK_ARGUMENTS[arity]]
            yield {
                "id": f"{shape.name}-{k}",
                "request": f"{FUNCTION_NAME}({', '.join(shape.parameters)}) {shape.description.format(k=k)}",
                "parameters": list(shape.parameters),
                "examples": [[arguments, value] for arguments, value in examples],
                "checks": [[arguments, value] for arguments, value in checks],
                "tests": [_check_to_statement(arguments, value) for arguments, value in checks],
            }


def call_to_text(arguments: list[int]) -> str:
    """The call as Python source: `f(1, 2)`."""
    return f"{FUNCTION_NAME}({', '.join(map(str, arguments))})"


def _check_to_statement(arguments: list[int], value: int) -> str:
    call = call_to_text(arguments)
    return f"assert type({call}) is int and {call} == {value}"
