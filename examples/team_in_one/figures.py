"""The report of a compared run folder -> a Markdown table: what each team is worth, and what a run of it costs.

    python -m examples.team_in_one.figures runs/team_in_one

Differences are to the first team, pair by pair on the same tasks, with their 95 % intervals.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from marft_bridge.comparison.records import Contrast, Report

COSTS = {"steps": "calls a run", "tokens": "sampled tokens a run", "seconds": "seconds a run"}
_DIGITS = {"steps": 1, "tokens": 1, "seconds": 2}


def report_to_table(report: Report) -> str:
    """A row for each team: the deciding metric, and calls, sampled tokens and seconds of a run; "-" where not known."""
    names = [report.metric, *COSTS]
    lines = [
        f"| team | {report.metric} | {' | '.join(COSTS.values())} |",
        f"| --- |{' ---: |' * len(names)}",
    ]
    of_candidates = {
        variant.name: [report.contrast(variant.name, name) for name in names] for variant in report.candidates
    }
    first = [next(filter(None, column), None) for column in zip(*of_candidates.values(), strict=True)]
    base = [_digits(name, None if row is None else row.mean_a) for name, row in zip(names, first, strict=True)]
    lines.append(f"| {report.base} | {' | '.join(base)} |")
    for candidate, contrasts in of_candidates.items():
        cells = [_contrast_to_cell(name, row) for name, row in zip(names, contrasts, strict=True)]
        lines.append(f"| {candidate} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _contrast_to_cell(metric: str, row: Contrast | None) -> str:
    if row is None:
        return "-"
    low, high = row.ci95
    signed = f"+.{_DIGITS.get(metric, 3)}f"
    return f"{_digits(metric, row.mean_b)} ({row.diff:{signed}}, {low:{signed}} to {high:{signed}})"


def _digits(metric: str, value: float | None) -> str:
    return "-" if value is None else f"{value:.{_DIGITS.get(metric, 3)}f}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.team_in_one.figures", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("run", type=Path, help="the run folder")
    report = (parser.parse_args().run / "report.json").read_text(encoding="utf-8")
    print(report_to_table(Report.model_validate_json(report)))


if __name__ == "__main__":
    main()
