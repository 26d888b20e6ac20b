"""A report into a table for the terminal: the verdict, then every metric of every candidate.

Invariant: no name of a variant or a metric is markup or an escape sequence there. The page beside it says the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from marft_bridge.comparison import wording
from marft_bridge.comparison.numbers import number, p_value, signed, signed_span
from marft_bridge.comparison.records import Contrast, Report
from marft_bridge.traces.plain import text_to_line

_LONGEST_NAME = 32  # characters


def report_table(report: Report) -> Table:
    """A report into a table: for each candidate the deciding metric first, then the others."""
    single = len(report.candidates) == 1
    title = f"{wording.headline(report, _named)}\n{wording.evidence(report, _named)}"
    table = Table(title=Text(title), title_justify="left", title_style="bold", caption_justify="left")
    names = [] if single else ["variant"]
    for header in (*names, "metric"):
        table.add_column(header)
    for header in (_named(report.base), _named(report.candidates[0].name) if single else "variant's"):
        table.add_column(Text(header), justify="right")
    for header in ("difference", "95% interval", "p"):
        table.add_column(header, justify="right", no_wrap=True)
    for candidate in report.candidates:
        rows = [row for row in (*report.contrasts, *report.secondary) if row.variant == candidate.name]
        for i, row in enumerate(rows):
            variant = [] if single else [Text("" if i else _named(row.variant))]
            style = None if i else "bold"
            table.add_row(*variant, *_cells(row), style=style, end_section=i == len(rows) - 1)
    table.caption = Text("\n".join(_notes(report)))
    return table


def _cells(row: Contrast) -> list[Text | str]:
    difference = f"{wording.MARKS[row.outcome]} {signed(row.diff)}"
    interval = signed_span(row.simultaneous)
    return [
        Text(_named(row.metric)),
        number(row.mean_a),
        number(row.mean_b),
        difference,
        interval,
        p_value(row.p_adjusted),
    ]


def _notes(report: Report) -> Iterator[str]:
    marks = wording.MARKS
    yield f"{marks['higher']} higher, {marks['lower']} lower, {marks['not settled']} not settled"
    if report.secondary:
        yield "p and interval of all rows but a variant's first are corrected for its number of metrics"
    for variant, sentence in wording.unsettled(report):
        yield sentence if len(report.candidates) == 1 else f"{_named(variant)}: {sentence}"
    if report.stopping is not None:
        yield wording.stopping(report.stopping)
    if report.mixed is not None:
        yield f"which agent moved: {wording.moved(report.mixed, _named)}"


def _named(name: str) -> str:
    return text_to_line(name, _LONGEST_NAME)
