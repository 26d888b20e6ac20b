"""The answer of a run and the expected one -> 1 where they match, else 0: exact, regex, json_schema, numeric.

Invariants: a field that is missing is an error that names it, an answer of the wrong form is a wrong answer; text that
a model wrote can neither hang the search for a pattern nor fetch anything.
"""

from __future__ import annotations

import asyncio
import json
import math
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from marft_bridge.common.errors import ConfigError, GraphError
from marft_bridge.rewards.contract import Absent, Earned, Kind, RewardOptions, RunView
from marft_bridge.rewards.numbers import EXACT, number_to_text, numbers_in, to_decimal
from trace_store.json_text import read_json


class _AnswerOptions(RewardOptions):
    answer_from: str = Field(min_length=1)
    """Dotted path into the final state, such as `messages.-1.text`, or `node:NAME` for the last text of that agent."""


class ExactOptions(_AnswerOptions):
    """1 where the answer is what the task expects, as text; a list in the task means any of these."""

    kind: Literal["exact"] = "exact"
    expected_from: str = Field(min_length=1)
    """Dotted path into the task."""
    strip: bool = True
    """Spaces and line ends around the texts do not count."""
    ignore_case: bool = False
    ignore_space: bool = False
    """Any stretch of spaces and line ends counts as one space."""


class RegexOptions(_AnswerOptions):
    """1 where the pattern is found; with `expected_from`, where its first group is what the task expects."""

    kind: Literal["regex"] = "regex"
    pattern: str = Field(min_length=1)
    full: bool = False
    """The pattern must match all of the answer."""
    expected_from: str | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _require_group(self) -> RegexOptions:
        groups = _compile(self.pattern).groups  # a ValueError here names the key
        if self.expected_from is not None and not groups:
            raise ValueError("expected_from compares the first group of the pattern, which has none")
        return self


class JsonSchemaOptions(_AnswerOptions):
    """1 where the answer is JSON (text or already an object) that the schema accepts."""

    kind: Literal["json_schema"] = "json_schema"
    schema_: dict[str, Any] | str = Field(alias="schema")
    """The schema as a table, or a file that holds it. References inside it resolve, those to elsewhere do not."""


class NumericOptions(_AnswerOptions):
    """1 where the number in the answer is the expected one, within max(abs_tol, rel_tol * |expected|)."""

    kind: Literal["numeric"] = "numeric"
    expected_from: str = Field(min_length=1)
    abs_tol: float = Field(0.0, ge=0, allow_inf_nan=False)
    rel_tol: float = Field(0.0, ge=0, allow_inf_nan=False)
    pick: Literal["last", "first", "only"] = "last"
    """Which number of a text; `only`: a text with another count of numbers than one is wrong."""

    @field_validator("rel_tol")
    @classmethod
    def _require_below_one(cls, value: float) -> float:
        if value >= 1:
            raise ValueError("a relative tolerance of 1 or more accepts 0 for every number")
        return value


def value_to_text(value: Any, path: str) -> str:
    """A text as it is, a number in plain decimals, true and false as JSON. Raises GraphError for anything else."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (int, float)):
        return json.dumps(value) if isinstance(value, bool) else number_to_text(value)
    raise GraphError(f"{path!r} is a {type(value).__name__}, not a text or a number; name a field inside it")


async def exact(options: ExactOptions, run: RunView) -> list[Earned]:
    """See `ExactOptions`."""
    answer = run.written_answer(options.answer_from)
    expected = run.expected(options.expected_from)
    accepted = expected if isinstance(expected, (list, tuple)) else [expected]
    accepted_texts = {_normalise(value_to_text(one, options.expected_from), options) for one in accepted}
    if answer is None:
        return _to_earned(False)
    return _to_earned(_normalise(value_to_text(answer, options.answer_from), options) in accepted_texts)


def _normalise(text: str, options: ExactOptions) -> str:
    text = text.strip() if options.strip else text
    text = " ".join(text.split()) if options.ignore_space else text
    return text.casefold() if options.ignore_case else text


async def regex(options: RegexOptions, run: RunView) -> list[Earned]:
    """See `RegexOptions`. Raises Absent where the search takes longer than `timeout_s`."""
    answer = run.written_answer(options.answer_from)
    if answer is None:
        return _to_earned(False)
    text = value_to_text(answer, options.answer_from)
    pattern = _compile(options.pattern)
    search = pattern.fullmatch if options.full else pattern.search
    try:  # the standard library's engine cannot be stopped, and would stop everything else meanwhile
        match = await asyncio.to_thread(search, text, timeout=options.timeout_s, concurrent=True)
    except TimeoutError:
        raise Absent(f"the pattern took longer than {options.timeout_s:g} s") from None
    if match is None or options.expected_from is None:
        return _to_earned(match is not None)
    expected = value_to_text(run.expected(options.expected_from), options.expected_from)
    return _to_earned((match.group(1) or "").strip() == expected.strip())


@lru_cache(maxsize=64)
def _compile(pattern: str) -> Any:
    import regex as engine

    try:
        return engine.compile(pattern)
    except engine.error as error:
        raise ValueError(f"pattern {pattern!r}: {error}") from None


async def json_schema(options: JsonSchemaOptions, run: RunView) -> list[Earned]:
    """See `JsonSchemaOptions`."""
    answer = run.answer(options.answer_from)
    if isinstance(answer, str):
        try:
            answer = read_json(answer)
        except ValueError:
            return _to_earned(False)
    try:
        return _to_earned(_is_finite(answer) and bool(_validator(options).is_valid(answer)))
    except RecursionError:
        return _to_earned(False)  # nested deeper than anything that a schema means


def _is_finite(value: Any) -> bool:
    """Whether a value has no number that JSON cannot write: NaN is neither below a minimum nor above a maximum."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def check_schema(options: JsonSchemaOptions) -> None:
    """Raises ConfigError for a schema that cannot be read, is not a JSON schema, or refers to another document."""
    from jsonschema.exceptions import SchemaError

    validator = _validator(options)
    try:
        validator.check_schema(validator.schema)
    except SchemaError as error:
        raise ConfigError(f"rewards.{options.name}: its schema is none: {error.message}") from None
    outside = [ref for ref in _references(validator.schema) if not ref.startswith("#")]
    if outside:
        raise ConfigError(f"rewards.{options.name}: its schema refers to {outside[0]!r}; put it inside, under $defs")
    _require_targets(validator.schema, options.name)


def _require_targets(schema: Any, name: str) -> None:
    """Raises ConfigError for a `$ref` that leads to nothing: only an answer that gets there would find out."""
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012, specification_with

    dialect = schema.get("$schema") if isinstance(schema, dict) else None
    specification = specification_with(dialect, default=DRAFT202012) if dialect else DRAFT202012
    root = Registry().resolver_with_root(specification.create_resource(schema))

    def check(resource: Any, resolver: Any) -> None:
        inside = resolver.in_subresource(resource)
        reference = resource.contents.get("$ref") if isinstance(resource.contents, dict) else None
        if isinstance(reference, str):
            try:
                inside.lookup(reference)
            except Unresolvable:
                raise ConfigError(f"rewards.{name}: its schema refers to {reference!r}, which is not there") from None
        for subresource in resource.subresources():
            check(subresource, inside)

    check(specification.create_resource(schema), root)


def _references(schema: Any) -> list[str]:
    """Every `$ref` in a schema, at any depth."""
    if isinstance(schema, dict):
        own_reference = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
        return own_reference + [ref for inner in schema.values() for ref in _references(inner)]
    return [ref for inner in schema for ref in _references(inner)] if isinstance(schema, list) else []


def _validator(options: JsonSchemaOptions) -> Any:
    schema = options.schema_
    return _file_to_validator(schema, options.name) if isinstance(schema, str) else _schema_to_validator(schema)


@lru_cache(maxsize=64)
def _file_to_validator(path: str, name: str) -> Any:
    try:
        return _schema_to_validator(json.loads(Path(path).read_text(encoding="utf-8-sig")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"rewards.{name}: cannot read the schema {path!r}: {error}") from None


def _schema_to_validator(schema: Any) -> Any:
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    # A registry of its own: without one, a reference to an address would be fetched.
    return validator_for(schema, default=Draft202012Validator)(schema, registry=Registry())


async def numeric(options: NumericOptions, run: RunView) -> list[Earned]:
    """See `NumericOptions`."""
    expected_value = run.expected(options.expected_from)
    expected = _pick_number(expected_value, "only", path=options.expected_from)
    if expected is None:
        raise GraphError(f"{options.expected_from!r} of task {run.task.get('id')!r} is not one finite number")
    answer = run.written_answer(options.answer_from)
    number = None if answer is None else _pick_number(answer, options.pick, path=options.answer_from)
    if number is None:
        return _to_earned(False)
    # In decimals, since two whole numbers above 2**53 can be one float.
    tolerances = [Decimal(repr(options.abs_tol)), EXACT.multiply(Decimal(repr(options.rel_tol)), expected.copy_abs())]
    return _to_earned(EXACT.subtract(number, expected).copy_abs() <= max(tolerances))


def _pick_number(value: Any, pick: Literal["last", "first", "only"], path: str) -> Decimal | None:
    """The picked number, which is finite; None where there is none."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return to_decimal(value)
    candidates = numbers_in(value_to_text(value, path))
    if not candidates or (pick == "only" and len(candidates) > 1):
        return None
    return to_decimal(candidates[0 if pick == "first" else -1])


def _to_earned(is_correct: bool) -> list[Earned]:
    return [Earned(1.0 if is_correct else 0.0)]


KINDS = (
    Kind(ExactOptions, exact),
    Kind(RegexOptions, regex),
    Kind(JsonSchemaOptions, json_schema, check_schema),
    Kind(NumericOptions, numeric),
)
