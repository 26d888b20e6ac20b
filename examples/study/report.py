"""Finished runs -> docs/study.json, docs/study.md and docs/study.svg: `python -m examples.study.report --help`.

Invariant: the page and the drawing follow from study.json, study.toml and the table of conditions alone, so whoever
doubts a figure can make them again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from examples.study.conditions import BASELINE, CONDITIONS
from examples.study.drawing import Panel, panels_to_svg
from examples.study.figures import curve, results_by_condition, rewards
from examples.study.page import results_to_page
from examples.study.results import RESULT, Result, json_to_result, read_result, result_to_json
from marft_bridge.config.bridge import BridgeConfig

HERE = Path(__file__).parent


def results_to_svg(results: Sequence[Result]) -> str:
    """The learning curves, in the order of the table of conditions."""
    by_condition = results_by_condition(results)
    panels = []
    for name in CONDITIONS:
        if runs := by_condition.get(name):
            points = curve(runs)
            panels.append(
                Panel(
                    name,
                    [x for x, _ in points],
                    [interval.mean for _, interval in points],
                    [None if i.low is None or i.high is None else (i.low, i.high) for _, i in points],
                    {seed: rewards(result) for seed, result in runs.items()},
                )
            )
    return panels_to_svg(panels, BASELINE)


def find_results(folder: Path) -> Iterator[Result]:
    """The results of the finished runs in a study's folder, in the order of their names."""
    for path in sorted(folder.glob(f"*/{RESULT}")):
        result = read_result(path.parent)
        if result is not None and result.condition in CONDITIONS:
            yield result


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the three files; 2 after a user error."""
    parser = argparse.ArgumentParser(prog="python -m examples.study.report", description="Runs -> the study's page.")
    parser.add_argument("--folder", type=Path, default=Path("runs/study"), help="where the run folders are")
    parser.add_argument("--config", type=Path, default=HERE / "study.toml", help="what all conditions share")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where study.json, study.md and study.svg go")
    given = parser.parse_args(arguments)
    try:
        results = list(find_results(given.folder))
        page, drawing = results_to_page(results, read_config(given.config)), results_to_svg(results)
    except (KeyError, OSError, TypeError, ValueError) as error:
        print(f"study: {error}", file=sys.stderr)
        return 2
    text = json.dumps([result_to_json(result) for result in results], indent=1, allow_nan=False) + "\n"
    for name, content in (("study.json", text), ("study.md", page), ("study.svg", drawing)):
        (given.out / name).write_text(content, encoding="utf-8")
    print(f"{len(results)} runs: {given.out / 'study.md'}")
    return 0


def read_config(path: Path) -> BridgeConfig:
    """What all conditions share."""
    return BridgeConfig.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))


def read_results(path: Path) -> list[Result]:
    """What a study.json holds."""
    return [json_to_result(content) for content in json.loads(path.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    sys.exit(main())
