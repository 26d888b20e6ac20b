"""Word problems in the layout of GSM8K -> tasks whose `answer` is the number after ####.

    {"question": "...", "answer": "She has 3 + 4 = <<3+4=7>>7 apples.\\n#### 7"}

Invariants: the worked solution is kept under `solution`, the number is a plain one (1,000 becomes 1000), and a record
without one is refused by name. It does not know how answers are compared: the rewards `numeric` and `math` do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from marft_bridge.errors import GraphError
from marft_bridge.tasks.lines import Placed, jsonl_to_objects, text_field, with_made
from marft_bridge.tasks.options import Gsm8kTasks

_LAYOUT = "GSM8K's layout"
_NUMBER = re.compile(r"-?(?:\d+(?:\.\d+)?|\.\d+)")


def gsm8k_to_tasks(options: Gsm8kTasks) -> Iterator[Placed]:
    """Every problem. An id is the record's own, or the file's name with the problem's number. Raises GraphError."""
    path = Path(options.path)
    for number, (where, record) in enumerate(jsonl_to_objects(path), start=1):
        text_field(record, "question", where, _LAYOUT)
        solution = text_field(record, "answer", where, _LAYOUT)
        answer = solution_to_number(solution)
        if answer is None:
            raise GraphError(f"graph.tasks: 'answer' in {where} has no number after ####; end it with one: #### 42")
        given = record.get("id", f"{path.name.partition('.')[0]}-{number}")
        yield where, with_made(record, where, solution=solution) | {"id": given, "answer": answer}


def solution_to_number(solution: str) -> str | None:
    """The number after the last ####, without separators of thousands, currency and a full stop; None without one."""
    _, marked, rest = solution.rpartition("####")
    number = rest.strip().replace(",", "").replace("$", "").rstrip(".")
    return number if marked and _NUMBER.fullmatch(number) else None
