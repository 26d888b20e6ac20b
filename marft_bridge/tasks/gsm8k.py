"""Word problems in the layout of GSM8K -> tasks whose `answer` is the number after ####.

    {"question": "...", "answer": "She has 3 + 4 = <<3+4=7>>7 apples.\\n#### 7"}

Invariants: the worked solution stays as `solution`, the number has no separators (1,000 becomes 1000), and a record
without a number is refused with its location. Answers are compared elsewhere, by the rewards `numeric` and `math`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from marft_bridge.common.errors import GraphError
from marft_bridge.tasks.lines import LocatedRecord, add_fields, jsonl_to_objects, read_text_field
from marft_bridge.tasks.options import Gsm8kTasks

_LAYOUT = "GSM8K's layout"
_NUMBER = re.compile(r"-?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)")


def gsm8k_to_tasks(options: Gsm8kTasks) -> Iterator[LocatedRecord]:
    """Every problem. Its id is the record's own, or the file's name with the problem's number. Raises GraphError."""
    path = Path(options.path)
    for number, (location, record) in enumerate(jsonl_to_objects(path), start=1):
        read_text_field(record, "question", location, layout=_LAYOUT)
        solution = read_text_field(record, "answer", location, layout=_LAYOUT)
        answer = solution_to_number(solution)
        if answer is None:
            raise GraphError(f"graph.tasks: 'answer' in {location} has no number after ####; end it with one: #### 42")
        task_id = record.get("id", f"{path.name.partition('.')[0]}-{number}")
        yield location, add_fields(record, location, solution=solution) | {"id": task_id, "answer": answer}


def solution_to_number(solution: str) -> str | None:
    """The number after the last ####, without thousands separators, currency and full stop; None without one."""
    _, marker, rest = solution.rpartition("####")
    number = rest.strip().replace("$", "").rstrip(".")
    return number.replace(",", "") if marker and _NUMBER.fullmatch(number) else None
