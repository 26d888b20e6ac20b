"""A promotion gate such as `correct>0 and tokens<1.2x and safety>=base-0.02` -> its clauses.

A clause is METRIC OP VALUE; all clauses have to hold. VALUE is a number (of the difference candidate - base), `base`
with or without a margin, or a factor of the base's mean such as `1.2x`. docs/promotion.md says what each form claims.
Invariant: nothing of an expression is evaluated, and a text that is no condition is refused with a caret at the error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NoReturn

from marft_bridge.common.errors import ConfigError

Op = Literal[">", ">=", "<", "<="]
_OPS: dict[str, Op] = {">": ">", ">=": ">=", "<": "<", "<=": "<="}

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
        """Whether the clause requires more (not less) of the metric."""
        return self.op in (">", ">=")

    @property
    def without_margin(self) -> bool:
        """Whether it is `>=base` or `<=base`: no worse in these runs, and not shown to be worse."""
        return self.form == "base" and self.number == 0 and self.op in (">=", "<=")


@dataclass(frozen=True, slots=True)
class Gate:
    """Clauses that have to hold together."""

    text: str
    clauses: tuple[Clause, ...]


def expression_to_gate(text: str) -> Gate:
    """`correct>0 and tokens<1.2x` -> its clauses.

    Raises:
        ConfigError: the text is no gate; the message shows the error with a caret.
    """
    parser = _Parser(text)
    clauses = [parser.read_clause()]
    while not parser.at_end:
        parser.read_word("and")
        clauses.append(parser.read_clause())
    return Gate(text.strip(), tuple(clauses))


class _Parser:
    """Reads an expression from left to right, one token at a time."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [match for match in _TOKEN.finditer(text) if match.group().strip()]
        self._index = 0

    @property
    def at_end(self) -> bool:
        return self._index == len(self._tokens)

    def read_clause(self) -> Clause:
        start = self._offset
        metric = self._read_metric()
        op = self._read_op()
        form: Literal["difference", "base", "factor"] = "difference"
        if self._peek("name") == "base":
            self._index += 1
            form = "base"
            number = self._read_signed_number() if self._peek("sign") else 0.0
        else:
            number = self._read_signed_number()
            if self._tokens[self._index - 1].group("times"):
                form = "factor"
                if number <= 0:
                    self._index -= 1
                    self._refuse("a factor of the base has to be above 0")
        if form == "base" and number != 0 and self._tokens[self._index - 1].group("times"):
            self._index -= 1
            self._refuse("a margin is in the metric's own units, without an x")
        end = self._tokens[self._index - 1].end()
        return Clause(self._text[start:end].strip(), metric, op, number=number, form=form)

    def read_word(self, expected_word: str) -> None:
        if self._peek("name") == "or":
            self._refuse("'or' would double the chance of a wrong promotion; only 'and' is known")
        if self._peek("name") != expected_word:
            self._refuse(f"expected {expected_word!r}")
        self._index += 1

    def _read_metric(self) -> str:
        quoted_name = self._peek("quoted")
        name = quoted_name[1:-1] if quoted_name else self._peek("name")
        if not name or name in ("and", "or", "base"):
            self._refuse("expected the name of a metric")
        self._index += 1
        return name

    def _read_op(self) -> Op:
        op = self._peek("op")
        if op in ("=", "==", "!="):
            self._refuse("equality cannot be shown; use >=base-MARGIN and <=base+MARGIN")
        if op not in _OPS:
            self._refuse("expected >, >=, < or <= (a name with other characters stands in double quotes)")
        self._index += 1
        return _OPS[op]

    def _read_signed_number(self) -> float:
        sign = self._peek("sign")
        if sign:
            self._index += 1
        number = self._peek("number")
        if not number:
            self._refuse("expected a number, base or a factor such as 1.2x")
        self._index += 1
        return -float(number) if sign == "-" else float(number)

    @property
    def _offset(self) -> int:
        """Index of the character where the next token begins."""
        if self.at_end:
            return len(self._text)
        match = self._tokens[self._index]
        return match.start() + len(match.group()) - len(match.group().lstrip())

    def _peek(self, kind: str) -> str:
        return "" if self.at_end else self._tokens[self._index].group(kind) or ""

    def _refuse(self, reason: str) -> NoReturn:
        offset = self._offset
        raise ConfigError(
            f"promotion gate: {reason}, at the caret: {self._text[:offset]}^{self._text[offset:]}".rstrip()
        )
