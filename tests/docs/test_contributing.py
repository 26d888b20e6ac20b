"""Owns: the recipes of CONTRIBUTING.md: who follows one to the letter has what it promises.

Each is carried out in a copy of the packages, with nothing else changed, and used from a bridge.toml.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.floors import PACKAGES
from support.paths import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
BLOCK = re.compile(r"```(python|diff)\n# (\S+)\n(.*?)```", re.DOTALL)

BRIDGE = """
[graph]
app = "graphs.math_duo:build"
nodes = ["planner", "executor"]
tasks = { kind = "csv", path = "train.csv" }

[[rewards]]
name = "reward"
kind = "brevity"
answer_from = "answer"
max_chars = 3

[train]
samples_per_task = 4

[train.trainer.advantage]
estimator = "median"
"""

USE = """
import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from marft_bridge.config.bridge import toml_to_config
from marft_bridge.rewards.contract import RunView
from marft_bridge.rewards.scoring import Scorer
from marft_bridge.tasks.reading import read_tasks

config = toml_to_config(Path("bridge.toml"))
(task, _) = read_tasks(config.graph.tasks, ("question",))
score = asyncio.run(Scorer(config.rewards).run_to_score(RunView(task, {"answer": "twelve"})))
advantage = config.train.trainer.advantage
print(task, score.earned["reward"][0].value, advantage.estimator_class.__module__, advantage.normalization)

episodes = [SimpleNamespace(task_id=task_id) for task_id in ("a", "b", "a", "a")]
returns = np.array([0.0, 7.0, 1.0, 5.0])
round_ = SimpleNamespace(episodes=episodes, episode_A=[0, 1, 2, 3])
print(advantage.estimator_class.baseline(None, returns, round_).advantages(returns))
"""


def carry_out(checkout: Path, recipes: str) -> None:
    """Writes each new file, and changes each line that a diff changes; a line that is not there is an error."""
    for kind, name, text in BLOCK.findall(recipes):
        path = checkout / name
        if kind == "python":
            assert not path.exists()
            path.write_text(text)
            continue
        lines = text.splitlines()
        for number, line in enumerate(lines):
            if line.startswith("-"):
                added = []
                for follower in lines[number + 1 :]:
                    if not follower.startswith("+"):
                        break
                    added.append(follower[1:])
                source = path.read_text()
                assert source.count(f"{line[1:]}\n") == 1, (name, line)
                path.write_text(source.replace(f"{line[1:]}\n", "\n".join(added) + "\n"))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages with the three recipes carried out."""
    folder = tmp_path_factory.mktemp("checkout")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    carry_out(folder, PAGE)
    return folder


def test_an_estimator_a_reward_and_a_task_reader_work_from_bridge_toml(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "bridge.toml").write_text(BRIDGE)
    (tmp_path / "train.csv").write_text('id,question,answer\na1,"5, doubled, plus 2",12\na2,1 + 1,2\n')
    used = subprocess.run(
        [sys.executable, "-c", USE],
        cwd=tmp_path,
        env={"PYTHONPATH": str(checkout), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert used.returncode == 0, used.stderr
    task = {"id": "a1", "question": "5, doubled, plus 2", "answer": "12"}
    assert used.stdout.split("\n") == [f"{task} 0.5 trainers.advantages.median none", "[-1.  0.  0.  4.]", ""]


def test_what_the_recipes_write_is_as_our_code_is(checkout: Path) -> None:
    ruff = Path(sys.executable).with_name("ruff")
    written = [name for _, name, _ in BLOCK.findall(PAGE)]
    for command in (["check"], ["format", "--check"]):
        checked = subprocess.run(
            [ruff, *command, "--no-cache", *written], cwd=checkout, capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stdout


def test_every_recipe_is_carried_out() -> None:
    new = {name for kind, name, _ in BLOCK.findall(PAGE) if kind == "python"}
    changed = {name for kind, name, _ in BLOCK.findall(PAGE) if kind == "diff"}
    assert len(new) == len(re.findall(r"```python", PAGE)) == 3
    assert len(changed) == len(re.findall(r"```diff", PAGE)) == 3
