"""A condition such as `correct>0 and tokens<1.2x and safety>=base-0.02`, and a report -> may the candidate go out?

A clause is METRIC OP VALUE; all clauses have to hold. VALUE is a number (of the difference candidate - base), `base`
with or without a margin, or a factor of the base's mean such as `1.2x`. docs/promotion.md says what each form claims.

Invariants: a clause passes only on what the report shows, never for lack of data: the bound that is read is the one
that the page shows, an interval without width is widened by what so few tasks cannot have shown, and a claim of any
difference needs the test too. Nothing of an expression is evaluated. The module knows no files and no commands.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from marft_bridge.comparison.records import Contrast, Report, Variant
from marft_bridge.errors import ConfigError

Op = Literal[">", ">=", "<", "<="]
Status = Literal["passed", "failed", "undecided"]
Outcome = Literal["promote", "refused", "undecided"]

FEWEST_TASKS = 10  # below, the intervals' coverage was never measured: docs/statistics.md
MOST_UNSCORED = 0.05  # share of episodes that a candidate may lose beyond the base's, whose pairs are left out
EXIT_CODES: dict[Outcome, int] = {"promote": 0, "refused": 3, "undecided": 4}
_OPS: dict[str, Op] = {">": ">", ">=": ">=", "<": "<", "<=": "<="}
_TAIL = 0.025  # on either side of a 95% interval

_TOKEN = re.compile(
    r"\s*(?:(?P<quoted>\"[^\"]*\")|(?P<op>>=|<=|==|!=|=|>|<)"
    r"|(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)(?P<times>x\b)?"
    r"|(?P<name>[^\W\d][\w./@:]*)|(?P<sign>[+-])|(?P<other>\S))"
)


@dataclass(frozen=True, slots=True)
class Clause:
    """One condition. The value is `number` by itself, `base` plus it, or it times the base's mean."""

    text: str
    metric: str
    op: Op
    number: float
    form: Literal["difference", "base", "factor"]

    @property
    def upwards(self) -> bool:
        """Whether more is what the clause asks for."""
        return self.op in (">", ">=")

    @property
    def without_margin(self) -> bool:
        """`>=base` or `<=base`: not worse as far as it was seen."""
        return self.form == "base" and self.number == 0 and self.op in (">=", "<=")


@dataclass(frozen=True, slots=True)
class Gate:
    """Clauses that have to hold together."""

    text: str
    clauses: tuple[Clause, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one clause, with the numbers in a sentence."""

    clause: str
    status: Status
    sentence: str


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a candidate may go out, and why."""

    candidate: str
    gate: str
    findings: tuple[Finding, ...]

    @property
    def outcome(self) -> Outcome:
        """`refused` as soon as one clause is shown not to hold; `undecided` while one is not settled."""
        statuses = {finding.status for finding in self.findings}
        if "failed" in statuses:
            return "refused"
        return "undecided" if "undecided" in statuses else "promote"

    @property
    def exit_code(self) -> int:
        """For CI: 0 promote, 3 refused, 4 undecided."""
        return EXIT_CODES[self.outcome]

    def lines(self) -> list[str]:
        """For people: the outcome first."""
        said = {
            "promote": "may be promoted",
            "refused": "is refused",
            "undecided": "is not settled: the data show neither that the condition holds nor that it does not",
        }
        lines = [f"{self.candidate} {said[self.outcome]} ({self.gate})"]
        return lines + [f"  {finding.status}: {finding.sentence}" for finding in self.findings]


def default_gate(report: Report) -> Gate:
    """The condition where none is given: better on the metric that decides."""
    name = report.metric if re.fullmatch(r"[^\W\d][\w./@:]*", report.metric) else f'"{report.metric}"'
    return expression_to_gate(f"{name}>0")


def decide(report: Report, gate: Gate | str, candidate: str | None = None) -> Decision:
    """Holds the condition against what a comparison found.

    Args:
        candidate: one of the variants; None takes the only one.

    Raises:
        ConfigError: the expression is none, a metric is unknown, or the candidate is not one of the variants.
    """
    wanted = expression_to_gate(gate) if isinstance(gate, str) else gate
    variant = find_candidate(report, candidate)
    known = _metrics(report)
    for clause in wanted.clauses:
        if clause.metric not in known:
            close = difflib.get_close_matches(clause.metric, known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise ConfigError(f"promotion gate: the comparison has no metric {clause.metric!r}; {hint}")
    findings = [_clause_to_finding(report, variant, clause) for clause in wanted.clauses]
    lost = _lost_episodes(report.variants[0], variant)
    return Decision(variant.name, wanted.text, (*findings, *([lost] if lost is not None else [])))


def find_candidate(report: Report, name: str | None) -> Variant:
    """One candidate by its name, or the only one. Raises ConfigError."""
    names = [variant.name for variant in report.candidates]
    if name is None:
        if len(names) > 1:
            raise ConfigError(f"promotion gate: there are several candidates; name one of: {', '.join(names)}")
        return report.candidates[0]
    if name not in names:
        base = "is the base of the comparison" if name == report.base else "is not in the comparison"
        raise ConfigError(f"promotion gate: {name!r} {base}; candidates: {', '.join(names)}")
    return report.candidates[names.index(name)]


# -- an expression to clauses ---------------------------------------------------------------------------------


def expression_to_gate(text: str) -> Gate:
    """`correct>0 and tokens<1.2x` -> its clauses.

    Raises:
        ConfigError: it is none; the message shows the place with a caret.
    """
    parser = _Parser(text)
    clauses = [parser.clause()]
    while not parser.at_end:
        parser.word("and")
        clauses.append(parser.clause())
    return Gate(text.strip(), tuple(clauses))


class _Parser:
    """Reads an expression from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [match for match in _TOKEN.finditer(text) if match.group().strip()]
        self._next = 0

    @property
    def at_end(self) -> bool:
        return self._next == len(self._tokens)

    def clause(self) -> Clause:
        begin = self._at
        metric = self._metric()
        op = self._op()
        form: Literal["difference", "base", "factor"] = "difference"
        if self._peek("name") == "base":
            self._next += 1
            form = "base"
            number = self._signed() if self._peek("sign") else 0.0
        else:
            number = self._signed()
            if self._tokens[self._next - 1].group("times"):
                form = "factor"
                if number <= 0:
                    self._next -= 1
                    self._refuse("a factor of the base has to be above 0")
        if form == "base" and number != 0 and self._tokens[self._next - 1].group("times"):
            self._next -= 1
            self._refuse("a margin is in the metric's own units, without an x")
        end = self._tokens[self._next - 1].end()
        return Clause(self._text[begin:end].strip(), metric, op, number, form)

    def word(self, wanted: str) -> None:
        if self._peek("name") == "or":
            self._refuse("'or' would double the chance of a wrong promotion; only 'and' is known")
        if self._peek("name") != wanted:
            self._refuse(f"expected {wanted!r}")
        self._next += 1

    def _metric(self) -> str:
        quoted = self._peek("quoted")
        name = quoted[1:-1] if quoted else self._peek("name")
        if not name or name in ("and", "or", "base"):
            self._refuse("expected the name of a metric")
        self._next += 1
        return name

    def _op(self) -> Op:
        found = self._peek("op")
        if found in ("=", "==", "!="):
            self._refuse("equality cannot be shown; use >=base-MARGIN and <=base+MARGIN")
        if found not in _OPS:
            self._refuse("expected >, >=, < or <= (a name with other characters stands in double quotes)")
        self._next += 1
        return _OPS[found]

    def _signed(self) -> float:
        sign = self._peek("sign")
        if sign:
            self._next += 1
        number = self._peek("number")
        if not number:
            self._refuse("expected a number, base or a factor such as 1.2x")
        self._next += 1
        return -float(number) if sign == "-" else float(number)

    @property
    def _at(self) -> int:
        """Where the next token begins."""
        if self.at_end:
            return len(self._text)
        match = self._tokens[self._next]
        return match.start() + len(match.group()) - len(match.group().lstrip())

    def _peek(self, kind: str) -> str:
        return "" if self.at_end else self._tokens[self._next].group(kind) or ""

    def _refuse(self, why: str) -> NoReturn:
        at = self._at
        raise ConfigError(f"promotion gate: {why}, at the caret: {self._text[:at]}^{self._text[at:]}".rstrip())


# -- a clause and a report to a finding -----------------------------------------------------------------------


def _clause_to_finding(report: Report, variant: Variant, clause: Clause) -> Finding:
    def found(status: Status, sentence: str) -> Finding:
        return Finding(clause.text, status, sentence)

    row = report.contrast(variant.name, clause.metric)
    if row is None:
        return found("undecided", f"{clause.text}: {variant.name} and {report.base} have no pair with {clause.metric}")
    if row.clusters < FEWEST_TASKS:
        return found("undecided", f"{clause.text}: {row.clusters} tasks are too few; {FEWEST_TASKS} are needed")
    if clause.form == "factor":
        return found(*_factor(clause, row, report.base))
    low, high = _widened(row)
    numbers = (
        f"{clause.metric} {row.mean_b:.4g} against {row.mean_a:.4g}, difference {row.diff:+.4g} "
        f"(95%: {low:+.4g} to {high:+.4g}, {row.clusters} tasks)"
    )
    if clause.without_margin:
        return found(*_not_worse(clause, row, numbers))
    status = _bounds_to_status(clause, low, high, clause.number)
    if clause.number == 0 and status == "passed" and row.outcome == "not settled":
        return found("undecided", f"{numbers}: the interval excludes 0, the test does not (p {row.p_adjusted:.3g})")
    asked = f"{'above' if clause.upwards else 'below'} {clause.number:+.4g}" if clause.number else _direction(clause)
    return found(status, f"{numbers}: {_SAID[status]} {asked}")


def _not_worse(clause: Clause, row: Contrast, numbers: str) -> tuple[Status, str]:
    """`>=base`: the mean is no worse, and worse was not shown. What could have been missed is said."""
    gain = row.diff if clause.upwards else -row.diff
    low, high = _widened(row)
    missed = max(0.0, -low if clause.upwards else high)
    if row.outcome == ("lower" if clause.upwards else "higher"):
        return "failed", f"{numbers}: shown to be worse than the base"
    if gain < 0:
        return "undecided", f"{numbers}: worse in these runs, though not shown to be"
    return "passed", f"{numbers}: no worse in these runs; being worse by up to {missed:.4g} is not excluded"


def _factor(clause: Clause, row: Contrast, base: str) -> tuple[Status, str]:
    """`<1.2x`: the ratio of the means by its own interval, or else the difference against the base's mean."""
    if row.mean_a <= 0:
        return "undecided", f"{clause.text}: the mean of {base} is {row.mean_a:.4g}; a factor of it says nothing"
    low, high = _widened(row)
    low, high = 1 + low / row.mean_a, 1 + high / row.mean_a
    if row.ratio_ci95 is not None:  # beside it, since the simultaneous one may be wider
        low, high = min(low, row.ratio_ci95[0]), max(high, row.ratio_ci95[1])
    status = _bounds_to_status(clause, low, high, clause.number)
    asked = f"{'above' if clause.upwards else 'below'} {clause.number:.4g} times the base"
    return status, (
        f"{clause.metric} {row.mean_b:.4g} against {row.mean_a:.4g}, {row.mean_b / row.mean_a:.3f} times the base "
        f"(95%: {low:.3f} to {high:.3f}, {row.clusters} tasks): {_SAID[status]} {asked}"
    )


def _bounds_to_status(clause: Clause, low: float, high: float, limit: float) -> Status:
    holds: dict[Op, Callable[[float], bool]] = {
        ">": lambda x: x > limit,
        ">=": lambda x: x >= limit,
        "<": lambda x: x < limit,
        "<=": lambda x: x <= limit,
    }
    worst, best = (low, high) if clause.upwards else (high, low)
    if holds[clause.op](worst):
        return "passed"
    return "undecided" if holds[clause.op](best) else "failed"


def _widened(row: Contrast) -> tuple[float, float]:
    """The simultaneous interval; where all tasks agree, with what so few of them could not have shown.

    A share q of tasks that differ stays unseen among n with probability (1 - q)^n; each is given a difference of 1, or
    of the larger mean where that is more.
    """
    low, high = row.simultaneous
    if high > low:
        return low, high
    unseen = (1 - _TAIL ** (1 / row.clusters)) * max(1.0, abs(row.mean_a), abs(row.mean_b))
    return low - unseen, high + unseen


def _lost_episodes(base: Variant, variant: Variant) -> Finding | None:
    """Pairs that lack a score are left out of every number: a candidate must not win by failing on what is hard."""
    lost, before = (v.unscored / v.episodes if v.episodes else 0.0 for v in (variant, base))
    if lost <= before + MOST_UNSCORED:
        return None
    reason = max(variant.reasons.items(), key=lambda item: item[1])[0] if variant.reasons else "no reason recorded"
    return Finding(
        "episodes with a score",
        "undecided",
        f"{variant.unscored} of {variant.episodes} episodes of {variant.name} have no score ({base.unscored} of "
        f"{base.episodes} of {base.name}), most often: {reason}; the numbers leave them out, so they show too little",
    )


_SAID: dict[Status, str] = {"passed": "shown to be", "failed": "shown not to be", "undecided": "not shown to be"}


def _direction(clause: Clause) -> str:
    strict = {">": "above", ">=": "at or above", "<": "below", "<=": "at or below"}
    return f"{strict[clause.op]} the base"


def _metrics(report: Report) -> Sequence[str]:
    return [report.metric, *dict.fromkeys(row.metric for row in report.secondary)]
