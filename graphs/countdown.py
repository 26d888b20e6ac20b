"""Countdown: all of some numbers, and + - * /, to a target; by a proposer with a calculator and a checker, in turns.

After the Countdown of TinyZero (github.com/Jiayi-Pan/TinyZero), whose numbers game is the usual small test of learning
from rewards; PettingLLMs has no such benchmark. Theirs: one model, one answer; 1 for an equation that uses every number
exactly once and gives the target, FORMAT for any other equation, 0 where there is none; six numbers of 1 to 100 and a
target of 1 to 1000, drawn without asking whether it can be reached. Ours: two agents and the turns of
`graphs.game_turns`: the proposer writes an expression, a calculator (the tool) says its value, the checker reads that
and answers; what the team earns over the turns adds up to the score of the last one, less TURN_COST for every turn
after the first, and less 1 (UNREADABLE) for every answer without an expression; an operation that is not offered makes
an answer wrong; values are exact fractions; four numbers at `published`, with a target that can be reached.

Invariants: the same seed gives the same task; no two tasks of a level have the same numbers and target; every target
can be reached; nothing that a model writes is executed, and no text takes more than a glance to evaluate.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

from langchain_core.language_models import BaseChatModel
from langgraph.graph.state import CompiledStateGraph

from graphs.few_shot import FewShotPrompt
from graphs.game_turns import (
    UNREADABLE,
    Agent,
    Game,
    GameState,
    Played,
    Position,
    RunProgram,
    distinct_tasks,
    game_to_graph,
    task_to_state,
    text_to_answer,
    turns_to_rewards,
)

CORRECT, FORMAT = 1.0, 0.1
TURN_COST = 0.05
MAX_CHARACTERS = 100
"""Characters of an expression; a longer one is none."""
TASKS = 400
"""Tasks of a level."""
_EXPRESSION = re.compile(r"[0-9+\-*/() ]+")
_NUMBER = re.compile(r"[0-9]+")
_NAMES = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


class Level(NamedTuple):
    """How hard: how many numbers, up to which, which operations lead to the target, up to which, and the turns."""

    name: str
    numbers: int
    largest: int
    operators: str
    largest_target: int
    turn_limit: int


FIRST = Level("first", 2, largest=50, operators="+-", largest_target=100, turn_limit=2)
EASY = Level("easy", 3, largest=20, operators="+-", largest_target=60, turn_limit=3)
MIDDLE = Level("middle", 3, largest=50, operators="+-*", largest_target=200, turn_limit=4)
PUBLISHED = Level("published", 4, largest=100, operators="+-*/", largest_target=1000, turn_limit=4)
LEVELS = (FIRST, EASY, MIDDLE, PUBLISHED)


def level_to_tasks(level: Level, seeds: Iterable[int]) -> Iterator[dict[str, Any]]:
    """One task for each seed, but for those whose numbers and target an earlier seed gave."""
    made = (_seed_to_task(level, seed) for seed in seeds)
    return distinct_tasks(made, lambda task: (*sorted(task["numbers"]), task["target"]))


def _seed_to_task(level: Level, seed: int) -> dict[str, Any]:
    draw = random.Random(f"countdown {level.name} {seed}")
    while True:
        numbers = [draw.randint(1, level.largest) for _ in range(level.numbers)]
        target = _draw_value(draw, numbers, level.operators)
        if target in numbers or target is None or target.denominator != 1 or not 1 <= target <= level.largest_target:
            continue
        return {
            "id": f"{level.name}-{seed}",
            "numbers": numbers,
            "target": int(target),
            "operators": level.operators,
            "turn_limit": level.turn_limit,
        }


def _draw_value(draw: random.Random, numbers: list[int], operators: str) -> Fraction | None:
    """The value of a random expression of all the numbers; None where it divides by zero."""
    values = [Fraction(number) for number in numbers]
    while len(values) > 1:
        draw.shuffle(values)
        value = _apply(draw.choice(operators), values.pop(), values.pop())
        if value is None:
            return None
        values.append(value)
    return values[0]


def _apply(operator: str, left: Fraction, right: Fraction) -> Fraction | None:
    """The value; None where it is a division by zero."""
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
    return left / right if right else None


def first_tasks() -> Iterator[dict[str, Any]]:
    """Two numbers, + and -: what a model of 135M parameters can begin on."""
    return level_to_tasks(FIRST, range(TASKS))


def easy_tasks() -> Iterator[dict[str, Any]]:
    """Three numbers up to 20, + and -."""
    return level_to_tasks(EASY, range(TASKS))


def middle_tasks() -> Iterator[dict[str, Any]]:
    """Three numbers up to 50, + - and *."""
    return level_to_tasks(MIDDLE, range(TASKS))


def tasks() -> Iterator[dict[str, Any]]:
    """Four numbers up to 100, + - * and /."""
    return level_to_tasks(PUBLISHED, range(TASKS))


def describe(position: Position) -> str:
    """The numbers, the target and the operations."""
    numbers = " ".join(map(str, position["numbers"]))
    return f"Numbers: {numbers}\nTarget: {position['target']}\nWith: {' '.join(position['operators'])}"


def text_to_expression(text: str) -> str | None:
    """The expression of a text's answer, without what follows a `=`; None where it is none."""
    expression = text_to_answer(text).split("=")[0].strip()
    readable = len(expression) <= MAX_CHARACTERS and _EXPRESSION.fullmatch(expression) and _NUMBER.search(expression)
    return expression if readable else None


def expression_to_value(expression: str) -> Fraction | None:
    """The exact value; None where the text is no expression, or has none."""
    try:
        # Of a number that is called, as in `2(3)`, the parser would warn.
        tree = ast.parse(re.sub(r"(?<=[0-9)])\s*\(", " @(", expression), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    return _evaluate(tree.body)


def _evaluate(node: ast.expr) -> Fraction | None:
    match node:
        case ast.Constant(value=int() as number):
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _evaluate(operand)
            return None if value is None else -value
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _NAMES:
            values = _evaluate(left), _evaluate(right)
            if values[0] is None or values[1] is None:
                return None
            return _apply(_NAMES[type(operation)], values[0], values[1])
    return None


def score(position: Position, text: str) -> float:
    """What TinyZero pays for an answer: CORRECT, FORMAT, or 0 where there is no equation."""
    expression = text_to_expression(text)
    if expression is None:
        return 0.0
    return CORRECT if _is_correct(position, expression) else FORMAT


def _uses_the_numbers(position: Position, expression: str) -> bool:
    return sorted(map(int, _NUMBER.findall(expression))) == sorted(position["numbers"])


def _uses_the_operators(position: Position, expression: str) -> bool:
    return set(expression) & set(_NAMES.values()) <= set(position["operators"])


def _is_correct(position: Position, expression: str) -> bool:
    is_allowed = _uses_the_numbers(position, expression) and _uses_the_operators(position, expression)
    return is_allowed and expression_to_value(expression) == position["target"]


def play(position: Position, text: str) -> Played:
    """Evaluates the expression of a text."""
    expression, earned = text_to_expression(text), score(position, text)
    gain = earned - position["score"] - (TURN_COST if position["answered"] else 0.0)
    gain += UNREADABLE if expression is None else 0.0
    following = {**position, "score": earned, "answered": True}
    if expression is None:
        return Played(following, gain, bad_moves=1, readable=False, note="no expression", solved=False, over=False)
    value, solved = expression_to_value(expression), _is_correct(position, expression)
    if value is None:
        note = f"{expression} has no value"
    elif not _uses_the_numbers(position, expression):
        note = f"{expression} = {value}, but not of each number once"
    elif not _uses_the_operators(position, expression):
        note = f"{expression} = {value}, but not with {' '.join(position['operators'])} alone"
    else:
        note = f"{expression} = {value}, {'right' if solved else 'wrong'}"
    return Played(following, gain, bad_moves=int(not solved), readable=True, note=note, solved=solved, over=False)


_EXAMPLE = "Numbers: 300 5 200\nTarget: 105\nWith: + -"
GAME = Game(
    "countdown",
    describe,
    play,
    writer=Agent(
        "proposer",
        FewShotPrompt(
            "You are the Proposer. Write an expression with each number once that gives the target.",
            ((f"{_EXAMPLE}\nExpression?", "300 - 200 + 5"),),
        ),
        "Expression?",
    ),
    planner=Agent(
        "checker",
        FewShotPrompt(
            "You are the Checker. Read what the Tool computed, and write the expression that gives the target.",
            (
                (f"{_EXAMPLE}\nTool: 300 - 200 + 5 = 105, right\nAnswer?", "300 - 200 + 5"),
                (f"{_EXAMPLE}\nTool: 300 + 200 - 5 = 495, wrong\nAnswer?", "300 - 200 + 5"),
            ),
        ),
        "Answer?",
    ),
    programmer=FewShotPrompt(
        "You are the Proposer. Write a Python program that tries expressions of all the numbers, each once, until one "
        "gives the target. Put it between ```python and ```. It must print that expression and nothing else.",
        (),
    ),
)


def build(model: BaseChatModel, run_program: RunProgram | None = None) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled graph; see `graphs.game_turns.game_to_graph`."""
    return game_to_graph(GAME, model, run_program)


def task_to_input(task: dict[str, Any]) -> GameState:
    """The numbers and the target."""
    position = {name: task[name] for name in ("numbers", "target", "operators")}
    return task_to_state({**position, "score": 0.0, "answered": False}, task["turn_limit"])


def reward(_task: dict[str, Any], result: dict[str, Any], run: Any) -> dict[str, Any]:
    """See `graphs.game_turns.turns_to_rewards`."""
    return turns_to_rewards(GAME, result, run)
