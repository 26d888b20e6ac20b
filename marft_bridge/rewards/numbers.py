"""What a state, a task or a text says of a number -> the number, exactly, and as plain decimals.

Invariants: nothing is rounded; a dash between two things is no sign, and U+2212 is one; finding the numbers of a text
takes time linear in its length.
"""

from __future__ import annotations

import math
import re
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, DecimalException

_MINUS = "\N{MINUS SIGN}"
_CURRENCY = "$€£"
# A sign stands at the number, and after no letter, digit or bracket; after "=" and ":" there may be a space between.
_SIGN = rf"(?:(?<![\w)\]}}])[-+][{_CURRENCY}]?|(?:(?<=[=:])|(?<=[=:] ))[-+] ?)"
_UNSIGNED = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\.)\.\d+)(?:[eE][-+]?\d+)?"
_NUMBER = re.compile(f"{_SIGN}?{_UNSIGNED}")
_NUMBER_OR_FRACTION = re.compile(rf"{_SIGN}?{_UNSIGNED}(?:/\d+(?:\.\d+)?)?")
# Three parts or more with points between them: a version, a date, an address, a section. It begins where digits begin.
_DOTTED = re.compile(r"(?<![\d,])[\d,]++(?:\.\d+){2,}+")
_FILLING = str.maketrans("", "", f", {_CURRENCY}")  # what a number may hold without a meaning
_MAX_PLAIN_EXPONENT = 400  # beyond it a number of a few characters would be a text of megabytes
EXACT = Context(prec=60, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
"""For differences: one of two numbers that differ is not 0, however large they are."""


def plain_minus(text: str) -> str:
    """The text with U+2212, which models write in formulas, as the minus of a keyboard."""
    return text.replace(_MINUS, "-")


def numbers_in(text: str, *, fractions: bool = False) -> list[str]:
    """The numbers of a text, without commas, spaces and a plus before them; with `fractions`, 1/2 is one.

    What has two points, such as 1.2.3, is a name and none of them.
    """
    pattern = _NUMBER_OR_FRACTION if fractions else _NUMBER
    plain = _DOTTED.sub("_", plain_minus(text))  # no space, behind which a dash would be a sign
    numbers = pattern.findall(plain)
    return [number.translate(_FILLING).removeprefix("+") for number in numbers]


def to_decimal(value: str | float) -> Decimal | None:
    """The number exactly, a float as it is written; None for one that is not finite, or has no such exponent."""
    if isinstance(value, float):
        return Decimal(float.__repr__(value)) if math.isfinite(value) else None
    try:
        return Decimal(value)
    except DecimalException:
        return None


def number_to_text(value: float) -> str:
    """A number as Python writes it, but without an exponent: 1e-05 is 0.00001."""
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    text = float.__repr__(value)
    return text if "e" not in text else _with_point(format(Decimal(text), "f"))


def _with_point(text: str) -> str:
    return text if "." in text else f"{text}.0"  # as Python writes all floats below 1e16


def without_exponent(expression: str) -> str:
    """The same expression; one that is a number with an exponent as plain decimals, or as a power of ten."""
    if "e" not in expression.lower() or not _NUMBER.fullmatch(expression.strip()):  # `1, 2e3` is a list of two
        return expression
    number = expression.translate(_FILLING)
    mantissa, _, exponent = number.lower().partition("e")
    if len(exponent) <= len(str(_MAX_PLAIN_EXPONENT)) + 1 and abs(int(exponent)) <= _MAX_PLAIN_EXPONENT:
        return format(Decimal(number), "f")
    return rf"{mantissa} \cdot 10^{{{exponent.removeprefix('+')}}}"
