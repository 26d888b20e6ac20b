"""The counts of one ingest -> a table on a terminal, plain lines elsewhere.

Shows what came in, what a record of our own would have had besides, and which traces are no episodes and why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.markup import escape
from rich.table import Table

from marft_bridge.common.progress import Reporter
from marft_bridge.ingest.cleaning import SpanCleaner
from marft_bridge.ingest.spans_to_rows import TraceRows

_EXAMPLES = 3  # trace ids shown for each reason


@dataclass(slots=True)
class IngestReport:
    """The counts of one ingest. Spans are counted as received, repeated ones included."""

    traces: int = 0
    spans: int = 0
    row_counts: dict[str, int] = field(default_factory=dict)  # trace id -> rows that were journaled
    stored_before: int = 0  # traces that were in the store already, as episodes or refused
    episodes: int = 0
    actions: int = 0
    rewards: int = 0  # that were not stored yet: scores of Langfuse
    conventions: Counter[str] = field(default_factory=Counter)  # traces by convention
    missing: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (convention, what is missing)
    refused: dict[str, list[str]] = field(default_factory=dict)  # reason -> trace ids
    removed_settings: int = 0  # credentials and headers of clients
    redactions: Counter[str] = field(default_factory=Counter)  # by pattern
    unredactable: int = 0  # spans whose content was dropped because redacting it failed
    late_spans: int = 0  # spans of traces that were written already, or that came again
    rejected: Counter[str] = field(default_factory=Counter)  # requests, spans and scores that were not taken, by reason

    def add_rows(self, trace_id: str, trace_rows: TraceRows) -> None:
        """Counts a trace that was journaled."""
        self.row_counts[trace_id] = len(trace_rows.rows)
        self.conventions.update(trace_rows.conventions)
        self.missing.update(trace_rows.missing)

    def refuse(self, trace_id: str, reason: str) -> None:
        """Notes a trace that is no episode."""
        self.refused.setdefault(reason, []).append(trace_id)

    def note_cleaning(self, cleaner: SpanCleaner) -> None:
        """Copies the counts of what was removed from the spans."""
        self.removed_settings = cleaner.removed_settings
        self.redactions = Counter(cleaner.privacy.redactions)
        self.unredactable = cleaner.privacy.failures

    def to_json(self) -> dict[str, Any]:
        """The counts under their names, for `--json`."""
        values = {name: value for name, value in asdict(self).items() if name != "row_counts"}
        missing = [{"convention": name, "what": what, "times": count} for (name, what), count in self.missing.items()]
        return {**values, "missing": missing}

    def show(self, reporter: Reporter) -> None:
        """Prints the report."""
        conventions = ", ".join(f"{name} {count}" for name, count in sorted(self.conventions.items()))
        reporter.say(
            f"{self.traces} traces of {self.spans} spans: {self.episodes} new episodes with {self.actions} actions"
            + (f" ({conventions})" if conventions else "")
        )
        for count, label in (
            (self.rewards, "new rewards, of scores that are numbers"),
            (self.stored_before, "traces were in the store already"),
            (self.late_spans, "spans came after their trace was done, or again; not taken in"),
            (self.removed_settings, "attributes left out: headers, keys and the like, that clients authenticate with"),
            *((count, f"redacted: {pattern}") for pattern, count in sorted(self.redactions.items())),
            (self.unredactable, "spans without content, because redacting them failed"),
        ):
            if count:
                reporter.say(f"  {count} {label}")
        _show_counts(
            reporter,
            "missing, compared with a record of our own",
            ("traced by", "what", "times"),
            rows=[(convention, label, count) for (convention, label), count in sorted(self.missing.items())],
        )
        _show_counts(
            reporter,
            "traces that are no episodes",
            ("why", "which", "traces"),
            rows=[(reason, _first_ids(ids), len(ids)) for reason, ids in sorted(self.refused.items())],
        )
        _show_counts(
            reporter,
            "requests, spans and scores that were not taken",
            ("why", "times"),
            rows=sorted(self.rejected.items()),
        )


def _first_ids(ids: Sequence[str]) -> str:
    return ", ".join(sorted(ids)[:_EXAMPLES]) + (", ..." if len(ids) > _EXAMPLES else "")


def _show_counts(reporter: Reporter, title: str, columns: Sequence[str], rows: Sequence[tuple[str | int, ...]]) -> None:
    if not rows:
        return
    if not reporter.console.is_terminal:
        reporter.say(f"{title}:")
        for row in rows:
            reporter.say("  " + "  ".join(_printable(str(cell)) for cell in (row[-1], *row[:-1])))
        return
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column == columns[-1] else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escape(_printable(str(cell))) for cell in row))
    reporter.console.print(table)


def _printable(text: str) -> str:
    """Text from a trace without control characters, which a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
