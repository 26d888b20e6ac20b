"""Owns: the numbers of a report are those of the stored episodes. Their statistics are in test_statistics*.py.

Checked against values worked out by hand from the answers that the test's own script gives.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.compare_rig import NODES, Lab, lab_in
from support.sessions import session_of

from marft_bridge.commands.collect import collect
from marft_bridge.common.errors import ConfigError
from marft_bridge.common.progress import Reporter
from marft_bridge.comparison import command
from marft_bridge.comparison.contrasts import pairs_to_power
from marft_bridge.comparison.outcomes import Outcome, Pair, pair_outcomes, read_outcomes
from marft_bridge.comparison.records import Report
from marft_bridge.rollouts.app import load_app
from marft_bridge.rollouts.episode_plan import plan_episodes
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.statistics import SIGN_FLIP, SIGNED_RANK
from trace_store.records import Episode, Reward, Trajectory
from trace_store.store import TraceStore

BEFORE = {"name": "before"}
AFTER = {"name": "after", "adapters": "newest"}
HOSTED = {"name": "hosted", "own_models": True}


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with lab_in(tmp_path) as found:
        yield found


class Numbered:
    """Answers by the place of a task in the comparison: its number, from 0, in the order in which tasks first came."""

    def __init__(self) -> None:
        self.places: dict[int, int] = {}

    def __call__(self, model: str, number: int) -> str:
        place = self.places.setdefault(number, len(self.places))
        if model == "actor@2" and place == 7:
            return "crash"
        if model.startswith("reasoner"):
            return "think" if model.endswith("@0") else "ok"
        return "yes" if place in ((0, 1) if model == "actor@0" else range(1, 6)) else "none"

    def tasks(self, *places: int) -> list[str]:
        """Ids of the tasks at these places."""
        return sorted(f"t{number}" for number, place in self.places.items() if place in places)


def test_the_report_holds_what_the_answers_come_to(lab: Lab) -> None:
    """Tasks 0 to 7. Before, 0 and 1 come out right; after, 1 to 5; after, task 7 crashes."""
    lab.answer = answer = Numbered()
    report = lab.compare(tasks=8, in_flight=1)
    # Tasks 0 to 6 are pairs: 2 of 7 right before, 5 of 7 after; task 0 lost, tasks 2 to 5 won.
    (main,) = report.contrasts
    assert (main.variant, main.metric, main.n, main.clusters) == ("after", "correct", 7, 7)
    assert main.mean_a == pytest.approx(2 / 7)
    assert main.mean_b == pytest.approx(5 / 7)
    # McNemar's exact test on 1 loss and 4 wins: 2 x P(X <= 1), X ~ B(5, 1/2) = 2 x 6/32. One candidate: no correction.
    assert main.p_value == main.p_adjusted == pytest.approx(12 / 32)
    assert main.simultaneous == main.ci95
    before, after = report.variants
    assert before.score is not None
    assert after.score is not None
    assert before.score.mean == pytest.approx(2 / 8)  # all that have a score, also the one without a partner
    assert after.score.mean == pytest.approx(5 / 7)
    assert (after.episodes, after.unscored) == (8, 1)
    metrics = ("correct", "reward", "seconds", "steps", "tokens")
    assert (before.measured, after.measured) == (dict.fromkeys(metrics, 8), dict.fromkeys(metrics, 7))
    # A test that nobody asked for yet, a gate's margin, needs the tasks: 1 lost, 4 won, 2 alike.
    assert main.task_differences is not None
    assert main.task_differences.rows == ((-1.0, 1, 1), (0.0, 1, 2), (1.0, 1, 4))
    assert main.task_differences.value_range == 1

    # Answers are as many ids as bytes, and one that ends the turn.
    reasoner, actor = report.nodes["reasoner"], report.nodes["actor"]
    assert (reasoner["before"].tokens_mean, reasoner["after"].tokens_mean) == (6.0, 3.0)  # "think", "ok"
    assert actor["before"].tokens_mean == pytest.approx((2 * 4 + 6 * 5) / 8)
    assert actor["after"].tokens_mean == pytest.approx((5 * 4 + 2 * 5) / 7)
    assert (actor["after"].calls_per_episode, actor["after"].stop_share) == (1.0, 1.0)

    others = {row.metric: row for row in report.secondary}
    assert list(others) == ["reward", "tokens", "steps", "seconds"]
    spans = {name: row.task_differences.value_range for name, row in others.items() if row.task_differences is not None}
    assert (spans["steps"], spans["reward"]) == (2.0, 1.0)  # a cost begins at 0
    assert (others["steps"].mean_a, others["steps"].diff, others["steps"].p_adjusted) == (2.0, 0.0, 1.0)
    assert others["tokens"].mean_a == pytest.approx(6 + (2 * 4 + 5 * 5) / 7)
    assert others["tokens"].mean_b == pytest.approx(3 + (5 * 4 + 2 * 5) / 7)
    # -2, -3 (twice) and -4 (four times): seven tasks on one side, whose ranks have one pattern as far out on each.
    assert (others["tokens"].test, others["tokens"].p_value) == (SIGNED_RANK, 2 / 2**7)
    assert others["reward"].test == SIGN_FLIP
    assert others["reward"].mean_a == pytest.approx((2 / 7 + 1) / 2)  # half a point for "think"
    assert others["reward"].mean_b == pytest.approx(5 / 14)
    assert all(row.p_adjusted >= row.p_value for row in report.secondary)

    (changed,) = report.tasks
    assert [change.task_id for change in changed.improved] == answer.tasks(2, 3, 4, 5)
    (lost,) = changed.regressed
    assert lost.task_id == answer.tasks(0)[0]
    assert (lost.reward_a, lost.reward_b, lost.a.reward, lost.b.reward) == (1.0, 0.0, 1.0, 0.0)
    assert [(s.kind, s.node, s.adapter, s.text, s.tokens) for s in lost.a.steps] == [
        ("call", "reasoner", "reasoner@0", "think", 6),
        ("call", "actor", "actor@0", "yes", 4),
    ]
    assert [(s.node, s.text) for s in lost.b.steps] == [("reasoner", "ok"), ("actor", "none")]
    assert (lost.a.variant, lost.b.variant) == ("before", "after")
    assert (report.setup.tasks, report.setup.samples_per_task, report.setup.temperature) == (8, 1, 1.0)
    assert report.setup.minutes is not None
    assert Report.model_validate_json((lab.run / "report.json").read_text()) == report


def test_ranks_are_those_that_were_asked_for_and_a_name_that_was_not_measured_is_said(lab: Lab) -> None:
    lab.answer = Numbered()
    report = lab.compare(tasks=8, in_flight=1, ranks=["reward", "smiles"])
    assert {row.metric: row.test for row in report.secondary if row.test == SIGNED_RANK} == {"reward": SIGNED_RANK}
    assert "after: compare.ranks names 'smiles', which both sides of no pair have" in lab.said


@pytest.mark.slow
def test_candidates_share_one_error_and_secondary_metrics_theirs(lab: Lab) -> None:
    """Of 12 tasks `after` is right on all, `one` on the even places, the base on none."""
    places: dict[int, int] = {}

    def answer(model: str, number: int) -> str:
        place = places.setdefault(number, len(places))
        return "yes" if model == "actor@2" or (model == "actor@1" and place % 2 == 0) else "no"

    lab.answer = answer
    report = lab.compare(BEFORE, AFTER, {"name": "one", "adapters": 1}, tasks=12, in_flight=1)
    after, one = report.contrasts
    # 12 wins: 2 / 2^12. 6 wins: 2 / 2^6. Holm: the smaller one twice, then the larger one once.
    assert (after.p_value, one.p_value) == (2 / 2**12, 2 / 2**6)
    assert (after.p_adjusted, one.p_adjusted) == (4 / 2**12, 2 / 2**6)
    assert one.simultaneous[0] <= one.ci95[0] <= one.diff <= one.ci95[1] <= one.simultaneous[1]
    assert (after.outcome, one.outcome) == ("higher", "higher")
    assert report.verdict == "after is better than before; one is better than before (correct)"


def test_samples_of_a_task_make_pass_at_k_and_avg_at_k(lab: Lab) -> None:
    """Two samples of each of four tasks; right once in the first task, twice in the second, never in the others."""
    places: dict[int, int] = {}
    calls: dict[tuple[str, int], int] = {}

    def answer(model: str, number: int) -> str:
        place = places.setdefault(number, len(places))
        call = calls[model, number] = calls.get((model, number), -1) + 1
        return "yes" if model.startswith("actor") and (place, call) in ((0, 1), (1, 0), (1, 1)) else "no"

    lab.answer = answer
    report = lab.compare(tasks=4, samples_per_task=2, pass_at=[1, 2], in_flight=1)
    before = report.variants[0]
    # pass@1: (1/2 + 1 + 0 + 0) / 4; pass@2: (1 + 1 + 0 + 0) / 4; avg@k: mean of the tasks' means.
    assert {k: estimate.mean for k, estimate in before.pass_at.items()} == {1: 0.375, 2: 0.5}
    assert {k: estimate.mean for k, estimate in before.avg_at.items()} == {1: 0.375, 2: 0.375}
    (main,) = report.contrasts
    assert (main.n, main.clusters) == (8, 4)


def test_a_score_that_is_not_0_or_1_has_no_pass_at_k(lab: Lab) -> None:
    report = lab.compare(tasks=4, samples_per_task=2, pass_at=[2], metric="reward")
    assert report.variants[0].pass_at == {}
    assert list(report.variants[0].avg_at) == [2]


@pytest.mark.slow
def test_cohorts_are_of_the_tasks_fields(lab: Lab) -> None:
    report = lab.compare(tasks=24, cohorts=["topic"])
    tasks = {t.episode.task_id: t.episode.task["topic"] for t in lab.stored()}
    sizes = {(c.field, c.value): c.tasks for c in report.cohorts}
    assert sizes == {("topic", value): list(tasks.values()).count(value) for value in ("even", "odd")}
    assert {row.variant for cohort in report.cohorts for row in cohort.contrasts} == {"after"}


@pytest.mark.slow
def test_the_learning_curve_takes_rewards_from_the_store_and_figures_from_the_metrics(lab: Lab) -> None:
    quiet = Reporter(Console(quiet=True))
    config = lab.config()
    config = config.model_copy(update={"collect": config.collect.model_copy(update={"episodes": 4})})
    lab.answer = lambda model, _: "yes" if model == "actor@0" else "no"
    collect(config, quiet, resume=False)
    app, folder = load_app(config), RunFolder(lab.run)
    plan = plan_episodes(
        app.train_tasks, 2, 1, seed=0, run_id="train", split="train", adapters=dict.fromkeys(NODES, 1), round=1
    )
    with session_of(config, folder, quiet) as session:
        session.models.publish(dict.fromkeys(NODES, 1))
        session.run(plan, "train", "reward")
    lines = [{"phase": "offline", "round": 0, "replay": {"agents": {"actor": {"grad_norm": 2.0}}}}]
    lines += [{"phase": "online", "round": 1, "agents": {"actor": {"approx_kl": 0.5, "entropy": 1.0}}}]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = lab.compare(tasks=4).learning_curve
    assert (first.round, first.phase, first.episodes, first.reward_mean) == (0, "offline", 4, 0.5)
    assert (second.round, second.phase, second.episodes, second.reward_mean) == (1, "online", 2, 0.0)
    assert first.nodes == {"actor": {"grad_norm": 2.0}}
    assert second.nodes == {"actor": {"approx_kl": 0.5}}


@pytest.mark.slow
def test_the_distance_to_the_base_is_asked_for_once_all_has_run(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the variants on the base model, whole episodes, with the store free for others meanwhile."""
    seen: dict[str, int] = {}

    def kl(_config: Any, bases: Any, _registry: Any, by_variant: Any, limit: int, seed: int) -> Any:
        seen.update({name: sum(len(t.actions) for t in episodes) for name, episodes in by_variant.items()})
        with TraceStore.open(lab.run / "store.duckdb", wait_s=0):
            pass
        assert ([base.directory for base in bases], limit, seed) == ([lab.model], 7, 0)
        return {("actor", "after"): (0.5, 3), ("actor", "before"): (0.0, 4)}

    monkeypatch.setattr(command, "adapters_to_kl", kl)
    report = lab.compare(BEFORE, AFTER, lab.solo(), HOSTED | {"app": f"{lab.apps}:hosted"}, tasks=4, kl_actions=7)
    assert seen == {"before": 8, "after": 8, "one agent": 4}
    sides = report.nodes["actor"]
    assert {name: (side.kl_to_base, side.kl_actions) for name, side in sides.items()} == {
        "before": (0.0, 4),
        "after": (0.5, 3),
    }
    # Where every node is at version 0 there is nothing to ask.
    seen.clear()
    lab.compare(BEFORE, lab.solo(), tasks=4, kl_actions=7)
    assert not seen


def test_a_metric_that_no_episode_has_is_refused_with_the_reasons(lab: Lab) -> None:
    with pytest.raises(ConfigError) as caught:
        lab.compare(tasks=4, metric="safety")
    assert str(caught.value) == (
        "compare: 'after' and the base have 0 pairs with the reward 'safety', of 0 tasks; 2 tasks are needed: check "
        "compare.metric and the app; before: ended without the reward 'safety' (4); after: ended without the reward "
        "'safety' (4)"
    )


def test_what_could_be_found_counts_the_candidates_that_share_the_error() -> None:
    pairs = [pair(f"t{n}", 0.0, float(n % 3 == 0)) for n in range(30)]
    alone, shared = (pairs_to_power("b", pairs, "correct", candidates) for candidates in (1, 4))
    assert alone.effect == shared.effect == pytest.approx(1 / 3)
    assert alone.detectable is not None
    assert shared.detectable is not None
    assert alone.detectable < shared.detectable


def pair(task: str, a: float, b: float) -> Pair:
    return Pair(outcome(task, a), outcome(task, b))


def outcome(task: str, value: float) -> Outcome:
    episode = Episode(f"e-{task}", "r", task, "heldout", 0, None, "v", 1, {}, "terminated", None, 0, 1, 1)
    reward = Reward(f"e-{task}", "correct", value, "test", 0)
    return Outcome(Trajectory(episode, (), (), (reward,)), {"correct": value})


@pytest.mark.slow
def test_of_several_attempts_the_latest_with_the_metric_counts(lab: Lab) -> None:
    """A task that crashed is run again on --resume, and its second episode is the one that is compared."""
    crash = iter([True])

    def answer(model: str, number: int) -> str:
        return "crash" if model == "actor@2" and next(crash, False) else "yes" if model.startswith("actor") else "ok"

    lab.answer = answer
    first = lab.compare(tasks=5)
    assert first.variants[1].unscored == 1
    again = lab.compare(tasks=5, resume=True)
    assert (again.variants[1].unscored, again.contrasts[0].n) == (0, 5)
    assert len(lab.stored()) == 11
    tasks = [t.episode.task_id for t in lab.stored()]
    with TraceStore.open(lab.run / "store.duckdb") as store:
        found = read_outcomes(store, "compare-1", "after", "correct", [(task, 0) for task in tasks])
        base = read_outcomes(store, "compare-1", "before", "correct", [(task, 0) for task in [*tasks, "t-none"]])
    assert (len(found.scored), found.unscored) == (5, 0)
    assert base.reasons == {"no complete record of the episode": 1}
    assert len(pair_outcomes(base, found)) == 5
    assert all(not o.trajectory.actions for o in found.scored.values())  # no tokens are kept


def test_a_plan_gives_a_task_the_seed_that_it_has_in_any_other_plan() -> None:
    """What makes a resumed or enlarged comparison the same: seeds follow from task and sample only."""
    tasks = [{"id": "a"}, {"id": "b"}]
    common = {"run_id": "r", "split": "heldout", "adapters": {}}
    both = plan_episodes(tasks, 4, 2, seed=7, **common)
    second = plan_episodes(tasks[1:], 2, 2, seed=7, **common)
    assert [r.seed for r in both[2:]] == [r.seed for r in second]
