"""The shapes of secrets and personal data in text, each with a name.

Invariant: every pattern takes time linear in the text, whatever the text is: a match starts at a fixed fragment or at
the first character of a run, and what follows is bounded, possessive or ended by a character that it cannot hold.
Most texts hold none of this, so each pattern names fragments that every match of it holds, and one quick search for
all of them (`Prefilter`) comes first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

SECRETS, PERSONAL = "secrets", "personal"


@dataclass(frozen=True, slots=True)
class Pattern:
    """One shape. Where the expression has a group called `secret`, only that group is replaced."""

    name: str
    group: str
    expression: re.Pattern[str]
    # Every match holds at least one clue, word or run of digits. Clues are chosen to end in rare characters.
    clues: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # compared in lower case and without hyphens and underscores
    digits: int = 0  # length of a run of digits, spaces and hyphens not counted
    confirm: Callable[[str], bool] | None = None  # whether a text that matched really is one; None: always

    def text_to_clean(self, text: str) -> tuple[str, int]:
        """The text with each match replaced by `[redacted:<name>]`, and the number of replacements."""
        secret = self.expression.groupindex.get("secret", 0)
        parts: list[str] = []
        copied_until = position = 0
        while (match := self.expression.search(text, position)) is not None:
            if self.confirm is not None and not self.confirm(match.group()):
                position = match.start() + 1  # another match may start inside this one
                continue
            parts += (text[copied_until : match.start(secret)], f"[redacted:{self.name}]")
            copied_until, position = match.end(secret), match.end()
        return ("".join((*parts, text[copied_until:])), len(parts) // 2) if parts else (text, 0)


_TO_LOWER = bytes(range(256)).lower()
_DIGITS_TO_ZERO = bytes(ord("0") if chr(byte).isdecimal() and byte < 128 else byte for byte in range(256))


class Prefilter:
    """Tells in a few microseconds whether any of the patterns may match in a text. False positives only."""

    def __init__(self, patterns: Iterable[Pattern]) -> None:
        patterns = tuple(patterns)
        self._clues = _any_of({clue.encode() for pattern in patterns for clue in pattern.clues})
        self._words = tuple({word.encode() for pattern in patterns for word in pattern.words})
        self._digits = b"0" * min((pattern.digits for pattern in patterns if pattern.digits), default=0)

    def may_be_in(self, text: str) -> bool:
        """False only when no pattern matches anywhere in the text."""
        raw = text.encode("utf-8", "surrogatepass")
        if self._clues is not None and self._clues.search(raw) is not None:
            return True
        if self._words:
            folded_bytes = raw.translate(_TO_LOWER, b"_-")
            for word in self._words:  # a plain loop: any() with a generator takes twice as long
                if word in folded_bytes:
                    return True
        return bool(self._digits) and self._digits in raw.translate(_DIGITS_TO_ZERO, b" -")


def _any_of(fragments: set[bytes]) -> re.Pattern[bytes] | None:
    """A pattern that finds any of the fragments: it stops at their last characters only, and looks back from there, for
    the fragments that end so."""
    if not fragments:
        return None
    by_last_character: dict[bytes, list[bytes]] = {}
    for fragment in sorted(fragments):
        by_last_character.setdefault(fragment[-1:], []).append(b"(?<=%s)" % re.escape(fragment))
    return re.compile(
        b"|".join(b"%s(?:%s)" % (re.escape(last), b"|".join(ends)) for last, ends in by_last_character.items())
    )


# A fragment starts here: no letter or digit before it, unless that is the end of an escape such as the n of \n.
_START = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrtbfv]))"

# Fields whose value is a secret, whatever it looks like; compared without case, hyphens and underscores.
SECRET_FIELDS = frozenset(
    [
        "authorization",
        "proxyauthorization",
        "apikey",
        "xapikey",
        "openaiapikey",
        "anthropicapikey",
        "accesstoken",
        "refreshtoken",
        "authtoken",
        "bearertoken",
        "clientsecret",
        "secretkey",
        "secretaccesskey",
        "awssecretaccesskey",
        "password",
        "passwd",
    ]
)
_FIELD = (
    r"(?:authorization|api[_-]?key|(?:access|refresh|auth|bearer)[_-]?token|client[_-]?secret|"
    r"secret[_-]?(?:access[_-]?)?key|password|passwd)"
)
_VALUE = r"[^\s\"'\\,;&\[]"


def is_secret_field(name: str) -> bool:
    """Whether a field of this name holds a secret."""
    return name.lower().replace("-", "").replace("_", "") in SECRET_FIELDS


def _secret(name: str, expression: str, *, clues: tuple[str, ...] = (), words: tuple[str, ...] = ()) -> Pattern:
    return Pattern(name, SECRETS, re.compile(expression), clues=clues, words=words)


_DIGITS = re.compile(r"[0-9]+")


def is_card(digits: str) -> bool:
    """13 to 19 digits that start as payment cards do and whose Luhn sum is a multiple of ten."""
    if not 13 <= len(digits) <= 19 or not (digits[0] in "3456" or "22" <= digits[:2] <= "27"):
        return False
    doubled_digits = (int(digit) * 2 for digit in digits[-2::-2])
    return (sum(int(digit) for digit in digits[::-2]) + sum(n - 9 if n > 9 else n for n in doubled_digits)) % 10 == 0


def _is_card_text(text: str) -> bool:
    return is_card("".join(_DIGITS.findall(text)))


# Cards are written without a break, or in the groups that are printed on them: 4-4-4-4, 4-4-5, 4-6-4 and 4-6-5.
_CARD = re.compile(
    r"(?<![0-9A-Za-z_.])(?:[0-9]{13,19}|[0-9]{4}(?P<gap>[ -])(?:[0-9]{4}(?P=gap)[0-9]{4}(?P=gap)[0-9]{4}"
    r"|[0-9]{4}(?P=gap)[0-9]{5}|[0-9]{6}(?P=gap)[0-9]{4,5}))(?![0-9A-Za-z_])"
)

PATTERNS: tuple[Pattern, ...] = (
    _secret(
        "private_key",
        r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?:[^-]|-(?!----))*+"
        r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----)?",
        clues=("PRIVATE KEY",),
    ),
    _secret(
        "jwt",
        r"(?:(?<![A-Za-z0-9_-])|(?<=\\[nrtbfv]))eyJ[A-Za-z0-9_-]{8,}+\.eyJ[A-Za-z0-9_-]{8,}+\.[A-Za-z0-9_-]*+",
        clues=("eyJ",),
    ),
    _secret("anthropic_key", _START + r"sk-ant-[A-Za-z0-9_-]{16,}+", clues=("sk-",)),
    _secret(
        "openai_key",
        _START + r"sk-(?:(?:proj|svcacct|admin|service|None|or-v1|lf|test|live)-[A-Za-z0-9_-]{16,}+"
        r"|[A-Za-z0-9_]{20,}+)",
        clues=("sk-",),
    ),
    _secret("stripe_key", _START + r"[sr]k_(?:live|test)_[A-Za-z0-9]{16,}+", clues=("k_live_", "k_test_")),
    _secret("aws_key", _START + r"(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])", clues=("AKIA", "ASIA")),
    _secret(
        "github_token",
        _START + r"(?:gh[pousr]_[A-Za-z0-9]{36,}+|github_pat_[A-Za-z0-9_]{22,}+)",
        clues=("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
    ),
    _secret(
        "google_key",
        _START + r"(?:AIza[A-Za-z0-9_-]{35}|ya29\.[A-Za-z0-9_-]{20,}+|GOCSPX-[A-Za-z0-9_-]{20,}+)",
        clues=("AIz", "ya29", "GOCSPX"),
    ),
    _secret(
        "slack_token",
        _START + r"(?:xox[abeoprs]-[A-Za-z0-9-]{10,}+|xapp-[0-9]-[A-Za-z0-9-]{10,}+|"
        r"hooks\.slack\.com/services/[A-Za-z0-9/]{20,}+)",
        clues=("xox", "xapp-", "hooks.slack.com/"),
    ),
    _secret("hugging_face_token", _START + r"hf_[A-Za-z0-9]{30,}+", clues=("hf_",)),
    _secret(
        "langsmith_key",
        _START + r"(?:lsv2_(?:pt|sk)_[0-9a-f]{32}_[0-9a-f]{10}|ls__[0-9a-f]{32})",
        clues=("lsv2_", "ls__"),
    ),
    _secret(
        "bearer_token",
        _START + r"(?i:bearer)[ \t]{1,8}"
        r"(?P<secret>(?=[A-Za-z._~+/-]{0,200}[0-9=])[A-Za-z0-9._~+/=-]{8,}+|[A-Za-z0-9._~+/=-]{32,}+)",
        words=("bearer",),
    ),
    _secret(
        "secret_field",
        rf"(?i:{_FIELD})[\"'\\]{{0,4}}\s{{0,4}}[:=]\s{{0,4}}[\"'\\]{{0,4}}"
        rf"(?P<secret>(?i:basic|bearer|digest|negotiate|token)[ \t]{{1,4}}{_VALUE}{{6,}}+|"
        rf"(?={_VALUE}{{0,200}}[0-9]){_VALUE}{{8,}}+)",
        words=("authorization", "apikey", "accesstoken", "refreshtoken", "authtoken", "bearer", "secret", "passw"),
    ),
    _secret("url_password", r"://[^\s/?#:\"'<>\\@]{0,256}+:(?P<secret>[^\s/?#\"'<>\\\[]{1,256})@", clues=("@",)),
    Pattern(
        "email",
        PERSONAL,
        re.compile(r"(?<![\w.%+-])(?!git@)[\w.%+-]++@(?:[\w-]{1,63}\.){1,8}[^\W\d_]{2,24}"),
        clues=("@",),
    ),
    Pattern("card", PERSONAL, _CARD, digits=13, confirm=_is_card_text),
)
"""In the order in which they are applied: a narrow shape before a wide one that would hold it too."""

NAMES = tuple(pattern.name for pattern in PATTERNS)
GROUPS = (SECRETS, PERSONAL)


def names_to_patterns(names: Iterable[str]) -> tuple[Pattern, ...]:
    """The patterns of these names and groups, in the order of the table. Raises ValueError for an unknown name."""
    requested_names = set(names)
    if unknown_names := sorted(requested_names - {*NAMES, *GROUPS}):
        raise ValueError(f"no pattern is called {unknown_names[0]!r}; known: {', '.join((*GROUPS, *NAMES))}")
    return tuple(pattern for pattern in PATTERNS if pattern.name in requested_names or pattern.group in requested_names)
