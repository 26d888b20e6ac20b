"""Owns: a comparison that may end early.

- What a look decides is what the statistics of looks say, with the error shared out over the candidates.
- A task that lost its pairs counts as run; the last look still spends what is left.
- A settled candidate runs no further; all settled ends the run after that look; without looks it goes to the end.
- The p-value and the intervals of the report are those of looks, never those of a fixed number of tasks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.compare_rig import Lab, lab_in

from marft_bridge.comparison.stopping import equally_spaced_looks, min_tasks_to_settle, scores_to_interim_result
from marft_bridge.statistics import monitor, repeated_interval, spent_error

TASKS = [f"t{n}" for n in range(40)]
BEFORE = {"name": "before"}
AFTER = {"name": "after", "adapters": "newest"}


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with lab_in(tmp_path) as found:
        yield found


def scores(values: list[float]) -> dict[tuple[str, int], float]:
    return {(task, 0): value for task, value in zip(TASKS, values, strict=True)}


def test_looks_are_equally_spaced_and_end_with_all() -> None:
    assert equally_spaced_looks(120, 4) == (30, 60, 90, 120)
    assert equally_spaced_looks(10, 4) == (3, 5, 8, 10)
    assert equally_spaced_looks(3, 5) == (1, 2, 3)


def test_fewer_tasks_than_could_ever_settle_are_named() -> None:
    # The clearest outcome of k tasks has probability 2 x 0.5^k: 1/32 for 6, and 1/16 for 5.
    assert min_tasks_to_settle(1) == 6
    # Of five candidates each has 0.01: 2/128 is above, 2/256 is below.
    assert min_tasks_to_settle(5) == 8


@pytest.mark.parametrize("candidates", range(1, 8))
def test_the_fewest_tasks_settle_a_clear_difference_whatever_the_seed(candidates: int) -> None:
    tasks = TASKS[: min_tasks_to_settle(candidates)]
    base, won = (dict.fromkeys([(task, 0) for task in tasks], value) for value in (0.0, 1.0))
    looks = equally_spaced_looks(len(tasks), 4)
    for seed in range(12):
        result = scores_to_interim_result("b", tasks, base, won, looks=looks, candidates=candidates, seed=seed)
        assert result is not None
        assert (result.tasks, result.stopped, result.p_value) == (len(tasks), True, 2 * 0.5 ** len(tasks))
        assert None not in (*result.interval, *result.simultaneous)  # a report has them, or it is refused


def test_an_interim_result_is_that_of_the_statistics_with_the_error_shared_out() -> None:
    chance = random.Random(1)
    base = [float(chance.random() < 0.4) for _ in TASKS]
    other = [float(chance.random() < 0.7) for _ in TASKS]
    interim_result = scores_to_interim_result(
        "b", TASKS, scores(base), scores(other), looks=[10, 20, 30, 40], candidates=2, seed=5
    )
    assert interim_result is not None
    common = {"looks": [10, 20, 30, 40], "max_tasks": 40, "seed": 5, "flips": 9_999}
    clusters = TASKS
    expected = monitor("b", base, other, clusters=clusters, alpha=0.025, **common)  # type: ignore[arg-type]
    assert (interim_result.stopped, interim_result.p_value, interim_result.spent) == (
        expected.stopped,
        expected.p_value,
        expected.spent,
    )
    assert interim_result.p_value is not None
    assert interim_result.interval == repeated_interval("b", base, other, clusters=clusters, **common)  # type: ignore[arg-type]
    assert interim_result.simultaneous == repeated_interval(
        *("b", base, other),
        clusters=clusters,
        alpha=0.025,
        **common,  # type: ignore[arg-type]
    )
    low, high = interim_result.interval
    wide_low, wide_high = interim_result.simultaneous
    assert low is not None and high is not None and wide_low is not None and wide_high is not None  # noqa: PT018
    assert wide_low <= low < high <= wide_high


def test_only_tasks_up_to_the_look_count() -> None:
    base, other = [0.0] * 40, [1.0] * 20 + [0.0] * 20
    early = scores_to_interim_result("b", TASKS, scores(base), scores(other), looks=[10, 20], candidates=1, seed=0)
    other[20:] = [-1.0] * 20
    again = scores_to_interim_result("b", TASKS, scores(base), scores(other), looks=[10, 20], candidates=1, seed=0)
    assert early == again
    assert early is not None
    assert early.stopped


def test_a_task_that_lost_its_pair_counts_as_run_and_the_end_spends_all_that_is_left() -> None:
    base, other = scores([0.0] * 40), scores([-1.0, 1.0] * 20)
    for task in TASKS[::5]:
        del other[task, 0]  # 8 of 40
    end = scores_to_interim_result("b", TASKS, base, other, looks=[10, 20, 30, 40], candidates=1, seed=0)
    assert end is not None
    assert end.p_value is not None  # all tasks have run
    # 8 tasks with a pair among the first 10, 16 among 20 and so on; each look spends by the tasks that had run.
    values_a = [base[task, 0] for task in TASKS if (task, 0) in other]
    values_b = [other[task, 0] for task in TASKS if (task, 0) in other]
    common = {"looks": [8, 16, 24, 32], "max_tasks": 40, "seed": 0, "flips": 4_999}
    with_shares = monitor("b", values_a, values_b, shares=[0.25, 0.5, 0.75, 1.0], **common)  # type: ignore[arg-type]
    assert (end.p_value, end.spent) == (with_shares.p_value, with_shares.spent)
    # Without knowing that the plan has ended, nothing could be said: a fifth of the tasks seems to be still to come.
    assert monitor("b", values_a, values_b, **common).p_value is None  # type: ignore[arg-type]


def test_shares_say_how_much_of_the_error_a_look_may_spend() -> None:
    rising = [0.0] * 30
    values = [float(number % 2) for number in range(30)]
    found = monitor("m", rising, values, looks=[30], shares=[0.5], max_tasks=100, seed=0, flips=9_999)
    assert found.spent <= spent_error(0.5)
    assert found.p_value is not None  # it stopped: 15 wins and no loss
    for shares in ([0.2], [1.2], [0.5, 0.6]):
        with pytest.raises(ValueError, match="shares"):
            monitor("m", rising, values, looks=[30], shares=shares, max_tasks=100, seed=0)


@pytest.mark.slow
def test_equals_are_told_apart_no_more_often_than_the_error_allows() -> None:
    """4 looks, 2 candidates that are as good as the base, a tenth of the pairs lost: whatever is found is false."""
    chance, found, studies = random.Random(0), 0, 400
    for study in range(studies):
        base = scores([float(chance.random() < 0.5) for _ in TASKS])
        stopped = False
        for name in ("b", "c"):
            other = {key: float(chance.random() < 0.5) for key in base if chance.random() < 0.9}
            interim_result = scores_to_interim_result(
                name, TASKS, base, other, looks=[10, 20, 30, 39], candidates=2, seed=study
            )
            stopped |= interim_result is not None and interim_result.stopped
        found += stopped
    # 5% of 400 is 20; more than 33 would happen to one such study in a thousand.
    assert found <= 33


# -- the command ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_clear_difference_ends_after_the_look_that_shows_it(lab: Lab) -> None:
    lab.answer = lambda model, number: "yes" if model == "actor@2" and number % 50 else "no"
    report = lab.compare(tasks=40, stop_early=True)
    # 20 tasks all won: the first look, of 10, may spend 0.0000005 of the error; the second 0.003.
    stopping = report.stopping
    assert stopping is not None
    assert (stopping.planned, stopping.used, stopping.looks, stopping.early) == (40, 20, (10, 20), True)
    assert Counter(t.episode.variant for t in lab.stored()) == {"before": 20, "after": 20}
    assert 0 < stopping.spent < 0.05
    (main,) = report.contrasts
    assert (main.outcome, main.n) == ("higher", 20)
    stored = {(t.episode.variant, t.episode.task_id): t.team_reward("correct") for t in lab.stored()}
    order = list(dict.fromkeys(t.episode.task_id for t in lab.stored()))
    a, b = ([stored[side, task] for task in sorted(order)] for side in ("before", "after"))
    assert main.p_value < 0.005
    assert main.mean_a == sum(filter(None, a)) / 20
    assert main.mean_b == sum(filter(None, b)) / 20
    assert "looks" in main.test
    assert main.ratio_ci95 is None
    assert main.simultaneous == main.ci95  # one candidate
    assert main.ci95[0] > 0


@pytest.mark.slow
def test_equals_go_to_the_end_and_the_interval_is_the_one_of_looks(lab: Lab) -> None:
    lab.answer = lambda model, number: "yes" if (number + model.endswith("2")) % 2 else "no"
    report = lab.compare(tasks=24, stop_early=True, looks=3)
    stopping = report.stopping
    assert stopping is not None
    assert (stopping.used, stopping.looks, stopping.early) == (24, (8, 16, 24), False)
    (main,) = report.contrasts
    assert main.outcome == "not settled"
    assert len(lab.stored()) == 48
    fixed = lab.compare(tasks=24)
    assert fixed.stopping is None
    assert fixed.contrasts[0].diff == main.diff
    assert fixed.contrasts[0].test != main.test
    assert main.ci95[0] <= fixed.contrasts[0].diff <= main.ci95[1]


@pytest.mark.slow
def test_a_settled_candidate_runs_no_further_while_the_other_goes_on(lab: Lab) -> None:
    lab.answer = lambda model, number: "yes" if model == "actor@2" or number % 4 == (model == "actor@1") else "no"
    report = lab.compare(BEFORE, AFTER, {"name": "one", "adapters": 1}, tasks=32, stop_early=True, mixed_teams="auto")
    ran = Counter(t.episode.variant for t in lab.stored())
    assert ran["before"] == ran["one"] == 32
    assert ran["after"] == ran["before+actor"] == ran["before+reasoner"] < 32  # mixed for the sake of the settled one
    better, unsettled = report.contrasts
    assert (better.outcome, better.n) == ("higher", ran["after"])
    assert (unsettled.outcome, unsettled.n) == ("not settled", 32)
    assert unsettled.p_adjusted == min(1.0, 2 * unsettled.p_value)
    assert report.stopping is not None
    assert not report.stopping.early
    # Resumed, it comes to the same looks and runs nothing.
    lab.asked.clear()
    tables = (BEFORE, AFTER, {"name": "one", "adapters": 1})
    again = lab.compare(*tables, tasks=32, stop_early=True, mixed_teams="auto", resume=True)
    assert lab.asked == []
    assert again.contrasts == report.contrasts
    assert again.stopping == report.stopping
