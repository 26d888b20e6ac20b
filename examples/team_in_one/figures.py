"""The report of a compared run folder -> a Markdown table: what each team is worth, and what a run of it costs.

    python -m examples.team_in_one.figures runs/team_in_one
    python -m examples.team_in_one.figures runs/team_in_one --write   # and what docs/zoo.md has, into bridge.toml

Differences are to the first team, pair by pair on the same tasks, with their 95 % intervals. The line for docs/zoo.md
has the node before and after training, pair by pair too, and beside it how it stands to the team.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from examples.zoo.run import EXPECTED, report_to_line
from examples.zoo.twins import scores_to_paired
from marft_bridge.comparison.contrasts import paired_to_contrasts
from marft_bridge.comparison.episodes import stored_scores
from marft_bridge.comparison.records import Contrast, Report
from marft_bridge.runs.run_folder import RunFolder
from trace_store.store import TraceStore

HERE = Path(__file__).parent
BEFORE, AFTER = "untrained", "in one"  # of the node, as bridge.toml calls them
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


def run_to_line(run: Path, report: Report) -> str:
    """What docs/zoo.md says of a run folder that was compared: the node before and after, and beside the team.

    The minutes are those from the first command of the folder to the report.
    """
    folder = RunFolder(run)
    with TraceStore.open(folder.store, read_only=True) as store:
        runs = store.runs()
        newest = [row.run_id for row in runs if row.command == "compare"][-1]
        before, after = (stored_scores(store, newest, name, report.metric) for name in (BEFORE, AFTER))
    minutes = (report.created.timestamp() - runs[0].started_ns / 1e9) / 60
    paired = scores_to_paired(AFTER, report.metric, base=before, values=after)
    (gain,) = paired_to_contrasts([paired], report.setup.seed)
    return report_to_line(report, minutes, gain=gain, further=report_to_parts(report))


def report_to_parts(report: Report) -> list[str]:
    """How the trained node stands to the team: the deciding metric, and what a run of either costs."""
    decided = report.contrast(AFTER, report.metric)
    assert decided is not None, f"the report has no variant {AFTER!r} beside its first"
    low, high = decided.ci95
    costs = [
        f"{title} {_digits(name, row.mean_a)} -> {_digits(name, row.mean_b)}"
        for name, title in COSTS.items()
        if (row := report.contrast(AFTER, name)) is not None
    ]
    return [
        f"the {report.base} has {report.metric} {decided.mean_a:.3f}, the trained node {decided.diff:+.3f} against it "
        f"(95 % {low:+.3f} to {high:+.3f})",
        *([f"{report.base} to node: {', '.join(costs)}"] if costs else []),
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.team_in_one.figures", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--write", action="store_true", help="put the line of docs/zoo.md into bridge.toml")
    flags = parser.parse_args()
    report = Report.model_validate_json((flags.run / "report.json").read_text(encoding="utf-8"))
    print(report_to_table(report))
    if flags.write:
        config = HERE / "bridge.toml"
        line = run_to_line(flags.run, report)
        config.write_text(EXPECTED.sub(lambda _: f"# Expected: {line}", config.read_text("utf-8"), count=1), "utf-8")
        print(f"\n{line}")


if __name__ == "__main__":
    main()
