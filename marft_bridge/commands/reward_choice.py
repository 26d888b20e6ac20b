"""What `init` is told of a reward, or what the tasks and the graph show -> a built-in reward for `[[rewards]]`.

Invariant: a choice names fields that every task has; which field of the final state holds the answer is known only when
the graph runs, so it is taken from the graph's own state and said.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from pydantic import ValidationError

from marft_bridge.common.errors import ConfigError, GraphError
from marft_bridge.rewards.code import CodeOptions
from marft_bridge.rewards.contract import RewardOptions, path_to_value
from marft_bridge.rewards.match import ExactOptions, NumericOptions
from marft_bridge.rewards.math import MathOptions
from marft_bridge.rewards.reasoning_gym import GymOptions
from marft_bridge.tasks.reasoning_gym import ORIGIN_FIELD

REWARD_NAME = "reward"  # that of train.trainer.reward's default
_KINDS: Mapping[str, type[RewardOptions]] = {
    get_args(options.model_fields["kind"].annotation)[0]: options
    for options in (NumericOptions, ExactOptions, MathOptions, CodeOptions, GymOptions)
}
_EXPECTED_KEYS = {"numeric": "expected_from", "exact": "expected_from", "math": "expected_from", "code": "tests_from"}
_EXPECTED_FIELDS = (
    *("answer", "expected", "gold", "target", "expected_answer", "ground_truth", "reference", "label", "solution"),
)
_ANSWER_FIELDS = ("answer", "final_answer", "output", "result", "response", "solution", "reply", "program", "text")
_LAST_MESSAGE = "messages.-1.text"
_NUMBER = re.compile(r"\s*[-+]?\$?\d[\d,]*(\.\d+)?\s*")
_MATHEMATICS = re.compile(r"\\[a-z]+|[\^=]|\d\s*/\s*\d|\d[a-z]\b")
_MAX_EXACT_LENGTH = 200  # of an expected text that a model may be asked to hit letter by letter
_TESTED_TASKS = 200

Task = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RewardChoice:
    """A built-in reward: its kind, where the answer is, and where the task says what is expected."""

    kind: str
    answer_from: str | None = None  # in the final state; None: not known yet
    expected_from: str | None = None  # in the task; None: not known yet, or of a kind that reads none

    def __str__(self) -> str:
        """The choice as `--reward` takes it."""
        paths = "=".join(path for path in (self.answer_from, self.expected_from) if path is not None)
        return f"{self.kind}:{paths}" if paths else self.kind

    def to_options(self, tasks: Sequence[Task]) -> RewardOptions:
        """The table of `[[rewards]]`. Raises ConfigError where a path is missing, or a task lacks what is expected."""
        key = _EXPECTED_KEYS.get(self.kind)
        if self.answer_from is None or (key is not None and self.expected_from is None):
            raise ConfigError(
                f"init: --reward {self}: it cannot be told where the answer is, or what a task expects; "
                f"say both: {self.kind}:ANSWER_FROM{'' if key is None else '=EXPECTED_FROM'}"
            )
        values: dict[str, Any] = {"name": REWARD_NAME, "kind": self.kind, "answer_from": self.answer_from}
        if key is not None and self.expected_from is not None:
            for task in tasks:
                try:
                    path_to_value(task, self.expected_from, f"task {task.get('id')!r}")
                except GraphError as error:
                    raise ConfigError(f"init: --reward {self}: {error}") from None
            values[key] = self.expected_from
        if self.kind == "code" and all("setup" in task for task in tasks):
            values["setup_from"] = "setup"
        try:
            return _KINDS[self.kind].model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"init: --reward {self}: {error.errors(include_url=False)[0]['msg']}") from None


def text_to_choice(text: str) -> RewardChoice | None:
    """`numeric`, `numeric:answer`, `numeric:answer=gold` -> a choice; None for the name of a function."""
    kind, _, paths = text.partition(":")
    answer_from, _, expected_from = paths.partition("=")
    if kind not in _KINDS:
        return None
    return RewardChoice(kind, answer_from or None, expected_from or None)


def complete_choice(choice: RewardChoice | None, tasks: Sequence[Task], graph: Any) -> RewardChoice | None:
    """The choice with the paths that tasks and graph show; without one the kind that fits, or None where none does."""
    kind = choice.kind if choice is not None else None
    fitting_kind, field = _tasks_to_kind(tasks, kind, _output_fields(graph))
    if choice is None:
        choice = None if fitting_kind is None else RewardChoice(fitting_kind)
    if choice is None:
        return None
    if choice.kind not in _EXPECTED_KEYS:
        field = None
    return replace(
        choice,
        answer_from=choice.answer_from or _graph_to_answer_path(graph),
        expected_from=choice.expected_from or field,
    )


def _tasks_to_kind(
    tasks: Sequence[Task], kind: str | None, state_fields: frozenset[str]
) -> tuple[str | None, str | None]:
    """The kind that fits what the tasks expect, and the field that says it; of `kind` where it is given.

    That is a field of a telling name, else the only one that the graph does not read.
    """
    sample = tasks[:_TESTED_TASKS]
    if not sample:
        return None, None
    fields = [name for name in sample[0] if all(task.get(name) is not None for task in sample)]
    if ORIGIN_FIELD in fields and kind in (None, "reasoning_gym"):
        return "reasoning_gym", None
    if "tests" in fields and kind in (None, "code"):
        return "code", "tests"
    if "test" in fields and "entry_point" in fields and kind in (None, "code"):
        return "code", "test"
    if kind in ("code", "reasoning_gym"):
        return kind, None
    unread_fields = [name for name in fields if name != "id" and name not in state_fields]
    only_unread = unread_fields if len(unread_fields) == 1 and state_fields & {*fields} else []
    for field in (*(name for name in _EXPECTED_FIELDS if name in fields), *only_unread):
        fitting_kind = _values_to_kind([task[field] for task in sample])
        if kind is not None or fitting_kind is not None:
            return kind or fitting_kind, field
    return None, None


def _values_to_kind(values: Collection[Any]) -> str | None:
    if any(isinstance(value, bool) or not isinstance(value, (str, int, float)) for value in values):
        return None
    texts = [str(value) for value in values]
    if all(_NUMBER.fullmatch(text) for text in texts):
        return "numeric"
    if any(_MATHEMATICS.search(text) for text in texts):
        return "math"
    return "exact" if max(map(len, texts)) <= _MAX_EXACT_LENGTH else None


def _graph_to_answer_path(graph: Any) -> str | None:
    """Where a run's final state most likely has its answer; None where no field is called so."""
    names = _output_fields(graph)
    answer_field = next((name for name in _ANSWER_FIELDS if name in names), None)
    return answer_field or (_LAST_MESSAGE if "messages" in names else None)


def _output_fields(graph: Any) -> frozenset[str]:
    output = getattr(graph, "output_channels", [])
    return frozenset([output] if isinstance(output, str) else output)
