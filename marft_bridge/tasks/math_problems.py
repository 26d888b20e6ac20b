r"""Problems in the layout of MATH -> tasks whose `answer` is the content of the solution's last \boxed{}.

    {"problem": ..., "solution": "... \boxed{\frac12}", "level": "Level 3", "type": "Algebra"}

A folder holds one such object a file, at any depth (`train/algebra/1.json`); a file, one a line. Invariants: a folder
is read in the order of its names, so that `limit` gives the same problems on every machine; a problem without an answer
is refused with its location, not left out. Answers are compared elsewhere, by the reward of kind `math`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from marft_bridge.common.errors import GraphError
from marft_bridge.tasks.lines import LocatedRecord, add_fields, file_to_object, jsonl_to_objects, read_text_field
from marft_bridge.tasks.options import MathTasks

_LAYOUT = "MATH's layout"
_LEVEL = re.compile(r"(?:Level )?([1-5])")
_BOXES = re.compile(r"\\f?boxed\s*(?:(\{)|([^\s{$]+))|\\fbox\s*(\{)")


def math_to_tasks(options: MathTasks) -> Iterator[LocatedRecord]:
    """Every problem of `options.levels`, or all. Raises GraphError."""
    for location, name, record in _read_problems(Path(options.path)):
        read_text_field(record, "problem", location, layout=_LAYOUT)
        level = _LEVEL.fullmatch(str(record.get("level", "")))
        if options.levels and (level is None or int(level[1]) not in options.levels):
            continue
        task_id = record.get("id", record.get("unique_id", name))
        if "answer" in record:  # as in files that were made from MATH
            read_text_field(record, "answer", location, layout=_LAYOUT)
            yield location, record | {"id": task_id}
            continue
        answer = solution_to_answer(read_text_field(record, "solution", location, layout=_LAYOUT))
        if answer is None:
            raise GraphError(
                f"graph.tasks: the solution in {location} boxes nothing; put its answer into \\boxed{{}}, or into a "
                "field 'answer'"
            )
        yield location, add_fields(record, location, answer=answer) | {"id": task_id}


def solution_to_answer(solution: str) -> str | None:
    r"""The content of the last `\boxed{...}`, `\fbox{...}` or `\boxed 5` of a solution; None where there is none."""
    boxes = list(_BOXES.finditer(solution))
    if not boxes:
        return None
    last_box = boxes[-1]
    if last_box[2] is not None:
        return str(last_box[2]).rstrip(".,;") or None
    depth = 1
    for index in range(last_box.end(), len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[index], 0)
        if depth == 0:
            return solution[last_box.end() : index].strip() or None
    return None


def _read_problems(path: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(location, unique name, problem), one by one."""
    if not path.is_dir():
        for number, (location, record) in enumerate(jsonl_to_objects(path), start=1):
            yield location, f"{path.name.partition('.')[0]}-{number}", record
        return
    files = 0
    for folder, subfolders, names in os.walk(path):
        subfolders.sort()  # in place: the order in which os.walk goes on
        for name in sorted((n for n in names if n.endswith(".json")), key=_name_to_sort_key):
            file = Path(folder) / name
            files += 1
            yield repr(str(file)), str(file.relative_to(path).with_suffix("")), file_to_object(file)
    if not files:
        raise GraphError(f"graph.tasks: the folder {str(path)!r} holds no .json file, at any depth")


def _name_to_sort_key(name: str) -> tuple[int, str]:
    """Numbers by value, so that 2.json comes before 10.json."""
    stem = name.removesuffix(".json")
    return (int(stem), "") if stem.isdecimal() and len(stem) < 19 else (-1, name)
