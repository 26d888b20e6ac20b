"""Owns: examples/team_in_one from the duo's stored runs to the report, on a tiny model and a stand-in for its server.

- `distil`, `train` and `compare` run one after the other on the configuration as it is, in small.
- The offline phase learns from the distilled calls, and rounds go on from there.
- The report has the duo on its copied adapters, and the node, on the same tasks.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.chat_rig import save_chat_model
from support.distil_rig import distil_team, duo, record_team
from support.fake_vllm import FakeVllm, running
from support.paths import ROOT

from examples.team_in_one.app import PROFILE
from graphs import math_duo
from marft_bridge.common.progress import Reporter
from marft_bridge.comparison.command import compare
from marft_bridge.config.bridge import BridgeConfig, toml_to_config
from marft_bridge.rollouts.app import options_to_app
from marft_bridge.runs.run_folder import read_metrics
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.serving.zero_adapter import write_zero_adapter
from marft_bridge.training.train import train
from trace_store.store import TraceStore
from trainers.common.files import weights_to_sha256

EXAMPLE = ROOT / "examples/team_in_one/bridge.toml"


def small_config(folder: Path, model: Path, server: FakeVllm) -> BridgeConfig:
    """The example's configuration, on a tiny model behind a stand-in."""
    importance = {"mismatch": "none", "proximal": "recomputed", "engine_tolerance": 1e3}
    return toml_to_config(
        EXAMPLE,
        {
            "run": str(folder),
            "model.path": str(model),
            "serve": {"attach": server.url},
            "sampling.temperature": 1.0,
            "collect.in_flight": 4,
            "train.rounds": 1,
            "train.episodes_per_round": 6,
            "train.trainer.importance": importance,
            "train.trainer.lora": {"rank": 4},
            "compare.tasks": 4,
            "compare.samples_per_task": 1,
            "compare.kl_actions": 0,
        },
    )


def small_team(folder: Path, model: Path, tasks: Sequence[dict[str, Any]]) -> None:
    """A run folder of the duo: a good run of each task, and adapters of version 2."""
    graphs = [duo(hint="Add them.", answer=str(task["answer"])) for task in tasks]
    record_team(folder, graphs, tasks=tasks, team_reward=math_duo.reward).close()
    registry = AdapterRegistry(folder / "adapters", weights_to_sha256(model))
    for node in ("reasoner", "actor"):
        write_zero_adapter(registry.new_folder(node, 2), model, ("q_proj", "v_proj"))
        registry.register(node, 2, None, metrics={})


def answer(body: dict[str, Any]) -> str:
    """The duo's actor is always right, the node on every second task, in a block and a number."""
    numbers = [int(number) for number in re.findall(r"\d+", body["messages"][1]["content"])]
    if body["model"].startswith("reasoner"):
        return "Add them."
    is_right = body["messages"][0]["content"] != PROFILE or numbers[0] % 2
    return str(sum(numbers[:2]) if is_right else 99)


@pytest.mark.slow
def test_a_team_is_distilled_trained_and_compared(tmp_path: Path) -> None:
    model = save_chat_model(tmp_path / "model")
    with running(FakeVllm()) as server:
        server.answer = answer
        config = small_config(tmp_path / "one", model, server)
        tasks = options_to_app(config.graph).train_tasks[:24]
        small_team(tmp_path / "team", model, tasks)
        said = distil_team(config, tmp_path / "team")
        assert "24 runs of" in said
        assert "24 of them good; 24 distilled" in said
        assert "the team's adapters are in" in said
        assert "actor@2, reasoner@2" in said

        text = io.StringIO()
        reporter = Reporter(Console(file=text, width=300))
        train(config, reporter, resume=False)
        assert "24 of 24 stored calls without token ids were re-tokenised for imitation" in text.getvalue()
        offline, round_1 = read_metrics(tmp_path / "one" / "metrics.jsonl")
        learned = offline["replay"]["agents"]["solver"]
        assert learned["retokenised_share"] == 1.0
        assert learned["steps"] > 0
        assert round_1["round"] == 1
        assert round_1["episodes"] == 6
        with TraceStore.open(tmp_path / "one" / "store.duckdb") as store:
            commands = {run.run_id: run.command for run in store.runs()}
        assert commands == {"distil-1": "distil", "train": "train"}

        report = compare(config, reporter, resume=False)
    assert [variant.name for variant in report.variants] == ["team", "untrained", "in one"]
    correct, tokens = report.contrast("in one", "correct"), report.contrast("in one", "tokens")
    assert correct is not None
    assert tokens is not None
    assert correct.diff < 0 > tokens.diff, "one call is cheaper, and this one is wrong on some tasks"
