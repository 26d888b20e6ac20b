"""docs/config.md: every option of bridge.toml, written from where the options are declared.

`make pages` writes the page.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import BaseMetadata
from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from support.pages.code_in_text import text_to_markdown
from support.paths import ROOT

PAGE = ROOT / "docs/config.md"

ELSEWHERE = {
    "rewards": ("tables", "Rewards that are declared: [rewards.md](rewards.md) has the kinds and their options."),
    "models.NAME.serve": ("a table", "How it is served: the keys of `[serve]`, and their defaults."),
    "compare.variants.serve": (
        "a table",
        "How that other model is served, with the keys of `[serve]`; without it as `[serve]` says, on a free port.",
    ),
    "train.loggers": (
        "list of names or tables",
        "Where the figures of every update go besides: `tensorboard`, `wandb`, `mlflow`, `trackio`. "
        "[metrics.md](metrics.md#loggers) has their options. As they are, all write into the run's folder and send "
        "nothing.",
    ),
    "train.trainer": ("a table", "What the trainer does: [training.md](training.md) has its options."),
}
INTRODUCTION = """\
# bridge.toml

Every option, by table. This page is written from the options' declarations (`make pages`);
`marft-bridge init APP` writes a file to start from, and an option that is left out has its default.
An unknown key is refused by name. Relative paths are relative to the working directory; a name of an app, a
function or an iterable is `package.module:attribute` or `path/file.py:attribute`.
"""

_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
_NAMED = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "any value"}


def page() -> str:
    """The whole page as the options are declared now."""
    from marft_bridge.config.bridge import BridgeConfig

    return INTRODUCTION + "".join(_section(BridgeConfig, ""))


def tables() -> dict[str, type[BaseModel]]:
    """Every table of the page by its dotted name; the empty name is the top of the file."""
    from marft_bridge.config.bridge import BridgeConfig

    return dict(_tables(BridgeConfig, ""))


def _tables(options: type[BaseModel], table: str) -> Iterator[tuple[str, type[BaseModel]]]:
    yield table, options
    for name, field in options.model_fields.items():
        dotted = _dotted(table, name, field)
        if (inner := _table_in(field)) is not None and dotted not in ELSEWHERE:
            yield from _tables(inner, dotted)


def _section(options: type[BaseModel], table: str) -> Iterator[str]:
    from marft_bridge.config.option_sentences import options_to_sentences

    said = options_to_sentences(options)
    heading = "The top of the file" if not table else _heading(options, table)
    yield f"\n## {heading}\n\n{inspect.getdoc(options)}\n"
    yield "\n| option | default | takes | meaning |\n|---|---|---|---|\n"
    inside = []
    for name, field in options.model_fields.items():
        dotted = _dotted(table, name, field)
        if dotted in ELSEWHERE:
            yield f"| `{name}` | none | {' | '.join(ELSEWHERE[dotted])} |\n"
            continue
        if (inner := _table_in(field)) is not None:
            inside.append((dotted, inner))
            if not table or isinstance(field.default, BaseModel):
                continue  # its section says everything
        assert name in said, f"{dotted}: nothing stands below its declaration"
        yield f"| `{name}` | {_default(field)} | {_takes(field)} | {_cell(said[name])} |\n"
    for dotted, inner in inside:
        yield from _section(inner, dotted)


def _cell(sentence: str) -> str:
    return text_to_markdown(sentence).replace("|", r"\|")


def _heading(options: type[BaseModel], table: str) -> str:
    from marft_bridge.config.bridge import BridgeConfig

    *outer, last = table.split(".")
    if last == "NAME":
        return f"`[{table}]`"
    inside: Any = BridgeConfig
    for name in outer:
        inside = _without_none(inside.model_fields[name].annotation)
    many = _without_none(inside.model_fields[last].annotation) is not options
    return f"`[[{table}]]`" if many else f"`[{table}]`"


def _without_none(annotation: Any) -> Any:
    """The table of `Table | None`; any other annotation as it is."""
    tables_inside = [part for part in get_args(annotation) if get_origin(part) is None and part is not type(None)]
    is_optional = get_origin(annotation) is types.UnionType and len(tables_inside) == 1
    is_table = is_optional and inspect.isclass(tables_inside[0]) and issubclass(tables_inside[0], BaseModel)
    return tables_inside[0] if is_table else annotation


def _table_in(field: FieldInfo) -> type[BaseModel] | None:
    """The options inside an option; None for a plain value, and for a table that is declared elsewhere on the page."""
    annotation = _without_none(field.annotation)
    if get_origin(annotation) is tuple:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is dict:
        annotation = get_args(annotation)[1]
    return annotation if inspect.isclass(annotation) and issubclass(annotation, BaseModel) else None


def _dotted(table: str, name: str, field: FieldInfo) -> str:
    """An option's name from the top of the file; a table of tables has names of the user's own below it."""
    below = ".NAME" if get_origin(field.annotation) is dict and _table_in(field) is not None else ""
    return f"{table}.{name}{below}".removeprefix(".")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default()
    assert value is not PydanticUndefined
    if value is None or value == ():
        return "none"
    return f"`{json.dumps(value)}`"  # which is how TOML writes these, too


def _takes(field: FieldInfo) -> str:
    return ", ".join([_kind(field.annotation), *_limits(field.metadata)])


def _limits(metadata: Any) -> Iterator[str]:
    for part in metadata:
        for sign, word in _BOUNDS.items():
            if isinstance(part, BaseMetadata) and getattr(part, sign, None) is not None:
                yield f"{word} {getattr(part, sign):g}"
        if getattr(part, "min_length", None):
            yield "not empty"
        if getattr(part, "pattern", None):
            yield from _pattern(part.pattern)
        if isinstance(part, FieldInfo):
            yield from _limits(part.metadata)


def _pattern(pattern: str) -> Iterator[str]:
    if (several := re.fullmatch(r"\^\(([\w|]+)\)\$", pattern)) is not None:
        yield "one of " + ", ".join(f"`{word}`" for word in several[1].split("|"))


def _kind(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return ", ".join([_kind(parts[0]), *_limits(parts[1:])])
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin is tuple:
        return "tables, below" if _is_table(parts[0]) else f"list of {_kind(parts[0])}"
    if origin is dict:
        return f"table name = {_kind(parts[1])}"
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_kind(part) for part in parts if part is not type(None)))
    if _is_table(annotation):
        return "a table"
    assert annotation in _NAMED, TypeAdapter(annotation).json_schema()
    return _NAMED[annotation]


def _is_table(annotation: Any) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, BaseModel)


def write() -> None:
    """Writes docs/config.md."""
    PAGE.write_text(page())
