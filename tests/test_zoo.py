"""Owns: what all graphs of the zoo have in common, and the rig that their own tests train them with.

- Every file of examples/zoo/ is a configuration as it stands, says what figures to expect, and keeps whole tasks apart.
- The rig trains: where reward depends on what a node says, its adapter is pulled towards what paid; without a
  learning rate worth its name nothing moves.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import Answer
from zoo_rig import ROOT, ZOO, train_zoo

from marft_bridge.config import toml_to_config
from marft_bridge.engine import load_app

FILES = sorted(ZOO.glob("*.toml"))
DUO = ROOT / "examples/math_duo/bridge.toml"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_configuration_of_the_zoo_loads_with_enough_different_tasks(path: Path) -> None:
    config = toml_to_config(path)
    app = load_app(config)
    ids = [str(task["id"]) for task in (*app.train_tasks, *app.heldout_tasks)]
    assert len(set(ids)) == len(ids) >= 100
    assert len(app.heldout_tasks) >= 20
    assert re.search(r"^# Expected: \S", path.read_text(), re.MULTILINE)


def sometimes_right(node: str, messages: list[dict[str, Any]], chance: random.Random) -> Answer:
    """A reasoner that always says the same, and an actor that is right half the time."""
    if node == "reasoner":
        return "add them"
    numbers = [int(number) for number in re.findall(r"\d+", str(messages[1]["content"]).split("\n")[0])]
    return str(sum(numbers[:2]) + (chance.random() < 0.5))


def test_training_pulls_a_node_towards_what_paid(tmp_path: Path) -> None:
    trained = train_zoo(DUO, sometimes_right, tmp_path)
    assert [row["round"] for row in trained.rounds] == [0, 1, 2]
    assert (len(trained.collected), len(trained.trained)) == (8, 16)
    assert min(trained.norms.values()) > 0
    assert trained.pull("actor") > 0.2


def test_without_learning_nothing_moves(tmp_path: Path) -> None:
    trained = train_zoo(DUO, sometimes_right, tmp_path, changes={"train.trainer.lr": 1e-12})
    assert max(trained.norms.values()) < 1e-8
