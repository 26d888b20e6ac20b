"""Owns: Countdown (TinyZero): its tasks, its score by hand, and its targets against a search over all expressions.

- Every target is the value of some expression of all the numbers, and a search finds it; levels are ordered by how
  many expressions there are.
- Scores are theirs: 1, 0.1 for another equation, 0 for none. What a team earns adds up to the last one, less the turns.
- Nothing that a model writes is executed, whatever it is.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest

from graphs import countdown

TASK = {"numbers": [3, 4, 5], "target": 17, "operators": "+-*/"}


def position_of(**changes: Any) -> dict[str, Any]:
    return {**TASK, "score": 0.0, "answered": False, **changes}


def expressions(numbers: list[str], operators: str) -> Iterator[str]:
    """Every expression of all the numbers, by joining two of them until one is left."""
    if len(numbers) == 1:
        yield numbers[0]
        return
    for i, j in itertools.permutations(range(len(numbers)), 2):
        rest = [number for k, number in enumerate(numbers) if k not in (i, j)]
        for operator in operators:
            if operator in "+*" and i > j:
                continue
            yield from expressions([*rest, f"({numbers[i]} {operator} {numbers[j]})"], operators)


def values(numbers: list[Fraction], operators: str) -> set[Fraction]:
    """The values of every such expression, by splitting the numbers in two, without a text."""
    if len(numbers) == 1:
        return set(numbers)
    reached: set[Fraction] = set()
    for size in range(1, len(numbers)):
        for chosen in itertools.combinations(range(len(numbers)), size):
            left = values([numbers[k] for k in chosen], operators)
            right = values([number for k, number in enumerate(numbers) if k not in chosen], operators)
            for a, b in itertools.product(left, right):
                reached |= {a + b} if "+" in operators else set()
                reached |= {a - b} if "-" in operators else set()
                reached |= {a * b} if "*" in operators else set()
                reached |= {a / b} if "/" in operators and b else set()
    return reached


@pytest.mark.parametrize("level", countdown.LEVELS, ids=lambda level: level.name)
def test_every_target_is_reached_by_an_expression_that_a_search_finds(level: countdown.Level) -> None:
    for task in countdown.level_to_tasks(level, range(60 if level.numbers < 4 else 12)):
        assert task["target"] in values([Fraction(number) for number in task["numbers"]], level.operators)
        assert 1 <= task["target"] <= level.largest_target
        assert task["target"] not in task["numbers"]
        position = countdown.task_to_input(task)["position"]
        found = next(
            text
            for text in expressions([str(number) for number in task["numbers"]], level.operators)
            if countdown.score(position, text) == 1
        )
        assert countdown.play(position, f"{found} = {task['target']}").solved


def test_the_levels_are_ordered_by_how_many_expressions_there_are() -> None:
    counts = [
        sum(1 for _ in expressions([str(n) for n in range(level.numbers)], level.operators))
        for level in countdown.LEVELS
    ]
    assert counts == sorted(set(counts))


@pytest.mark.parametrize(
    ("text", "scored"),
    [
        ("3 * 4 + 5", 1.0),
        ("3*4+5", 1.0),
        ("(3 * 4) + 5 = 17", 1.0),
        ("<answer> 5 + 4 * 3 </answer>", 1.0),
        ("So: \n#### 5+3*4", 1.0),
        ("3 + 4 + 5", 0.1),
        ("12 + 5", 0.1),
        ("3 * 4 + 5 + 3 - 3", 0.1),
        ("3 * 4", 0.1),
        ("3 * (4 + 5", 0.1),
        ("17", 0.1),
        ("", 0.0),
        ("I think 3 * 4 + 5", 0.0),
        ("+ - *", 0.0),
        ("3 * 4 + 5 " + "+ 0" * 50, 0.0),
    ],
)
def test_the_score_is_one_a_tenth_or_nothing(text: str, scored: float) -> None:
    assert countdown.score(position_of(), text) == scored


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7 - 2 * 3", 1),
        ("(7 - 2) * 3", 15),
        ("-3 + 5", 2),
        ("1 / 3 + 2 / 3", 1),
        ("8 / (3 - 8 / 3)", 24),
        ("5 / (4 - 4)", None),
        ("2 ** 9", None),
        ("7 // 2", None),
        ("2(3)", None),
        ("(2)(3)", None),
        ("007", None),
        ("1 +", None),
        ("()", None),
        ("(" * 49 + ")" * 49, None),
        ("-" * 99 + "1", -1),
    ],
)
def test_a_value_is_exact_and_absent_where_there_is_none(expression: str, value: int | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert countdown.expression_to_value(expression) == value


def test_an_operation_that_is_not_offered_makes_an_answer_wrong() -> None:
    position = {**position_of(), "numbers": [2, 2], "target": 4, "operators": "+-"}
    wrong = countdown.play(position, "2 * 2")
    assert (wrong.solved, wrong.reward) == (False, 0.1)
    assert wrong.note == "2 * 2 = 4, but not with + - alone"
    assert countdown.play(position, "2 + 2").solved


@pytest.mark.parametrize("text", ["__import__('os').abort()", "exit()", "9**9**9**9", 'f"{1}"', "(lambda: 3)()"])
def test_nothing_that_is_written_is_executed(text: str) -> None:
    played = countdown.play(position_of(), text)
    assert not played.solved
    assert played.bad_moves == 1


def test_what_a_team_earns_adds_up_to_the_last_score_less_the_turns() -> None:
    position, earned = position_of(), []
    for text in ("hm", "3 + 4 + 5", "3 * 4 + 5"):
        played = countdown.play(position, text)
        position = played.position
        earned.append(played.reward)
    assert earned == [pytest.approx(-1.0), pytest.approx(0.1 - 0.05), pytest.approx(0.9 - 0.05)]
    assert sum(earned) == pytest.approx(1 - 2 * countdown.TURN_COST - 1)  # one of them had no expression
    # To write an equation and lose it again costs.
    lost = countdown.play(countdown.play(position_of(), "3 + 4 + 5").position, "hm")
    assert lost.reward == pytest.approx(-0.1 - 0.05 - 1.0)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("3 + 4 + 5", "3 + 4 + 5 = 12, wrong"),
        ("3 * 4 + 5", "3 * 4 + 5 = 17, right"),
        ("12 + 5", "12 + 5 = 17, but not of each number once"),
        ("3 / (4 - 4)", "3 / (4 - 4) has no value"),
        ("3 / 4 + 5", "3 / 4 + 5 = 23/4, wrong"),
        ("hm", "no expression"),
    ],
)
def test_the_calculator_says_the_value_and_what_is_wrong(text: str, note: str) -> None:
    assert countdown.play(position_of(), text).note == note
