"""Owns: the calculator for what models write (graphs/tiny_python.py) and the functions that they are asked for.

- Where it gives a value, Python gives the same one; everything else is refused, soon and without harm.
- Every task can be solved, is not solved by a constant or a parameter alone, and shows no test as an example.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs.function_tasks import CONSTANTS, tasks
from graphs.tiny_python import (
    MAX_CHARACTERS,
    MAX_VALUE,
    RefusedExpression,
    expression_to_value,
    pass_rate,
    text_to_expression,
)

SOLUTIONS = {
    "add": "x + {k}",
    "times": "x * {k}",
    "minus": "x - {k}",
    "less": "{k} - x",
    "rest": "x % {k}",
    "whole": "x // {k}",
    "larger": "max(x, {k})",
    "smaller": "x if x < {k} else {k}",
    "sum": "a + b + {k}",
    "product": "a * b + {k}",
    "max": "(a if a > b else b) + {k}",
}

OPERATORS = ["+", "-", "*", "//", "%", "<", "<=", ">", ">=", "==", "!=", "and", "or"]


def joined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    binary = st.builds("({} {} {})".format, parts, st.sampled_from(OPERATORS), parts)
    power = st.builds("({} ** {})".format, parts, st.integers(0, 3))
    chosen = st.builds("({} if {} else {})".format, parts, parts, parts)
    called = st.builds("{}({}, {})".format, st.sampled_from(["min", "max"]), parts, parts)
    return binary | power | chosen | called | st.builds("(-{})".format, parts) | st.builds("(not {})".format, parts)


EXPRESSIONS = st.recursive(st.sampled_from(["a", "b", "0", "1", "7", "abs(a)"]), joined, max_leaves=8)


@settings(deadline=None)  # the machine is shared
@given(EXPRESSIONS, st.integers(-20, 20), st.integers(-20, 20))
def test_a_value_is_the_one_that_python_gives(expression: str, a: int, b: int) -> None:
    known = {"__builtins__": {}, "min": min, "max": max, "abs": abs, "a": a, "b": b}
    try:
        found = expression_to_value(expression, {"a": a, "b": b})
    except RefusedExpression as refused:
        why = str(refused)
    else:
        assert found == eval(expression, known)  # noqa: S307 - built from the parts above
        return
    if why == "a division by zero":
        with pytest.raises(ZeroDivisionError):
            eval(expression, known)  # noqa: S307
    else:
        assert why == "too large a number" or (why == "too long" and len(expression) > MAX_CHARACTERS)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3", 3),
        ("x", 5),
        ("-x + 2 * 3", 1),
        ("x // 2", 2),
        ("-x // 2", -3),
        ("x % 3", 2),
        ("x ** 2", 25),
        ("max(x, 2, 9)", 9),
        ("abs(-x)", 5),
        ("1 < x < 9", 1),
        ("x if x > 9 else 9", 9),
        ("x > 9 or 4", 4),
        ("not x", 0),
        ("True + x", 6),
    ],
)
def test_values_worked_out_by_hand(expression: str, value: int) -> None:
    assert expression_to_value(expression, {"x": 5}) == value


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("", "not an expression"),
        ("x +", "not an expression"),
        ("x = 1", "not an expression"),
        ("def f(x): return x", "not an expression"),
        ("__import__('os').system('true')", "not an expression"),
        ("x.real", "not an expression"),
        ("[x]", "not an expression"),
        ("1e9", "not an expression"),
        ("1if x else 2", "not an expression"),
        ("2x", "not an expression"),
        ("x\n+ 1", "not an expression"),
        ("x \\", "not an expression"),
        ("'%999999999d' % x", "not an expression"),
        ("(" * 150, "not an expression"),
        ("(" * 99 + "x" + ")" * 99, "not an expression|5"),
        ("-" * 199 + "x", "-5"),
        ("x" * 201, "too long"),
        ("y", "a name that is not known"),
        ("__builtins__", "a name that is not known"),
        ("max", "a name that is not known"),
        ("print(x)", "not an expression of numbers"),
        ("max(x)", "a wrong number of arguments"),
        ("abs(x, x)", "a wrong number of arguments"),
        ("max(x, key=x)", "not an expression of numbers"),
        ("(x, x)", "not an expression of numbers"),
        ("(x := 3)", "not an expression"),
        ("+x", "not an expression of numbers"),
        ("x / 2", "an operation that is not known"),
        ("1 << 99999999999", "an operation that is not known"),
        ("x is 5", "a comparison that is not known"),
        ("x in x", "a comparison that is not known"),
        ("x % 0", "a division by zero"),
        ("9 ** 9 ** 9", "too large a number"),
        ("x ** -1", "too large a number"),
        ("9999999 * 9999999", "too large a number"),
        ("9" * 199, "too large a number"),
        ("None", "not an expression of numbers"),
    ],
)
def test_what_is_no_sum_of_numbers_is_refused_with_the_reason(expression: str, why: str) -> None:
    try:
        found = str(expression_to_value(expression, {"x": 5}))
    except RefusedExpression as refused:
        found = str(refused)
    assert found in why.split("|")


def test_values_end_at_a_bound() -> None:
    assert expression_to_value(str(MAX_VALUE), {}) == MAX_VALUE
    with pytest.raises(RefusedExpression, match="too large"):
        expression_to_value(f"{MAX_VALUE} + 1", {})


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ("x + 1", "x + 1"),
        ("\n  x + 1  \nbecause", "x + 1"),
        ("```python\nx + 1\n```", "x + 1"),
        ("def f(x):\n    return x + 1\n", "x + 1"),
        ("f = lambda x: x + 1", "x + 1"),
        ("return", ""),
        ("", ""),
        ("```", ""),
    ],
)
def test_the_expression_of_a_text_is_what_is_returned_or_else_its_first_line(text: str, expression: str) -> None:
    assert text_to_expression(text) == expression


def test_the_share_that_passes_counts_what_is_refused_as_wrong() -> None:
    checks = [([0], 0), ([1], 2), ([2], 3), ([3], 6)]
    assert pass_rate("2 * x", ["x"], checks) == 0.75
    assert pass_rate("6 // x", ["x"], [([0], 0), ([1], 6)]) == 0.5
    assert pass_rate("y", ["x"], checks) == 0.0


def in_python(expression: str, task: dict[str, Any]) -> list[bool]:
    """Which tests of the task pass when Python itself runs them."""
    names: dict[str, Any] = {}
    exec(f"def f({', '.join(task['parameters'])}):\n    return {expression}", names)  # noqa: S102
    passed = []
    for test in task["tests"]:
        try:
            exec(test, names)  # noqa: S102
        except AssertionError:
            passed.append(False)
        else:
            passed.append(True)
    return passed


def test_every_function_can_be_written_and_no_constant_or_parameter_alone_is_one() -> None:
    found = list(tasks())
    assert found == list(tasks())
    assert len({task["id"] for task in found}) == len({task["request"] for task in found}) == len(found) == 132
    for task, (shape, k) in zip(found, itertools.product(SOLUTIONS, CONSTANTS), strict=True):
        assert task["id"] == f"{shape}-{k}"
        right = SOLUTIONS[shape].format(k=k)
        assert pass_rate(right, task["parameters"], task["checks"] + task["examples"]) == 1
        assert in_python(right, task) == [True] * 4
        assert not {str(given) for given, _ in task["examples"]} & {str(given) for given, _ in task["checks"]}
        for lazy in (*task["parameters"], *(str(value) for _, value in task["checks"])):
            assert pass_rate(lazy, task["parameters"], task["checks"]) < 1
            assert not all(in_python(lazy, task))


def test_the_function_of_no_other_task_passes_all_tests_of_one() -> None:
    found = list(tasks())
    shapes = itertools.product(SOLUTIONS, CONSTANTS)
    functions = {task["id"]: SOLUTIONS[shape].format(k=k) for task, (shape, k) in zip(found, shapes, strict=True)}
    for task in found:
        for other in found:
            if other["parameters"] == task["parameters"] and other["id"] != task["id"]:
                share = pass_rate(functions[other["id"]], task["parameters"], task["checks"])
                assert share < 1, (task["id"], other["id"])


def test_a_number_of_another_type_passes_no_test() -> None:
    task = next(task for task in tasks() if task["id"] == "times-2")
    assert in_python("x * 2.0", task) == [False] * 4
    assert in_python("type('E', (int,), {'__eq__': lambda *_: True})()", task) == [False] * 4
