"""Owns: what graphs share: a world to search in, how answers are compared as words and as numbers, examples in prompts.

- The world says one thing of everybody, and search ranks as BM25 worked out by hand.
- Exact match and F1 are the fractions worked out by hand, for hostile texts too.
- Digits of other scripts, and numbers too long to be read, are no numbers to any graph that reads them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from graphs import defer, map_reduce, math_duo, supervisor, swarm
from graphs.few_shot import FewShotPrompt
from graphs.last_number import last_number, number_credit, numbers_in
from graphs.local_corpus import corpus, people, query_to_sentences, search
from graphs.word_overlap import exact_match, f1


def test_everybody_has_one_name_one_boss_that_is_somebody_else_and_four_sentences() -> None:
    names = [person.name for person in people()]
    assert len(set(names)) == 40
    assert all(person.boss in names and person.boss != person.name for person in people())
    assert len(set(corpus())) == 160
    assert all(sum(sentence.startswith(f"{name} ") for sentence in corpus()) == 4 for name in names)


def test_search_ranks_as_bm25_by_hand() -> None:
    sentences = ["red red fox runs", "blue fox", "red hen", "a b c d e f g"]
    # N = 4, mean length 15 / 4. Rarity is ln(1 + (N - n + 1/2) / (n + 1/2)): red and fox ln 2, hen and blue ln 10/3.
    # "red": with K = 1.2, B = 0.75 the norm of length 4 is 1.26 and that of length 2 is 0.78:
    #     red red fox runs: 2 * 2.2 / (2 + 1.26) = 1.350 of ln 2; red hen: 2.2 / (1 + 0.78) = 1.236 of it.
    assert query_to_sentences("Red?", sentences, 3) == ["red red fox runs", "red hen"]
    # "red hen": 0.935 for the first, 0.857 + 1.488 for the other.
    assert query_to_sentences("red hen", sentences, 3) == ["red hen", "red red fox runs"]
    # "fox": 2.2 / 2.26 of ln 2 in the long one, 2.2 / 1.78 in the short one.
    assert query_to_sentences("fox", sentences, 3) == ["blue fox", "red red fox runs"]
    # "red fox": 0.935 + 0.675 for the first, 0.857 for the others, which are equal and keep their order.
    assert query_to_sentences("fox red", sentences, 3) == ["red red fox runs", "blue fox", "red hen"]
    assert query_to_sentences("fox red", sentences, 1) == ["red red fox runs"]
    assert query_to_sentences("green", sentences, 3) == query_to_sentences("", sentences, 3) == []
    assert query_to_sentences("red", [], 3) == []


def test_the_tool_finds_what_is_said_of_somebody() -> None:
    first = people()[0]
    found = asyncio.run(search.ainvoke({"query": f"Where {first.name} lives"}))
    assert found[0] == first.sentences["city"]
    assert len(found) == 3
    assert search.name == "search"


@pytest.mark.parametrize(
    ("answer", "expected", "exact", "overlap"),
    [
        ("Oslo", "Oslo", 1, 1.0),
        ("  the BAKER. ", "baker", 1, 1.0),
        ("It is in Oslo.", "Oslo", 0, 0.4),  # 1 of 4 given, 1 of 1 wanted: 2 * 1 / 5
        ("Oslo Oslo", "Oslo", 0, 2 / 3),
        ("old red house", "red house", 0, 0.8),
        ("house red", "red house", 0, 1.0),
        ("", "Oslo", 0, 0.0),
        ("the", "Oslo", 0, 0.0),
        ("", "", 1, 1.0),
        ("Rome", "Oslo", 0, 0.0),
        ("Oslo " * 5000, "Oslo", 0, 2 / 5001),
        ("\x00<b>\u202eOslo", "Oslo", 0, 2 / 3),
    ],
)
def test_words_are_compared_without_case_punctuation_and_articles(
    answer: str, expected: str, exact: int, overlap: float
) -> None:
    assert exact_match(answer, expected) == exact
    assert f1(answer, expected) == pytest.approx(overlap)


@pytest.mark.parametrize(
    ("text", "numbers", "credit"),
    [
        ("7", [7], 1.0),
        ("3 + 4 = 7.", [3, 4, 7], 1.0),
        ("7 or 8", [7, 8], 0.1),
        ("-7", [-7], 0.0),
        ("seven", [], 0.0),
        ("", [], 0.0),
        ("8" * 10_000, [], 0.0),  # longer than any answer
        ("007", [7], 1.0),
        ("٧", [], 0.0),  # a digit of another script
        ("7.0", [7, 0], 0.1),
    ],
)
def test_a_number_is_worth_one_as_the_last_and_a_tenth_anywhere(text: str, numbers: list[int], credit: float) -> None:
    assert numbers_in(text) == numbers
    assert last_number(text) == (numbers[-1] if numbers else None)
    assert number_credit(text, 7) == credit


def test_what_is_asked_comes_after_the_duty_and_the_examples() -> None:
    messages = FewShotPrompt("Add.", (("1 1", "2"), ("2 2", "4"))).messages("3 3")
    assert [(message.type, message.text) for message in messages] == [
        ("system", "Add."),
        *(("human", "1 1"), ("ai", "2")),
        *(("human", "2 2"), ("ai", "4")),
        ("human", "3 3"),
    ]


def _correct_of_sum(answer: str) -> float:
    return map_reduce.reward({"sums": [7], "answer": 7}, {"results": [(0, answer)], "answer": answer})["parts"]


def _correct_of_price(answer: str) -> float:
    return swarm.reward({"answer": 7, "desk": "x"}, {"path": ["y"], "answer": answer})["correct"]


@pytest.mark.parametrize(
    "correct",
    [
        lambda answer: math_duo.reward({"answer": 7}, {"answer": answer})["correct"],
        lambda answer: defer.reward({"answer": 7}, {"answer": answer})["correct"],
        _correct_of_sum,
        _correct_of_price,
    ],
    ids=["math_duo", "defer", "map_reduce", "swarm"],
)
def test_an_answer_of_another_scripts_digits_or_of_thousands_of_them_is_no_number_to_a_reward(
    correct: Callable[[str], float],
) -> None:
    assert correct("so it is 7.") == 1.0
    assert correct("\u0667") == 0.0  # Arabic 7
    assert correct("9" * 4301) == 0.0
    assert correct("9" * 9 + "7") == 0.0  # one number of ten digits, which does not end in a number of one


def test_two_numbers_of_a_specialist_are_of_ascii_digits_and_of_six_at_most() -> None:
    assert supervisor.reply_to_numbers("12 and 7") == (12, 7)
    assert supervisor.reply_to_numbers("\u0661\u0662, \u0667") is None
    assert supervisor.reply_to_numbers(f"{'9' * 4301} 3, 4") == (3, 4)


def test_a_reply_without_ascii_digits_may_be_a_handoff() -> None:
    first, second, *_ = swarm.DESKS
    assert swarm.reply_to_handoff(f"{second}, price 7", first) is None
    assert swarm.reply_to_handoff(f"{second}, price \u0667", first) == second
