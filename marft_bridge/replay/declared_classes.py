"""An app's compiled graph -> the classes that its state, input and context are declared with, by their names.

Only these, and their subclasses that the app has loaded, are made again from a record, which is data and may name
anything.
"""

from __future__ import annotations

import dataclasses
import enum
import typing
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from langgraph.types import Send
from pydantic import BaseModel

from marft_bridge.recording.value_forms import class_to_form

_PLAIN_MODULES = ("abc", "builtins", "collections", "enum", "pathlib", "pydantic.main", "types", "typing")
"""Modules whose classes an annotation may name without meaning all that derive from them."""


def graph_to_classes(graph: Any) -> dict[str, type]:
    """Name of a class as the record has it -> the class, of all that the graph's schemas mention, however deep."""
    builder = getattr(graph, "builder", None)
    declared = [getattr(graph, "context_schema", None), *getattr(builder, "schemas", ())]
    declared += [getattr(channel, "ValueType", None) for channel in getattr(graph, "channels", {}).values()]
    classes: dict[str, type] = {}
    visited: dict[int, Any] = {}  # by identity, since annotations need not be hashable
    while declared:
        annotation = declared.pop()
        if annotation is Send or id(annotation) in visited:
            continue
        visited[id(annotation)] = annotation
        declared += _parts_of(annotation)
        if isinstance(annotation, type) and annotation.__module__ not in _PLAIN_MODULES:
            declared += type.__subclasses__(annotation)  # an instance of any may stand there
            if _is_makeable(annotation):
                classes[class_to_form(annotation)] = annotation
    return classes


def _parts_of(annotation: Any) -> Iterator[Any]:
    """The annotations inside an annotation: of a container's items, of a class's fields."""
    if typing.get_origin(annotation) is not typing.Literal:
        yield from typing.get_args(annotation)
    if isinstance(annotation, type) and (
        _is_makeable(annotation) or typing.is_typeddict(annotation) or hasattr(annotation, "__annotations__")
    ):
        if issubclass(annotation, BaseModel):
            yield from (field.annotation for field in annotation.model_fields.values())
            return
        try:
            yield from typing.get_type_hints(annotation).values()
        except (NameError, TypeError):  # names that only its author's function knows
            return


def _is_makeable(kind: type) -> bool:
    """See `value_forms.forms_to_value`."""
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_make")
    return dataclasses.is_dataclass(kind) or is_named_tuple or issubclass(kind, (BaseModel, enum.Enum, PurePath))
