"""Registered benches -> figures, as a table on the terminal and as a list of objects in a JSON file.

A bench sets its work up once and yields one measurement as often as it is asked; it is asked twice, so that the
table can show how far two measurements lie apart, and the figure is their mean. Invariant: the file holds the
latest figure of every bench that was ever run in that folder, and is never half written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from marft_bridge.common.files import write_atomically

MEASUREMENTS = 2


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measured value; `baseline` is the same work without what is measured, in the same unit."""

    value: float
    unit: str
    baseline: float
    ratio: float  # of the work with what is measured to the work without
    parts: Mapping[str, float] = field(default_factory=dict)  # what `value` is the sum of, where that is known


@dataclass(frozen=True, slots=True)
class Figure:
    """What a bench comes to: means over its measurements."""

    name: str
    value: float
    unit: str
    baseline: float
    ratio: float
    parts: Mapping[str, float] = field(default_factory=dict)


Bench = Callable[[Path], Iterator[Measurement]]
"""(an empty folder to work in, to be left as it likes) -> measurements without end; one where it takes minutes."""

BENCHES: dict[str, Bench] = {}


def bench(function: Bench) -> Bench:
    """Makes a bench known under its own name."""
    BENCHES[function.__name__] = function
    return function


def bench_to_measurements(function: Bench, folder: Path) -> list[Measurement]:
    """Runs one bench and lets it clean up."""
    with closing(function(folder)) as measuring:  # type: ignore[type-var]
        return list(islice(measuring, MEASUREMENTS))


def measurements_to_figure(name: str, measured: list[Measurement]) -> Figure:
    """Means of value, baseline, ratio and parts."""
    return Figure(
        name,
        fmean(one.value for one in measured),
        measured[0].unit,
        fmean(one.baseline for one in measured),
        fmean(one.ratio for one in measured),
        {part: fmean(one.parts[part] for one in measured) for part in measured[0].parts},
    )


def figures_to_file(figures: list[Figure], path: Path) -> None:
    """Puts the figures into the file, in place of those of the same name; the others stay. No parts, no key."""
    before = json.loads(path.read_text()) if path.exists() else []
    new = {figure.name: asdict(figure) for figure in figures}
    for known in new.values():
        if not known["parts"]:
            del known["parts"]
    merged = {known["name"]: known for known in before} | new
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(list(merged.values()), indent=2) + "\n")


def print_figures(console: Console, measured: dict[str, list[Measurement]]) -> None:
    """A table; `spread` is the distance between the two measurements. Parts stand below what they sum to."""
    table = Table("bench", "value", "unit", "baseline", "ratio", "spread")
    for name, each in measured.items():
        figure = measurements_to_figure(name, each)
        spread = f"{max(one.value for one in each) - min(one.value for one in each):.2g}" if len(each) > 1 else "-"
        numbers = (f"{figure.value:.4g}", figure.unit, f"{figure.baseline:.4g}", f"{figure.ratio:.4g}", spread)
        table.add_row(name, *numbers)
        for part, value in figure.parts.items():
            table.add_row(f"  {part}", f"{value:.4g}")
    console.print(table)
