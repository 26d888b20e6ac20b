"""Owns: examples/hosted_to_local/judge.py and judged_games.py: what a judge is taught, and on which tasks.

- No task is on two sides; a measured one is refused under any id.
- A verdict follows from the known rewards, in both orders, as worked by hand; so does the reason.
- An attempt that was put right or wrong earns what the graph's own reward says.
- A lesson's request is byte for byte what `rank` sends, and its record what the trainer imitates.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support import study_server
from support.chat_rig import save_chat_model
from support.fake_judge import FakeJudge, nonce_of
from support.fake_vllm import FakeVllm, running
from support.paths import ROOT

from examples.hosted_to_local import agreement, judge
from examples.hosted_to_local import judged_games as games
from examples.hosted_to_local.judge import Attempt, pair_to_lesson, pair_to_reason, put_right, put_wrong
from graphs import map_reduce, math_duo, safe_conversation
from marft_bridge.common.progress import Reporter
from marft_bridge.rewards.ranking import reply_to_outcome
from trace_store.store import TraceStore

SUM = {"id": "s", "question": "What is 3 + 4?", "answer": 7}
LIST = {"id": "l", "question": "Largest of: 3 + 4; 9 + 2", "sums": [7, 11], "answer": 11}
REQUEST = {"id": "r", "request": "Where does Ann live?", "decision": "DECLINE"}


def duo(answer: str, earned: float) -> Attempt:
    return Attempt((("reasoner", "add 3 to 4"), ("actor", answer)), earned)


def workers(*texts: str, answer: str, earned: float, parts: float) -> Attempt:
    return Attempt((*(("worker", text) for text in texts), ("reducer", answer)), earned, parts)


def desk(*texts: str, earned: float) -> Attempt:
    return Attempt(tuple(zip(("conversation", "feedback", "conversation"), texts, strict=False)), earned)


RIGHT, WRONG, NONE = duo("It is 7", 1.0), duo("8", 0.0), duo("well", 0.0)


@pytest.mark.parametrize(
    ("graph", "task", "pair", "verdict", "reason"),
    [
        ("math_duo", SUM, (RIGHT, WRONG), "first", "3 + 4 = 7. Right is 7. First: 7. Second: 8."),
        ("math_duo", SUM, (WRONG, RIGHT), "second", "3 + 4 = 7. Right is 7. First: 8. Second: 7."),
        ("math_duo", SUM, (WRONG, NONE), "tie", "3 + 4 = 7. Right is 7. First: 8. Second: no number."),
        (
            *("math_duo", SUM, (WRONG, duo("7 - 1 = 6", 0.1)), "second"),
            "3 + 4 = 7. Right is 7. First: 8. Second: 6. The second has 7 before.",
        ),
        (
            *("map_reduce", LIST),
            (
                workers("7", "2", answer="7", earned=0.2, parts=0.5),
                workers("1", "2", answer="3", earned=0.0, parts=0.0),
            ),
            *("first", "3 + 4 = 7, 9 + 2 = 11. Right is 11. First: 7. Second: 3. Right sums: first 1, second 0."),
        ),
        (
            *("safe_conversation", REQUEST),
            (desk("HELP", "YES", earned=0.1), desk("HELP", "NO: DECLINE", "DECLINE.", earned=1.0)),
            *("second", "Private, so DECLINE. First: HELP. Second: DECLINE."),
        ),
        (
            *("safe_conversation", REQUEST, (desk("Hm", "YES", earned=0.0), desk("HELP", "NO", "?", earned=0.0))),
            *("tie", "Private, so DECLINE. First: neither. Second: neither."),
        ),
    ],
)
def test_a_verdict_and_its_reason_are_those_worked_by_hand(
    graph: str, task: dict[str, Any], pair: tuple[Attempt, Attempt], verdict: str, reason: str
) -> None:
    lesson = pair_to_lesson(graph, task, *pair, random.Random(0))
    assert reply_to_outcome(lesson["reply"], nonce_of(lesson["system"])) == verdict
    assert json.loads(lesson["reply"])["reason"] == pair_to_reason(graph, task, *pair) == reason
    assert lesson["user"].index(pair[0].text) < lesson["user"].index(pair[1].text)


def test_with_the_places_swapped_the_verdict_is_swapped_and_rounding_is_a_tie() -> None:
    swapped = {"first": "second", "second": "first", "tie": "tie"}
    for one, two in combinations([0.0, 0.1, 0.3, 0.1 + 0.2, 1.0], 2):
        assert judge.rewards_to_outcome(two, one) == swapped[judge.rewards_to_outcome(one, two)]
    assert judge.rewards_to_outcome(0.1 + 0.2, 0.3) == "tie"


def test_a_replys_reward_is_that_of_its_verdict() -> None:
    lesson = pair_to_lesson("math_duo", SUM, RIGHT, WRONG, random.Random(0))
    assert judge.reward(lesson, {"reply": lesson["reply"]}) == {"reward": 1.0}
    assert judge.reward(lesson, {"reply": lesson["reply"].replace("first", "tie")}) == {"reward": 0.0}
    assert judge.reward(lesson, {"reply": "first"}) == {"reward": 0.0}


@pytest.mark.parametrize("seed", range(5))
def test_an_attempt_that_was_changed_earns_what_the_graphs_reward_says(seed: int) -> None:
    draw = random.Random(seed)
    for text in ("It is 7", "7 apples and 7 pens", "3 + 4 = 9", "-7", "well", ""):
        for changed in (put_right("math_duo", SUM, duo(text, 0.0)), put_wrong("math_duo", SUM, duo(text, 1.0), draw)):
            assert changed.earned == math_duo.reward(SUM, {"answer": changed.last_answer("actor")})["reward"]
    attempt = workers("7", "10", answer="11 it is", earned=1.0, parts=0.5)
    for changed in (put_right("map_reduce", LIST, attempt), put_wrong("map_reduce", LIST, attempt, draw)):
        state = {"answer": changed.last_answer("reducer"), "results": [(0, "7"), (1, "10")]}
        assert changed.earned == map_reduce.reward(LIST, state)["reward"]
    for task in (REQUEST, REQUEST | {"decision": "HELP"}):
        twice = desk("HELP", "NO", "HELP", earned=0.1)
        for changed in (put_right("safe_conversation", task, twice), put_wrong("safe_conversation", task, twice, draw)):
            state = {"answer": changed.last_answer("conversation"), "first_answer": "HELP"}
            assert changed.earned == safe_conversation.reward(task, state)["reward"]
            assert changed.answers[:2] == twice.answers[:2]


def test_a_measured_task_is_on_no_other_side_and_is_refused_under_any_id() -> None:
    for graph in games.CONFIGS:
        sides = {side: games.graph_to_tasks(graph, side) for side in ("measured", "lessons", "development")}
        asked = {side: {t.get("question", t.get("request")) for t in tasks} for side, tasks in sides.items()}
        for one, two in combinations(asked, 2):
            assert asked[one]
            assert not asked[one] & asked[two], graph
        games.refuse_measured(graph, [*sides["lessons"], *sides["development"]])
        measured = dict(sides["measured"][0]) | {"id": "lessons of something else"}
        with pytest.raises(ValueError, match="is measured"):
            list(judge.attempts_to_lessons(graph, [(measured, [])], seed=0))


def test_of_three_pairs_about_two_have_a_better_attempt_and_no_text_meets_itself() -> None:
    attempts = [duo(str(number), float(number < 3)) for number in (*range(6), *range(6))]
    pairs = judge.choose_pairs(attempts, 12, random.Random(1))
    assert all(one.text != two.text for one, two in pairs)
    ties = sum(one.earned == two.earned for one, two in pairs)
    assert 2 <= ties <= 6
    assert len({frozenset((one.text, two.text)) for one, two in pairs}) == len(pairs)


# -- against `rank` ---------------------------------------------------------------------------------------------------


def answers(body: dict[str, Any]) -> str:
    """What a node of one of the three graphs could say, by the request's seed."""
    chance = random.Random(f"{body['seed']} {body['messages'][-1]['content']}")
    text = str(body["messages"][-1]["content"])
    if "HELP or DECLINE" in text:
        return chance.choice(["HELP", "DECLINE", "well,\nno"])
    if "YES or NO" in text:
        return chance.choice(["YES", "NO: HELP", "NO: DECLINE"])
    numbers = [int(number) for number in re.findall(r"\d+", text)] or [0]
    return str(chance.choice([sum(numbers[:2]), f"{numbers[0]}\n + {sum(numbers[:2]) + 1}", max(numbers)]))


@pytest.fixture(scope="module")
def attempts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of the three graphs on tasks for lessons."""
    folder = tmp_path_factory.mktemp("judge")
    model, vllm = save_chat_model(folder / "model"), FakeVllm()
    vllm.answer = answers
    with running(vllm) as server:
        for graph in games.CONFIGS:
            games.collect_side(
                graph,
                folder,
                "lessons",
                changes={"serve": {"attach": server.url}, "model.path": str(model)},
                attempts=games.Attempts(4, 3),
                reporter=Reporter(Console(file=io.StringIO())),
            )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("graph", games.CONFIGS)
def test_a_lessons_request_is_byte_for_byte_what_rank_sends(attempts_folder: Path, graph: str) -> None:
    stand_in = FakeJudge(lambda system, _: json.dumps({"nonce": nonce_of(system), "reason": "r", "better": "tie"}))
    agreement.judge_runs(graph, attempts_folder / graph, agreement.Judge(stand_in.url, "j"), samples=3)
    stand_in.close()
    runs = judge.store_to_attempts(attempts_folder / graph / "store.duckdb")
    assert len(runs) == 4
    rebuilt = []
    for body in stand_in.asked:
        system = body["messages"][0]["content"]
        (mark,) = set(re.findall(r"<<<[12] (\w+)>>>", system))
        nonce = nonce_of(system)
        assert re.fullmatch("[0-9a-f]{24} [0-9a-f]{24}", f"{mark} {nonce}")
        own_requests = [
            judge.request(graph, task, one, two, mark=mark, nonce=nonce)
            for task, attempts in runs
            for one in attempts
            for two in attempts
        ]
        rebuilt.append(body["messages"] in own_requests)
    assert rebuilt
    assert all(rebuilt)


@pytest.mark.slow
def test_lessons_are_recorded_as_they_are_and_end_with_the_right_verdict(attempts_folder: Path, tmp_path: Path) -> None:
    lessons = []
    for graph in games.CONFIGS:
        runs = judge.store_to_attempts(attempts_folder / graph / "store.duckdb")
        of_graph = list(judge.attempts_to_lessons(graph, runs, seed=0))
        assert of_graph == list(judge.attempts_to_lessons(graph, runs, seed=0))
        lessons += of_graph
    assert len({lesson["id"] for lesson in lessons}) == len(lessons) > 20
    store_path = judge.record_lessons(tmp_path, lessons)
    with TraceStore.open(store_path, read_only=True) as store:
        trajectories = list(store.trajectories(split="train"))
    assert {t.team_reward("reward") for t in trajectories} == {1.0}
    replies = {lesson["id"]: lesson["reply"] for lesson in lessons}
    assert {t.episode.task_id: t.actions[0].completion for t in trajectories} == replies


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_lessons_become_a_merged_model(
    attempts_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study_server.install(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path / "site", ROOT / "tests", ROOT))))
    tiny = save_chat_model(tmp_path / "tiny")
    settings = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 4096}))  # a byte each
    folder = tmp_path / "judge"
    folder.mkdir()
    (folder / "attempts").symlink_to(attempts_folder)
    model = judge.make_judge(folder, epochs=1, model=str(tiny))
    assert (model / "config.json").is_file()
    assert not list(model.glob("adapter*"))
    lines = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    (offline,) = [line for line in lines if line["phase"] == "offline"]
    assert offline["replay"]["agents"]["judge"]["actions"] > 10
