"""Owns: the zoo's two graphs that write programs: planner -> coder, and coder -> environment -> reflector -> coder.

- What the coder wrote becomes one program, which the reward `code` judges; nothing of it runs in the graph.
- A node without a model passes its dependencies on; the loop ends by itself, which is not being cut short.
- What a try adds is a reward of that step, and training reaches every agent.
"""

from __future__ import annotations

import asyncio
import random
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from langgraph.errors import GraphRecursionError
from support.edge_rig import recorded_edges, recorded_trajectories
from support.zoo_rig import ZOO, train_zoo

from graphs import coder_reflector, planner_coder
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from trace_store.journal import Journal

TASK = {
    "id": "times-3",
    "request": "f(x) multiplies x by 3",
    "parameters": ["x"],
    "examples": [[[1], 3], [[9], 27]],
    "checks": [[[0], 0], [[4], 12], [[7], 21], [[30], 90]],
}


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def run(module: Any, recorder: Recorder, config: dict[str, Any] | None = None, **answers: list[str]) -> Any:
    graph = wrap(module.build(ScriptedPolicy(answers=answers)), recorder)
    return asyncio.run(graph.ainvoke(module.task_to_input(TASK), config))


def rewards(result: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
    (trajectory,) = recorded_trajectories(recorder)
    return coder_reflector.reward(TASK, result, SimpleNamespace(game=lambda: trajectory))


def test_the_coder_depends_on_the_planner_whose_plan_it_reads(recorder: Recorder) -> None:
    result = run(planner_coder, recorder, planner=["\nTake x times 3.\nThat is all."], coder=["return x * 3\n# done"])
    assert (result["plan"], result["program"]) == ("Take x times 3.", "def f(x):\n    return x * 3\n")
    assert recorded_edges(recorder) == {"trigger": "planner>coder", "data": "planner>coder"}


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("return a + b", "def f(a, b):\n    return a + b\n"),
        ("a + b", "def f(a, b):\n    return a + b\n"),
        ("```python\nreturn a\n```", "def f(a, b):\n    return a\n"),
        ("def f(a, b):\n    c = a\n    return c", "def f(a, b):\n    c = a\n    return c"),
        ("", "def f(a, b):\n    return \n"),
        ("return\nimport os", "def f(a, b):\n    return\n"),
    ],
)
def test_a_program_is_the_function_as_written_or_the_first_line_as_its_body(text: str, program: str) -> None:
    assert planner_coder.text_to_program(text, ["a", "b"]) == program


def test_what_the_graphs_are_given_holds_no_test() -> None:
    assert set(planner_coder.task_to_input(TASK)) == {"request", "parameters"}
    assert set(coder_reflector.task_to_input(TASK)) == {"request", "parameters", "examples"}


def test_a_first_try_that_passes_the_examples_ends_the_run(recorder: Recorder) -> None:
    result = run(coder_reflector, recorder, coder=["3 * x"])
    (trajectory,) = recorded_trajectories(recorder)
    (call,) = trajectory.actions
    assert (call.node, trajectory.edges, trajectory.episode.outcome) == ("coder", (), "terminated")
    assert rewards(result, recorder) == {
        "correct": 1.0,
        "passed": 1.0,
        "tries": 1.0,
        "reward": 1.0,
        "progress": {f"step:{call.action_id}": 1.0},
    }


def test_each_try_depends_on_the_hint_before_it_and_the_hint_on_what_the_environment_found(recorder: Recorder) -> None:
    tries = {"coder": ["x + 3", "x * 3 if x > 2 else 0", "x * 3"], "reflector": ["Use *.", "Drop the if."]}
    result = run(coder_reflector, recorder, **tries)
    assert recorded_edges(recorder) == {
        # The environment makes no call: whom it makes run depends on the coder that it ran after.
        "trigger": "coder1>reflector1 coder2>reflector2 reflector1>coder2 reflector2>coder3",
        # Every later try reads what was written and found last, how many tries there were, and the hint. The first try
        # goes another way through the same function and reads no hint, so that the hint is a bound.
        "data": "coder1>coder2 coder1>coder3 coder1>reflector1 coder2>coder3 coder2>reflector2"
        " reflector1?coder2 reflector2?coder3",
    }
    assert result["scores"] == [0.0, 0.5, 1.0]
    found = rewards(result, recorder)
    # Right at the third try: 0.5 + 0.5 - 2 * 0.05.
    assert (found["correct"], found["tries"], found["reward"]) == (1.0, 3.0, pytest.approx(0.9))
    (trajectory,) = recorded_trajectories(recorder)
    calls = [action.action_id for action in trajectory.actions if action.node == "coder"]
    assert found["progress"] == {f"step:{calls[0]}": 0.0, f"step:{calls[1]}": 0.5, f"step:{calls[2]}": 0.5}


def test_the_last_try_ends_the_run_by_itself_and_a_limit_from_outside_cuts_it(tmp_path: Path) -> None:
    own, cut = Recorder(Journal(tmp_path / "own")), Recorder(Journal(tmp_path / "cut"))
    wrong = {"coder": ["x"] * 3, "reflector": ["No."] * 2}
    result = run(coder_reflector, own, **wrong)
    (trajectory,) = recorded_trajectories(own)
    assert [action.node for action in trajectory.actions] == ["coder", "reflector", "coder", "reflector", "coder"]
    assert (trajectory.episode.outcome, trajectory.episode.reason) == ("terminated", None)
    # f(0) = 0 is right by chance, one of four; nothing passes all. 0.125 - 2 * 0.05.
    found = rewards(result, own)
    assert (found["correct"], found["passed"], found["reward"]) == (0.0, 0.25, pytest.approx(0.025))

    with pytest.raises(GraphRecursionError):
        run(coder_reflector, cut, {"recursion_limit": 4}, **wrong)
    (trajectory,) = recorded_trajectories(cut)
    assert [action.node for action in trajectory.actions] == ["coder", "reflector", "coder"]
    assert (trajectory.episode.outcome, trajectory.episode.reason) == ("truncated", "recursion limit reached")


@pytest.mark.parametrize(
    ("written", "feedback"),
    [
        ("x + 2", "f(9) gave 11 and not 27"),
        ("y", "f(1) gave nothing: a name that is not known"),
        ("__import__('os').abort()", "f(1) gave nothing: not an expression"),
        ("9**9**9", "f(1) gave nothing: too large a number"),
        ("x" * 5000, "f(1) gave nothing: too long"),
        ("", "f(1) gave nothing: not an expression"),
    ],
)
def test_hostile_and_broken_programs_are_a_finding_and_pass_nothing(
    written: str, feedback: str, recorder: Recorder
) -> None:
    result = run(coder_reflector, recorder, coder=[written] * 3, reflector=["word " * 999] * 2)
    assert result["feedback"] == feedback
    assert result["scores"] == [0.5 if written == "x + 2" else 0.0] * 3
    assert len(result["hint"]) <= coder_reflector.MAX_SHOWN_CHARACTERS
    found = rewards(result, recorder)
    assert (found["correct"], found["passed"]) == (0.0, 0.0)


def test_progress_is_absent_where_the_record_has_not_one_call_for_each_try() -> None:
    result = {"expression": "x * 3", "scores": [1.0]}
    found = coder_reflector.reward(TASK, result, SimpleNamespace(game=lambda: SimpleNamespace(actions=())))
    assert (found["reward"], found["progress"]) == (1.0, None)


def solution(request: str) -> str:
    """The expression that a request asks for, for the shapes with a plain one."""
    k = re.findall(r"\d+", request)[-1]
    for words, expression in (
        ("adds a, b", f"a + b + {k}"),
        ("multiplies a by b", f"a * b + {k}"),
        ("larger of a and b", f"max(a, b) + {k}"),
        ("adds", f"x + {k}"),
        ("multiplies", f"x * {k}"),
        ("subtracts x", f"{k} - x"),
        ("subtracts", f"x - {k}"),
        ("remainder", f"x % {k}"),
        ("divides", f"x // {k}"),
        ("larger", f"max(x, {k})"),
    ):
        if words in request:
            return expression
    return f"min(x, {k})"


def plans_and_codes(node: str, messages: list[dict[str, Any]], chance: random.Random) -> str:
    """A plan is good half the time. The coder is right with a good plan only, and then not always."""
    asked = messages[-1]["content"]
    if node == "planner":
        return "Do it." if chance.random() < 0.6 else "zzzz zzzz"
    right = "Plan: Do it." in asked and chance.random() < 0.8
    return f"return {solution(asked.splitlines()[0])}" if right else "zzzz zzzz zzzz"


@pytest.mark.slow
def test_training_pulls_planner_and_coder_towards_programs_that_pass_their_tests(tmp_path: Path) -> None:
    config = ZOO / "planner_coder.toml"
    declared = tomllib.loads(config.read_text())["rewards"]
    declared[0]["isolation"] = "limits-only"  # the script's programs do no harm, and every machine has this wall
    trained = train_zoo(config, plans_and_codes, tmp_path, rounds=2, episodes=8, changes={"rewards": declared})
    assert set(trained.norms) == {"planner", "coder"}
    assert min(trained.norms.values()) > 0
    for trajectory in trained.trained:
        tests, correct = trajectory.team_reward("tests"), trajectory.team_reward("correct")
        assert (tests, correct) in {(0.0, 0.0), (1.0, 1.0)}
        assert trajectory.team_reward("reward") == correct
    assert trained.pull("planner") > 0.2
    assert trained.pull("coder") > 0.2


def tries_and_hints(node: str, messages: list[dict[str, Any]], chance: random.Random) -> str:
    """The first try is right now and then, a later one after a good hint; hints are good half the time."""
    asked = messages[-1]["content"]
    if node == "reflector":
        return "Use it." if chance.random() < 0.5 else "zzzz zzzz"
    right = "Hint: Use it." in asked or ("Hint:" not in asked and chance.random() < 0.3)
    return solution(asked.splitlines()[0]) if right else "zzzz zzzz zzzz"


@pytest.mark.slow
def test_training_pulls_coder_and_reflector_towards_tries_that_pass(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "coder_reflector.toml", tries_and_hints, tmp_path, rounds=2, episodes=8)
    assert set(trained.norms) == {"coder", "reflector"}
    assert min(trained.norms.values()) > 0
    for trajectory in trained.trained:
        coder = [action.action_id for action in trajectory.actions if action.node == "coder"]
        gains = [reward for reward in trajectory.rewards if reward.name == "progress"]
        assert sorted(str(gain.action_id) for gain in gains) == sorted(coder)
        assert {gain.scope for gain in gains} == {"step"}
    assert trained.pull_to("coder", "progress") > 0.2
    assert trained.pull("reflector") > 0.1
