"""Owns: docs/metrics.md explains every figure that the trainer returns, and no figure that it does not; and every
logger that takes them elsewhere."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
import torch
from support.paths import ROOT
from support.tiny_policy import AGENTS, play, save_tiny_llama
from support.trainer_options import trainer_options

from marft_bridge.config.loggers import LOGGERS
from marft_bridge.training.forecast import Forecast, NodeForecast
from marft_bridge.training.tree_metrics import round_to_tree_metrics
from trace_store.records import Action
from trainers.marft import MarftTrainer

PAGE = (ROOT / "docs/metrics.md").read_text()
EXPLAINED = set(re.findall(r"`([a-z_]+)`", PAGE))
OF_THE_LINE = {
    "phase",
    "round",
    "served",
    "staleness",
    "best",
    "signal",
    "wasted_rollouts",
    "progress",
    "trees",
    "teacher",
    "hosted",
}  # what `train` adds
OF_THE_STRUCTURE = {"agents", "critic", "critics", "adapter", "mode", "used", "warm_up", "replay"}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one trainer returns of its offline phase, of a round, and of one that a teacher scored."""
    folder = save_tiny_llama(tmp_path_factory.mktemp("model"))
    trainer = MarftTrainer(trainer_options(device="cpu", threads=1), folder, AGENTS, seed=0)
    played = play(trainer, 8, torch.Generator().manual_seed(0), same_half)
    lines = {"warm_up": trainer.warm_up(played), "replay": trainer.replay(played), "update": trainer.update(played)}
    teacher = save_tiny_llama(tmp_path_factory.mktemp("teacher"), seed=1)
    return lines | {"distil_on_policy": trainer.distil_on_policy(played, teacher)}


def same_half(first: Action, second: Action) -> float:
    """A reward that some episodes earn."""
    return float((sum(first.sampled_ids or ()) < 16) == (sum(second.sampled_ids or ()) < 16))


def figures(line: dict[str, Any]) -> set[str]:
    """The names in a line, of its agents and critics too, but for the agents' own names and the reasons of drops."""
    agents = [agent for agent in line.get("agents", {}).values() if isinstance(agent, dict)]
    return set(line).union(line.get("critic", {}), *agents)


def test_every_figure_is_explained(lines: dict[str, Any]) -> None:
    found = set().union(*map(figures, lines.values()))
    assert {"approx_kl", "explained_variance", "coefficient_mean"} <= found
    assert found - OF_THE_STRUCTURE - EXPLAINED == set()


def test_every_figure_that_heads_a_row_is_returned(lines: dict[str, Any]) -> None:
    rows = re.findall(r"^\| (`.+?`(?:, `.+?`)*) \|", PAGE, flags=re.MULTILINE)
    headed = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert len(headed) > 25
    returned = set().union(*(figures(lines[name]) for name in ("update", "replay", "distil_on_policy")))
    assert headed - returned - OF_THE_LINE - {"critic"} == set()


def test_every_figure_about_trees_is_explained() -> None:
    assert set(round_to_tree_metrics([], [], 4, "reward", stored=True)) <= EXPLAINED


def test_every_field_of_the_forecast_is_explained() -> None:
    (section,) = re.findall(r"^## The forecast$(.*?)^## ", PAGE, flags=re.MULTILINE | re.DOTALL)
    named = {field.name for record in (Forecast, NodeForecast) for field in fields(record)}
    assert named | {"phase", "lines", "without_signal"} == set(re.findall(r"`([a-z_]+)`", section)) - {"shaping"}


def test_every_logger_and_its_options_are_explained() -> None:
    section = PAGE.partition("\n## Loggers\n")[2]
    options = {option for table in LOGGERS.values() for option in table.model_fields} - {"name"}
    assert {"mode", "tracking_uri", "space"} <= options
    assert [word for word in (*LOGGERS, *options) if not re.search(rf"[`\"{{ ]{word}\b", section)] == []
