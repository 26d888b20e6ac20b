"""Two runs of the zoo, compared on the same held-out tasks -> which training came out ahead, with an interval.

    python -m examples.zoo.twins prisma-two-stage              # its run in runs/zoo and its twin's
    python -m examples.zoo.twins prisma-two-stage --write      # and the line becomes its `# Against:`

Twins are two configurations that differ in the one thing that they are to tell apart. What counts is the trained
version of each in its newest comparison, task by task and sample by sample; a task that only one of them ran counts
for neither. Nothing is run here. The interval is of these two adapters, not of the two trainings, and it takes tasks
for independent: where tasks share their questions it is too narrow.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from examples.zoo.run import AGAINST, EXPECTED, HERE, TWINS
from marft_bridge.comparison.episodes import stored_scores
from marft_bridge.comparison.records import Report
from marft_bridge.comparison.variants import AFTER_VARIANT
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.statistics import Contrast, compare_family
from trace_store.store import TraceStore

Scores = Mapping[tuple[str, int], float]
"""(Task, sample) -> the metric."""


def scores_to_paired(variant: str, metric: str, *, base: Scores, values: Scores) -> Contrast:
    """Two sides pair by pair, over the tasks and samples that both have."""
    keys = sorted(base.keys() & values.keys())
    base_values, own_values = ([scores[key] for key in keys] for scores in (base, values))
    return Contrast(variant, metric, base=base_values, values=own_values, clusters=[task for task, _ in keys])


def scores_to_line(scores: Scores, twin_scores: Scores, *, metric: str, twin: str) -> str:
    """What training made of a configuration against what it made of its twin, over the tasks and samples of both.

    Raises:
        ValueError: they share fewer than two tasks.
    """
    paired = scores_to_paired("own", metric, base=twin_scores, values=scores)
    count = len(set(paired.clusters or ()))
    if count < 2:
        raise ValueError(f"the two comparisons share {count} tasks; two or more make an interval")
    (member,) = compare_family([paired], seed=0)
    result = member.result
    low, high = result.ci95
    return (
        f"{metric} {result.mean_b:.3f} where {twin} ends at {result.mean_a:.3f}, on {result.clusters} held-out tasks "
        f"({result.diff:+.3f}, 95 % {low:+.3f} to {high:+.3f})"
    )


def folder_to_scores(run: Path) -> tuple[str, Scores]:
    """The metric that decided the newest comparison of a run folder, and what the trained version had of it.

    Raises:
        FileNotFoundError: nothing was compared there.
    """
    folder = RunFolder(run)
    metric = Report.model_validate_json((folder.path / "report.json").read_text(encoding="utf-8")).metric
    with TraceStore.open(folder.store, read_only=True) as store:
        newest = [row.run_id for row in store.runs() if row.command == "compare"][-1]
        return metric, stored_scores(store, newest, AFTER_VARIANT, metric)


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.zoo.twins", description=__doc__.split("\n\n")[0])
    parser.add_argument("name", choices=sorted(TWINS))
    parser.add_argument("--folder", type=Path, default=Path("runs/zoo"), help="where the run folders are")
    parser.add_argument("--write", action="store_true", help="put the line into the configuration")
    flags = parser.parse_args(argv)
    twin = TWINS[flags.name]
    for name in (flags.name, twin):
        if not (flags.folder / name / "report.json").exists():
            parser.error(f"{flags.folder / name} has no report.json; first python -m examples.zoo.run {name}")
    (metric, scores), (twin_metric, twin_scores) = (folder_to_scores(flags.folder / n) for n in (flags.name, twin))
    if metric != twin_metric:
        parser.error(f"{flags.name} was decided by {metric}, {twin} by {twin_metric}; compare both by one metric")
    line = scores_to_line(scores, twin_scores, metric=metric, twin=twin)
    print(f"{flags.name}: {line}")
    if flags.write:
        write_line(HERE / f"{flags.name}.toml", line)
    return 0


def write_line(config: Path, line: str) -> None:
    """Puts the line under `# Expected:`, in place of an earlier one."""
    text = AGAINST.sub("", config.read_text(encoding="utf-8"))
    config.write_text(EXPECTED.sub(lambda found: f"{found[0]}\n# Against: {line}", text, count=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
