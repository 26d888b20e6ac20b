"""Owns: the zoo's team that a host builds (MasHost): the language, D, who is idle, rewards by hand, training."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.edge_rig import recorded_edges, recorded_trajectories
from support.zoo_rig import ZOO, train_zoo

from graphs import mashost
from graphs.mashost import Addition
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from marft_bridge.rollouts.app import split_tasks
from trace_store.journal import Journal

LARGER = {"id": "t", "question": "Which is larger, 3 + 4 or 2 + 3?", "answer": "7"}
FACT = {"id": "t", "question": "Which animal does Ann own?", "answer": "goat"}


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def run(recorder: Recorder, task: dict[str, Any], **answers: list[str]) -> tuple[dict[str, Any], ScriptedPolicy]:
    policy = ScriptedPolicy(answers=answers)
    return asyncio.run(wrap(mashost.build(policy), recorder).ainvoke(mashost.task_to_input(task))), policy


def earned(task: dict[str, Any], result: dict[str, Any], host_calls: int | None = None) -> dict[str, Any]:
    """Rewards of a run whose record has the host's calls c0, c1 and so on."""
    count = len(result["lines"]) if host_calls is None else host_calls
    actions = [SimpleNamespace(node="host", action_id=f"c{number}") for number in range(count)]
    return mashost.reward(task, result, SimpleNamespace(game=lambda: SimpleNamespace(actions=actions)))


def agent(role: str, said: str, line: int, *links: int, part: int | None = None) -> dict[str, Any]:
    return {"role": role, "said": said, "line": line, "links": links, "part": part}


def team(*agents: dict[str, Any]) -> list[Any]:
    return [{**each, "number": number} for number, each in enumerate(agents, 1)]


# -- who acts, and on whom they depend ---------------------------------------------------------------------------------


def test_agents_side_by_side_depend_on_the_line_that_added_them_and_not_on_each_other(recorder: Recorder) -> None:
    result, policy = run(
        recorder,
        LARGER,
        host=["NEXT: ADDER AND ADDER", "NEXT: SOLVER READS 2 AND 1", "NEXT: DONE"],
        adder=["3, 4", "2, 3"],
        solver=["7"],
    )
    assert [(each["role"], each["links"], each["part"], each["said"]) for each in result["team"]] == [
        ("adder", (), 0, "7"),
        ("adder", (), 1, "5"),
        ("solver", (2, 1), None, "7"),
    ]
    prompts = [call.prompt.rsplit("human: ", 1)[1].removesuffix("\nai: ") for call in policy.asked]
    assert sorted(prompts[1:3]) == ["What is 2 + 3?", "What is 3 + 4?"]
    assert prompts[3] == f"{LARGER['question']}\n1 ADDER: 7\n2 ADDER: 5"
    assert prompts[4] == f"5\n7\n{LARGER['question']}"  # in the order of the line
    assert recorded_edges(recorder) == {
        "send": "host1>adder1 host1>adder2 host2>solver",
        "trigger": "adder1>host2 adder2>host2 solver>host3",
        # The host reads all that the team said, and how many lines there were. What a solver reads comes by its host.
        "data": "adder1>host2 adder1>host3 adder2>host2 adder2>host3 host1>host2 host1>host3 host2>host3 solver>host3",
    }


def test_an_agent_that_is_linked_to_nobody_reads_the_question_alone(recorder: Recorder) -> None:
    _, policy = run(recorder, FACT, host=["NEXT: FINDER", "NEXT: SOLVER", "DONE"], finder=["Ann animal"], solver=["x"])
    assert policy.asked[3].node == "solver"
    assert policy.asked[3].prompt.rsplit("human: ", 1)[1].startswith(f"{FACT['question']}\nai")


def test_what_an_agent_says_is_one_line_so_that_it_cannot_pose_as_another(recorder: Recorder) -> None:
    result, policy = run(recorder, FACT, host=["SOLVER", "DONE"], solver=["goat\n2 ADDER: 7"])
    assert result["team"][0]["said"] == "goat 2 ADDER: 7"
    assert policy.asked[-1].prompt.rsplit("human: ", 1)[1].splitlines()[1] == "1 SOLVER: goat 2 ADDER: 7"


def test_a_line_outside_the_language_costs_the_host_its_line_and_never_ends_the_run(recorder: Recorder) -> None:
    """The first adds a solver, since somebody has to answer. The second adds nobody, and the host is asked again."""
    lines = ["I would say a goat", "NEXT: NOBODY", "NEXT: FINDER", "NEXT: DONE"]
    result, policy = run(recorder, FACT, host=lines, solver=["cow"], finder=["Ann"])
    assert [call.node for call in policy.asked] == ["host", "solver", "host", "host", "finder", "host"]
    assert policy.asked[2].prompt == policy.asked[3].prompt  # nothing of the line is kept
    assert result["lines"] == [False, False, True, True]
    (trajectory,) = recorded_trajectories(recorder)
    assert trajectory.episode.outcome == "terminated"
    assert recorded_edges(recorder)["trigger"] == "finder>host4 host2>host3 solver>host2"
    found = earned(FACT, result)
    assert found["bad_line"] == {"step:c0": 1.0, "step:c1": 1.0, "step:c2": 0.0, "step:c3": 0.0}
    assert found["idle"] == {"step:c0": 1.0, "step:c1": 0.0, "step:c2": 0.0, "step:c3": 0.0}  # nobody read the solver


def test_a_host_that_only_writes_bad_lines_is_stopped_after_its_last_line_with_an_answer(recorder: Recorder) -> None:
    result, policy = run(recorder, FACT, host=["?"] * (mashost.MAX_LINES + 1), solver=["goat"])
    assert [call.node for call in policy.asked] == ["host", "solver"] + ["host"] * (mashost.MAX_LINES - 1)
    assert result["lines"] == [False] * mashost.MAX_LINES
    found = earned(FACT, result)
    assert (found["correct"], found["reward"], found["calls"]) == (1.0, 1.0, 1.0)
    assert found["bad_line"] == {f"step:c{number}": 1.0 for number in range(mashost.MAX_LINES)}
    assert found["idle"] == {f"step:c{number}": 0.0 for number in range(mashost.MAX_LINES)}


def test_a_host_that_never_ends_is_stopped_after_its_last_line(recorder: Recorder) -> None:
    lines = ["NEXT: SOLVER AND SOLVER"] * (mashost.MAX_LINES + 1)
    result, policy = run(recorder, FACT, host=lines, solver=["goat"] * 20)
    assert sum(call.node == "host" for call in policy.asked) == mashost.MAX_LINES == len(result["lines"])
    assert [each["number"] for each in result["team"]] == list(range(1, 1 + 2 * mashost.MAX_LINES))
    # the last of eight answers; everybody else was idle
    assert earned(FACT, result)["idle"] == {"step:c0": 2.0, "step:c1": 2.0, "step:c2": 2.0, "step:c3": 1.0}


# -- the language ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "team_size", "move"),
    [
        ("NEXT: ADDER", 0, Addition(("adder",))),
        ("solver and adder.", 0, Addition(("solver", "adder"))),
        ("next:solver READS 2 and 1", 2, Addition(("solver",), (2, 1))),
        ("NEXT: DONE", 1, Addition(())),
        ("NEXT: DONE", 0, None),  # nobody would answer
        ("NEXT: SOLVER READS 3", 2, None),
        ("NEXT: SOLVER READS 0", 2, None),
        ("NEXT: SOLVER READS 1 AND 1", 2, None),
        ("NEXT: ADDER AND ADDER AND ADDER", 0, None),
        ("NEXT: DOCTOR", 0, None),
        ("NEXT: ADDER, 12", 0, None),
        ("NEXT: DONE READS 1", 1, None),
        ("", 1, None),
        ("next: " + "adder and " * 50_000, 1, None),
    ],
)
def test_a_line_is_a_move_or_outside_the_language(line: str, team_size: int, move: Addition | None) -> None:
    assert mashost.line_to_move(line, team_size) == move


def test_every_line_of_the_examples_is_of_the_language() -> None:
    for prompt, line in mashost.HOST.examples:
        assert mashost.line_to_move(line, prompt.count("\n")) is not None


# -- rewards -----------------------------------------------------------------------------------------------------------


SEVEN, FIVE = agent("adder", "7", 0, part=0), agent("adder", "5", 0, part=1)  # for a line that shares LARGER out


@pytest.mark.parametrize(
    ("members", "idle"),
    [
        ((agent("adder", "7", 0),), []),
        ((SEVEN, FIVE, agent("solver", "7", 1, 1, 2)), []),  # it compared the two parts
        ((SEVEN, FIVE, agent("solver", "7", 1, 1)), [2, 3]),  # it repeated 1
        ((agent("adder", "7", 0), agent("solver", "it is 7", 1, 1)), [2]),
        ((agent("adder", "7", 0), agent("solver", "8", 1, 1)), []),
        ((agent("finder", "Ann keeps a goat.", 0), agent("solver", "goat", 1, 1)), []),
        ((agent("finder", "Ann keeps a goat.", 0), agent("solver", "goat", 1)), [1]),  # nobody reads 1
        ((agent("solver", "a goat", 0), agent("solver", "Goat.", 1, 1)), [2]),
        ((agent("finder", "x", 0), agent("solver", "y", 1, 1), agent("solver", "z", 2, 2)), []),  # 1 by way of 2
        # Whoever reads several repeats as well, and who said it first was enough.
        ((agent("adder", "12", 0), agent("adder", "12", 1)), [1]),  # the last answers
        ((agent("adder", "12", 0), agent("adder", "12", 1), agent("solver", "12", 2, 1, 2)), [2, 3]),
        ((agent("adder", "12", 0), agent("finder", "", 1), agent("solver", "12", 2, 2, 1)), [2, 3]),
        ((agent("adder", "7", 0, part=0), agent("adder", "7", 0, part=1), agent("solver", "7", 1, 1, 2)), [2, 3]),
        (
            (
                agent("finder", "x", 0),
                agent("solver", "y", 1, 1),
                agent("finder", "z", 1),
                agent("solver", "y", 2, 2, 3),
            ),
            [3, 4],
        ),
        # To compare once more, to repeat whoever compared, or to read an answer twice, is nothing new.
        ((SEVEN, FIVE, agent("solver", "7", 1, 1, 2), agent("solver", "7", 2, 1, 2)), [3]),
        ((SEVEN, FIVE, agent("solver", "7", 1, 1, 2), agent("solver", "7", 2, 1, 2, 3)), [4]),
        ((SEVEN, FIVE, SEVEN, FIVE, agent("solver", "7", 2, 4, 3, 2, 1)), [3, 4]),
        ((agent("finder", "x", 0), agent("finder", "x", 0), agent("solver", "y", 1, 1, 2)), [2]),
        ((agent("adder", "7", 0), agent("adder", "5", 0), agent("solver", "9", 1, 1, 2)), []),
    ],
)
def test_an_agent_is_idle_where_the_answer_would_have_been_the_same_without_it(
    members: tuple[dict[str, Any], ...], idle: list[int]
) -> None:
    assert mashost.team_to_idle(team(*members)) == idle


@pytest.mark.parametrize(
    ("task", "members", "correct", "reward"),
    [
        (LARGER, (agent("solver", "7", 0),), 1.0, 1.0),
        (LARGER, (agent("solver", "7 or 5", 0),), 0.0, 0.1),
        (LARGER, (agent("adder", "no two numbers", 0),), 0.0, 0.0),
        (FACT, (agent("solver", "A goat.", 0),), 1.0, 1.0),
        # three words without the article, one of them right: 2 * 1 / (3 + 1)
        (FACT, (agent("finder", "Ann keeps a goat.", 0),), 0.0, 0.5),
        (FACT, (agent("solver", "goat", 0), agent("solver", "", 1)), 0.0, 0.0),  # the last answers
    ],
)
def test_rewards_of_the_team_are_those_worked_out_by_hand(
    task: dict[str, Any], members: tuple[dict[str, Any], ...], correct: float, reward: float
) -> None:
    found = earned(task, {"team": team(*members)[::-1], "lines": [True, True]})
    assert (found["correct"], found["reward"]) == (correct, pytest.approx(reward))
    assert found["calls"] == len(members)


@pytest.mark.parametrize(
    ("task", "members", "lines", "paid"),
    [
        (LARGER, (agent("adder", "7", 0),), 2, 0.95),  # asked the whole, it named the numbers of the larger sum
        (LARGER, (SEVEN, FIVE, agent("solver", "7", 1, 1, 2)), 3, 0.85),
        (LARGER, (agent("adder", "5", 0), agent("adder", "7", 0)), 2, 1 - 0.1 - 0.3),  # nobody read the first
        (FACT, (agent("finder", "Ann keeps a goat.", 0), agent("solver", "goat", 1, 1)), 3, 0.9),
        (FACT, (agent("finder", "Ann keeps a goat.", 0),), 2, 0.5 - 0.05),
    ],
)
def test_who_answers_alone_is_paid_best_by_the_configuration_and_a_fact_takes_two(
    task: dict[str, Any], members: tuple[dict[str, Any], ...], lines: int, paid: float
) -> None:
    found = earned(task, {"team": team(*members), "lines": [True] * lines})
    trainer = toml_to_config(ZOO / "mashost.toml").train.trainer
    values = {name: sum(value.values()) if isinstance(value, dict) else value for name, value in found.items()}
    total = values[trainer.reward] + sum(term.weight * values[term.reward] for term in trainer.shaping)
    assert total == pytest.approx(paid)


def test_idle_agents_cost_the_line_that_added_them() -> None:
    members = team(SEVEN, FIVE, agent("finder", "", 1), agent("solver", "7", 2, 1, 2))
    found = earned(LARGER, {"team": members, "lines": [True, True, True, False]})
    assert found["idle"] == {"step:c0": 0.0, "step:c1": 1.0, "step:c2": 0.0, "step:c3": 0.0}
    assert found["bad_line"] == {"step:c0": 0.0, "step:c1": 0.0, "step:c2": 0.0, "step:c3": 1.0}


def test_rewards_of_lines_are_absent_where_the_record_has_another_number_of_calls() -> None:
    found = earned(FACT, {"team": team(agent("solver", "goat", 0)), "lines": [True, True]}, host_calls=1)
    assert (found["correct"], found["idle"], found["bad_line"]) == (1.0, None, None)


# -- tasks -------------------------------------------------------------------------------------------------------------


def test_tasks_are_distinct_and_none_is_an_example() -> None:
    tasks = list(mashost.tasks())
    assert tasks == list(mashost.tasks())
    assert len({task["id"] for task in tasks}) == len({task["question"] for task in tasks}) == len(tasks) == 162
    shown = " ".join(prompt for part in (mashost.HOST, *mashost.ROLES.values()) for prompt, _ in part.examples)
    for task in tasks:
        assert task["question"] not in shown
        assert set(mashost.task_to_input(task)) == {"question"}
        sums = [sum(map(int, pair)) for pair in re.findall(r"(\d+) \+ (\d+)", task["question"])]
        if sums:
            assert len(set(sums)) == len(sums) == len(mashost.question_to_parts(task["question"]))
            assert task["answer"] == str(max(sums))
        else:
            found = mashost.search.invoke({"query": task["question"].split()[-1 if "town" in task["question"] else -2]})
            assert any(task["answer"] in sentence for sentence in found)  # the name alone finds it


def test_no_sum_or_part_that_is_held_out_is_in_a_task_of_training_or_in_an_example() -> None:
    """With the package's own split, and in either order of its two numbers."""
    train, heldout = split_tasks(list(mashost.tasks()), toml_to_config(ZOO / "mashost.toml").graph.heldout)
    assert {task["id"].split("-")[0] for task in heldout} == {"sum", "fact", "larger"}
    shown = [{"question": prompt} for part in (mashost.HOST, *mashost.ROLES.values()) for prompt, _ in part.examples]
    trained, kept, examples = map(tasks_to_sums, (train, heldout, shown))
    assert not set(kept) & set(trained)
    assert not set(examples) & {*trained, *kept}
    assert len({*trained, *kept}) == len(trained) + len(kept) == 54 + 2 * 54  # none is in two tasks


def tasks_to_sums(tasks: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    """What is added in these tasks, the smaller number first."""
    text = "\n".join(task["question"] for task in tasks)
    return [tuple(sorted(map(int, pair))) for pair in re.findall(r"(\d+) \+ (\d+)", text)]


# -- training ----------------------------------------------------------------------------------------------------------


def builds(node: str, messages: list[dict[str, Any]], chance: random.Random) -> str:
    """A host that adds the right agents, idle ones, or writes nonsense; roles that are right two times in three."""
    asked = str(messages[-1]["content"])
    if chance.random() < 0.33:
        return "zzzz zzzz"
    if node == "host":
        if len(asked.splitlines()) > 1:
            return "DONE" if chance.random() < 0.5 else "SOLVER"
        return "ADDER" if "+" in asked else "FINDER"
    numbers = re.findall(r"\d+", asked)
    if node == "adder":
        return f"{numbers[0]}, {numbers[1]}"
    return asked.split()[-1].strip("?")


@pytest.mark.slow
def test_training_moves_the_team_and_pulls_the_host_away_from_lines_that_cost_it(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "mashost.toml", builds, tmp_path, rounds=2, episodes=16)
    assert {"host", "adder"} <= {node for node, norm in trained.norms.items() if norm > 0}
    assert trained.pull_to("host", "bad_line") < -0.2
    assert {t.episode.outcome for t in trained.trained} == {"terminated"}
