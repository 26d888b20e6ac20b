"""Numbers -> the text that people read in a report: on the page, in Markdown and in the terminal.

Invariant: an absent number reads "n/a", never 0.
"""

from __future__ import annotations

_SMALLEST_P = 0.001
_MINUS = "\N{MINUS SIGN}"


def number(x: float | None) -> str:
    """A figure as people read it: three decimals, fewer for large ones, two digits for tiny ones; "n/a" for None."""
    if x is None:
        return "n/a"
    if 0 < abs(x) < 0.0095:
        return f"{x:.2g}".replace("-", _MINUS)
    digits = 3 if abs(x) < 10 else 1 if abs(x) < 1000 else 0
    return f"{x:,.{digits}f}".replace("-", _MINUS)


def signed(x: float) -> str:
    """A difference with its sign, except 0."""
    return ("+" if x > 0 else "") + number(x)


def points(x: float) -> str:
    """An Elo rating in whole points with its sign, except 0."""
    rounded = round(x)
    return f"{rounded:+,}".replace("-", _MINUS) if rounded else "0"


def percent(x: float | None) -> str:
    """A share of 1 in whole percent, "< 1%" and "> 99%" where it would round to 0 or 100; "n/a" for None."""
    if x is None:
        return "n/a"
    if 0 < x < 0.005:
        return "< 1%"
    return "> 99%" if 0.995 < x < 1 else f"{x:.0%}"


def p_value(p: float) -> str:
    """A p-value with three decimals, or "< 0.001"."""
    return f"< {_SMALLEST_P}" if p < _SMALLEST_P else f"{p:.3f}"


def p_equals(p: float) -> str:
    """A p-value inside a sentence: "p = 0.031" or "p < 0.001"."""
    return f"p {p_value(p)}" if p < _SMALLEST_P else f"p = {p_value(p)}"


def interval_text(low: float | None, high: float | None) -> str:
    """The interval of a mean, "0.410 to 0.532"; empty where a bound is not known."""
    return "" if low is None or high is None else f"{number(low)} to {number(high)}"


def signed_interval(interval: tuple[float, float] | None) -> str:
    """The interval of a difference, "+0.040 to +0.235"; empty for None."""
    return "" if interval is None else f"{signed(interval[0])} to {signed(interval[1])}"


def counted(n: int, noun: str) -> str:
    """A count with its noun: "1 task", "1,200 tasks"."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
