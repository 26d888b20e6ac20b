"""Credits of nodes and of their calls -> two tables and lines for people, and the same as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from marft_bridge.common.progress import Reporter
from marft_bridge.common.terminal_text import print_uncut, text_to_cell
from marft_bridge.fork_credit.estimates import Estimate, ForkCredit
from marft_bridge.fork_credit.leave_one_out import LeaveOneOut

_SHOWN_REASONS = 3


@dataclass(frozen=True, slots=True)
class CreditReport:
    """What one command found."""

    run_id: str
    run_of: str
    metric: str
    substitute: str | None  # its label
    runs: int
    tasks: int
    forks: int  # stored
    failures: Counter[str]  # reason -> forks without a reward
    refused: Counter[str]  # reason -> runs that could not be forked
    nodes: Sequence[ForkCredit]
    calls: Sequence[ForkCredit]
    leave_one_out: LeaveOneOut | None
    min_contribution: float

    def print(self, reporter: Reporter) -> None:
        """Two tables, lines for what was found and for what failed, and the JSON."""
        print_uncut(reporter.console, self._table("agent", "95%, all together", self.nodes))
        print_uncut(reporter.console, self._table("call", "95%, each by itself", self.calls))
        for line in (*self._finding_lines(), *self._failure_lines()):
            reporter.say(line)
        reporter.give(self._to_json())

    def _table(self, first: str, interval: str, credits_: Sequence[ForkCredit]) -> Table:
        has_difference = self.substitute is not None
        title = f"what each {first} decides of {self.metric}" + (", and adds to it" if has_difference else "")
        table = Table(title=text_to_cell(title, "table.title"))
        columns = [first, "calls per run", "decides", interval]
        if has_difference:
            columns += ["difference", interval]
        is_of_nodes = any(credit.finding is not None for credit in credits_)
        if is_of_nodes:
            columns.append("finding")
            if self.leave_one_out is not None:
                columns.append(f"leave-one-out ({self.leave_one_out.run_id}, {self.leave_one_out.substitute})")
        for column in columns:
            table.add_column(text_to_cell(column))
        for credit in credits_:
            name = credit.node if credit.number is None else f"{credit.node}:{credit.number}"
            cells = [name, f"{credit.calls:.2f}", *_share_cells(credit)]
            if has_difference:
                cells += _difference_cells(credit.difference)
            if is_of_nodes:
                cells.append(credit.finding or "")
                if self.leave_one_out is not None:
                    cells.append(" ".join(_difference_cells(self.leave_one_out.estimates.get(credit.node))))
            table.add_row(*map(text_to_cell, cells))
        return table

    def _finding_lines(self) -> Iterator[str]:
        for credit in self.nodes:
            if credit.finding == "lazy":
                yield (
                    f"{credit.node} is lazy: it makes {credit.calls:.2f} calls a run, and adds less than"
                    f" {self.min_contribution:g} over {self.substitute} in its place"
                )
            elif credit.finding == "idle":
                yield (
                    f"{credit.node} is idle: it makes {credit.calls:.2f} calls a run, and its answers move"
                    f" {self.metric} by less than {self.min_contribution:g}"
                )
            elif credit.finding == "harmful":
                yield f"{credit.node} is harmful: the team does better with {self.substitute} in its place"
            elif credit.finding == "not settled":
                yield f"{credit.node}: {self.tasks} tasks do not settle whether it matters; run more with --forks"

    def _failure_lines(self) -> Iterator[str]:
        failed, shown = sum(self.failures.values()), self.failures.most_common(_SHOWN_REASONS)
        for reason, count in shown:
            yield f"{count} of {self.forks} forks failed: {reason}"
        if rest := failed - sum(count for _, count in shown):
            yield f"{rest} more failed for other reasons"
        if failed:
            yield f"{failed} failed forks are in no figure"
        for reason, count in self.refused.most_common(_SHOWN_REASONS):
            yield f"{count} of the runs drawn were passed over: {reason}"

    def _to_json(self) -> dict[str, Any]:
        other = self.leave_one_out
        return {
            "run": self.run_id,
            "by": "forks",
            "run_of": self.run_of,
            "metric": self.metric,
            "substitute": self.substitute,
            "runs": self.runs,
            "tasks": self.tasks,
            "forks": self.forks,
            "agents": [asdict(credit) for credit in self.nodes],
            "calls": [asdict(credit) for credit in self.calls],
            "leave_one_out": None
            if other is None
            else {
                "run": other.run_id,
                "substitute": other.substitute,
                "agents": {node: asdict(estimate) for node, estimate in other.estimates.items()},
            },
            "failures": dict(self.failures),
            "passed_over": dict(self.refused),
        }


def _share_cells(credit: ForkCredit) -> list[str]:
    if credit.decided is None:
        return ["", "not measured"]
    share = credit.share
    if share is None:
        return ["", "the score never changes"]
    if share.low is None or share.high is None:
        return [f"{share.mean:.0%}", "no interval"]
    return [f"{share.mean:.0%}", f"{share.low:.0%} to {share.high:.0%}"]


def _difference_cells(difference: Estimate | None) -> list[str]:
    if difference is None:
        return ["", "not measured"]
    if difference.low is None or difference.high is None:
        return [f"{difference.mean:+.3f}", "no interval"]
    return [f"{difference.mean:+.3f}", f"{difference.low:+.3f} to {difference.high:+.3f}"]
