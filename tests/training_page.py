"""What docs/training.md shows of the options, rendered from `trainers/config.py`.

Between two markers in the page stands what `rendered` gives; `python tests/training_page.py` puts it there.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from marft_bridge.option_sentences import options_to_sentences

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/training.md"
BEGIN, END = "<!-- rendered: options -->\n", "<!-- end -->\n"

_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def filled(page: str) -> str:
    """The page with the options as they are declared now."""
    before, begin, rest = page.partition(BEGIN)
    assert begin, "docs/training.md has no place for the options"
    _, end, after = rest.partition(END)
    return before + begin + "".join(_table()) + end + after


def options() -> dict[str, tuple[FieldInfo, str | None]]:
    """Every option by its dotted name: how it is declared, and what the source says below it."""
    from trainers.config import TrainerOptions

    return dict(_options_of(TrainerOptions, ""))


def _options_of(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, tuple[FieldInfo, str | None]]]:
    said = options_to_sentences(model)
    for name, field in model.model_fields.items():
        inner = _inner(field.annotation)
        if inner is None or f"{prefix}{name}" == "agents.<agent>.schedule":
            yield f"{prefix}{name}", (field, said.get(name))
        else:
            member, nested = inner
            yield from _options_of(nested, f"{prefix}{name}{member}.")


def _inner(annotation: Any) -> tuple[str, type[BaseModel]] | None:
    """The options inside an option, and how their names lead there: a table, a list of tables, tables by name."""
    found = [part for part in (annotation, *get_args(annotation)) if inspect.isclass(part)]
    nested = next((part for part in found if issubclass(part, BaseModel)), None)
    if nested is None:
        return None
    return {dict: ".<agent>", tuple: "[]"}.get(get_origin(annotation), ""), nested


def _table() -> Iterator[str]:
    yield "\n| option | default | takes | meaning |\n|---|---|---|---|\n"
    for name, (field, sentence) in options().items():
        assert sentence is not None, f"{name}: nothing stands below its declaration"
        meaning = sentence.replace("|", "\\|")
        yield f"| `{name}` | {_default(field)} | {_takes(field)} | {meaning} |\n"
    yield "\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default()
    if value is None:
        return "absent"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`".replace("'", '"')


def _takes(field: FieldInfo) -> str:
    bounds = [
        f"{word} {getattr(part, sign):g}"
        for part in field.metadata
        for sign, word in _BOUNDS.items()
        if getattr(part, sign, None) is not None
    ]
    return ", ".join([_kind(field.annotation), *bounds])


def _kind(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin is tuple:
        return "list of texts"
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(part) for part in parts if part is not type(None))
    named = {int: "whole number", float: "number", str: "text", bool: "true or false"}
    return named.get(annotation) or "a table"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(filled(PAGE.read_text()))
