"""Owns: the zoo's map-reduce: a worker for each part, none depends on another, the reducer on all; training."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path
from typing import Any

import pytest
from support.edge_rig import recorded_edges, recorded_trajectories
from support.zoo_rig import ZOO, train_zoo

from graphs import map_reduce
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from trace_store.journal import Journal


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def run(recorder: Recorder, question: str, reduced: str = "9") -> tuple[dict[str, Any], ScriptedPolicy]:
    def script(node: str, prompt: str, _: random.Random) -> str:
        asked = prompt.rsplit("human: ", 1)[1]
        return str(sum(map(int, re.findall(r"\d+", asked)))) if node == "worker" else reduced

    policy = ScriptedPolicy(script=script)
    result = asyncio.run(wrap(map_reduce.build(policy), recorder).ainvoke({"question": question}))
    return result, policy


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_there_are_as_many_workers_as_parts_and_only_the_reducer_depends_on_them(
    parts: int, recorder: Recorder
) -> None:
    result, policy = run(recorder, "Largest of: " + "; ".join(f"{n} + 1" for n in range(1, 1 + parts)))
    assert sorted(result["results"]) == [(n, str(n + 2)) for n in range(parts)]
    workers = ["worker"] if parts == 1 else [f"worker{n}" for n in range(1, 1 + parts)]
    joined = " ".join(f"{worker}>reducer" for worker in workers)
    assert recorded_edges(recorder) == {"trigger": joined, "data": joined}
    lines = policy.asked[-1].prompt.rsplit("human: ", 1)[1].splitlines()
    assert lines[:parts] == [f"Worker {n + 1}: {n + 2}" for n in range(parts)]  # in the list's order


def test_a_list_without_a_sum_goes_to_the_reducer_alone(recorder: Recorder) -> None:
    result, _ = run(recorder, "Largest of nothing")
    assert result["results"] == []
    (trajectory,) = recorded_trajectories(recorder)
    assert [action.node for action in trajectory.actions] == ["reducer"]


def test_a_list_that_is_too_long_is_cut() -> None:
    assert map_reduce.question_to_parts("1 + 1; " * 9) == ["1 + 1"] * map_reduce.MAX_PARTS


@pytest.mark.parametrize(
    ("results", "answer", "parts", "earned"),
    [
        ([(0, "14"), (1, "6")], "14", 1.0, 1.0),
        ([(1, "6"), (0, "it is 14")], "6", 1.0, 0.4),
        ([(0, "13"), (1, "6")], "13", 0.5, 0.2),
        ([(0, "13"), (1, "7")], "the largest is 14", 0.0, 1.0),
        ([], "", 0.0, 0.0),
        ([(0, "1" * 5000), (7, "6")], "-14", 0.0, 0.0),
    ],
)
def test_rewards_are_those_worked_out_by_hand(
    results: list[tuple[int, str]], answer: str, parts: float, earned: float
) -> None:
    task = {"id": "t", "question": "", "sums": [14, 6], "answer": 14}
    found = map_reduce.reward(task, {"results": results, "answer": answer})
    assert found == {"correct": float(earned == 1.0), "parts": parts, "reward": pytest.approx(earned)}


def test_tasks_have_one_to_four_parts_and_the_largest_sum_as_their_answer() -> None:
    tasks = list(map_reduce.tasks())
    assert tasks == list(map_reduce.tasks())
    assert len(tasks) == len({task["id"] for task in tasks}) == len({task["question"] for task in tasks}) >= 100
    assert {len(task["sums"]) for task in tasks} == {1, 2, 3, 4}
    for task in tasks:
        found = [sum(map(int, part.split(" + "))) for part in map_reduce.question_to_parts(task["question"])]
        assert (found, max(found)) == (task["sums"], task["answer"])
        assert set(map_reduce.task_to_input(task)) == {"question"}


def half_right(node: str, messages: list[dict[str, Any]], chance: random.Random) -> str:
    """The right number, or nonsense, by the toss of a coin."""
    if chance.random() < 0.4:
        return "zzzz"
    numbers = [int(n) for n in re.findall(r"\d+", re.sub(r"Worker \d", "", messages[-1]["content"]))]
    return str(sum(numbers) if node == "worker" else max(numbers, default=0))


@pytest.mark.slow
def test_training_moves_both_agents_and_pulls_them_towards_what_paid(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "map_reduce.toml", half_right, tmp_path, rounds=2, episodes=16)
    assert set(trained.norms) == {"worker", "reducer"}
    assert all(norm > 0 for norm in trained.norms.values())
    assert len({len(t.actions) for t in trained.trained}) > 2  # the number of agents varies
    assert trained.pull("reducer") > 0.2
