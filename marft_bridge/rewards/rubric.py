"""A rubric template and a task -> the rubric's text for the judge.

The template is the user's; the task's fields are data. Invariant: a dot in the template reads keys of mappings and
nothing else, so no field of a task leads to an attribute or a method of a Python object, and the content of a field is
never read as a template.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from marft_bridge.common.errors import GraphError


class _KeysOnly(ImmutableSandboxedEnvironment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        return self.getitem(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        try:
            if isinstance(obj, (Mapping, list, tuple, str)):
                return obj[argument]
        except (LookupError, TypeError):
            pass
        return self.undefined(obj=obj, name=argument)

    def is_safe_attribute(self, *_: Any) -> bool:
        return False

    def is_safe_callable(self, obj: Any) -> bool:
        """Loops over ranges are the one call that a rubric needs."""
        return obj is self.globals["range"]


@functools.lru_cache(maxsize=64)
def _template(rubric: str) -> Template:
    environment = _KeysOnly(undefined=StrictUndefined, autoescape=False, keep_trailing_newline=False)
    for name in [name for name in environment.globals if name != "range"]:
        del environment.globals[name]
    return environment.from_string(rubric)


def rubric_to_text(rubric: str, task: Mapping[str, Any] | None) -> str:
    """The rubric with the task's fields filled in. Without a task, only checks that it is a template and returns "".

    Raises:
        GraphError: it is no template, or names a field that the task lacks; the message says which.
    """
    try:
        template = _template(rubric)
        return "" if task is None else template.render(task=dict(task))
    except Exception as error:  # noqa: BLE001 - besides TemplateError, whatever an expression in it raises
        suffix = "" if task is None else f" for task {task.get('id')!r}"
        raise GraphError(f"the rubric cannot be filled in{suffix}: {' '.join(str(error).split())[:300]}") from None
