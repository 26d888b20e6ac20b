"""Programs to complete in the layout of HumanEval -> tasks that the reward of kind `code` can test.

    {"task_id": "HumanEval/0", "prompt": "from typing import List\\n\\ndef f(...", "entry_point": "f",
     "canonical_solution": "    return ...", "test": "def check(candidate): ..."}

Invariant: `setup` is what the prompt has before the function that is asked for (imports and helper functions), so that
an answer which writes that function alone runs as one that repeats all of the prompt does. It runs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from marft_bridge.errors import GraphError
from marft_bridge.tasks.lines import Placed, jsonl_to_objects, text_field, with_made
from marft_bridge.tasks.options import HumanEvalTasks

_LAYOUT = "HumanEval's layout"


def humaneval_to_tasks(options: HumanEvalTasks) -> Iterator[Placed]:
    """Every program that is asked for. Raises GraphError."""
    for where, record in jsonl_to_objects(Path(options.path)):
        name, prompt, entry_point, test = (
            text_field(record, field, where, _LAYOUT) for field in ("task_id", "prompt", "entry_point", "test")
        )
        if not entry_point.isidentifier():
            raise GraphError(f"graph.tasks: 'entry_point' in {where} is no name of a function: {entry_point!r}")
        start = re.search(rf"^(?:async\s+)?def\s+{re.escape(entry_point)}\b", prompt, re.MULTILINE)
        if start is None:
            raise GraphError(f"graph.tasks: 'prompt' in {where} does not begin the function {entry_point!r}")
        if not re.search(r"^def\s+check\s*\(", test, re.MULTILINE):
            raise GraphError(f"graph.tasks: 'test' in {where} defines no function check(candidate)")
        yield where, with_made(record, where, id=name, setup=prompt[: start.start()])
