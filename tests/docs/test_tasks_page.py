"""Owns: docs/tasks.md: what it shows is read as it says, and earns what stands below it.

- Each record, in a file of the name that the table gives, becomes a task; each answer is worth what the page says.
- The Python block runs and gives tasks; the table of kinds, and of the fields that readers make, is that of the code.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.rewards import math
from marft_bridge.rewards.contract import RunView
from marft_bridge.rewards.scoring import Scorer
from marft_bridge.tasks import lines, reading
from marft_bridge.tasks import reasoning_gym as entries
from marft_bridge.tasks.options import SOURCES
from marft_bridge.tasks.reading import read_tasks

PAGE = (ROOT / "docs/tasks.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", PAGE, flags=re.MULTILINE))

# On a busy machine the defaults are short, and a test must not depend on it.
PATIENT = {"math": {"limit_s": 120.0}, "reasoning_gym": {"limit_s": 120.0}, "code": {"wall_s": 120.0}}


def block(text: str, kind: str) -> str:
    (found,) = re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)
    return str(found)


@pytest.fixture(autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    yield
    entries.close_workers()
    math.close_workers()


@pytest.mark.parametrize("section", SECTIONS)
def test_a_record_becomes_a_task_and_each_answer_earns_what_the_page_says(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SECTIONS[section]
    raw = tomllib.loads(block(text, "toml"))
    raw["graph"] |= {"app": "a:b", "nodes": ["n"]}
    for reward in raw["rewards"]:
        reward |= {"timeout_s": 280.0, **PATIENT.get(reward["kind"], {})}
    config = BridgeConfig.model_validate(raw)
    monkeypatch.chdir(tmp_path)
    if "```json" in text:
        path = Path(config.graph.tasks.path)  # type: ignore[union-attr]
        path.parent.mkdir(exist_ok=True)
        line = json.dumps(json.loads(block(text, "json"))).encode()
        path.write_bytes(gzip.compress(line) if path.suffix == ".gz" else line)
    task = read_tasks(config.graph.tasks, ())[0]
    (first, *rows) = re.findall(r"^\| `(.+?)` \| `?(\w+)`? \|$", text, re.MULTILINE)
    scorer = Scorer(config.rewards)
    given = {}
    for answer, value in rows:
        score = asyncio.run(scorer.run_to_score(RunView(task, {first[0]: answer})))
        assert score.absent == {}
        given[answer] = (score.team[first[1]], float(value))
    assert len(given) == len(rows) > 1
    for earned, said in given.values():
        assert earned == said, given


def test_the_answer_that_the_page_gives_for_the_first_generated_task_is_its_answer() -> None:
    raw = tomllib.loads(block(SECTIONS["reasoning-gym"], "toml"))
    task = read_tasks(SOURCES["reasoning_gym"].model_validate(raw["graph"]["tasks"]), ())[0]
    assert f"has the answer {task['answer']}." in SECTIONS["reasoning-gym"]


def test_the_python_block_gives_tasks_and_an_input_without_the_answer(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(block(PAGE, "python"))
    tasks = read_tasks(f"{tmp_path / 'shown.py'}:tasks", ("question", "gold"))
    assert (len(tasks), tasks[0]) == (841, {"id": "sum-1-1", "question": "What is 1 + 1?", "gold": 2})
    names: dict[str, Any] = {}
    exec(block(PAGE, "python"), names)  # noqa: S102 - of our own page
    assert names["task_to_input"](tasks[0]) == {"question": "What is 1 + 1?"}


def test_every_kind_and_bound_is_the_codes() -> None:
    assert set(re.findall(r'kind = "(\w+)", (?:path|dataset)', PAGE)) == set(SOURCES) - {"parquet"}
    assert 'or `"parquet"`' in PAGE
    assert (lines.MAX_LINE, reading.MAX_TASKS) == (16 << 20, 1_000_000)
    assert "A line may have 16 MiB, and a set a million tasks." in PAGE
