"""An exam of the player -> a task that a coach sets it -> the player's attempts at that task, from which it learns.

The coach is paid by what its tasks make of the player: by the change of the player's measured performance between two
rounds, which training measures (`[train.progress]`), times how much the player could learn from the task. The player is
paid for each attempt that is right. The two are sides of their own: a coach that shared in the player's successes would
set 1 + 1.

After CPMobius (Iterative Coach-Player Reasoning for Data-Free Reinforcement Learning, arXiv 2602.02979). Theirs: coach
and player, no tasks from elsewhere, and the coach's reward of a step: accuracy on validation tasks after the player's
update less that before it, the same for all tasks of the step; tasks that the player solves less often than 0.2 or more
often than 0.8 are left out for both. Simplified: sums in a checked language instead of free mathematics, so that an
attempt is right by arithmetic and not by the vote of the attempts; four attempts instead of sixteen. Ours: the change
counts for a task by `learnable`, in place of the two bounds; a small pay for a learnable task beside it; a price for
what is no task; and the exam's results in the coach's prompt, where theirs is told nothing of the player.

Language of tasks: one line of two or three whole numbers from 0 to 50 with + or - between them, worth 0 or more.

Invariants: each question is in one exam only, so exams that are held out ask nothing that others ask, and comparisons
may take them for independent. Nobody practises a question that exams ask, in whatever order and with whatever zeros: a
task that is one is changed (`task_to_lesson`), whoever set it. What is no task costs the coach alone: the player then
gets a random one. The exam is a node of its own, so that a configuration can have it answered by the player's adapter
and learn nothing from it.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from graphs.few_shot import profile_to_messages
from graphs.first_line import first_line
from graphs.last_number import last_number, number_credit

HIGHEST = 50
"""The largest number of a task."""
EXAM_HIGHEST = 24
"""The largest number of an exam's questions."""
EXAM_SHARE = 3
"""Of five sums or differences of two numbers from 1 to EXAM_HIGHEST, how many are kept for exams."""
ATTEMPTS = 4
EXAMS = 160
NO_TASK_COST = 1.0
"""What the coach pays for a line that is no task: as much as the most learnable task earns."""

COACH = (
    "You coach a player who learns to add and subtract. Write one task for it: two or three numbers from 0 to 50 with "
    "+ or - between them. Neither too easy nor too hard for the player."
)
_REPORT = "The player solved {} of {} sums and {} of {} differences. Your task?"
COACH_EXAMPLES = (
    (_REPORT.format(0, 1, 0, 1), "4 + 1 = ?"),
    (_REPORT.format(1, 1, 0, 1), "8 - 3 = ?"),
    (_REPORT.format(1, 1, 1, 1), "17 + 26 - 8 = ?"),
    (_REPORT.format(0, 1, 1, 1), "5 + 4 = ?"),
)
PLAYER = "You solve sums. Reply with the number only."
PLAYER_EXAMPLES = (  # each with a number that is in no exam
    ("What is 31 + 4?", "35"),
    ("What is 32 - 8?", "24"),
    ("What is 2 + 31?", "33"),
    ("What is 33 - 26?", "7"),
)


class Lesson(NamedTuple):
    """A task of the language: its text, as it is asked, and its answer."""

    question: str
    answer: int


class CoachState(TypedDict, total=False):
    """The state that the nodes share."""

    exam: list[str]  # the questions
    exam_replies: list[str]
    proposal: str | None  # what the coach wrote; None without a coach
    usable: bool  # whether that is a task
    lesson: str
    attempts: list[str]


class Node(Protocol):
    """A node of the graph."""

    async def __call__(self, state: CoachState) -> CoachState:
        """Adds what the node found."""


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled graph, in which the exam, the coach and the player call `model`."""

    async def coach(state: CoachState) -> CoachState:
        reply = await model.ainvoke(profile_to_messages(COACH, COACH_EXAMPLES, state_to_report(state)))
        proposal = first_line(str(reply.text))[:200]
        lesson = text_to_lesson(proposal)
        return {
            "proposal": proposal,
            "usable": lesson is not None,
            "lesson": task_to_lesson(lesson or state_to_random(state)).question,
        }

    return _compile(model, coach, "coach_player")


def build_random(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The same graph with a coach that draws tasks of the language at random, which is what the coach must beat."""

    async def coach(state: CoachState) -> CoachState:
        return {"proposal": None, "usable": True, "lesson": task_to_lesson(state_to_random(state)).question}

    return _compile(model, coach, "random_coach")


def _compile(model: BaseChatModel, coach: Node, name: str) -> CompiledStateGraph[Any, Any, Any, Any]:
    async def ask_player(questions: Sequence[str]) -> list[str]:
        chats = [profile_to_messages(PLAYER, PLAYER_EXAMPLES, f"What is {question}?") for question in questions]
        return [str(reply.text) for reply in await asyncio.gather(*map(model.ainvoke, chats))]

    async def exam(state: CoachState) -> CoachState:
        return {"exam_replies": await ask_player(state["exam"])}

    async def player(state: CoachState) -> CoachState:
        return {"attempts": await ask_player([state["lesson"]] * ATTEMPTS)}

    graph = StateGraph(CoachState)
    graph.add_node("exam", exam)
    graph.add_node("coach", coach)
    graph.add_node("player", player)
    graph.add_edge(START, "exam")
    graph.add_edge("exam", "coach")
    graph.add_edge("coach", "player")
    graph.add_edge("player", END)
    return graph.compile(name=name)


def text_to_lesson(text: str) -> Lesson | None:
    """A line of the language, with or without spaces, `=` and `?` behind it; None for anything else."""
    match = re.fullmatch(r"(\d{1,2}(?: ?[+-] ?\d{1,2}){1,2}) ?(?:= ?)?\??", text.strip(), re.ASCII)
    if match is None:
        return None
    first, *terms = re.findall(r"[+-]?\d+", match[1].replace(" ", ""))
    numbers = [int(first), *map(int, terms)]
    answer = sum(numbers)
    if answer < 0 or max(map(abs, numbers)) > HIGHEST:
        return None
    return numbers_to_lesson(numbers)


def numbers_to_lesson(numbers: Sequence[int]) -> Lesson:
    """Signed numbers to the task that adds them up."""
    first, *later_numbers = numbers
    parts = [str(first), *(f"{'-' if number < 0 else '+'} {abs(number)}" for number in later_numbers)]
    return Lesson(" ".join(parts), sum(numbers))


def lesson_to_numbers(question: str) -> list[int]:
    """The signed numbers of a task; "- 0" is 0."""
    return [int(part) for part in re.findall(r"[+-]?\d+", question.replace(" ", ""))]


def is_exam_question(question: str) -> bool:
    """Whether exams may ask it: three in five of the sums and differences of two numbers from 1 to EXAM_HIGHEST.

    A sum is the same question in either order; a 0 makes no other question, nor does writing what is taken away first.
    """
    numbers = sorted(number for number in lesson_to_numbers(question) if number)
    if len(numbers) != 2 or sum(numbers) <= 0:
        return False
    smaller, larger = abs(numbers[0]), numbers[1]
    # 5 divides neither 2 - 1 nor 2 + 1, so `kept` rules out no sum, no difference and no number
    kept = smaller + 2 * larger if numbers[0] > 0 else larger + 2 * smaller
    return max(smaller, larger) <= EXAM_HIGHEST and kept % 5 < EXAM_SHARE


def task_to_lesson(task: Lesson) -> Lesson:
    """What the player practises: the task, or, where exams ask it, with its last number raised until they do not."""
    while is_exam_question(task.question):
        *first, last = lesson_to_numbers(task.question)
        task = numbers_to_lesson([*first, last - 1 if last < 0 else last + 1])
    return task


def random_lesson(chance: random.Random) -> Lesson:
    """A task of the language: how many numbers, each of them and each sign is as likely as any other."""
    while True:
        count = chance.choice((2, 3))
        first, *later_numbers = (chance.randint(0, HIGHEST) for _ in range(count))
        lesson = numbers_to_lesson([first, *(chance.choice((1, -1)) * number for number in later_numbers)])
        if lesson.answer >= 0:
            return lesson


def state_to_random(state: CoachState) -> Lesson:
    """A random task, drawn by the exam and what the player replied: the same where these are the same."""
    text = repr((state["exam"], state["exam_replies"]))
    return random_lesson(random.Random(hashlib.sha256(text.encode("utf-8", "replace")).digest()))


def exam_to_results(exam: Sequence[str], replies: Sequence[str]) -> list[bool]:
    """Whether the player was right, by question."""
    return [
        last_number(reply) == sum(lesson_to_numbers(question)) for question, reply in zip(exam, replies, strict=True)
    ]


def state_to_report(state: CoachState) -> str:
    """What the coach is asked: how the player did in the exam, by kind."""
    results = list(zip(state["exam"], exam_to_results(state["exam"], state["exam_replies"]), strict=True))
    sums = [right for question, right in results if "+" in question]
    differences = [right for question, right in results if "-" in question]
    return _REPORT.format(sum(sums), len(sums), sum(differences), len(differences))


def right_share_to_learnable(share: float) -> float:
    """4 p (1 - p) of the share p of attempts that were right: 0 where all or none were, 1 where half of them were."""
    return 4 * share * (1 - share)


def tasks() -> Iterator[dict[str, Any]]:
    """160 exams in one fixed order: a sum and a difference each, and no question in two of them."""
    rng = random.Random(0)
    terms = range(1, EXAM_HIGHEST + 1)
    pairs = [rng.sample((a, b), 2) for a in terms for b in terms if a <= b]
    sums = [q for a, b in pairs if is_exam_question(q := numbers_to_lesson([a, b]).question)]
    differences = [q for a in terms for b in terms if is_exam_question(q := numbers_to_lesson([a, -b]).question)]
    questions = zip(rng.sample(sums, EXAMS), rng.sample(differences, EXAMS), strict=True)
    for number, exam in enumerate(questions, 1):
        yield {"id": f"exam-{number}", "exam": list(exam)}


def task_to_input(task: dict[str, Any]) -> CoachState:
    """The questions."""
    return {"exam": task["exam"]}


def reward(task: dict[str, Any], result: dict[str, Any], run: Any) -> dict[str, Any]:
    """Rewards of one episode, from its final state and its record.

    Measures, which nobody earns: `correct`, the share of the exam's questions that the player answered rightly, asked
    directly; `solved`, that of its attempts at the lesson; `usable`, 1 where the coach's line was a task; `learnable`,
    see `right_share_to_learnable`, 0 where it was none. Of the player, for each attempt whose text was recorded:
    `attempt`, 1 where it is right, 0.1 where the answer occurs at all. Of a coach that is a model: `lesson`, which is
    `learnable`, or -NO_TASK_COST.
    """
    answer = sum(lesson_to_numbers(result["lesson"]))
    right = [last_number(text) == answer for text in result["attempts"]]
    share = sum(right) / len(right)
    learnable = right_share_to_learnable(share) if result["usable"] else 0.0
    results = exam_to_results(task["exam"], result["exam_replies"])
    calls = [action for action in run.game().actions if action.node == "player" and action.completion is not None]
    has_coach = result["proposal"] is not None
    return {
        "correct": sum(results) / len(results),
        "solved": share,
        "usable": float(result["usable"]),
        "learnable": learnable,
        "attempt": {f"step:{call.action_id}": number_credit(call.completion, answer) for call in calls} or None,
        "lesson": {"agent:coach": learnable if result["usable"] else -NO_TASK_COST} if has_coach else None,
    }
