"""Owns: examples/team_in_one from the duo's stored runs to the report, on a tiny model and a stand-in for its server.

- `distil`, `train` and `compare` run one after the other on the configuration as it is, in small.
- The offline phase learns from the distilled calls, and rounds go on from there.
- The report has the duo on its copied adapters, and the node, on the same tasks; the table shows quality and cost.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.chat_rig import save_chat_model
from support.distil_rig import distil_team, duo, record_team
from support.fake_vllm import FakeVllm, running
from support.paths import ROOT
from support.sample_report import bare_report

from examples.team_in_one.app import PROFILE
from examples.team_in_one.figures import report_to_table
from graphs import math_duo
from marft_bridge.common.progress import Reporter
from marft_bridge.comparison.command import compare
from marft_bridge.comparison.records import Contrast, Variant
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


def test_the_table_has_what_each_team_is_worth_and_costs() -> None:
    def contrast(variant: str, metric: str, a: float, b: float) -> Contrast:
        interval = (b - a - 0.25, b - a + 0.25)
        test = {"n": 96, "clusters": 48, "p_value": 1, "p_adjusted": 1, "test": "t"}
        means = {"mean_a": a, "mean_b": b, "diff": b - a, "ci95": interval, "simultaneous": interval}
        return Contrast.model_validate({"variant": variant, "metric": metric, **means, **test})

    variants = tuple(Variant(name=name, episodes=96, unscored=0, score=None) for name in ("team", "raw", "in one"))
    report = bare_report().model_copy(
        update={
            "metric": "correct",
            "base": "team",
            "variants": variants,
            "contrasts": (contrast("raw", "correct", 0.75, 0.125), contrast("in one", "correct", 0.75, 0.5)),
            "secondary": (
                contrast("raw", "steps", 2, 1),
                contrast("in one", "steps", 2, 1),
                contrast("in one", "tokens", 27.5, 37),
                contrast("raw", "seconds", 1.5, 0.5),
                contrast("in one", "seconds", 1.5, 1),
            ),
        }
    )
    assert report_to_table(report).splitlines() == [
        "| team | correct | calls a run | sampled tokens a run | seconds a run |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| team | 0.750 | 2.0 | 27.5 | 1.50 |",
        "| raw | 0.125 (-0.625, -0.875 to -0.375) | 1.0 (-1.0, -1.2 to -0.8) | - | 0.50 (-1.00, -1.25 to -0.75) |",
        "| in one | 0.500 (-0.250, -0.500 to +0.000) | 1.0 (-1.0, -1.2 to -0.8) | 37.0 (+9.5, +9.2 to +9.8) | "
        "1.00 (-0.50, -0.75 to -0.25) |",
    ]


def test_the_script_runs_the_commands_of_a_user_one_after_the_other_on_one_server(tmp_path: Path) -> None:
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(f"""#!/bin/sh
echo "$*" >> {log}
case "$*" in *" serve "*) while [ "$1" != -- ]; do shift; done; shift; exec "$@";; esac
""")
    python.chmod(0o700)
    variables = {"PYTHON": str(python), "RUN": "runs/one", "PATH": os.environ["PATH"]}
    subprocess.run(["sh", "examples/team_in_one/run.sh", "runs/duo"], check=True, cwd=ROOT, env=variables)
    options = "--config examples/team_in_one/bridge.toml --run runs/one"
    assert log.read_text().splitlines() == [
        f"-m marft_bridge distil runs/duo --into solver {options}",
        f"-m marft_bridge serve {options} -- sh examples/team_in_one/run.sh",
        f"-m marft_bridge train {options}",
        f"-m marft_bridge compare {options}",
        "-m examples.team_in_one.figures runs/one",
    ]


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
    rows = report_to_table(report).splitlines()[2:]
    assert [row.split(" |")[0] for row in rows] == ["| team", "| untrained", "| in one"]
    assert "| 2.0 |" in rows[0]
    assert "| 1.0 (-1.0, -1.0 to -1.0) |" in rows[2]
