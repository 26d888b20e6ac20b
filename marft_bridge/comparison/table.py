"""A report -> a table for the terminal: the verdict, then every metric of every candidate.

Invariant: no name of a variant or a metric is interpreted as markup or as an escape sequence of the terminal.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from marft_bridge.common.terminal_text import text_to_line
from marft_bridge.comparison import wording
from marft_bridge.comparison.numbers import number, p_value, signed, signed_interval
from marft_bridge.comparison.records import Contrast, Report

_MAX_NAME_LENGTH = 32  # characters


def report_table(report: Report) -> Table:
    """A report into a table: for each candidate the deciding metric first, then the others."""
    single = len(report.candidates) == 1
    title = f"{wording.headline(report, _shorten_name)}\n{wording.evidence(report, _shorten_name)}"
    table = Table(title=Text(title), title_justify="left", title_style="bold", caption_justify="left")
    variant_headers = [] if single else ["variant"]
    for header in (*variant_headers, "metric"):
        table.add_column(header)
    for header in (_shorten_name(report.base), _shorten_name(report.candidates[0].name) if single else "variant's"):
        table.add_column(Text(header), justify="right")
    for header in ("difference", "95% interval", "p"):
        table.add_column(header, justify="right", no_wrap=True)
    for candidate in report.candidates:
        rows = [row for row in (*report.contrasts, *report.secondary) if row.variant == candidate.name]
        for i, row in enumerate(rows):
            variant_cells = [] if single else [Text("" if i else _shorten_name(row.variant))]
            style = None if i else "bold"
            table.add_row(*variant_cells, *_cells(row), style=style, end_section=i == len(rows) - 1)
    table.caption = Text("\n".join(_notes(report)))
    return table


def _cells(row: Contrast) -> list[Text | str]:
    difference = f"{wording.MARKS[row.outcome]} {signed(row.diff)}"
    interval = signed_interval(row.simultaneous)
    return [
        Text(_shorten_name(row.metric)),
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
    for variant, sentence in (*wording.margins(report), *wording.unsettled(report)):
        yield sentence if len(report.candidates) == 1 else f"{_shorten_name(variant)}: {sentence}"
    if report.stopping is not None:
        yield wording.describe_stopping(report.stopping)
    worse = [(c, row.variant) for c in report.cohorts for row in c.contrasts if row.outcome == "lower"]
    if worse:
        yield f"worse: {'; '.join(wording.cohort_loss(c, variant, _shorten_name) for c, variant in worse)}"
    if report.choices:
        yield f"efficient by their means: {wording.efficient_teams(report, _shorten_name)}"
    if report.tournament is not None:
        yield f"Elo: {wording.ratings_text(report.tournament, _shorten_name)}"
        yield wording.describe_tournament(report, report.tournament, _shorten_name)
    if report.mixed is not None:
        yield f"which agent moved: {wording.moved_nodes(report.mixed, _shorten_name)}"


def _shorten_name(name: str) -> str:
    return text_to_line(name, _MAX_NAME_LENGTH)
