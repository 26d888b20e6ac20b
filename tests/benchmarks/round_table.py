"""`python -m benchmarks.round_table`: the figures of the benches of a round -> a Markdown table, and how they grow.

A part grows with agents as n^k: k is the slope of log(seconds) over log(n), by least squares. With the length L of a
call it grows as a L + b L^2, which is what products with weights and attention take: a and b by least squares on the
seconds per token, and from them the share of b L^2 at the greatest length. It runs no bench; it reads their file.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import linear_regression

RESULTS = Path("runs/bench/latest.json")
AGENTS, LENGTH = "round_seconds_agents_", "round_seconds_length_"
Points = dict[int, Mapping[str, float]]
"""Agents, or tokens of a call -> seconds by part; `round` is the whole."""


def file_to_lines(path: Path) -> Iterator[str]:
    """latest.json -> lines of Markdown; what was not measured is left out."""
    figures = {figure["name"]: figure for figure in json.loads(path.read_text()) if "parts" in figure}
    rows = {name: {"round": figure["value"], **figure["parts"]} for name, figure in figures.items()}
    if not rows:
        return
    parts = list(next(iter(rows.values())))
    yield f"| bench | {' | '.join(parts)} |"
    yield f"|---|{'---:|' * len(parts)}"
    for name, row in rows.items():
        cells = " | ".join(f"{row[part]:.3g}" for part in parts)
        yield f"| `{name}`, {figures[name]['unit']} | {cells} |"
    agents, lengths = (named_rows(rows, prefix) for prefix in (AGENTS, LENGTH))
    for part in parts if len(agents) > 1 else ():
        yield f"- {part}: agents^{exponent(list(agents), [row[part] for row in agents.values()]):.2f}"
    for part in parts if len(lengths) > 2 else ():
        share = quadratic_share(list(lengths), [row[part] for row in lengths.values()])
        yield f"- {part}: {share:.0%} of it is quadratic at {max(lengths)} tokens"


def named_rows(rows: Mapping[str, Mapping[str, float]], prefix: str) -> Points:
    """The rows whose name is `prefix` and a number, by that number, the smallest first."""
    found = {int(name.removeprefix(prefix)): row for name, row in rows.items() if name.startswith(prefix)}
    return dict(sorted(found.items()))


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """k of seconds ~ size^k."""
    return linear_regression([math.log(n) for n in sizes], [math.log(s) for s in seconds]).slope


def quadratic_share(lengths: Sequence[int], seconds: Sequence[float]) -> float:
    """The share of b L^2 in a L + b L^2 at the greatest length; below 0 where the seconds grow less than linearly."""
    line = linear_regression(lengths, [s / n for n, s in zip(lengths, seconds, strict=True)])
    longest = max(lengths)
    return line.slope * longest / (line.intercept + line.slope * longest)


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in file_to_lines(RESULTS))
