"""What one ingest did -> a table on a terminal, plain lines elsewhere.

Says what came in, what an exact record would have had, and which traces are no episodes and why. It only counts what
it is told; it decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.markup import escape
from rich.table import Table

from marft_bridge.ingest.door import Door
from marft_bridge.ingest.spans_to_rows import Mapped
from marft_bridge.progress import Reporter

_EXAMPLES = 3  # trace ids shown for each reason


@dataclass(slots=True)
class IngestReport:
    """The figures of one ingest. Spans count as they came, repeated ones included."""

    traces: int = 0
    spans: int = 0
    written: dict[str, int] = field(default_factory=dict)  # trace id -> rows that were journaled
    stored_before: int = 0  # traces that the store had decided on already
    episodes: int = 0
    actions: int = 0
    dialects: Counter[str] = field(default_factory=Counter)  # traces
    missing: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: dict[str, list[str]] = field(default_factory=dict)  # reason -> trace ids
    settings: int = 0  # attributes left out because a client authenticates with them
    redactions: Counter[str] = field(default_factory=Counter)  # by pattern
    unredactable: int = 0  # spans whose content was dropped because redacting it failed
    late: int = 0  # spans of traces that were done already
    rejected: Counter[str] = field(default_factory=Counter)  # requests and spans that were not taken, by reason

    def add_rows(self, trace_id: str, mapped: Mapped) -> None:
        """A trace that was journaled."""
        self.written[trace_id] = len(mapped.rows)
        self.dialects.update(mapped.dialects)
        self.missing.update(mapped.missing)

    def refuse(self, trace_id: str, reason: str) -> None:
        """A trace that is no episode."""
        self.refused.setdefault(reason, []).append(trace_id)

    def note_cleaning(self, door: Door) -> None:
        """What was left out of the spans before they were kept."""
        self.settings = door.settings
        self.redactions = Counter(door.privacy.redactions)
        self.unredactable = door.privacy.failures

    def show(self, reporter: Reporter) -> None:
        """Print it."""
        dialects = ", ".join(f"{name} {count}" for name, count in sorted(self.dialects.items()))
        reporter.say(
            f"{self.traces} traces of {self.spans} spans: {self.episodes} new episodes with {self.actions} actions"
            + (f" ({dialects})" if dialects else "")
        )
        for number, what in (
            (self.stored_before, "traces were in the store already"),
            (self.late, "spans came after their trace was done, or again; not taken in"),
            (self.settings, "attributes left out: headers, keys and the like, that clients authenticate with"),
            *((count, f"redacted: {pattern}") for pattern, count in sorted(self.redactions.items())),
            (self.unredactable, "spans without content, because redacting them failed"),
        ):
            if number:
                reporter.say(f"  {number} {what}")
        _show_counts(
            reporter,
            "missing, compared with a record of our own",
            ("traced by", "what", "times"),
            [(dialect, what, number) for (dialect, what), number in sorted(self.missing.items())],
        )
        _show_counts(
            reporter,
            "traces that are no episodes",
            ("why", "which", "traces"),
            [(why, _examples(ids), len(ids)) for why, ids in sorted(self.refused.items())],
        )
        _show_counts(
            reporter,
            "requests and spans that were not taken",
            ("why", "times"),
            sorted(self.rejected.items()),
        )


def _examples(ids: Sequence[str]) -> str:
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


def _printable(words: str) -> str:
    """Text from a trace without control characters, which a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in words)
