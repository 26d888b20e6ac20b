"""An expression that a model wrote, and examples of its function -> what an agent is told of the first failure.

Invariant: nothing is executed but by `graphs.tiny_python`, and the text holds nothing of the expression.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphs.function_tasks import call_to_text
from graphs.tiny_python import RefusedExpression, expression_to_value


def describe_failure(expression: str, parameters: Sequence[str], examples: Sequence[Sequence[Any]]) -> str:
    """The first example that fails: `f(1) gave 2 and not 3`, or the reason why there is no value.

    Empty where all pass. `examples` holds [arguments, value].
    """
    for arguments, expected in examples:
        try:
            value = expression_to_value(expression, dict(zip(parameters, arguments, strict=True)))
        except RefusedExpression as reason:
            return f"{call_to_text(arguments)} gave nothing: {reason}"
        if value != expected:
            return f"{call_to_text(arguments)} gave {value} and not {expected}"
    return ""
