"""Whole runs with several learners: how they are configured, and one that is trained from its start to its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.school_rig import School, school_in

OPTIONS: dict[str, Any] = {"rounds": 2, "trainer": {"replay": {"share": 0.5}, "importance": {"mismatch": "truncate"}}}


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> School:
    folder.mkdir()
    with school_in(folder, monkeypatch) as school:
        school.collect()
        school.train(without_signal=True, **OPTIONS, **options)
    return school


TOML = """
run = "{run}"
[graph]
app = "{apps}:duo"
nodes = ["reasoner", "actor"]
tasks = "{tasks}"
task_to_input = "{apps}:to_input"
reward = "{apps}:reward"
heldout = 0.25
[model]
path = "{model}"
[serve]
attach = "{url}"
[sampling]
max_tokens = 8
[collect]
episodes = 20
in_flight = 4
[train]
rounds = 2
episodes_per_round = 6
[train.trainer]
lora = {{ rank = 4 }}
importance = {{ mismatch = "truncate", engine_tolerance = 1000.0 }}
replay = {{ share = 0.5 }}
"""
