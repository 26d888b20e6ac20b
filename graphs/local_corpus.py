"""A small world of made-up people as sentences, and a search tool over them: what graphs that retrieve search in.

Facts become one sentence each, and a query the sentences that match it best by BM25, in pure Python. Invariants: the
world is the same in every process; equal scores keep the order of the corpus; a sentence that shares no word with the
query is never found. It knows no graph and no question.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from langchain_core.tools import tool

NAMES = (
    *("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "June", "Kai", "Lena", "Max", "Nora"),
    *("Otto", "Pia", "Quin", "Rosa", "Sam", "Tess", "Udo", "Vera", "Will", "Xena", "Yan", "Zoe", "Abel", "Bea"),
    *("Carl", "Dora", "Emil", "Fay", "Glen", "Hugo", "Iris", "Jack", "Kira", "Luis", "Mona", "Nick"),
)
CITIES = ("Oslo", "Rome", "Lima", "Cairo", "Paris", "Tokyo", "Delhi", "Quito", "Bern", "Seoul")
JOBS = ("baker", "pilot", "nurse", "farmer", "singer", "painter", "teacher", "lawyer")
PETS = ("cat", "dog", "parrot", "rabbit", "horse", "goat")

K1, B = 1.2, 0.75  # BM25's usual constants


@dataclass(frozen=True, slots=True)
class Person:
    """What the world says of one person."""

    name: str
    city: str
    job: str
    pet: str
    boss: str

    @property
    def sentences(self) -> dict[str, str]:
        """Fact -> the sentence of the corpus that says it."""
        return {
            "city": f"{self.name} lives in {self.city}.",
            "pet": f"{self.name} keeps a {self.pet}.",
            "boss": f"{self.name} reports to {self.boss}.",
            "job": f"{self.name} works as a {self.job}.",
        }


@cache
def people() -> tuple[Person, ...]:
    """All forty, in one fixed order. Nobody is their own boss."""
    pick = random.Random(0)
    return tuple(
        Person(name, pick.choice(CITIES), pick.choice(JOBS), pick.choice(PETS), NAMES[(place + 7) % len(NAMES)])
        for place, name in enumerate(NAMES)
    )


@cache
def corpus() -> tuple[str, ...]:
    """The 160 sentences, those of one person beside each other."""
    return tuple(sentence for person in people() for sentence in person.sentences.values())


def query_to_sentences(query: str, sentences: Sequence[str], limit: int) -> list[str]:
    """The best sentences for a query, best first: BM25, with the inverse document frequency that is never negative."""
    documents = [text_to_words(sentence) for sentence in sentences]
    seen_in = Counter(word for document in documents for word in set(document))
    mean_length = sum(map(len, documents)) / max(len(documents), 1)
    wanted = set(text_to_words(query)) & seen_in.keys()

    def rarity(word: str) -> float:
        return math.log(1 + (len(documents) - seen_in[word] + 0.5) / (seen_in[word] + 0.5))

    # Sorted, so that the sum does not depend on the order of a set, which differs between processes.
    weights = {word: rarity(word) for word in sorted(wanted)}

    def score(document: Sequence[str]) -> float:
        counts = Counter(document)
        norm = K1 * (1 - B + B * len(document) / mean_length)
        return sum(weight * counts[word] * (K1 + 1) / (counts[word] + norm) for word, weight in weights.items())

    scored = [(score(document), -place) for place, document in enumerate(documents)]
    return [sentences[-place] for value, place in sorted(scored, reverse=True)[:limit] if value > 0]


def text_to_words(text: str) -> list[str]:
    """Lower-case words of letters and digits."""
    return re.findall(r"[a-z0-9]+", text.lower())


@tool
def search(query: str) -> list[str]:
    """Finds up to three sentences about people that match the words of the query."""
    return query_to_sentences(query, corpus(), 3)
