"""Owns: tasks and scores of reasoning-gym (gym/, rewards/gym.py), by the real library.

- A generator gives the same tasks each time; a task alone is enough for its score, and one that is not the generator's
  any more is refused.
- Scores are the library's own; answers are never run as programs, though some of its scorers mean to.
- What is missing or misspelt is one line before any episode runs.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from marft_bridge.common.errors import GraphError
from marft_bridge.rewards.contract import Absent, RunView
from marft_bridge.rewards.reasoning_gym import GYM, GymOptions
from marft_bridge.sandbox.worker_process import UnansweredJob
from marft_bridge.tasks.options import GymTasks
from marft_bridge.tasks.reading import read_tasks
from marft_bridge.tasks.reasoning_gym import answer_to_score, close_workers

LIMIT_S = 120.0  # a busy machine
OTHER_SCORER = "+".join(
    f"chr({ord(letter)})"
    for letter in "import reasoning_gym.games.puzzle24 as p;p.Puzzle24Dataset.score_answer=lambda*a:1."
)  # a program without a quotation mark, by which every later answer would be right


@pytest.fixture(scope="module", autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    yield
    close_workers()


def tasks_of(dataset: str, size: int = 3, seed: int = 0, **options: Any) -> list[dict[str, Any]]:
    return read_tasks(GymTasks(dataset=dataset, size=size, seed=seed, options=options), ("question",))


def score(task: dict[str, Any], answer: str) -> float:
    return answer_to_score(task, answer, LIMIT_S)


def test_a_generator_gives_the_same_tasks_each_time_and_others_with_another_seed() -> None:
    tasks = tasks_of("chain_sum", 60, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    assert [task["id"] for task in tasks] == [f"chain_sum-0-{n}" for n in range(60)]
    for task in tasks:  # an independent reading of what is asked
        first, sign, second = task["question"].split(": ")[1].removesuffix(" =").split()
        assert int(task["answer"]) == int(first) + int(second) * (1 if sign == "+" else -1)
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    assert tasks_of("chain_sum", 60, **options) == tasks
    assert tasks_of("chain_sum", 60, seed=1, **options)[:10] != tasks[:10]


def test_a_score_is_the_generators_own() -> None:
    (task, *_) = tasks_of("chain_sum", 2)
    right = task["answer"]
    assert score(task, right) == 1.0
    assert score(task, f"it is {right}") == len(right) / len(f"it is {right}")  # its rule for more than the answer
    assert score(task, "") == 0.0


def test_a_task_of_another_version_of_the_generator_is_not_scored() -> None:
    (task, *_) = tasks_of("chain_sum", 2)
    with pytest.raises(GraphError, match="makes another question now; use the version that made the task"):
        score(task | {"question": "What is 1 + 1?"}, "2")
    with pytest.raises(GraphError, match="task 't' is of no generator of reasoning-gym: it has no table"):
        score({"id": "t", "question": "?"}, "2")


@pytest.mark.parametrize(
    ("dataset", "answer"),
    [
        ("string_insertion", "__import__('sys').modules['reasoning_gym'].__dict__.clear() or list('A')"),
        ("spiral_matrix", "[setattr(__import__('builtins'), 'float', lambda *_: 1.0), 1]"),
        ("binary_matrix", "(lambda: [[__import__('os').getpid()]])()"),
        ("n_queens", "[open('x', 'w')]"),
        ("countdown", "(1).__class__.__base__.__subclasses__()"),
        ("countdown", "exec('import os') or 3"),
        ("puzzle24", "Integer(24) . __add__(0)"),
        ("simple_integration", "x.__class__"),
        ("puzzle24", f"exec({OTHER_SCORER})"),
        ("puzzle24", f"(exec)({OTHER_SCORER})"),
        ("countdown", f"eval(compile({OTHER_SCORER},chr(97),chr(101)+chr(120)+chr(101)+chr(99)))"),
        ("polynomial_multiplication", f"sympify({OTHER_SCORER})"),
        ("simple_integration", f"S({OTHER_SCORER})"),
        ("intermediate_integration", f"lambdify(x,{OTHER_SCORER})(1)"),
        ("polynomial_multiplication", "(lambda: 1)()"),
        ("countdown", "getattr(1,dir(1)[0])"),
        ("puzzle24", "24 if 1 else x"),
        ("intermediate_integration", "Integral(x, x)"),
    ],
)
def test_an_answer_is_text_even_where_a_scorer_would_run_it(dataset: str, answer: str) -> None:
    (task, *_) = tasks_of(dataset, 1)
    assert score(task, answer) <= 0.05  # what these scorers give any text
    if task["answer"]:
        assert score(task, task["answer"]) == 1.0  # and nothing was changed by it


@pytest.mark.parametrize(
    "dataset", ["countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication"]
)
def test_a_right_formula_keeps_its_score(dataset: str) -> None:
    for task in tasks_of(dataset, 12):
        if "Integral" not in task["answer"]:  # of which the library takes any, the question's own too
            assert score(task, task["answer"]) == 1.0, task["answer"]


def test_a_formula_may_call_functions_and_name_symbols() -> None:
    integral = next(task for task in tasks_of("intermediate_integration", 30) if "exp" in task["answer"])
    assert score(integral, f"{integral['answer']} + K*pi - sqrt(abs(-4)) + log(8, 2) + 3!") == 1.0


def test_an_answer_in_the_form_of_a_list_is_still_read() -> None:
    (task, *_) = tasks_of("spiral_matrix", 1)
    assert score(task, str(task["answer"].split())) == 0.1  # the library's own share for that form


def test_an_answer_without_end_is_not_scored() -> None:
    (task, *_) = tasks_of("chain_sum", 1)
    with pytest.raises(UnansweredJob, match="longer than 100000 characters"):
        score(task, "1" * 100_001)


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        ("chainsum", {}, "graph.tasks: reasoning-gym has no generator 'chainsum'; did you mean 'chain_sum'?"),
        ("chain_sum", {"terms": 2}, "'chain_sum' does not take these options: TypeError: .*'terms'"),
        ("chain_sum", {"min_terms": 9}, "does not take these options: AssertionError: max_terms must be >= min_terms"),
    ],
)
def test_what_a_generator_does_not_know_is_one_line(dataset: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message) as caught:
        tasks_of(dataset, **options)
    assert "\n" not in str(caught.value)


def test_a_generator_whose_library_is_missing_says_which_and_the_others_work() -> None:
    """cellpylib needs matplotlib and is not among the pins; where somebody installed it, the generator works."""
    if importlib.util.find_spec("cellpylib") is not None:
        assert len(tasks_of("game_of_life")) == 3
        return
    with pytest.raises(GraphError, match="'game_of_life' needs the library cellpylib, which is not installed"):
        tasks_of("game_of_life")
    assert len(tasks_of("leg_counting")) == 3


def test_without_reasoning_gym_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "reasoning_gym" else found(name))
    with pytest.raises(
        GraphError, match=r"reasoning-gym is not installed: pip install 'marft-bridge\[reasoning-gym\]'"
    ):
        tasks_of("chain_sum")
    with pytest.raises(GraphError, match="is not installed"):
        GYM.check(GymOptions(name="right", answer_from="answer"))


def earned(task: dict[str, Any], answer: Any, **options: Any) -> float:
    table = GymOptions(name="right", answer_from="answer", limit_s=LIMIT_S, **options)
    (one,) = asyncio.run(GYM.compute(table, RunView(task, {"answer": answer})))
    return one.value


def test_the_reward_finds_the_answer_where_the_table_says() -> None:
    (task, *_) = tasks_of("chain_sum", 1)
    right = task["answer"]
    assert earned(task, right) == 1.0
    assert earned(task, f"<answer>1</answer> no: <answer> {right} </answer>.", find="tag") == 1.0
    assert earned(task, f"so \\boxed{{{right}}}", find="boxed") == 1.0
    assert earned(task, f"1 + 1 is not it, {right} is", find="last_number") == 1.0
    assert earned(task, f"so it is +{right}", find="last_number") == 1.0
    assert earned(task, right, find="tag") == 0.0
    assert earned(task, f"<answer>{right}", find="tag") == 0.0
    assert earned(task, None) == 0.0


def test_what_cannot_be_scored_is_absent_or_worth_nothing_as_the_table_says() -> None:
    (task, *_) = tasks_of("chain_sum", 1)
    with pytest.raises(Absent, match="reasoning-gym gave no answer: the answer is longer"):
        earned(task, "1" * 100_001)
    assert earned(task, "1" * 100_001, uncheckable="wrong") == 0.0
    assert earned(task, [1]) == earned(task, {"x": 1}) == 0.0


def test_the_process_that_asks_never_loads_the_library() -> None:
    (task, *_) = tasks_of("chain_sum", 1)
    assert score(task, task["answer"]) == 1.0
    assert "reasoning_gym" not in sys.modules
