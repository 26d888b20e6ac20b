"""Owns: what was measured at calls becomes shares, differences and findings, per node and per call.

- A node's figures are the sum over its calls and the difference at its first; a run without a call of it counts 0.
- Intervals hold as often as they say, and an idle agent is seldom called anything else.
- What was measured too little has no figure, and what never changed no share.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from marft_bridge.fork_credit.estimates import Estimate, ForkCredit, MeasuredCall, MeasuredRun, runs_to_credits
from marft_bridge.statistics.decided_variance import decided_variance

NODES = ("helper", "idler", "harmer")


def judge(
    runs: Sequence[MeasuredRun], nodes: Sequence[str] = NODES, min_contribution: float = 0.2
) -> tuple[dict[str, ForkCredit], dict[tuple[str, int | None], ForkCredit]]:
    credit = runs_to_credits(runs, nodes, score_range=1.0, min_contribution=min_contribution, seed=0)
    return {each.node: each for each in credit[0]}, {(each.node, each.number): each for each in credit[1]}


def figure(credit: ForkCredit, name: str) -> Estimate:
    estimate = getattr(credit, name)
    assert isinstance(estimate, Estimate)
    return estimate


def test_a_nodes_figures_are_the_sum_of_its_calls_and_the_difference_at_its_first() -> None:
    twice = [MeasuredCall("a", 1, 0.1, 0.5), MeasuredCall("b", 1, 0.0, 0.0), MeasuredCall("a", 2, 0.2, 0.25)]
    runs = [
        MeasuredRun("e1", "t1", 0.5, twice),
        MeasuredRun("e2", "t2", 0.5, [MeasuredCall("b", 1, 0.0, 0.0)]),
        MeasuredRun("e3", "t3", 0.2, [MeasuredCall("a", 1, 0.3, 0.0), MeasuredCall("b", 1, 0.0, 0.0)]),
    ]
    nodes, calls = judge(runs, ("a", "b"))
    whole, first, second = nodes["a"], calls["a", 1], calls["a", 2]
    assert figure(whole, "decided").mean == pytest.approx((0.3 + 0.0 + 0.3) / 3)
    assert figure(whole, "share").mean == pytest.approx(0.6 / 1.2)
    assert figure(whole, "difference").mean == pytest.approx(0.5 / 3)
    assert figure(first, "decided").mean == pytest.approx(0.2)
    assert figure(first, "share").mean == pytest.approx(0.4 / 0.7)
    assert (figure(first, "decided").runs, first.calls) == (2, pytest.approx(2 / 3))
    assert (figure(second, "decided").low, figure(second, "decided").tasks) == (None, 1)
    assert whole.calls == 1.0


def test_what_never_changed_is_bounded_and_what_was_not_measured_has_no_figure() -> None:
    """Of 8 tasks a share of 1 - (0.05 / 2)^(1/8) may differ unseen; a variance of rewards 0 and 1 is 1/2 at most."""
    runs = [MeasuredRun(f"e{n}", f"t{n}", 0.25, [MeasuredCall("a", 1, 0.0, 0.0)]) for n in range(8)]
    nodes, _ = judge(runs, ("a",))
    unseen = 1 - (0.05 / 2) ** (1 / 8)
    assert figure(nodes["a"], "difference").high == pytest.approx(unseen)
    assert figure(nodes["a"], "decided").high == pytest.approx(unseen / 2)
    assert figure(nodes["a"], "share").high == pytest.approx(unseen / 2 / 0.25)
    assert nodes["a"].finding == "not settled"
    unmeasured, _ = judge([MeasuredRun(f"e{n}", f"t{n}", None, [MeasuredCall("a", 1, None)]) for n in range(8)], ("a",))
    assert unmeasured["a"] == ForkCredit("a", None, 1.0, None, share=None, difference=None, finding="not settled")
    silent, _ = judge([MeasuredRun(f"e{n}", f"t{n}", 0.25, []) for n in range(8)], ("a",))
    assert silent["a"].finding == "did not act"


def test_values_that_are_all_alike_are_bounded_too_and_the_verdict_reads_the_bound() -> None:
    """Tasks that are unlike all that were seen may have any value between -1 and 1."""

    def of_value(value: float, tasks: int) -> ForkCredit:
        runs = [MeasuredRun(f"e{n}", f"t{n}", 0.5, [MeasuredCall("a", 1, 0.3, value)]) for n in range(tasks)]
        return judge(runs, ("a",))[0]["a"]

    for value, tasks in ((1.0, 3), (0.1 + 0.2, 8), (-1.0, 8)):
        unseen = 1 - (0.05 / 2) ** (1 / tasks)
        estimate = figure(of_value(value, tasks), "difference")
        assert estimate.low == pytest.approx((1 - unseen) * value - unseen)
        assert estimate.high == pytest.approx((1 - unseen) * value + unseen)
    assert [of_value(1.0, 3).finding, of_value(0.3, 8).finding] == ["not settled", "not settled"]
    assert [of_value(1.0, 8).finding, of_value(-1.0, 8).finding] == ["adds", "harmful"]
    twice = [MeasuredRun(f"e{n}", f"t{n // 2}", 0.5, [MeasuredCall("a", 1, 0.3, n % 2 - 0.5)]) for n in range(8)]
    assert figure(judge(twice, ("a",))[0]["a"], "difference").low == pytest.approx(-(1 - (0.05 / 2) ** (1 / 4)))


def test_a_few_losses_do_not_make_a_node_lazy_or_idle() -> None:
    """The bootstrap of differences that are 0 or below ends at 0, and so says nothing of what was not seen."""

    def of_losses(tasks: int, difference: float | None) -> str | None:
        """One task of them lost something; None: there is no stand-in, and what the node decides is looked at."""
        decided = [-0.5, *[0.0] * (tasks - 1)]
        differences = [None] * tasks if difference is None else [difference, *[0.0] * (tasks - 1)]
        runs = [
            MeasuredRun(f"e{n}", f"t{n}", 0.5, [MeasuredCall("a", 1, decided[n], differences[n])]) for n in range(tasks)
        ]
        return judge(runs, ("a",), min_contribution=0.2)[0]["a"].finding

    assert of_losses(2, None) == of_losses(8, None) == of_losses(2, -1.0) == of_losses(8, -0.1) == "not settled"
    assert of_losses(200, -0.1) == "lazy"
    # a share 1 - 0.05^(1/200) = 0.015 of runs may be unseen, of a variance of 1/2 at most: below 0.2 squared
    assert of_losses(200, None) == "idle"


def test_the_bound_of_values_that_are_all_alike_holds_as_often_as_it_says() -> None:
    """A difference of 1 in nine of ten tasks and of 0 in the rest, over 5 tasks: all are alike with chance 0.59."""
    chance, held = random.Random(0), 0
    for _ in range(200):
        values = [float(chance.random() < 0.9) for _ in range(5)]
        runs = [
            MeasuredRun(f"e{n}", f"t{n}", 0.5, [MeasuredCall("a", 1, 0.3, value)]) for n, value in enumerate(values)
        ]
        estimate = figure(judge(runs, ("a",))[1]["a", 1], "difference")
        assert estimate.low is not None
        assert estimate.high is not None
        held += estimate.low <= 0.9 <= estimate.high
    assert held >= 0.9 * 200


def test_a_share_without_spread_has_no_interval_unless_it_is_1_by_construction() -> None:
    alike = [MeasuredRun(f"e{n}", f"t{n}", 0.5, [MeasuredCall("a", 1, 0.25, None)]) for n in range(8)]
    share = figure(judge(alike, ("a",))[0]["a"], "share")
    assert (share.mean, share.low, share.high) == (0.5, None, None)
    varied = [replace(run, variance=0.1 * (n + 1)) for n, run in enumerate(alike)]
    all_of_it = [replace(run, calls=[MeasuredCall("a", 1, run.variance, None)]) for run in varied]
    share = figure(judge(all_of_it, ("a",))[0]["a"], "share")
    assert (share.mean, share.low, share.high) == (pytest.approx(1), None, None)
    nodes, calls = judge([replace(run, whole_nodes={"a"}) for run in all_of_it], ("a",))
    for credit in (nodes["a"], calls["a", 1]):
        share = figure(credit, "share")
        assert (share.mean, share.low, share.high) == (pytest.approx(1), pytest.approx(1), pytest.approx(1))
    seldom_whole = [*alike[:2], replace(alike[2], variance=None, calls=[MeasuredCall("a", 1, 0.3, 0.4)])]
    seldom_whole[:2] = [replace(run, calls=[MeasuredCall("a", 1, 0.0, 0.0)]) for run in alike[:2]]
    share = figure(judge(seldom_whole, ("a",))[0]["a"], "share")
    assert (share.mean, share.low, share.high, share.tasks) == (0.0, None, None, 2)


# -- a team of three, whose rewards are known ------------------------------------------------------------------------

SAMPLES = 2
HINT, POISON = 0.9, 0.5


def chance_right(hint: bool, poison: bool, ease: float) -> float:
    return ease if hint and not poison else 0.1


def play(chance: random.Random, ease: float, given: dict[str, bool], silent: str | None = None) -> float:
    """One run's reward, after these answers; `silent` says nothing."""
    hint = given.get("helper", chance.random() < HINT) and silent != "helper"
    chance.random()  # the idler, whom nobody reads
    poison = given.get("harmer", chance.random() < POISON) and silent != "harmer"
    return float(chance.random() < chance_right(hint, poison, ease))


def measured_team(tasks: int, seed: int) -> list[MeasuredRun]:
    chance = random.Random(seed)
    runs = []
    for n in range(tasks):
        ease = (0.6, 0.8, 1.0)[n % 3]
        answers = {"helper": chance.random() < HINT, "idler": True, "harmer": chance.random() < POISON}
        recorded = float(chance.random() < chance_right(answers["helper"], answers["harmer"], ease))
        given: dict[str, bool] = {}
        levels = []
        seeds = [chance.random() for _ in range(SAMPLES)]
        calls = []
        for node in NODES:
            level = [recorded, *(play(random.Random(each), ease, given) for each in seeds)]
            replaced = [play(random.Random(each), ease, given, silent=node) for each in seeds]
            levels.append((level, (sum(level[1:]) - sum(replaced)) / SAMPLES))
            given = given | {node: answers[node]}
        end = [recorded, *(play(random.Random(each), ease, given) for each in seeds)]
        for (level, difference), after, node in zip(
            levels, [*(each for each, _ in levels[1:]), end], NODES, strict=True
        ):
            calls.append(MeasuredCall(node, 1, decided_variance(level, after), difference))
        runs.append(MeasuredRun(f"e{n}", f"t{n}", decided_variance(levels[0][0], None), calls))
    return runs


def true_figures() -> dict[tuple[str, str], float]:
    """By the law of total variance, the mean over the three kinds of tasks."""
    figures = dict.fromkeys([(kind, node) for kind in ("decided", "difference") for node in NODES], 0.0)
    for ease in (0.6, 0.8, 1.0):
        clean = (1 - POISON) * ease + POISON * 0.1  # after a hint
        mean = HINT * clean + (1 - HINT) * 0.1
        figures["decided", "helper"] += HINT * (1 - HINT) * (clean - 0.1) ** 2 / 3
        figures["decided", "harmer"] += HINT * POISON * (1 - POISON) * (ease - 0.1) ** 2 / 3
        figures["difference", "helper"] += (mean - 0.1) / 3
        figures["difference", "harmer"] += (mean - (HINT * ease + (1 - HINT) * 0.1)) / 3
    return figures


def test_the_figures_of_many_runs_are_the_true_ones_and_the_planted_agents_are_found() -> None:
    nodes, _ = judge(measured_team(800, seed=1))
    for (kind, node), true in true_figures().items():
        estimate = figure(nodes[node], kind)
        assert estimate.mean == pytest.approx(true, abs=0.04)
    assert {node: each.finding for node, each in nodes.items()} == {
        "helper": "adds", "idler": "lazy", "harmer": "harmful",
    }  # fmt: skip


@pytest.mark.slow
def test_intervals_of_single_calls_hold_and_the_idler_is_found_nothing_else_than_lazy() -> None:
    true, held, wrong = true_figures(), dict.fromkeys(true_figures(), 0), 0
    repeats = 100
    for seed in range(repeats):
        nodes, calls = judge(measured_team(30, seed=seed))
        for kind, node in true:
            estimate = figure(calls[node, 1], kind)
            low, high = estimate.low, estimate.high
            held[kind, node] += low is not None and high is not None and low <= true[kind, node] <= high
        wrong += nodes["idler"].finding not in ("lazy", "not settled")
    assert wrong == 0
    assert min(held.values()) >= 0.88 * repeats, held
