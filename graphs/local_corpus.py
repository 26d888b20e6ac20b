"""A corpus of sentences about made-up people, and a search tool over it, for graphs with retrieval.

Each fact becomes one sentence; a query becomes the sentences that match it best by BM25, in pure Python. Invariants:
the corpus is the same in every process; equal scores keep the order of the corpus; a sentence that shares no word with
the query is never returned.
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
    "Ann",
    "Ben",
    "Cleo",
    "Dan",
    "Eva",
    "Finn",
    "Gus",
    "Hana",
    "Ivo",
    "June",
    "Kai",
    "Lena",
    "Max",
    "Nora",
    "Otto",
    "Pia",
    "Quin",
    "Rosa",
    "Sam",
    "Tess",
    "Udo",
    "Vera",
    "Will",
    "Xena",
    "Yan",
    "Zoe",
    "Abel",
    "Bea",
    "Carl",
    "Dora",
    "Emil",
    "Fay",
    "Glen",
    "Hugo",
    "Iris",
    "Jack",
    "Kira",
    "Luis",
    "Mona",
    "Nick",
)
CITIES = ("Oslo", "Rome", "Lima", "Cairo", "Paris", "Tokyo", "Delhi", "Quito", "Bern", "Seoul")
JOBS = ("baker", "pilot", "nurse", "farmer", "singer", "painter", "teacher", "lawyer")
PETS = ("cat", "dog", "parrot", "rabbit", "horse", "goat")

K1, B = 1.2, 0.75  # BM25's usual constants


@dataclass(frozen=True, slots=True)
class Person:
    """The facts about one person."""

    name: str
    city: str
    job: str
    pet: str
    boss: str

    @property
    def sentences(self) -> dict[str, str]:
        """Fact -> its sentence in the corpus."""
        return {
            "city": f"{self.name} lives in {self.city}.",
            "pet": f"{self.name} keeps a {self.pet}.",
            "boss": f"{self.name} reports to {self.boss}.",
            "job": f"{self.name} works as a {self.job}.",
        }


@cache
def people() -> tuple[Person, ...]:
    """All forty, in one fixed order. Nobody is their own boss."""
    rng = random.Random(0)
    return tuple(
        Person(name, rng.choice(CITIES), rng.choice(JOBS), pet=rng.choice(PETS), boss=NAMES[(index + 7) % len(NAMES)])
        for index, name in enumerate(NAMES)
    )


@cache
def corpus() -> tuple[str, ...]:
    """The 160 sentences, those of one person next to each other."""
    return tuple(sentence for person in people() for sentence in person.sentences.values())


def query_to_sentences(query: str, sentences: Sequence[str], limit: int) -> list[str]:
    """At most `limit` sentences that match a query, best first, by BM25 with the never negative form of the IDF."""
    documents = [text_to_words(sentence) for sentence in sentences]
    document_frequency = Counter(word for document in documents for word in set(document))
    mean_length = sum(map(len, documents)) / max(len(documents), 1)
    known_query_words = set(text_to_words(query)) & document_frequency.keys()

    def inverse_document_frequency(word: str) -> float:
        return math.log(1 + (len(documents) - document_frequency[word] + 0.5) / (document_frequency[word] + 0.5))

    # Sorted, so that the sum does not depend on the order of a set, which differs between processes.
    weights = {word: inverse_document_frequency(word) for word in sorted(known_query_words)}

    def score(document: Sequence[str]) -> float:
        counts = Counter(document)
        length_norm = K1 * (1 - B + B * len(document) / mean_length)
        return sum(weight * counts[word] * (K1 + 1) / (counts[word] + length_norm) for word, weight in weights.items())

    # The negative index: under `reverse`, equal scores keep the order of the corpus.
    scored = [(score(document), -index) for index, document in enumerate(documents)]
    return [sentences[-negative_index] for value, negative_index in sorted(scored, reverse=True)[:limit] if value > 0]


def text_to_words(text: str) -> list[str]:
    """Lower-case words of letters and digits."""
    return re.findall(r"[a-z0-9]+", text.lower())


@tool
def search(query: str) -> list[str]:
    """Finds up to three sentences about people that match the words of the query."""
    return query_to_sentences(query, corpus(), 3)
