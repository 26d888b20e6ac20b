"""Owns: what the published games have in common: who plays in which order, D, what answers cost, and their tasks.

- D is worked by hand: a planner depends on its writer, and every later call on the planners before it, by the position.
- An unreadable answer or a refused move costs, and never ends a run; the turns of the task, or its moves, do.
- A writer's own reward is what its proposal would have paid, on a copy; a planner's is what its answer paid.
- The same seed gives the same task; tasks differ in content; no example of a prompt is a task; who plays at random
  solves most at the first level.
- A writer may write Python, which the given function runs.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.edge_rig import recorded_edges, recorded_trajectories

from graphs import countdown, plan_path, sokoban, sudoku
from graphs.game_turns import MAX_PRINTED_CHARACTERS, NO_ANSWER, text_to_answer, text_to_code
from graphs.grid_moves import MAX_MOVES, text_to_moves
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from marft_bridge.rewards.contract import RunView
from trace_store.journal import Journal

GAMES = (plan_path, sudoku, sokoban, countdown)
# A task of each game, an answer that solves it, one that is played and does not, and one that is refused.
PLAYS: dict[ModuleType, tuple[dict[str, Any], str, str, str]] = {
    plan_path: (
        {"grid": ["...", "##.", "..."], "start": [0, 0], "goal": [2, 2], "shortest": 4, "step_limit": 99},
        "R2 D2",
        "R L",
        "D",
    ),
    sudoku: (
        {"grid": [[1, 2, 3, 4], [3, 4, 0, 2], [2, 1, 4, 3], [4, 3, 2, 0]]},
        "r2c3=1 r4c4=1",
        "r2c3=1",
        "r1c1=2",
    ),
    sokoban: ({"room": ["#####", "#@$.#", "#___#", "#####"], "step_limit": 99}, "R", "D U", "L"),
    countdown: ({"numbers": [3, 4, 5], "target": 17, "operators": "+-*"}, "3 * 4 + 5", "3 + 4 + 5", "3 + 4"),
}


def short_names(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


each_game = pytest.mark.parametrize("module", GAMES, ids=short_names)


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def run(
    module: ModuleType, recorder: Recorder, turn_limit: int, writer: list[str], planner: list[str]
) -> dict[str, Any]:
    """A run of the game's task, in which the two agents say this, turn by turn."""
    game = module.GAME
    policy = ScriptedPolicy(answers={game.writer.node: writer, game.planner.node: planner})
    task = {**PLAYS[module][0], "turn_limit": turn_limit}
    result: dict[str, Any] = asyncio.run(wrap(module.build(policy), recorder).ainvoke(module.task_to_input(task)))
    return result


def rewards(module: ModuleType, result: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
    """The rewards of the only run, `local` as {node and number: value}."""
    (trajectory,) = recorded_trajectories(recorder)
    task = PLAYS[module][0]
    values: dict[str, Any] = module.reward(task, result, RunView(task, result, trajectory))
    numbers: dict[str, int] = {}
    named: dict[str, float] = {}
    for action in trajectory.actions:
        numbers[action.node] = numbers.get(action.node, 0) + 1
        named[f"{action.node}{numbers[action.node]}"] = values["local"][f"step:{action.action_id}"]
    return {**values, "local": named}


@each_game
def test_a_game_that_is_solved_ends_and_its_planner_depended_on_its_writer(
    module: ModuleType, recorder: Recorder
) -> None:
    _, solving, _, _ = PLAYS[module]
    result = run(module, recorder, turn_limit=3, writer=[solving], planner=[solving])
    writer, planner = module.GAME.writer.node, module.GAME.planner.node
    assert recorded_edges(recorder) == {"trigger": f"{writer}>{planner}", "data": f"{writer}>{planner}"}
    values = rewards(module, result, recorder)
    assert (values["correct"], values["turns"], values["bad_moves"]) == (1.0, 1.0, 0.0)
    # Both said the same of the same state, so both earned what the team did.
    assert values["local"] == {f"{writer}1": values["reward"], f"{planner}1": values["reward"]}
    assert values["reward"] >= 1


@each_game
def test_every_turn_depends_on_the_planners_before_it_and_on_its_own_writer(
    module: ModuleType, recorder: Recorder
) -> None:
    _, solving, playing, _ = PLAYS[module]
    run(module, recorder, turn_limit=3, writer=[solving] * 3, planner=[playing, playing, solving])
    w, p = module.GAME.writer.node, module.GAME.planner.node
    assert recorded_edges(recorder) == {
        # The environment makes no call: whom it makes run depends on the planner that it ran after.
        "trigger": " ".join(sorted([f"{w}1>{p}1", f"{w}2>{p}2", f"{w}3>{p}3", f"{p}1>{w}2", f"{p}2>{w}3"])),
        # A planner reads its writer's proposal; position and last turn came from the planners before, of all turns.
        "data": " ".join(
            sorted(f"{w}1>{p}1 {w}2>{p}2 {w}3>{p}3 {p}1>{w}2 {p}1>{p}2 {p}1>{w}3 {p}1>{p}3 {p}2>{w}3 {p}2>{p}3".split())
        ),
    }


@each_game
@pytest.mark.parametrize(
    "said", ["", "I do not know.", "```\n```", "\x00" * 50, "9" * 5000, "((((" * 400, "move it now"]
)
def test_an_answer_without_a_move_costs_and_the_run_goes_on(module: ModuleType, said: str, recorder: Recorder) -> None:
    _, solving, _, _ = PLAYS[module]
    result = run(module, recorder, turn_limit=3, writer=[said, solving], planner=[said, solving])
    values = rewards(module, result, recorder)
    assert (values["correct"], values["turns"]) == (1.0, 2.0)
    assert values["bad_moves"] == 1
    solved_at_once = run(module, Recorder(recorder.journal), turn_limit=3, writer=[solving], planner=[solving])
    assert values["reward"] < sum(turn["team"] for turn in solved_at_once["turns"])
    writer, planner = module.GAME.writer.node, module.GAME.planner.node
    assert (values["local"][f"{writer}1"], values["local"][f"{planner}1"]) == (NO_ANSWER, NO_ANSWER)


@each_game
def test_refused_moves_cost_and_never_end_a_run_before_its_turns_are_over(
    module: ModuleType, recorder: Recorder
) -> None:
    _, _, _, refused = PLAYS[module]
    result = run(module, recorder, turn_limit=4, writer=[refused] * 4, planner=[refused] * 4)
    (trajectory,) = recorded_trajectories(recorder)
    assert (trajectory.episode.outcome, len(trajectory.actions)) == ("terminated", 8)
    values = rewards(module, result, recorder)
    assert (values["correct"], values["turns"], values["bad_moves"]) == (0.0, 4.0, 4.0)
    assert values["reward"] < 0.1


@each_game
def test_the_tool_plays_on_a_copy_and_a_position_is_never_changed(module: ModuleType, recorder: Recorder) -> None:
    task, solving, playing, _ = PLAYS[module]
    state = module.task_to_input({**task, "turn_limit": 1})
    before = json.dumps(state)
    assert module.play(state["position"], solving).solved
    assert json.dumps(state) == before
    result = run(module, recorder, turn_limit=1, writer=[solving], planner=[playing])
    values = rewards(module, result, recorder)
    assert values["correct"] == 0.0  # what the writer found is worth nothing where the planner does not do it
    local = values["local"]
    assert local[f"{module.GAME.writer.node}1"] > local[f"{module.GAME.planner.node}1"]


@each_game
def test_the_planner_reads_what_became_of_the_proposal_and_the_next_turn_what_became_of_the_answer(
    module: ModuleType,
) -> None:
    task, solving, playing, _ = PLAYS[module]
    game = module.GAME
    policy = ScriptedPolicy(answers={game.writer.node: [solving, solving], game.planner.node: [playing, solving]})
    state = module.task_to_input({**task, "turn_limit": 2})
    asyncio.run(module.build(policy).ainvoke(state))
    questions = [call.prompt.rsplit("human: ", 1)[1] for call in policy.asked]
    note = module.play(state["position"], solving).note
    assert [f"Tool: {note}" in question for question in questions[:2]] == [False, True]
    happened = module.play(state["position"], playing).note
    assert [f"Last turn: {happened}" in question for question in questions] == [False, False, True, True]


@each_game
def test_local_rewards_are_absent_where_the_record_has_not_one_call_of_each_agent_for_each_turn(
    module: ModuleType, recorder: Recorder
) -> None:
    _, solving, _, _ = PLAYS[module]
    result = run(module, recorder, turn_limit=1, writer=[solving], planner=[solving])

    class Game:
        actions = ()

    class Run:
        def game(self) -> Game:
            return Game()

    assert module.reward({}, result, Run())["local"] is None


# -- tasks ------------------------------------------------------------------------------------------------------------


def content_of(module: ModuleType, task: dict[str, Any]) -> str:
    """What a model sees of a task."""
    return str(module.describe(module.task_to_input(task)["position"]))


@each_game
def test_the_same_seed_gives_the_same_task_and_no_two_tasks_are_the_same(module: ModuleType) -> None:
    for level in module.LEVELS:
        tasks = list(module.level_to_tasks(level, range(60)))
        assert tasks == list(module.level_to_tasks(level, range(60)))
        assert len({task["id"] for task in tasks}) == len({content_of(module, task) for task in tasks}) == len(tasks)
        assert json.loads(json.dumps(tasks)) == tasks


@each_game
def test_tasks_of_other_seeds_share_nothing_with_those_that_are_trained_on_from_the_middle_level_on(
    module: ModuleType,
) -> None:
    """Below there are too few for that: who needs others leaves out what is known."""
    for level in module.LEVELS[2:]:
        first = {content_of(module, task) for task in module.level_to_tasks(level, range(60))}
        others = {content_of(module, task) for task in module.level_to_tasks(level, range(1000, 1060))}
        assert first.isdisjoint(others)


@each_game
def test_no_example_of_a_prompt_is_a_task(module: ModuleType) -> None:
    """An example is played as it says, too: its proposal is answered as the tool would."""
    game = module.GAME
    shown = {
        example.split("\nTool:")[0] for agent in (game.writer, game.planner) for example, _ in agent.prompt.examples
    }
    for level in module.LEVELS:
        for task in module.level_to_tasks(level, range(200)):
            assert not any(example.startswith(content_of(module, task)) for example in shown)


@each_game
def test_a_level_has_enough_tasks_and_turns_fit_the_recursion_limit(module: ModuleType) -> None:
    names = ["first_tasks", "easy_tasks", "middle_tasks", "tasks"]
    for name, level in zip(names, module.LEVELS, strict=False):
        tasks = list(getattr(module, name)())
        assert len(tasks) >= 200
        assert all(task["id"].startswith(f"{level.name}-") for task in tasks)
        assert 3 * level.turn_limit < 25  # three nodes a turn; LangGraph's default limit


# -- what is read of an answer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("R R", "R R"),
        ("\n```\nR R\n```", "R R"),
        ("First D.\n#### ['R', 'R']", "['R', 'R']"),
        ("<think>D</think><answer> 3 + 4 </answer> so", "3 + 4"),
        ("####", ""),
        ("", ""),
    ],
)
def test_the_answer_is_the_first_line_or_what_is_marked_as_one(text: str, answer: str) -> None:
    assert text_to_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "moves"),
    [
        ("R2 D", "RRD"),
        ("R 2 D", "RRD"),
        ('["R", "R", "D"]', "RRD"),
        ("['R', 'R', 'D']", "RRD"),  # as Python prints a list
        ("I'D say U", "U"),
        ("R,R,D.", "RRD"),
        ("Right Down", ""),
        ("I don't know, U?", "U"),
        ("R0", ""),
        ("R12", ""),
        ("R999999999", ""),
        ("r r", ""),
        ("", ""),
    ],
)
def test_moves_are_single_letters_with_a_count_or_without(text: str, moves: str) -> None:
    assert text_to_moves(text) == list(moves)


def test_an_answer_has_a_bounded_number_of_moves() -> None:
    assert len(text_to_moves("R9 " * 1000)) == MAX_MOVES


# -- Python as the tool -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("So:\n```python\nprint(1)\n```\nDone", "print(1)"),
        ("```\nprint(1)\n```", "print(1)"),
        ("print(1)", "print(1)"),
        ("```python\nprint(1)", "print(1)"),
        ("```py\nprint(1)\n```", "print(1)"),
        ("```python3\nprint(1)\n```", "print(1)"),
        ("```\na\n```\nBetter:\n```\nb\n```\nSo.", "b"),
        ("```python\na\n```\nIt prints\n```text\nb\n```", "b"),
        ("```python print(1)```", "print(1)"),
    ],
)
def test_code_is_what_stands_between_the_fences(text: str, code: str) -> None:
    assert text_to_code(text) == code


@each_game
def test_a_writer_of_python_is_told_so_and_what_it_printed_is_played(module: ModuleType) -> None:
    task, solving, _, _ = PLAYS[module]
    game = module.GAME
    policy = ScriptedPolicy(answers={game.writer.node: ["```python\nsearch()\n```"], game.planner.node: [solving]})
    ran: list[str] = []

    async def run_program(source: str) -> str:
        ran.append(source)
        return f"{solving}\n{'x' * 2000}"

    state = module.task_to_input({**task, "turn_limit": 1})
    result = asyncio.run(module.build(policy, run_program).ainvoke(state))
    assert ran == ["search()"]
    assert result["trials"] == [module.play(state["position"], solving).reward]
    writer, planner = policy.asked
    assert "Python program" in writer.prompt
    shown = planner.prompt.rsplit("human: ", 1)[1]
    assert "Code: search()\nPrinted: " in shown
    assert len(shown) < 600 + MAX_PRINTED_CHARACTERS


def random_answer(module: ModuleType, position: dict[str, Any], draw: random.Random) -> str:
    """An answer of the right form, without a plan."""
    if module in (plan_path, sokoban):
        return " ".join(draw.choices("UDLR", k=3))
    if module is sudoku:
        empty = [(r, c) for r in range(4) for c in range(4) if not position["grid"][r][c]]
        return " ".join(f"r{r + 1}c{c + 1}={draw.randint(1, 4)}" for r, c in empty) or "r1c1=1"
    first, *others = draw.sample(position["numbers"], len(position["numbers"]))
    return str(first) + "".join(f" {draw.choice(position['operators'])} {number}" for number in others)


@pytest.mark.slow
@each_game
def test_who_plays_at_random_solves_a_part_of_the_first_level_and_far_less_of_the_published_one(
    module: ModuleType,
) -> None:
    draw = random.Random(0)
    shares = []
    for level in module.LEVELS:
        tasks = list(module.level_to_tasks(level, range(300)))
        solved = 0
        for task in tasks:
            position = module.task_to_input(task)["position"]
            for _ in range(2):  # as many turns for all levels
                played = module.play(position, random_answer(module, position, draw))
                position = played.position
                if played.solved:
                    solved += 1
                    break
        shares.append(solved / len(tasks))
    assert shares[0] == max(shares)
    assert 0.05 < shares[0] < 0.8
    assert max(shares[3:]) < shares[0] / 3
