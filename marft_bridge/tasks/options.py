"""`graph.tasks` as the configuration writes it: a name, or a table whose `kind` names the layout.

Invariant: a table takes only the options that have an effect for its kind; others are refused by name. No file is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, JsonValue, Tag

from marft_bridge.common.distinct_names import require_distinct

_NAME_TAG = "name"


class _Source(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _File(_Source):
    path: str = Field(min_length=1)
    """The file, relative to the working directory."""
    limit: int | None = Field(None, ge=1)
    """Only so many tasks, from the beginning; all without it."""


class JsonlTasks(_File):
    """JSON lines, plain or gzip: one object a line."""

    kind: Literal["jsonl"] = "jsonl"
    """One JSON object a line; a path that ends in .gz is read as gzip."""
    id_from: str = Field("id", min_length=1)
    """The field whose value is the task's id."""


class ParquetTasks(_File):
    """A Parquet file: one task a row, a field for each column."""

    kind: Literal["parquet"] = "parquet"
    """One task a row."""
    id_from: str = Field("id", min_length=1)
    """The column whose value is the task's id."""


class MathTasks(_File):
    """Problems as MATH lays them out: a folder of JSON files, one a problem, or JSON lines of the same objects."""

    kind: Literal["math"] = "math"
    """`problem`, `solution`, `level`, `type`; the answer is what the solution boxes."""
    levels: Annotated[tuple[Annotated[int, Field(ge=1, le=5)], ...], AfterValidator(require_distinct)] = ()
    """Only problems of these levels, 1 to 5; all without it."""


class Gsm8kTasks(_File):
    """Word problems as GSM8K lays them out: JSON lines."""

    kind: Literal["gsm8k"] = "gsm8k"
    """`question`, and `answer` with the number after ####."""


class HumanEvalTasks(_File):
    """Programs to complete as HumanEval lays them out: JSON lines, plain or gzip."""

    kind: Literal["humaneval"] = "humaneval"
    """`task_id`, `prompt`, `entry_point`, `test` and, if there, `canonical_solution`."""


class GymTasks(_Source):
    """Tasks that a generator of reasoning-gym makes, the same each time."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    """Needs the extra `reasoning-gym`."""
    dataset: str = Field(min_length=1)
    """The generator's name there, as chain_sum."""
    size: int = Field(500, ge=1, le=100_000)
    """How many tasks."""
    seed: int = Field(0, ge=0)
    """What they are made from."""
    options: dict[str, JsonValue] = {}
    """The generator's own options, as min_terms."""


AnySource = JsonlTasks | ParquetTasks | MathTasks | Gsm8kTasks | HumanEvalTasks | GymTasks
"""A table; `marft_bridge.tasks.reading` has the reader of each kind."""

SOURCES: dict[str, type[AnySource]] = {
    str(source.model_fields["kind"].default): source for source in get_args(AnySource)
}


def _value_to_tag(value: Any) -> str:
    if isinstance(value, str):
        return _NAME_TAG
    return str(value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None))


_TAGGED = (
    Annotated[str, Tag(_NAME_TAG)],
    *(Annotated[source, Tag(kind)] for kind, source in SOURCES.items()),
)
_DISCRIMINATOR = Discriminator(
    _value_to_tag,
    custom_error_type="tasks",
    custom_error_message="a name, or a table whose kind is one of " + ", ".join(SOURCES),
)
if TYPE_CHECKING:
    AnyTasks = str | AnySource
else:
    AnyTasks = Annotated[Union[_TAGGED], _DISCRIMINATOR]  # noqa: UP007 - of as many members as there are kinds
"""A name (a JSONL or Parquet file, or an iterable) or a table."""


def text_to_tasks(text: str) -> str | AnySource:
    """A command-line value -> a name as in the configuration, or the table for `KIND:WHERE` (`gsm8k:train.jsonl`)."""
    kind, colon, location = text.partition(":")
    if not colon or kind not in SOURCES or not location:
        return text
    source = SOURCES[kind]
    return source.model_validate({"dataset" if source is GymTasks else "path": location})


def tasks_to_text(tasks: str | AnySource) -> str:
    """The name, file or generator, as messages name the tasks."""
    if isinstance(tasks, str):
        return tasks
    return tasks.dataset if isinstance(tasks, GymTasks) else tasks.path
