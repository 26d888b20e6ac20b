"""The lines of metrics.jsonl, of one run or of several -> a curve for every number in them.

    agents.reasoner.entropy, agents.actor.entropy  ->  one chart `entropy`, a curve for each agent and run

Invariants: a chart has one x axis, the rounds of all its runs; a round without the number is None, never 0. What is no
finite number is no point. Names of agents are values of the store: they are told as they are, and escaped by whoever
shows them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_CHARTS = 200
MAX_ROUNDS = 5000  # the newest
_KEYED = ("agents", "critics", "nodes")  # tables whose keys are names, each of which gets a curve
_MERGED = ("replay",)  # the round before the first has its figures in such a table
_FIRST = (
    *("reward", "entropy", "approx_kl", "kl_after", "clipfrac", "grad_norm", "loss", "advantage_mean", "advantage_std"),
    *("adapter_norm", "adapter_moved", "ratio_mean", "ratio_max"),
)


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart. `node`: an agent or a critic; "" where the number is of the whole round."""

    run: str
    node: str
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """One number of the update, by round. `group`: the table of metrics.jsonl that it comes from."""

    name: str
    group: str
    rounds: tuple[int, ...]
    curves: tuple[Curve, ...]


def lines_to_charts(
    lines_by_run: Mapping[str, Sequence[Mapping[str, Any]]], rewards_by_run: Mapping[str, Mapping[int, float]]
) -> list[Chart]:
    """A chart for each number, those that people look at first in front.

    Args:
        lines_by_run: name of a run -> the lines of its updates.
        rewards_by_run: name of a run -> round -> mean team reward.
    """
    points: dict[tuple[str, str], dict[tuple[str, str], dict[int, float]]] = {}
    for run, rewards in rewards_by_run.items():
        if rewards:
            points.setdefault(("", "reward"), {})[run, ""] = dict(rewards)
    for run, lines in lines_by_run.items():
        for line in lines:
            if not isinstance(line.get("round"), int):
                continue
            for path, value in _numbers(line, ()):
                group, name, node = _path_to_names(path)
                points.setdefault((group, name), {}).setdefault((run, node), {})[line["round"]] = value
    charts = [_points_to_chart(group, name, curves) for (group, name), curves in points.items()]
    return sorted(charts, key=_importance)[:MAX_CHARTS]


def _numbers(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], float]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _numbers(value, (*path, str(key)))
        elif _is_number(value) and (path or key != "round"):
            yield (*path, str(key)), float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _path_to_names(path: tuple[str, ...]) -> tuple[str, str, str]:
    """The path of a number -> the table that it is in, its own name, and whose it is."""
    if path[0] in _MERGED and len(path) > 1:
        path = path[1:]
    for place, key in enumerate(path[:-1]):
        if key in _KEYED:
            name = ".".join((*path[:place], *path[place + 2 :])) or key
            return path[0], name, path[place + 1]
    return (path[0] if len(path) > 1 else ""), ".".join(path), ""


def _points_to_chart(group: str, name: str, points: Mapping[tuple[str, str], Mapping[int, float]]) -> Chart:
    rounds = sorted({number for values in points.values() for number in values})[-MAX_ROUNDS:]
    curves = [Curve(run, node, tuple(values.get(r) for r in rounds)) for (run, node), values in points.items()]
    return Chart(name, group, tuple(rounds), curves=tuple(curves))


def _importance(chart: Chart) -> tuple[int, str, str]:
    is_first = chart.name in _FIRST and chart.group in ("", "agents")
    return (_FIRST.index(chart.name) if is_first else len(_FIRST) + (chart.group != "agents"), chart.group, chart.name)
