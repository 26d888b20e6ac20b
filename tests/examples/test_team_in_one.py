"""Owns: examples/team_in_one from the duo's stored runs to the report, on a tiny model and a stand-in for its server.

- `distil`, `train` and `compare` run one after the other on the configuration as it is, in small.
- The offline phase learns from the distilled calls, and rounds go on from there.
- The report has the duo on its copied adapters, and the node, on the same tasks; the table shows quality and cost.
- No task that is held out is one that the duo or the node is trained on, up to names, things and the order of numbers.
- The node depends on nobody and sees the question only; its rewards are those worked out by hand.
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
from support.edge_rig import recorded_edges, recorded_trajectories, run_recorded
from support.fake_vllm import FakeVllm, running
from support.pages.zoo_page import config_to_entry, entries_to_page
from support.paths import ROOT
from support.sample_report import bare_report

from examples.team_in_one.app import PROFILE
from examples.team_in_one.figures import report_to_parts, report_to_table, run_to_line
from examples.team_in_one.tasks import HELDOUT
from examples.zoo.run import EXPECTED
from graphs import math_duo
from marft_bridge.common.progress import Reporter
from marft_bridge.comparison.command import compare
from marft_bridge.comparison.records import Contrast, Variant
from marft_bridge.config.bridge import BridgeConfig, toml_to_config
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.rollouts.app import options_to_app
from marft_bridge.runs.run_folder import read_metrics
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.serving.zero_adapter import write_zero_adapter
from marft_bridge.training.train import train
from trace_store.journal import Journal
from trace_store.store import TraceStore
from trainers.common.files import weights_to_sha256

EXAMPLE = ROOT / "examples/team_in_one/bridge.toml"
DEMO = ROOT / "examples/math_duo/bridge.toml"


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
            "compare.tasks": 8,
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
    """The duo's actor is always right, the node unless the first number is a multiple of 3."""
    numbers = [int(number) for number in re.findall(r"\d+", body["messages"][1]["content"])]
    if body["model"].startswith("reasoner"):
        return "Add them."
    is_right = body["messages"][0]["content"] != PROFILE or numbers[0] % 3
    return str(sum(numbers[:2]) if is_right else 99)


def question_to_key(question: str) -> tuple[str, tuple[str, ...]]:
    """A question without its names and things, and its numbers in order of size. Worked out from the words alone."""
    words = "|".join((*math_duo.NAMES, *math_duo.OBJECTS))
    wording = re.sub(r"\d+", "#", re.sub(rf"\b({words})\b", "_", question))
    return wording, tuple(sorted(re.findall(r"\d+", question)))


def keys(tasks: Sequence[dict[str, Any]]) -> list[tuple[str, tuple[str, ...]]]:
    return [question_to_key(task["question"]) for task in tasks]


def test_no_task_that_is_held_out_is_trained_on_in_another_order_or_under_other_names() -> None:
    config, demo_config = toml_to_config(EXAMPLE), toml_to_config(DEMO)
    app, demo = options_to_app(config.graph), options_to_app(demo_config.graph)
    assert config.graph.heldout == demo_config.graph.heldout == HELDOUT
    assert list(app.train_tasks) == list(demo.train_tasks), "what the duo was trained on is what the node learns from"
    assert all(task in demo.heldout_tasks for task in app.heldout_tasks)
    held_out = keys(app.heldout_tasks)
    assert not set(held_out) & {*keys(demo.train_tasks), *keys(app.train_tasks)}
    assert len(set(held_out)) == len(held_out) == config.compare.tasks == 33, "no two of them are alike either"
    # Nothing else was left out: every other held-out task of the duo is like one that is there.
    assert set(keys(demo.heldout_tasks)) <= {*held_out, *keys(app.train_tasks)}


def test_the_duo_is_compared_under_the_limit_that_it_was_trained_with_and_the_node_under_its_own() -> None:
    config, demo = toml_to_config(EXAMPLE), toml_to_config(DEMO)
    limits = {variant.name: variant.max_tokens for variant in config.compare.variants}
    assert limits == {"team": demo.sampling.max_tokens, "untrained": None, "in one": None}
    assert (demo.sampling.max_tokens, config.sampling.max_tokens) == (24, 64)


def test_the_pages_of_the_demo_say_how_many_of_its_held_out_tasks_are_like_a_training_task() -> None:
    demo = options_to_app(toml_to_config(DEMO).graph)
    trained, held_out = set(keys(demo.train_tasks)), keys(demo.heldout_tasks)
    alike = sum(key in trained for key in held_out)
    assert (alike, len(held_out)) == (75, 125)
    for page in ("README.md", "docs/small-study.md", "docs/zoo.md"):
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        told = rf"of the {len(held_out)} tasks that [^.,]*, {alike} differ from a training task only in names, things"
        assert re.search(f"{told} and the order of the two numbers", text, re.IGNORECASE), page


@pytest.mark.parametrize(
    ("answer", "correct", "reward"),
    [
        ("<reasoner>\nAdd 4 to 3.\n</reasoner>\n7", 1.0, 1.0),  # what distil makes of a good run of the duo
        ("<reasoner>\nIt is 7.\n</reasoner>\n8", 0.0, 0.1),  # the hint is right, the number behind it is not
        ("<reasoner>\n3 + 4 = 7\n</reasoner>\nDone.", 1.0, 1.0),  # the last number counts, wherever it stands
        ("<reasoner>\nAdd 4 to 3.\n</reasoner>", 0.0, 0.0),  # cut short: the last number is the question's
        ("7 apples, or 8", 0.0, 0.1),
        ("seven", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_the_node_depends_on_nobody_and_earns_what_was_worked_out_by_hand(
    answer: str, correct: float, reward: float, tmp_path: Path
) -> None:
    config, task = toml_to_config(EXAMPLE), {"id": "t", "question": "What is 3 + 4?", "answer": 7}
    app = options_to_app(config.graph)
    assert app.reward is not None
    recorder = Recorder(Journal(tmp_path / "journal"))
    policy = ScriptedPolicy(answers={"solver": [answer]})
    result = run_recorded(app.build(policy), app.task_to_input(task), recorder)
    assert app.reward(task, result) == {"correct": correct, "reward": reward}
    assert recorded_edges(recorder) == {}
    (trajectory,) = recorded_trajectories(recorder)
    assert [action.node for action in trajectory.actions] == ["solver"]
    assert trajectory.edges == ()
    (call,) = policy.asked
    assert call.prompt == f"system: {PROFILE}\nhuman: What is 3 + 4?\nai: "


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
    assert report_to_parts(report) == [
        "the team has correct 0.750, the trained node -0.250 against it (95 % -0.500 to +0.000)",
        "team to node: calls a run 2.0 -> 1.0, sampled tokens a run 27.5 -> 37.0, seconds a run 1.50 -> 1.00",
    ]
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
    run = tmp_path / "one"
    variables = {"PYTHON": str(python), "RUN": str(run), "PATH": os.environ["PATH"]}
    subprocess.run(["sh", "examples/team_in_one/run.sh", "runs/duo"], check=True, cwd=ROOT, env=variables)
    options = f"--config examples/team_in_one/bridge.toml --run {run}"
    assert log.read_text().splitlines() == [
        f"-m marft_bridge distil runs/duo --into solver {options}",
        f"-m marft_bridge serve {options} -- sh examples/team_in_one/run.sh",
        f"-m marft_bridge train {options}",
        f"-m marft_bridge compare {options}",
        f"-m examples.team_in_one.figures {run}",
    ]

    (run / "adapters").mkdir(parents=True)
    for argv, reason in (["runs/duo"], f"{run} is begun already"), ([], "name the run folder of a trained team"):
        script = ["sh", "examples/team_in_one/run.sh", *argv]
        refused = subprocess.run(script, check=False, cwd=ROOT, env=variables, capture_output=True, text=True)
        assert refused.returncode != 0
        assert reason in refused.stderr
    assert len(log.read_text().splitlines()) == 5, "nothing was begun"


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
    asked = {(str(body["model"]).partition("@")[0], body["max_tokens"]) for body in server.asked}
    assert asked == {("reasoner", 24), ("actor", 24), ("solver", 64)}
    assert [variant.max_tokens for variant in report.variants] == [24, None, None]
    correct, tokens = report.contrast("in one", "correct"), report.contrast("in one", "tokens")
    assert correct is not None
    assert tokens is not None
    assert correct.diff < 0 > tokens.diff, "one call is cheaper, and this one is wrong on some tasks"
    rows = report_to_table(report).splitlines()[2:]
    assert [row.split(" |")[0] for row in rows] == ["| team", "| untrained", "| in one"]
    assert "| 2.0 |" in rows[0]
    assert "| 1.0 (-1.0, -1.0 to -1.0) |" in rows[2]

    line = run_to_line(tmp_path / "one", report)
    assert re.match(r"correct 0\.\d+ -> 0\.\d+ on 8 held-out tasks \(", line)
    assert "; the team has correct 1.000, the trained node -" in line
    assert "; team to node: calls a run 2.0 -> 1.0, sampled tokens a run " in line
    path = tmp_path / "bridge.toml"
    path.write_text(EXPECTED.sub(lambda _: f"# Expected: {line}", EXAMPLE.read_text(), count=1))
    assert f"| [{tmp_path.name}](#{tmp_path.name}) | correct | " in entries_to_page([config_to_entry(path)])
