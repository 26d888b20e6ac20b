"""Owns: examples/notebook.ipynb runs from the first cell to the last, and ends in the report.

- Its cells are plain Python: what runs here without IPython runs in a notebook.
- It is stored without outputs, so that a change of it can be read.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

NOTEBOOK = ROOT / "examples/notebook.ipynb"
CELLS: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
# As a notebook does it: all cells in one namespace, and the value of a cell's last line is shown.
RUNNER = """
import ast, json, sys
names = {"__name__": "__main__"}
for source in json.load(sys.stdin):
    *body, last = ast.parse(source).body
    shown = isinstance(last, ast.Expr)
    exec(compile(ast.Module(body if shown else [*body, last], []), "cell", "exec"), names)
    if shown:
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        if value is not None:
            print(value._repr_markdown_() if hasattr(value, "_repr_markdown_") else value)
"""


@pytest.mark.slow
def test_the_notebook_leads_from_an_app_to_the_report() -> None:
    command = [sys.executable, "-c", RUNNER]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=NOTEBOOK.parent,
        env=environment,
        input=json.dumps(CODE),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 planner sampled 21 tokens: Add the two numbers." in done.stdout
    assert "after is better than before" in done.stdout
    assert "95% interval" in done.stdout
    folder = Path(done.stdout.splitlines()[-1])
    assert (folder / "runs/sums/report.html").is_file()


def test_the_notebook_is_stored_without_outputs() -> None:
    for cell in CELLS:
        assert cell["cell_type"] != "code" or (cell["outputs"], cell["execution_count"]) == ([], None)


@pytest.mark.parametrize("number", range(len(CODE)))
def test_a_cell_is_plain_python_within_the_width_of_a_page(number: int) -> None:
    ast.parse(CODE[number])
    assert max(map(len, CODE[number].splitlines())) <= 120
