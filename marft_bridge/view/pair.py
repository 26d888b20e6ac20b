"""Two episodes -> their calls beside each other, with what differs marked.

Invariants: each call stands in one row; a row has calls of the same node, by how often that node had acted before. A
text is compared word by word up to MAX_WORDS and MAX_MATCHES, which bound the time; beyond them it is shown without
marks. Markup is only what this module writes, around escaped text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from markupsafe import Markup, escape

from marft_bridge.comparison.numbers import number, signed
from marft_bridge.comparison.wording import visible
from marft_bridge.view.episode import ActionCard, EpisodePage, MessageText

MAX_WORDS = 3000  # of both texts together
MAX_MATCHES = 50_000  # pairs of equal words, one of each text; two texts that differ in 5 of 100 words have 40,000
# A word with the space behind it, as (word, space). Space is no token: being equal everywhere, it made the comparison
# cubic in the number of words.
_WORD = re.compile(r"(\S*)(\s*)")


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that can be said of both episodes, as text. `change`: the difference of two numbers."""

    name: str
    left: str
    right: str
    change: str = ""

    @property
    def differs(self) -> bool:
        """Whether it is another on either side."""
        return self.left != self.right


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Two texts with what differs in <del> and <ins>; None on a side that has none."""

    left: Markup | None
    right: Markup | None
    differs: bool


@dataclass(frozen=True, slots=True)
class PairRow:
    """The same call of the two episodes; None where one of them has no such call."""

    node: str
    left: ActionCard | None
    right: ActionCard | None
    prompt: SideBySide
    answer: SideBySide


@dataclass(frozen=True, slots=True)
class Pair:
    """The values of the page."""

    left: EpisodePage
    right: EpisodePage
    facts: list[Fact]
    rows: list[PairRow]


def pages_to_pair(left: EpisodePage, right: EpisodePage) -> Pair:
    """Two pages of episodes, from their first action on -> what the page of both shows."""
    rows = [
        PairRow(
            node=(a or b).action.node,  # type: ignore[union-attr] # one of them is there
            left=a,
            right=b,
            prompt=texts_side_by_side(_prompt_text(a), _prompt_text(b)),
            answer=texts_side_by_side(_answer_text(a), _answer_text(b)),
        )
        for a, b in match_cards(left.actions, right.actions)
    ]
    return Pair(left, right, _facts(left, right), rows=rows)


def texts_side_by_side(left: str | None, right: str | None) -> SideBySide:
    """Two texts, compared word by word."""
    if left is None or right is None or left == right:
        return SideBySide(_escaped(left), _escaped(right), differs=left != right)
    a, b = (_text_to_words(text) for text in (left, right))
    if len(a) + len(b) > MAX_WORDS or count_matches(a, b) > MAX_MATCHES:
        return SideBySide(_escaped(left), _escaped(right), differs=True)
    marked_a, marked_b = _MarkedText("del"), _MarkedText("ins")
    matcher = SequenceMatcher(a=[word for word, _ in a], b=[word for word, _ in b], autojunk=False)
    for kind, from_a, to_a, from_b, to_b in matcher.get_opcodes():
        if kind != "equal":
            marked_a.add_marked(a[from_a:to_a])
            marked_b.add_marked(b[from_b:to_b])
            continue
        for (word, space_a), (_, space_b) in zip(a[from_a:to_a], b[from_b:to_b], strict=True):
            marked_a.add_equal_word(word, space_a, is_space_marked=space_a != space_b)
            marked_b.add_equal_word(word, space_b, is_space_marked=space_a != space_b)
    return SideBySide(marked_a.to_markup(), marked_b.to_markup(), differs=True)


def _text_to_words(text: str) -> list[tuple[str, str]]:
    """(word, space behind it) of each word; the first word is empty where the text begins with space."""
    return [(word, space) for word, space in _WORD.findall(text) if word or space]


def count_matches(left: Sequence[tuple[str, str]], right: Sequence[tuple[str, str]]) -> int:
    """The pairs of equal words that a comparison looks at, once for each part that differs."""
    counts = Counter(word for word, _ in right)
    return sum(counts[word] for word, _ in left)


class _MarkedText:
    """One side of a comparison as it grows: runs of text, each marked or not."""

    def __init__(self, tag: str) -> None:
        self._mark = Markup(f"<{tag}>{{}}</{tag}>")  # noqa: S704 - the tag is this module's
        self._runs: list[tuple[bool, list[str]]] = []

    def add_marked(self, words: Sequence[tuple[str, str]]) -> None:
        """Words that the other side has not; the space behind the last of them stays outside of the mark."""
        if not words:
            return
        text = "".join(word + space for word, space in words)
        kept = text.rstrip() or text
        self._add(kept, is_marked=True)
        self._add(text[len(kept) :], is_marked=False)

    def add_equal_word(self, word: str, space: str, *, is_space_marked: bool) -> None:
        """A word that the other side has too, with the space behind it, which may be another there."""
        self._add(word, is_marked=False)
        self._add(space, is_marked=is_space_marked)

    def _add(self, text: str, *, is_marked: bool) -> None:
        if not text:
            return
        if not self._runs or self._runs[-1][0] != is_marked:
            self._runs.append((is_marked, []))
        self._runs[-1][1].append(text)

    def to_markup(self) -> Markup:
        """The whole side."""
        runs = [(is_marked, escape(visible("".join(texts)))) for is_marked, texts in self._runs]
        return Markup().join(self._mark.format(text) if is_marked else text for is_marked, text in runs)


def _escaped(text: str | None) -> Markup | None:
    return None if text is None else escape(visible(text))


def match_cards(
    left: Sequence[ActionCard], right: Sequence[ActionCard]
) -> list[tuple[ActionCard | None, ActionCard | None]]:
    """The cards in rows, in the order of the left side; what only the right side has stands where it came there."""
    keys = [_occurrences(cards) for cards in (left, right)]
    by_key = [dict(zip(side, cards, strict=True)) for side, cards in zip(keys, (left, right), strict=True)]
    order: list[tuple[str, int]] = list(keys[0])
    for row, key in enumerate(keys[1]):
        if key not in by_key[0]:
            position = order.index(keys[1][row - 1]) + 1 if row else 0
            order.insert(position, key)
    return [(by_key[0].get(key), by_key[1].get(key)) for key in order]


def _occurrences(cards: Sequence[ActionCard]) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    keys = []
    for card in cards:
        node = card.action.node
        keys.append((node, counts.get(node, 0)))
        counts[node] = counts.get(node, 0) + 1
    return keys


def _prompt_text(card: ActionCard | None) -> str | None:
    if card is None or not card.messages:
        return None
    return "\n\n".join(f"{message.role}: {message.text}" for message in card.messages)


def _answer_text(card: ActionCard | None) -> str | None:
    texts: list[MessageText] = [] if card is None or card.answer is None else [card.answer]
    return texts[0].text if texts else None


def _facts(left: EpisodePage, right: EpisodePage) -> list[Fact]:
    a, b = left.episode, right.episode
    facts = [
        Fact("task", a.task_id, b.task_id),
        Fact("run", a.run_id, b.run_id),
        Fact("round", *(("" if e.round is None else str(e.round)) for e in (a, b))),
        Fact("variant", a.variant or "", b.variant or ""),
        Fact("sample", str(a.sample), str(b.sample)),
        Fact("adapters", *(", ".join(f"{node}@{v}" for node, v in e.adapters.items()) for e in (a, b))),
        Fact("outcome", *(e.outcome + (f": {e.reason}" if e.reason else "") for e in (a, b))),
    ]
    rewards = [{reward.name: reward.value for reward in page.team_rewards} for page in (left, right)]
    names = dict.fromkeys([*rewards[0], *rewards[1]])
    facts += [_number_fact(name, rewards[0].get(name), rewards[1].get(name)) for name in names]
    facts.append(Fact("actions", str(left.action_count), str(right.action_count)))
    facts.append(_number_fact("seconds", *((e.ended_ns - e.started_ns) / 1e9 for e in (a, b))))
    return [fact for fact in facts if fact.left or fact.right]


def _number_fact(name: str, left: float | None, right: float | None) -> Fact:
    change = "" if left is None or right is None or left == right else signed(right - left)
    texts = ["none" if value is None else number(value) for value in (left, right)]
    return Fact(name, texts[0], texts[1], change=change)
