"""A game of two sides in the school: its reward, and rounds against earlier versions."""

from __future__ import annotations

from typing import Any

SIDES = {"left": ("reasoner",), "right": ("actor",)}

GAME: dict[str, Any] = {
    "sides": {side: list(nodes) for side, nodes in SIDES.items()},
    "shaping": [{"reward": "own", "level": "agent", "weight": 1.0}],
    "advantage": {"estimator": "dr_mas"},
}


REWARD = """

def game(task, result):
    chips = float(result["log"][-1] == "yes") - 0.5
    return {"correct": chips + 0.5, "reward": 0.0, "own": {"agent:reasoner": -chips, "agent:actor": chips}}
"""


OPTIONS: dict[str, Any] = {
    "rounds": 3,
    "episodes_per_round": 16,
    "samples_per_task": 2,
    "league": {"share": 0.7, "versions": 2},
    "trainer": {**GAME, "offline": {"mode": "off"}},
}
