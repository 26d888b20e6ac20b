"""A class of options -> the sentence that its source says below each of them.

Invariant: what people read in a generated file or page is what stands at the declaration, and nowhere else. The
source is read when it is asked for, so that declaring options costs nothing.
"""

from __future__ import annotations

import ast
import inspect
from textwrap import dedent

from pydantic import BaseModel


def options_to_sentences(options: type[BaseModel]) -> dict[str, str]:
    """Field -> the string below it, on one line. Fields that have none, and those of base classes, are absent."""
    (body,) = ast.parse(dedent(inspect.getsource(options))).body
    assert isinstance(body, ast.ClassDef)
    said = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            said[field.target.id] = " ".join(str(below.value.value).split())
    return said
