"""Owns: the zoo's coach and player (CPMobius): the language of tasks, who pays for what, D, and its training.

- What the player practises is of the language and never a question of an exam, whoever set it and in whatever order.
- A line that is no task costs the coach alone; the player gets a random task; the run ends as any other.
- A round's change of the measured exams reaches the coach's tasks of that round, and nothing is learned from exams.
- A twin without that pay has the coach learn from `lesson` alone, in the same round; nothing else is different there.
"""

from __future__ import annotations

import random
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from support.edge_rig import recorded_edges, recorded_trajectories, run_recorded
from support.zoo_rig import ZOO, train_zoo

from graphs import coach_player
from graphs.coach_player import Lesson, is_exam_question, lesson_to_numbers, task_to_lesson, text_to_lesson
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.config.progress import PROGRESS
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.rewards.contract import RunView
from marft_bridge.rollouts.app import split_tasks
from marft_bridge.runs.run_folder import MEASURE, RunFolder
from trace_store.journal import Journal
from trace_store.records import Trajectory
from trace_store.store import TraceStore

TASK = {"id": "t", "exam": ["6 + 7", "3 + 4", "9 - 4"]}


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def run(
    recorder: Recorder, task: str, attempts: list[str], exam: tuple[str, ...] = ("13", "8", "5"), build: Any = None
) -> tuple[dict[str, Any], ScriptedPolicy]:
    """One run, with what the player says in the exam, the coach, and the player of its task."""
    policy = ScriptedPolicy(answers={"exam": list(exam), "coach": [task], "player": attempts})
    graph = (build or coach_player.build)(policy)
    return run_recorded(graph, coach_player.task_to_input(TASK), recorder), policy


def earned(result: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
    trajectory = recorded_trajectories(recorder)[0]
    found = coach_player.reward(TASK, result, RunView(TASK, result, trajectory))
    if found["attempt"] is not None:
        found["attempt"] = sorted(found["attempt"].values())
    return found


@pytest.mark.parametrize(
    ("text", "lesson"),
    [
        ("12 + 7", Lesson("12 + 7", 19)),
        (" 12+7 = ?", Lesson("12 + 7", 19)),
        ("12 - 7 =", Lesson("12 - 7", 5)),
        ("50 - 20 + 03?", Lesson("50 - 20 + 3", 33)),
        ("4 - 0", Lesson("4 + 0", 4)),
        ("2 - 7 + 5", Lesson("2 - 7 + 5", 0)),
        ("7", None),
        ("2 - 7", None),  # below 0
        ("51 + 1", None),
        ("1 + 2 + 3 + 4", None),
        ("3 * 4", None),
        ("-3 + 4", None),
        ("3 + -4", None),
        ("What is 3 + 4?", None),
        ("3 + 4 5", None),
        ("\u0663 + \u0664", None),  # Arabic digits
        ("", None),
    ],
)
def test_a_line_is_a_task_of_the_language_with_its_exact_answer_or_none(text: str, lesson: Lesson | None) -> None:
    assert text_to_lesson(text) == lesson


def test_no_lesson_is_a_question_of_an_exam_and_every_lesson_is_of_the_language() -> None:
    asked = {question for task in coach_player.tasks() for question in task["exam"]}
    assert all(is_exam_question(question) for question in asked)
    terms = range(coach_player.HIGHEST + 1)
    all_pairs = [
        coach_player.numbers_to_lesson([a, b]) for a in terms for b in (*terms, *(-n for n in terms[1 : a + 1]))
    ]
    chance = random.Random(0)
    for task in (*all_pairs, *(coach_player.random_lesson(chance) for _ in range(500))):
        lesson = task_to_lesson(task)
        assert not is_exam_question(lesson.question)
        assert text_to_lesson(lesson.question) == lesson
        assert lesson.answer == sum(lesson_to_numbers(lesson.question))
        assert (lesson == task) != is_exam_question(task.question)


def question_to_key(question: str) -> tuple[int, ...]:
    """Equal for questions that differ in the order of their numbers and in zeros alone."""
    return tuple(sorted(number for number in lesson_to_numbers(question) if number))


def test_no_question_is_in_two_exams_nor_practised_in_another_order_or_with_zeros() -> None:
    tasks = list(coach_player.tasks())
    asked = [question_to_key(question) for task in tasks for question in task["exam"]]
    assert len(set(asked)) == len(asked)
    trained, held_out = split_tasks(tasks, toml_to_config(ZOO / "coach_player.toml").graph.heldout)
    sides = [{question_to_key(question) for task in side for question in task["exam"]} for side in (trained, held_out)]
    assert not sides[0] & sides[1]
    known = set(asked)
    for key in known:
        for numbers in {*permutations(key), *permutations((*key, 0))}:
            task = coach_player.numbers_to_lesson(numbers)
            assert numbers[0] < 0 or text_to_lesson(task.question) == task
            assert question_to_key(task_to_lesson(task).question) not in known


def test_exams_and_what_may_be_practised_have_the_same_numbers_and_but_for_a_few_the_same_answers() -> None:
    """So that practice rules out no answer of an exam."""
    terms = range(1, 25)
    questions = [coach_player.numbers_to_lesson([a, sign * b]) for a in terms for b in terms for sign in (1, -1)]
    questions = [lesson for lesson in questions if lesson.answer > 0]
    exams = [lesson for lesson in questions if is_exam_question(lesson.question)]
    others = [lesson for lesson in questions if not is_exam_question(lesson.question)]
    assert {lesson.answer for lesson in exams} - {lesson.answer for lesson in others} == {43, 47, 48}
    for side in (exams, others):
        assert {abs(number) for lesson in side for number in lesson_to_numbers(lesson.question)} == set(terms)
    assert {question for task in coach_player.tasks() for question in task["exam"]} <= {
        lesson.question for lesson in exams
    }


def test_the_coach_is_told_how_the_exam_went_and_the_player_its_task_alone(recorder: Recorder) -> None:
    result, policy = run(recorder, "14 + 5 = ?\nand more", ["19"] * 4, exam=("13", "it is 9", "5"))
    (coach,) = [call.prompt for call in policy.asked if call.node == "coach"]
    assert coach.endswith("human: The player solved 1 of 2 sums and 1 of 1 differences. Your task?\nai: ")
    attempts = [call.prompt for call in policy.asked if call.node == "player"]
    assert len(attempts) == coach_player.ATTEMPTS
    assert len(set(attempts)) == 1
    assert attempts[0].endswith("human: What is 14 + 5?\nai: ")
    assert (result["lesson"], result["usable"]) == ("14 + 5", True)
    to_coach = " ".join(f"exam{n}>coach" for n in (1, 2, 3))
    to_player = " ".join(f"coach>player{n}" for n in (1, 2, 3, 4))
    assert recorded_edges(recorder) == {"trigger": f"{to_player} {to_coach}", "data": f"{to_player} {to_coach}"}


@pytest.mark.parametrize(
    ("attempts", "solved", "learnable", "attempt"),
    [
        (["19", "19", "12", "I say 19"], 0.75, 0.75, [0.0, 1.0, 1.0, 1.0]),
        (["19", "18", "19 of 20", "19"], 0.5, 1.0, [0.0, 0.1, 1.0, 1.0]),
        (["1", "2", "3", ""], 0.0, 0.0, [0.0] * 4),
        (["19"] * 4, 1.0, 0.0, [1.0] * 4),
    ],
)
def test_rewards_are_those_worked_out_by_hand(
    attempts: list[str], solved: float, learnable: float, attempt: list[float], recorder: Recorder
) -> None:
    result, _ = run(recorder, "14 + 5", attempts, exam=("13", "9", "5"))
    assert earned(result, recorder) == {
        "correct": pytest.approx(2 / 3),
        "solved": solved,
        "usable": 1.0,
        "learnable": learnable,
        "attempt": pytest.approx(attempt),
        "lesson": {"agent:coach": learnable},
    }


@pytest.mark.parametrize("text", ["A hard one!", "", "99 + 1", "2 - 7", "x" * 5000])
def test_what_is_no_task_costs_the_coach_alone(text: str, recorder: Recorder) -> None:
    result, policy = run(recorder, text, ["7", "8", "9", "10"])
    lesson = text_to_lesson(result["lesson"])
    assert lesson is not None
    assert sum(call.node == "player" for call in policy.asked) == coach_player.ATTEMPTS
    found = earned(result, recorder)
    assert (found["usable"], found["learnable"], found["lesson"]) == (0.0, 0.0, {"agent:coach": -1.0})
    right = [number == lesson.answer for number in (7, 8, 9, 10)]
    assert found["attempt"] == sorted(map(float, right))
    assert recorded_trajectories(recorder)[0].episode.outcome == "terminated"


def test_a_random_coach_asks_no_model_and_earns_nothing(recorder: Recorder) -> None:
    result, policy = run(recorder, "", ["7"] * 4, build=coach_player.build_random)
    assert {call.node for call in policy.asked} == {"exam", "player"}
    assert len(policy.asked) == len(TASK["exam"]) + coach_player.ATTEMPTS
    found = earned(result, recorder)
    assert (found["usable"], found["lesson"], len(found["attempt"])) == (1.0, None, 4)
    pairs = " ".join(f"exam{m}>player{n}" for m in (1, 2, 3) for n in (1, 2, 3, 4))
    assert recorded_edges(recorder) == {"trigger": pairs, "data": pairs}


def test_a_random_task_follows_from_the_exam_and_its_replies() -> None:
    states = [{"exam": TASK["exam"], "exam_replies": [str(n), "8", "5"]} for n in (1, 1, 2, 3, 4)]
    questions = [coach_player.state_to_random(state).question for state in states]  # type: ignore[arg-type]
    assert questions[0] == questions[1]
    assert len(set(questions)) > 2


def test_exams_are_a_sum_and_a_difference_of_numbers_to_24_and_no_example_is_of_one() -> None:
    tasks = list(coach_player.tasks())
    assert tasks == list(coach_player.tasks())
    assert len({task["id"] for task in tasks}) == len(tasks) == coach_player.EXAMS
    assert all(["+" in question for question in task["exam"]] == [True, False] for task in tasks)
    asked = {question for task in tasks for question in task["exam"]}
    assert {number for question in asked for number in map(abs, lesson_to_numbers(question))} == set(range(1, 25))
    sums = [lesson_to_numbers(task["exam"][0]) for task in tasks]
    assert {first < second for first, second in sums} == {True, False}
    shown = [question.removeprefix("What is ") for question, _ in coach_player.PLAYER_EXAMPLES]
    shown += [answer for _, answer in coach_player.COACH_EXAMPLES]
    for text in shown:
        lesson = text_to_lesson(text)
        assert lesson is not None
        assert task_to_lesson(lesson) == lesson


def plays(node: str, messages: list[dict[str, Any]], chance: random.Random) -> str:
    """A player that is right half the time, and a coach that sets a task two times in three."""
    if node == "coach":
        return chance.choice(["7 + 4 = ?", "9 - 5 = ?", "zzzz zzzz"])
    answer = sum(lesson_to_numbers(messages[-1]["content"].removeprefix("What is ").removesuffix("?")))
    return str(answer) if chance.random() < 0.5 else "zzzz"


@pytest.mark.slow
def test_training_pulls_player_and_coach_each_to_its_own_pay_and_the_exam_is_the_players(tmp_path: Path) -> None:
    trained = train_zoo(
        ZOO / "coach_player.toml", plays, tmp_path, rounds=2, episodes=12, changes={"train.progress.tasks": 4}
    )
    assert sorted(trained.norms) == ["coach", "player"]
    assert min(trained.norms.values()) > 0
    assert trained.pull_to("player", "attempt") > 0.2
    folder = RunFolder(trained.config.run_folder)
    with TraceStore.open(folder.store, read_only=True) as store:
        measured = list(store.trajectories(run_ids=[MEASURE]))
    assert sorted(each.episode.round for each in measured) == [1] * 4 + [2] * 4  # type: ignore[type-var]
    assert all(action.adapter == f"exam@{each.episode.round}" for each in measured for action in each.actions[:1])
    before, after = (
        sum(each.team_reward("correct") or 0.0 for each in measured if each.episode.round == version) / 4
        for version in (1, 2)
    )
    for each in trained.trained:
        paid = [reward.value for reward in each.rewards if reward.name == PROGRESS]
        learnable = each.team_reward("learnable")
        assert learnable is not None
        assert paid == ([pytest.approx((after - before) * learnable)] if each.episode.round == 1 else [])
    newest = {
        node: max((folder.adapters / node).iterdir(), key=lambda path: int(path.name)) for node in ("exam", "player")
    }
    weights = [(path / "adapter_model.safetensors").read_bytes() for path in newest.values()]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_the_twin_without_a_coach_trains_on_random_tasks_with_as_many_attempts(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "coach_player-random.toml", plays, tmp_path, rounds=2, episodes=8)
    assert sorted(trained.norms) == ["player"]
    assert trained.pull_to("player", "attempt") > 0.2
    assert {len([a for a in each.actions if a.node == "player"]) for each in trained.trained} == {coach_player.ATTEMPTS}


@pytest.mark.slow
def test_the_twin_with_a_frozen_coach_trains_the_player_alone(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "coach_player-frozen.toml", plays, tmp_path, rounds=2, episodes=8)
    assert sorted(trained.norms) == ["player"]
    assert trained.pull_to("player", "attempt") > 0.2
    assert any(action.node == "coach" for each in trained.trained for action in each.actions)
    versions = list((RunFolder(trained.config.run_folder).adapters / "coach").iterdir())
    assert len(versions) > 2
    for path in versions:
        tensors = load_file(path / "adapter_model.safetensors")
        assert not any(tensor.any() for name, tensor in tensors.items() if "lora_B" in name)  # the base model
        assert any("lora_B" in name for name in tensors)


@pytest.mark.slow
def test_the_twin_by_lesson_pays_the_coach_for_learnable_tasks_at_once_and_for_no_change(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "coach_player-lesson.toml", plays, tmp_path, rounds=2, episodes=12)
    assert sorted(trained.norms) == ["coach", "player"]
    assert trained.pull_to("player", "attempt") > 0.2

    def lesson(trajectory: Trajectory) -> float | None:
        return next(reward.value for reward in trajectory.rewards if reward.name == "lesson")

    assert trained.pull("coach", lesson) > 0.2
    assert {reward.name for each in trained.trained for reward in each.rewards}.isdisjoint({PROGRESS})
    with TraceStore.open(RunFolder(trained.config.run_folder).store, read_only=True) as store:
        assert not list(store.trajectories(run_ids=[MEASURE]))


def test_the_twin_by_lesson_differs_in_the_pay_for_the_change_alone() -> None:
    coached, other = (
        toml_to_config(ZOO / f"{name}.toml").recorded() for name in ("coach_player", "coach_player-lesson")
    )
    assert (coached.pop("name"), other.pop("name")) == ("coach_player", "coach_player-lesson")
    assert coached["train"].pop("progress")["agent"] == "coach"
    assert other["train"].pop("progress") is None
    *kept_terms, paid_for_change = coached["train"]["trainer"].pop("shaping")
    assert paid_for_change["reward"] == PROGRESS
    assert [term["reward"] for term in kept_terms] == ["attempt", "lesson"]
    assert other["train"]["trainer"].pop("shaping") == kept_terms
    assert coached == other


@pytest.mark.parametrize("twin", ["coach_player-random", "coach_player-frozen"])
def test_the_twins_differ_in_nothing_but_the_coach(twin: str) -> None:
    coached, other = (toml_to_config(ZOO / f"{name}.toml") for name in ("coach_player", twin))
    for part in ("model", "sampling", "collect", "compare"):
        assert getattr(coached, part) == getattr(other, part)
    same: dict[str, set[str]] = {"graph": {"app", "nodes"}, "train": {"progress", "trainer"}}
    if twin == "coach_player-frozen":
        same["graph"] = set()
    for part, fields in same.items():
        assert getattr(coached, part).model_dump(exclude=fields) == getattr(other, part).model_dump(exclude=fields)
    coaching = {"shaping", "sides", "agents"}
    trainers = [config.train.trainer for config in (coached, other)]
    assert trainers[0].model_dump(exclude=coaching) == trainers[1].model_dump(exclude=coaching)
    for trainer in trainers:
        assert [term.reward for term in trainer.shaping if term.reward == "attempt"] == ["attempt"]
    for parts in (
        [[term for term in trainer.shaping if term.reward == "attempt"] for trainer in trainers],
        [{name: nodes for name, nodes in trainer.sides.items() if name != "coach"} for trainer in trainers],
        [{name: agent for name, agent in trainer.agents.items() if name != "coach"} for trainer in trainers],
    ):
        assert parts[0] == parts[1] != []
