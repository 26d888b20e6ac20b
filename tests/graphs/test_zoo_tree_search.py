"""Owns: the zoo's tree search (MARS2): which program is expanded by whom, D, shaped rewards by hand, bad programs."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.edge_rig import recorded_trajectories, run_recorded
from support.zoo_rig import ZOO, train_zoo

from graphs import tree_search
from graphs.tree_search import CODERS, PROGRAMS, Program, choose_expansion, find_best, find_subtree, shape_rewards
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from trace_store.journal import Journal

TASK = {
    "id": "times-3",
    "request": "f(x) multiplies x by 3",
    "parameters": ["x"],
    "examples": [[[1], 3], [[9], 27]],
    "checks": [[[0], 0], [[4], 12], [[7], 21], [[30], 90]],
}
# 0 -> 1 -> 3, 0 -> 2, and 4 and 5 that began anew
PARENTS = (None, 0, 0, 1, None, None)


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def run(recorder: Recorder, *answers: str) -> dict[str, Any]:
    """A search in which the k-th call of either coder is answered by its k-th answer, the last one again and again."""
    said = [*answers, *[answers[-1]] * PROGRAMS]
    policy = ScriptedPolicy(answers=dict.fromkeys(CODERS, said))
    return run_recorded(tree_search.build(policy), tree_search.task_to_input(TASK), recorder)


def tree(*programs: tuple[str, int | None, float]) -> list[Program]:
    """Programs as (coder, parent, score)."""
    return [Program("x", coder, parent, score) for coder, parent, score in programs]


def expansions(programs: list[Program], count: int = 400) -> Counter[tuple[int | None, str]]:
    """How often each (parent, coder) is chosen, over searches that differ in their requests."""
    return Counter(choose_expansion(programs, f"request {k}") for k in range(count))


# -- the search --------------------------------------------------------------------------------------------------------


def test_an_empty_tree_is_begun_by_either_coder_alike() -> None:
    chosen = expansions([])
    assert set(chosen) == {(None, name) for name in CODERS}
    assert abs(chosen[None, "coder_a"] - 200) < 40  # four deviations of 10


def test_equal_states_go_on_equally_and_the_text_of_programs_has_no_say() -> None:
    programs = tree(("coder_a", None, 0.5), ("coder_b", 0, 0.0))
    others = [program._replace(expression="y") for program in programs]
    assert choose_expansion(programs, "r") == choose_expansion(others, "r") == choose_expansion(programs, "r")


def test_a_program_that_passes_all_examples_is_not_refined() -> None:
    assert {parent for parent, _ in expansions(tree(("coder_a", None, 1.0), ("coder_b", None, 1.0)))} == {None}


def test_the_better_a_branch_did_the_more_often_it_is_gone_on_with() -> None:
    """Below 0 stand programs that pass half of the examples, below 1 such that pass none."""
    good = [("coder_a", 0, 0.5)] * 4
    bad = [("coder_b", 1, 0.0)] * 4
    programs = tree(("coder_a", None, 0.5), ("coder_b", None, 0.0), *good, *bad)
    below = Counter(
        next(top for top in (0, 1) if parent in find_subtree(programs, top))
        for parent, _ in expansions(programs)
        if parent is not None
    )
    assert below[0] > 4 * below[1]


def test_the_coder_that_did_better_below_a_program_is_asked_more_often_there() -> None:
    programs = tree(*[("coder_a", None, 1.0)] * 4, *[("coder_b", None, 0.0)] * 4)
    chosen = expansions(programs)
    assert chosen[None, "coder_a"] > 4 * chosen[None, "coder_b"]


def test_a_subtree_holds_what_refines_a_program_directly_or_not() -> None:
    programs = tree(*[("coder_a", parent, 0.0) for parent in PARENTS])
    assert [find_subtree(programs, top) for top in range(6)] == [[0, 1, 2, 3], [1, 3], [2], [3], [4], [5]]


def test_the_best_by_the_examples_is_handed_in_of_several_the_latest() -> None:
    programs = tree(("coder_a", None, 0.5), ("coder_b", 0, 1.0), ("coder_a", None, 1.0), ("coder_b", None, 0.0))
    assert find_best(programs) is programs[2]


# -- a run -------------------------------------------------------------------------------------------------------------


def test_every_call_depends_on_all_before_it_since_the_search_looks_at_all_scores(recorder: Recorder) -> None:
    result = run(recorder, "x + 3")
    (trajectory,) = recorded_trajectories(recorder)
    calls = [action.action_id for action in trajectory.actions]
    assert [action.node for action in trajectory.actions] == [program.coder for program in result["tree"]]
    assert len(calls) == PROGRAMS
    pairs = {kind: {(e.src, e.dst) for e in trajectory.edges if e.kind == kind} for kind in ("trigger", "data")}
    assert pairs["trigger"] == set(pairwise(calls))
    assert pairs["data"] == {(a, b) for i, b in enumerate(calls) for a in calls[:i]}
    assert all(edge.exact for edge in trajectory.edges)


def test_a_call_is_shown_the_program_that_it_refines_and_its_first_failure() -> None:
    policy = ScriptedPolicy(answers=dict.fromkeys(CODERS, ["x + 3"] * PROGRAMS))
    result = asyncio.run(tree_search.build(policy).ainvoke(tree_search.task_to_input(TASK)))
    prompts = [call.prompt.split("human: ")[-1].split("\nai:")[0] for call in policy.asked]
    anew = "f(x) multiplies x by 3\nExpression?"
    refining = "f(x) multiplies x by 3\nWritten: x + 3\nf(1) gave 4 and not 3\nExpression?"
    assert prompts == [anew if program.parent is None else refining for program in result["tree"]]
    assert {program.parent is None for program in result["tree"]} == {True, False}


def test_the_graph_is_given_no_check() -> None:
    assert set(tree_search.task_to_input(TASK)) == {"request", "parameters", "examples", "tree"}


@pytest.mark.parametrize(
    "written", ["__import__('os').abort()", "9**9**9", "x" * 5000, "", "while True: pass", "lambda: (yield)"]
)
def test_programs_that_do_not_run_end_no_search_and_cost_their_writers(written: str, recorder: Recorder) -> None:
    result = run(recorder, written)
    (trajectory,) = recorded_trajectories(recorder)
    assert (trajectory.episode.outcome, len(result["tree"])) == ("terminated", PROGRAMS)
    found = earned(result, recorder)
    assert (found["correct"], found["found"], found["reward"], found["broken"]) == (0.0, 0.0, 0.0, float(PROGRAMS))
    assert list(found["path"].values()) == pytest.approx([-0.1] * PROGRAMS)  # nobody leads anybody


# -- rewards -----------------------------------------------------------------------------------------------------------


def earned(result: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
    (trajectory,) = recorded_trajectories(recorder)
    return tree_search.reward(TASK, result, SimpleNamespace(game=lambda: trajectory))


def test_rewards_of_a_tree_of_six_are_shaped_as_worked_out_by_hand() -> None:
    rewards = (0.2, 0.6, 0.0, 1.0, 0.2, 0.8)
    assert shape_rewards(rewards, PARENTS) == pytest.approx(
        [
            0.2 + 0.5 * (0.2 - 0.5),  # began anew beside 0.2 and 0.8
            0.6 + 0.5 * (0.6 - (0.2 + 0.0) / 2),  # parent 0.2, sibling 0.0
            0.0 + 0.5 * (0.0 - (0.2 + 0.6) / 2),  # parent 0.2, sibling 0.6
            1.0 + 0.5 * (1.0 - 0.6),  # parent 0.6 alone
            0.2 + 0.5 * (0.2 - 0.5),
            0.8 + 0.5 * (0.8 - 0.2),
        ]
    )
    assert shape_rewards([0.7], [None]) == [0.7]
    assert shape_rewards([0.7, 0.7, 0.7], [None, 0, None]) == pytest.approx([0.7] * 3)


def test_a_worse_program_costs_no_other_program_anything() -> None:
    chance = random.Random(0)
    for _ in range(50):
        rewards = [chance.random() for _ in PARENTS]
        at = chance.randrange(len(PARENTS))
        worse = [*rewards[:at], rewards[at] - 0.5, *rewards[at + 1 :]]
        gains = [b - a for a, b in zip(shape_rewards(rewards, PARENTS), shape_rewards(worse, PARENTS), strict=True)]
        assert gains.pop(at) < 0
        assert min(gains) >= -1e-12


def test_rewards_are_those_worked_out_by_hand() -> None:
    programs = [
        Program("x + 3", "coder_a", None, 0.0),  # passes no check: 0
        Program("x * 3", "coder_b", 0, 1.0),  # all: 1
        Program("x", "coder_a", None, 0.0),  # f(0) only, a quarter: 0.125
        Program("y", "coder_b", 2, 0.0),  # does not run: -0.1
    ]
    actions = [SimpleNamespace(action_id=f"c{i}", node=program.coder) for i, program in enumerate(programs)]
    record = SimpleNamespace(game=lambda: SimpleNamespace(actions=actions))
    found = tree_search.reward(TASK, {"tree": programs}, record)
    path = found.pop("path")
    assert found == {"correct": 1.0, "found": 1.0, "broken": 1.0, "reward": 1.0}
    assert path == pytest.approx(
        {
            "step:c0": 0.0 + 0.5 * (0.0 - 0.125),
            "step:c1": 1.0 + 0.5 * (1.0 - 0.0),
            "step:c2": 0.125 + 0.5 * (0.125 - 0.0),
            "step:c3": -0.1 + 0.5 * (-0.1 - 0.125),
        }
    )


def test_a_program_that_is_right_and_not_handed_in_is_found_and_not_correct() -> None:
    programs = [Program("x * 3", "coder_a", None, 0.0), Program("x + 2", "coder_b", None, 0.5)]
    found = tree_search.reward(TASK, {"tree": programs}, SimpleNamespace(game=lambda: SimpleNamespace(actions=[])))
    assert (found["correct"], found["found"], found["reward"], found["path"]) == (0.0, 1.0, 0.0, None)


# -- training ----------------------------------------------------------------------------------------------------------


def programs_half_right(node: str, messages: list[dict[str, Any]], chance: random.Random) -> str:
    """What adds is right half the time, and every other program does not run."""
    asked = messages[-1]["content"].splitlines()[0]
    numbers = re.findall(r"\d+", asked)
    return f"x + {numbers[-1]}" if chance.random() < 0.5 else "zzzz zzzz zzzz"


@pytest.mark.slow
def test_training_pulls_both_coders_towards_programs_that_lead_their_tree(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "tree_search.toml", programs_half_right, tmp_path, rounds=2, episodes=8)
    assert set(trained.norms) == set(CODERS)
    assert min(trained.norms.values()) > 0
    for trajectory in trained.trained:
        paid = [reward for reward in trajectory.rewards if reward.name == "path"]
        assert len(paid) == len(trajectory.actions) == PROGRAMS
        assert {reward.scope for reward in paid} == {"step"}
    assert min(trained.pull_to(coder, "path") for coder in CODERS) > 0.2
