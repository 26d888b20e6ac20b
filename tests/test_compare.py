"""Owns: the comparison's report is made of the right episodes. Its statistics are in test_statistics.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from duo_rig import TASKS, Rig

from marft_bridge.compare import AFTER, BEFORE, episodes_to_report
from marft_bridge.config import BridgeConfig
from marft_bridge.errors import ConfigError
from marft_bridge.progress import Reporter
from marft_bridge.rollouts import plan_episodes
from marft_bridge.run_folder import RunFolder

SIDES = {BEFORE: {"reasoner": 0, "actor": 0}, AFTER: {"reasoner": 2, "actor": 2}}
CONFIG = BridgeConfig.model_validate(
    {"graph": {"app": "m:b", "nodes": ["reasoner", "actor"], "tasks": "t.jsonl", "reward": "m:r"}}
)


class Sides(Rig):
    """Tasks 0 to 7. Before, tasks 0 and 1 come out right; after, tasks 1 to 5; after, task 7 crashes."""

    def __init__(self, folder: Path) -> None:
        self.side = BEFORE
        super().__init__(folder, self.answer)
        plan = plan_episodes(TASKS, 8, 1, seed=0, run_id="compare-1", split="heldout", adapters={})
        for name, adapters in SIDES.items():
            self.side = name
            self.run([replace(request, variant=name, adapters=adapters) for request in plan])

    def answer(self, node: str, prompt: str, _random: Any) -> str:
        number = int(prompt.split("human: ")[1].split(" ")[0])
        if self.side == AFTER and number == 7:
            raise ConnectionResetError("cut")
        if node == "reasoner":
            return "think" if self.side == BEFORE else "ok"
        right = number in ((0, 1) if self.side == BEFORE else range(1, 6))
        return str(number + 1) if right else "none"


def test_the_report_pairs_tasks_and_leaves_out_what_has_no_reward_on_one_side(tmp_path: Path) -> None:
    rig = Sides(tmp_path)
    with rig.store() as store:
        report = episodes_to_report(CONFIG, RunFolder(tmp_path), store, "compare-1", SIDES, 0.0, Reporter())
    # Tasks 0 to 6 are pairs: 2 of 7 right before, 5 of 7 after; task 0 lost, tasks 2 to 5 won.
    assert (report.n, report.clusters, report.metric) == (7, 7, "correct")
    assert report.mean_a == pytest.approx(2 / 7)
    assert report.mean_b == pytest.approx(5 / 7)
    # McNemar's exact test on 1 loss and 4 wins: 2 x P(X <= 1), X ~ B(5, 1/2) = 2 x 6/32.
    assert report.p_value == pytest.approx(12 / 32)
    assert [change.task_id for change in report.tasks.improved] == ["t2", "t3", "t4", "t5"]
    (lost,) = report.tasks.regressed
    assert (lost.task_id, lost.text, lost.expected) == ("t0", "0 + 1?", "1")
    assert [(o.node, o.text) for o in lost.outputs_a] == [("reasoner", "think"), ("actor", "1")]
    assert [(o.node, o.text) for o in lost.outputs_b] == [("reasoner", "ok"), ("actor", "none")]

    # "think" and "ok" are 5 and 2 bytes, and each answer ends with one more id.
    reasoner = report.nodes["reasoner"]
    assert reasoner.a is not None
    assert reasoner.b is not None
    assert (reasoner.a.tokens_mean, reasoner.b.tokens_mean) == (6.0, 3.0)
    assert (reasoner.a.stop_share, reasoner.a.calls_per_episode, reasoner.a.logprob_mean) == (1.0, 1.0, -1.0)
    others = {metric.metric: metric for metric in report.metrics}
    assert set(others) == {"reward", "tokens", "steps", "seconds"}
    assert (others["steps"].mean_a, others["steps"].diff) == (2.0, 0.0)
    # Actor before: two digits ("1", "2") and five times "none"; after: five digits and twice "none".
    assert others["tokens"].mean_a == pytest.approx(6 + (2 * 2 + 5 * 5) / 7)
    assert others["tokens"].mean_b == pytest.approx(3 + (5 * 2 + 2 * 5) / 7)


def test_the_learning_curve_takes_rewards_from_the_store_and_figures_from_the_metrics(tmp_path: Path) -> None:
    rig = Sides(tmp_path)
    plan = plan_episodes(TASKS[:4], 4, 1, seed=0, split="train", adapters={"reasoner": 0, "actor": 0}, run_id="collect")
    rig.side = BEFORE
    rig.run(plan)
    rig.run([replace(request, run_id="train", round=1) for request in plan[:2]])
    lines = [{"phase": "offline", "round": 0, "replay": {"agents": {"actor": {"grad_norm": 2.0}}}}]
    lines += [{"phase": "online", "round": 1, "agents": {"actor": {"approx_kl": 0.5, "entropy": 1.0}}}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with rig.store() as store:
        report = episodes_to_report(CONFIG, RunFolder(tmp_path), store, "compare-1", SIDES, 0.0, Reporter())
    first, second = report.learning_curve
    assert (first.round, first.phase, first.episodes, first.reward_mean) == (0, "offline", 4, 0.5)
    assert (second.round, second.phase, second.episodes, second.reward_mean) == (1, "online", 2, 1.0)
    assert first.nodes == {"actor": {"grad_norm": 2.0}}
    assert second.nodes == {"actor": {"approx_kl": 0.5}}


def test_a_metric_that_no_episode_has_is_refused(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"compare": CONFIG.compare.model_copy(update={"metric": "safety"})})
    with Sides(tmp_path).store() as store, pytest.raises(ConfigError, match="0 pairs have the reward 'safety'"):
        episodes_to_report(config, RunFolder(tmp_path), store, "compare-1", SIDES, 0.0, Reporter())
