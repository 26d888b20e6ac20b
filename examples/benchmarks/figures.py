"""Runs of the benchmarks -> their figures: how much the team learned, and how fast for the tokens that it sampled.

Invariant: a seed is one observation. Intervals are t intervals over seeds, and differences are taken seed by seed, as
the runs of a seed share their collected episodes and tasks. What too few seeds leave unknown is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from examples.benchmarks.results import BenchmarkRound, BenchmarkRun
from marft_bridge.statistics import MeanInterval, mean_interval

Setting = tuple[str, str, str]
"""Game, level and model."""
Runs = Mapping[str, Mapping[int, BenchmarkRun]]
"""Condition -> seed -> its run."""


def runs_by_setting(runs: Iterable[BenchmarkRun]) -> dict[Setting, dict[str, dict[int, BenchmarkRun]]]:
    """Runs in the order of their seeds.

    Raises:
        ValueError: a run occurs twice, or runs that would be averaged are of different configurations.
    """
    grouped: dict[Setting, dict[str, dict[int, BenchmarkRun]]] = {}
    for run in sorted(runs, key=lambda each: (each.game, each.level, each.model, each.condition, each.seed)):
        by_seed = grouped.setdefault((run.game, run.level, run.model), {}).setdefault(run.condition, {})
        if run.seed in by_seed:
            raise ValueError(f"{run.game} {run.level} {run.model} {run.condition} seed {run.seed} is there twice")
        if any(run.setting_sha256 != other.setting_sha256 for other in by_seed.values()):
            names = f"{run.game} {run.level} {run.model} {run.condition}"
            raise ValueError(f"runs of {names} are of different configurations; give each a --folder and an --out")
        by_seed[run.seed] = run
    return grouped


def learned(runs: Mapping[int, BenchmarkRun]) -> MeanInterval:
    """Share of held-out tasks that is solved after training less that before, over seeds."""
    return mean_interval([run.heldout.after - run.heldout.before for run in runs.values()])


def token_curve(run: BenchmarkRun) -> tuple[list[int], list[float]] | None:
    """Tokens sampled before each round of training, and the share of its episodes that was solved.

    None where a round has no tokens or no such share.
    """
    tokens, shares, total = [], [], 0
    for each in run.rounds[1:]:
        if each.sampled_tokens is None or each.correct is None:
            return None
        tokens.append(total)
        shares.append(each.correct)
        total += each.sampled_tokens
    return (tokens, shares) if shares else None


def area_at(run: BenchmarkRun, budget: int) -> float | None:
    """Area under the token curve up to a budget, over the budget: the mean share solved on the way.

    None where the curve does not reach so far, or has only one point.
    """
    curve = token_curve(run)
    if curve is None or len(curve[0]) < 2 or curve[0][-1] < budget or budget <= 0:
        return None
    tokens, shares = np.array(curve[0], float), np.array(curve[1])
    inside = tokens < budget
    x = np.append(tokens[inside], budget)
    y = np.append(shares[inside], np.interp(budget, tokens, shares))
    return float(np.trapezoid(y, x) / budget)


def calls_of_a_run(runs: Mapping[int, BenchmarkRun]) -> float | None:
    """Mean number of calls of a whole run in training, over rounds and seeds; None where there was none."""
    return _mean(each.calls for each in _training_rounds(runs))


def repeated_share(runs: Mapping[int, BenchmarkRun]) -> float | None:
    """Of the tokens of all answers in training, those that were given again to a fork and not sampled."""
    rounds = [each for each in _training_rounds(runs) if each.repeated_tokens is not None]
    repeated = sum(each.repeated_tokens or 0 for each in rounds)
    total = repeated + sum(each.sampled_tokens or 0 for each in rounds)
    return repeated / total if total else None


def teaching_calls(runs: Mapping[int, BenchmarkRun]) -> float | None:
    """Calls with an advantage, of a thousand sampled tokens, in training; None where advantages were not kept."""
    rounds = [each for each in _training_rounds(runs) if each.teaching_calls is not None and each.sampled_tokens]
    tokens = sum(each.sampled_tokens or 0 for each in rounds)
    return 1000 * sum(each.teaching_calls or 0 for each in rounds) / tokens if tokens else None


def _training_rounds(runs: Mapping[int, BenchmarkRun]) -> list[BenchmarkRound]:
    return [each for run in runs.values() for each in run.rounds[1:]]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def area_differences(runs: Runs, condition: str, baseline: str) -> list[float]:
    """Seed by seed: the area of a condition less the baseline's, both up to where the shorter curve ends.

    A pair of runs by different versions of the program is left out.
    """
    differences = []
    for seed, run in runs.get(condition, {}).items():
        base = runs.get(baseline, {}).get(seed)
        curves = None if base is None else (token_curve(run), token_curve(base))
        if base is None or curves is None or curves[0] is None or curves[1] is None:
            continue
        if run.code_sha256 != base.code_sha256:
            continue
        budget = min(curves[0][0][-1], curves[1][0][-1])
        areas = area_at(run, budget), area_at(base, budget)
        if areas[0] is not None and areas[1] is not None:
            differences.append(areas[0] - areas[1])
    return differences
