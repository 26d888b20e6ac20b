"""docs/reference/trainer-options.md: every option of the trainer, from `trainers/config.py`. `make pages` writes it."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from marft_bridge.config.option_sentences import options_to_sentences
from support.paths import ROOT

PAGE = ROOT / "docs/reference/trainer-options.md"
GENERATED = "<!-- written by `make pages` from trainers/config.py -->\n\n"
INTRODUCTION = """\
# Options of the trainer

Every option of `[train.trainer]`, by its dotted name: `objective.clip_low` stands in `[train.trainer.objective]`.
[Training](../training.md) says which to choose when. "Absent" means that the option is left out; TOML has no other way
to say it, so there `objective.kl_stop` is turned off by "off".
"""

_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def page() -> str:
    """The whole page as the options are declared now: a table for each group."""
    from trainers.config import TrainerOptions

    groups: dict[str, list[str]] = {}
    for name, (field, sentence) in options().items():
        assert sentence is not None, f"{name}: nothing stands below its declaration"
        group = name.partition(".")[0] if "." in name else ""
        meaning = sentence.replace("|", "\\|")
        groups.setdefault(group, []).append(f"| `{name}` | {_default(field)} | {_takes(field)} | {meaning} |\n")
    text = GENERATED + INTRODUCTION
    for group, rows in groups.items():
        purpose = ""
        if group:
            inner = _inner(TrainerOptions.model_fields[group.removesuffix("[]")].annotation)
            assert inner is not None, group
            purpose = f"{(inner[1].__doc__ or '').strip()}\n\n"
        text += f"\n## {group or 'The table itself'}\n\n{purpose}| option | default | takes | meaning |\n"
        text += "|---|---|---|---|\n" + "".join(rows)
    return text


def options() -> dict[str, tuple[FieldInfo, str | None]]:
    """Every option by its dotted name: how it is declared, and the sentence below its declaration."""
    from trainers.config import TrainerOptions

    return dict(_options_of(TrainerOptions, ""))


def _options_of(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, tuple[FieldInfo, str | None]]]:
    sentences = options_to_sentences(model)
    for name, field in model.model_fields.items():
        inner = _inner(field.annotation)
        if inner is None:
            yield f"{prefix}{name}", (field, sentences.get(name))
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


def write() -> None:
    """Writes the page."""
    PAGE.write_text(page())
