"""Numbers into the text that people read in a report, on the page and in the terminal.

Invariant: an absent number reads "n/a", never 0. It does not know what a number means.
"""

from __future__ import annotations

_SMALLEST_P = 0.001
_MINUS = "\N{MINUS SIGN}"


def number(x: float | None) -> str:
    """A figure as people read it: three decimals, fewer for large ones, two digits for tiny ones; "n/a" for None."""
    if x is None:
        return "n/a"
    if 0 < abs(x) < 0.01:
        return f"{x:.2g}".replace("-", _MINUS)
    digits = 3 if abs(x) < 10 else 1 if abs(x) < 1000 else 0
    return f"{x:,.{digits}f}".replace("-", _MINUS)


def signed(x: float) -> str:
    """A difference with its sign, except 0."""
    return ("+" if x > 0 else "") + number(x)


def percent(x: float | None) -> str:
    """A share of 1 in whole percent; "n/a" for None."""
    return "n/a" if x is None else f"{x:.0%}"


def p_value(p: float) -> str:
    """A p-value with three decimals; below the smallest of them only that."""
    return f"< {_SMALLEST_P}" if p < _SMALLEST_P else f"{p:.3f}"


def p_equals(p: float) -> str:
    """A p-value inside a sentence: "p = 0.031" or "p < 0.001"."""
    return f"p {p_value(p)}" if p < _SMALLEST_P else f"p = {p_value(p)}"
