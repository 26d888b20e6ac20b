"""A class of options -> the sentence below each option in its source.

Invariant: generated files and pages show the text at the declaration and no other. The source is read on each call,
so that declaring options costs nothing.
"""

from __future__ import annotations

import ast
import inspect
from textwrap import dedent

from pydantic import BaseModel


def options_to_sentences(options: type[BaseModel]) -> dict[str, str]:
    """Field -> the string below it, on one line. Fields without one, and those of base classes, are absent."""
    (class_definition,) = ast.parse(dedent(inspect.getsource(options))).body
    assert isinstance(class_definition, ast.ClassDef)
    sentences = {}
    for field, next_statement in zip(class_definition.body, class_definition.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(next_statement, ast.Expr)
            and isinstance(next_statement.value, ast.Constant)
        ):
            sentences[field.target.id] = " ".join(str(next_statement.value.value).split())
    return sentences
