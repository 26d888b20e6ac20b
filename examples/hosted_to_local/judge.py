"""Runs of three games whose reward is known -> lessons in judging pairs of them -> a judge that can tell, as a model.

    python -m examples.hosted_to_local.judge runs/judge

The small local model runs each graph on tasks that are never measured, and some of its last answers are put right or
wrong, so that there are attempts of both kinds. Two attempts at one task make two lessons, one for each order: the
request that `rank` sends, and the verdict that follows from the known rewards, with a reason that works it out.

Invariant: a lesson's request is that of `rank` byte for byte but for mark and nonce, which are new in each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from examples.hosted_to_local import judged_games as games
from examples.hosted_to_local.record import Rules, record
from examples.hosted_to_local.taught_model import OracleModel, teach, write_config
from graphs.safe_conversation import answer_to_decision
from marft_bridge.common.errors import BridgeError
from marft_bridge.rewards.ranking import pair_messages, reply_to_outcome
from marft_bridge.rewards.rubric import rubric_to_text
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.statistics.bradley_terry import Outcome
from trace_store.store import TraceStore

CONFIG = Path(__file__).with_name("judge.toml")
ANSWERING = {"math_duo": "actor", "map_reduce": "reducer", "safe_conversation": "conversation"}
RUN_TASKS = {"math_duo": 25, "map_reduce": 14, "safe_conversation": 14}
SAMPLES = 4
PAIRS = {"math_duo": 2, "map_reduce": 3, "safe_conversation": 2}  # of each task
_RUNS = """
SELECT e.task, e.task_id, e.episode_id, k.value, coalesce(p.value, 0),
       list({'node': a.node, 'text': a.completion} ORDER BY a."index")
FROM episodes e
JOIN actions a ON a.episode_id = e.episode_id AND a.completion IS NOT NULL AND a.node <> ''
JOIN episode_reward k ON k.episode_id = e.episode_id AND k.name = 'reward'
LEFT JOIN episode_reward p ON p.episode_id = e.episode_id AND p.name = 'parts'
WHERE e.outcome = 'terminated' GROUP BY ALL ORDER BY e.task_id, e.episode_id
"""


# -- attempts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attempt:
    """A run of a game, or what became of it when its last answer was changed."""

    answers: tuple[tuple[str, str], ...]  # (node, what it wrote), in the order of the record
    earned: float  # the known reward
    parts: float = 0.0  # of map_reduce: the share of sums that workers got right

    @property
    def text(self) -> str:
        """What `rank` shows of a run."""
        return "\n".join(f"{node}: {text}" for node, text in self.answers)

    def last_answer(self, node: str) -> str:
        """What the node wrote last; "" where it wrote nothing."""
        return next((text for name, text in reversed(self.answers) if name == node), "")

    def with_last_answer(self, node: str, text: str, earned: float) -> Attempt:
        """Another end, and what that earns."""
        last = max(i for i, (name, _) in enumerate(self.answers) if name == node)
        return replace(self, answers=(*self.answers[:last], (node, text), *self.answers[last + 1 :]), earned=earned)


def store_to_attempts(path: Path) -> list[tuple[games.Task, list[Attempt]]]:
    """Tasks of a store with their runs."""
    with TraceStore.open(path, read_only=True) as store:
        rows = store.sql(_RUNS)
    return [
        (
            json.loads(task),
            [
                Attempt(tuple((a["node"], a["text"]) for a in answers), earned, parts)
                for _, _, _, earned, parts, answers in group
            ],
        )
        for task, group in itertools.groupby(rows, key=lambda row: row[0])
    ]


def put_right(graph: str, task: games.Task, attempt: Attempt) -> Attempt:
    """The attempt with the right last answer."""
    node = ANSWERING[graph]
    if graph == "safe_conversation":
        return attempt.with_last_answer(node, task["decision"], 1.0)
    return attempt.with_last_answer(node, _with_last_number(attempt.last_answer(node), task["answer"]), 1.0)


def put_wrong(graph: str, task: games.Task, attempt: Attempt, draw: random.Random) -> Attempt:
    """The attempt with a wrong last answer, in which the right one does not occur either."""
    node = ANSWERING[graph]
    if graph == "safe_conversation":
        return attempt.with_last_answer(node, "DECLINE" if task["decision"] == "HELP" else "HELP", 0.1)
    number = draw.choice([task["answer"] + gap for gap in (-3, -2, -1, 1, 2, 3) if task["answer"] + gap >= 0])
    text = _with_last_number(attempt.last_answer(node), number)
    if task["answer"] in map(int, re.findall(r"-?\d+", text)):
        text = str(number)
    return attempt.with_last_answer(node, text, 0.4 * attempt.parts)


def _with_last_number(text: str, number: int) -> str:
    numbers = list(re.finditer(r"-?\d+", text))
    return f"{text[: numbers[-1].start()]}{number}{text[numbers[-1].end() :]}" if numbers else str(number)


# -- verdicts ---------------------------------------------------------------------------------------------------------


def rewards_to_outcome(first: float, second: float) -> Outcome:
    """Which of two is better by the known rewards; those that differ by rounding only are tied."""
    if abs(first - second) < 1e-9:
        return "tie"
    return "first" if first > second else "second"


def pair_to_reason(graph: str, task: games.Task, first: Attempt, second: Attempt) -> str:
    """What is right, and what either attempt says, in one line."""
    one, two = (attempt.last_answer(ANSWERING[graph]) for attempt in (first, second))
    if graph == "safe_conversation":
        kind = {"HELP": "Harmless, so HELP", "DECLINE": "Private, so DECLINE"}[task["decision"]]
        decisions = [answer_to_decision(text) or "neither" for text in (one, two)]
        return f"{kind}. First: {decisions[0]}. Second: {decisions[1]}."
    sums = [f"{a} + {b} = {int(a) + int(b)}" for a, b in re.findall(r"(\d+)\D+(\d+)", task["question"])]
    numbers = [(re.findall(r"-?\d{1,9}", text) or ["no number"])[-1] for text in (one, two)]
    reason = f"{', '.join(sums)}. Right is {task['answer']}. First: {numbers[0]}. Second: {numbers[1]}."
    if max(first.earned, second.earned) == 1.0 or first.earned == second.earned:
        return reason
    if graph == "map_reduce":
        counts = [round(attempt.parts * len(task["sums"])) for attempt in (first, second)]
        return f"{reason} Right sums: first {counts[0]}, second {counts[1]}."
    better = "first" if first.earned > second.earned else "second"
    return f"{reason} The {better} has {task['answer']} before."


def request(
    graph: str, task: games.Task, first: Attempt, second: Attempt, *, mark: str, nonce: str
) -> list[dict[str, str]]:
    """What `rank` sends for this pair in this order."""
    rubric = rubric_to_text(games.RUBRICS[graph], task)
    return pair_messages(rubric, first.text, second.text, mark=mark, nonce=nonce)


def pair_to_lesson(
    graph: str, task: games.Task, first: Attempt, second: Attempt, draw: random.Random
) -> dict[str, str]:
    """One order of a pair: {"system", "user", "reply"}."""
    mark, nonce = (f"{draw.getrandbits(96):024x}" for _ in range(2))
    system, user = (m["content"] for m in request(graph, task, first, second, mark=mark, nonce=nonce))
    verdict = {
        "nonce": nonce,
        "reason": pair_to_reason(graph, task, first, second),
        "better": rewards_to_outcome(first.earned, second.earned),
    }
    return {"system": system, "user": user, "reply": json.dumps(verdict)}


def choose_pairs(attempts: Sequence[Attempt], count: int, draw: random.Random) -> list[tuple[Attempt, Attempt]]:
    """Pairs of different texts: of three, two with different rewards and one without, as far as there are such."""
    distinct = list({attempt.text: attempt for attempt in attempts}.values())
    pairs = list(itertools.combinations(distinct, 2))
    draw.shuffle(pairs)
    unequal = [pair for pair in pairs if rewards_to_outcome(pair[0].earned, pair[1].earned) != "tie"]
    equal = [pair for pair in pairs if rewards_to_outcome(pair[0].earned, pair[1].earned) == "tie"]
    ties = sum(draw.random() < 1 / 3 for _ in range(count))
    return [*unequal[: count - ties], *equal[:ties]]


def attempts_to_lessons(
    graph: str, attempts: Sequence[tuple[games.Task, Sequence[Attempt]]], seed: int
) -> Iterator[dict[str, str]]:
    """Both orders of the chosen pairs of each task. Raises ValueError for a task that is measured."""
    games.refuse_measured(graph, [task for task, _ in attempts])
    draw = random.Random(f"{seed} {graph}")
    for task, runs in attempts:
        changed = [
            put_wrong(graph, task, run, draw) if run.earned == 1.0 else put_right(graph, task, run) for run in runs
        ]
        for number, (one, two) in enumerate(choose_pairs([*runs, *changed], PAIRS[graph], draw)):
            for first, second in ((one, two), (two, one)):
                lesson = pair_to_lesson(graph, task, first, second, draw)
                yield {"id": f"{graph} {task['id']} {number} {first is one:d}", **lesson}


# -- the app that the judge is ----------------------------------------------------------------------------------------


class Verdict(TypedDict, total=False):
    """The state of the graph."""

    system: str
    user: str
    reply: str


def make_graph(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """One node: the request as it is, and what the model replies."""

    def judge(state: Verdict) -> Verdict:
        reply = model.invoke([SystemMessage(state["system"]), HumanMessage(state["user"])])
        return {"reply": str(reply.text)}

    builder = StateGraph(Verdict)
    builder.add_node("judge", judge)
    builder.add_edge(START, "judge")
    builder.add_edge("judge", END)
    return builder.compile(name="judge")


def task_to_input(task: Mapping[str, Any]) -> dict[str, str]:
    """The request without the right reply."""
    return {"system": task["system"], "user": task["user"]}


def reward(task: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, float]:
    """1 where the reply can be read and says what the right one says."""
    right = json.loads(task["reply"])
    try:
        return {"reward": float(reply_to_outcome(state.get("reply", ""), right["nonce"]) == right["better"])}
    except ValueError:
        return {"reward": 0.0}


RULES = Rules(task_to_input, reward, "examples.hosted_to_local.judge:reward")


# -- the whole way ----------------------------------------------------------------------------------------------------


def record_lessons(folder: Path, lessons: Sequence[dict[str, str]]) -> Path:
    """The store with a run of the judge for each lesson, as the oracle replies."""
    replies = {(lesson["system"], lesson["user"]): lesson["reply"] for lesson in lessons}
    oracle = OracleModel(answer=lambda system, user: replies[system, user])
    store = folder / "lessons.duckdb"
    done = record(make_graph(oracle), lessons, store, run_id="lessons", in_flight=1, rules=RULES)
    assert done.mean("reward") == 1.0, "the oracle was wrong"
    return store


def make_judge(folder: Path, *, epochs: int, model: str | None) -> Path:
    """The model's folder. Raises CalledProcessError where a command fails, which says why itself."""
    attempts = {graph: store_to_attempts(RunFolder(folder / "attempts" / graph).store) for graph in games.CONFIGS}
    lessons = [lesson for graph, runs in attempts.items() for lesson in attempts_to_lessons(graph, runs, seed=0)]
    tasks = folder / "lessons.jsonl"
    tasks.write_text("".join(json.dumps(lesson) + "\n" for lesson in lessons), encoding="utf-8")
    print(f"{len(lessons)} lessons", flush=True)
    changes = {
        '"runs/judge/lessons"': f'"{folder / "lessons"}"',
        '"runs/judge/lessons.jsonl"': f'"{tasks}"',
        "epochs = 2": f"epochs = {epochs}",
    }
    config = write_config(CONFIG, folder, changes | ({} if model is None else {"smollm2-135m": model}))
    return teach(folder, record_lessons(folder, lessons), config, node="judge")


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes it, where it is not there yet."""
    parser = argparse.ArgumentParser(prog="python -m examples.hosted_to_local.judge", description=__doc__)
    parser.add_argument("folder", type=Path, help="where attempts, lessons, run and model go")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the lessons, at most")
    parser.add_argument("--model", help="another model folder to start from than SmolLM2-135M-Instruct")
    given = parser.parse_args(arguments)
    if (given.folder / "model").exists():
        print(f"{given.folder / 'model'} is there already")
        return
    if (given.folder / "lessons.jsonl").exists():
        parser.error(f"{given.folder} holds an unfinished judge; remove all of it but attempts/ first")
    try:
        wanted = {graph: games.Attempts(tasks, SAMPLES) for graph, tasks in RUN_TASKS.items()}
        games.collect_missing((given.folder / "attempts").resolve(), "lessons", wanted)
    except BridgeError as error:
        sys.exit(str(error))
    print(make_judge(given.folder, epochs=given.epochs, model=given.model))


if __name__ == "__main__":
    main()
