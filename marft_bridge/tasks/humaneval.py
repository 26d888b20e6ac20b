"""Programs to complete in the layout of HumanEval -> tasks that the reward of kind `code` can test.

    {"task_id": "HumanEval/0", "prompt": "from typing import List\\n\\ndef f(...", "entry_point": "f",
     "canonical_solution": "    return ...", "test": "def check(candidate): ..."}

Invariant: `setup` is what the prompt has before the requested function (imports and helper functions), so that an
answer with that function alone runs just as one that repeats the whole prompt. Nothing is run here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from marft_bridge.common.errors import GraphError
from marft_bridge.tasks.lines import LocatedRecord, add_fields, jsonl_to_objects, read_text_field
from marft_bridge.tasks.options import HumanEvalTasks

_LAYOUT = "HumanEval's layout"


def humaneval_to_tasks(options: HumanEvalTasks) -> Iterator[LocatedRecord]:
    """Every requested program. Raises GraphError."""
    for location, record in jsonl_to_objects(Path(options.path)):
        name, prompt, entry_point, test = (
            read_text_field(record, field, location, layout=_LAYOUT)
            for field in ("task_id", "prompt", "entry_point", "test")
        )
        if not entry_point.isidentifier():
            raise GraphError(f"graph.tasks: 'entry_point' in {location} is no name of a function: {entry_point!r}")
        start = re.search(rf"^(?:async\s+)?def\s+{re.escape(entry_point)}\b", prompt, re.MULTILINE)
        if start is None:
            raise GraphError(f"graph.tasks: 'prompt' in {location} does not begin the function {entry_point!r}")
        if not re.search(r"^def\s+check\s*\(", test, re.MULTILINE):
            raise GraphError(f"graph.tasks: 'test' in {location} defines no function check(candidate)")
        yield location, add_fields(record, location, id=name, setup=prompt[: start.start()])
