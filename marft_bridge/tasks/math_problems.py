r"""Problems in the layout of MATH -> tasks whose `answer` is what the solution boxes.

    {"problem": ..., "solution": "... \boxed{\frac12}", "level": "Level 3", "type": "Algebra"}

A folder holds one such object a file, at any depth (`train/algebra/1.json`); a file, one a line. Invariants: a folder
is read in the order of its names, so that `limit` is the same problems on every machine; a problem without an answer is
refused by name, not left out. It does not know how answers are compared: the reward of kind `math` does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from marft_bridge.errors import GraphError
from marft_bridge.tasks.lines import Placed, file_to_object, jsonl_to_objects, text_field, with_made
from marft_bridge.tasks.options import MathTasks

_LAYOUT = "MATH's layout"
_LEVEL = re.compile(r"(?:Level )?([1-5])")
_BOXES = re.compile(r"\\f?boxed\s*(?:(\{)|([^\s{$]+))|\\fbox\s*(\{)")


def math_to_tasks(options: MathTasks) -> Iterator[Placed]:
    """Every problem of the wanted levels. Raises GraphError."""
    for where, name, record in _records(Path(options.path)):
        text_field(record, "problem", where, _LAYOUT)
        level = _LEVEL.fullmatch(str(record.get("level", "")))
        if options.levels and (level is None or int(level[1]) not in options.levels):
            continue
        given = record.get("unique_id", record.get("id", name))
        if "answer" in record:  # as in files that were made from MATH
            text_field(record, "answer", where, _LAYOUT)
            yield where, record | {"id": given}
            continue
        answer = solution_to_answer(text_field(record, "solution", where, _LAYOUT))
        if answer is None:
            raise GraphError(
                f"graph.tasks: the solution in {where} boxes nothing; put its answer into \\boxed{{}}, or into a "
                "field 'answer'"
            )
        yield where, with_made(record, where, answer=answer) | {"id": given}


def solution_to_answer(solution: str) -> str | None:
    r"""What the last `\boxed{...}`, `\fbox{...}` or `\boxed 5` of a solution holds; None where there is none."""
    boxes = list(_BOXES.finditer(solution))
    if not boxes:
        return None
    found = boxes[-1]
    if found[2] is not None:
        return str(found[2]).rstrip(".,;") or None
    depth = 1
    for place in range(found.end(), len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[place], 0)
        if depth == 0:
            return solution[found.end() : place].strip() or None
    return None


def _records(path: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Where, a name that is no other problem's, and the problem."""
    if not path.is_dir():
        for number, (where, record) in enumerate(jsonl_to_objects(path), start=1):
            yield where, f"{path.name.partition('.')[0]}-{number}", record
        return
    files = 0
    for folder, inner, names in os.walk(path):
        inner.sort()
        for name in sorted((n for n in names if n.endswith(".json")), key=_number_first):
            file = Path(folder) / name
            files += 1
            yield repr(str(file)), str(file.relative_to(path).with_suffix("")), file_to_object(file)
    if not files:
        raise GraphError(f"graph.tasks: the folder {str(path)!r} holds no .json file, at any depth")


def _number_first(name: str) -> tuple[int, str]:
    """2.json before 10.json."""
    stem = name.removesuffix(".json")
    return (int(stem), "") if stem.isdecimal() and len(stem) < 19 else (-1, name)
