"""A question -> a team that a host builds for it, line by line, and the answer of the agent that was added last.

Every turn the host sees the question and what the team said so far, and writes one line of a checked language:

    NEXT: SOLVER                   an agent that reads the question alone
    NEXT: ADDER AND ADDER          two side by side; where the question has two parts, each gets one
    NEXT: SOLVER READS 1 AND 2     an agent that reads what agents 1 and 2 said
    NEXT: DONE                     the last agent's answer is the team's

An added agent acts at once (`Send`), and the host is next. Adder and finder have a tool each, a solver has none. By
what `examples/zoo/mashost.toml` pays, whoever can answer alone is best paid alone: one adder for a sum, and one adder
for two sums to compare as well (0.95), where it names the numbers of the larger one; two adders whom a solver reads
need not know which that is, and have 0.85. Only a fact takes two, a finder and a solver that reads it (0.9). A solver
alone is as cheap as an adder, and mostly wrong.

After MasHost (arXiv 2506.08507). Theirs: building a team as a search over graphs, in which an action is a role with its
connections, or to end, given the question, the team so far and its messages; the host learns from how whole teams did
beside each other and from rewards of single actions (the estimator `hrpo`); accuracy, cost and component rationality
as what is wanted. Simplified: three roles instead of a large pool, no DELETE, links to earlier agents only, at most
MAX_LINES lines, and one language model that writes a line in place of two networks that sample a role and its links.
Ours, since their formulas were not at hand: what makes an agent idle (`team_to_idle`), the prices, and that roles learn
too, each by an adapter of its own.

Invariant: every run ends with an answer. A line outside the language counts as a line and never ends a run: it adds a
solver where there is nobody yet, and nobody otherwise, and the host is asked again; what it costs (`bad_line`) arrives
with that call of the host alone.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command, Send

from graphs.few_shot import FewShotPrompt
from graphs.first_line import first_line
from graphs.last_number import last_number, number_credit
from graphs.local_corpus import people, search
from graphs.supervisor import add, reply_to_numbers
from graphs.word_overlap import exact_match, f1

_SUM = "What is 10 + 2?"
_FACT = "Which animal does Mary own?"
_LARGER = "Which is larger, 10 + 2 or 5 + 10?"
HOST = FewShotPrompt(
    "You build a team from ADDER, who adds two numbers, FINDER, who finds facts, and SOLVER, who reads them and "
    "answers. Reply with NEXT: and who is next, or NEXT: DONE when the answer is there.",
    (
        (_LARGER, "NEXT: ADDER AND ADDER"),
        (f"{_LARGER}\n1 ADDER: 12\n2 ADDER: 15", "NEXT: SOLVER READS 1 AND 2"),
        ("In which town is the home of Mary?", "NEXT: FINDER"),
        (_FACT, "NEXT: FINDER"),
        (f"{_FACT}\n1 FINDER: Mary keeps a hen.", "NEXT: SOLVER READS 1"),
        (f"{_FACT}\n1 FINDER: Mary keeps a hen.\n2 SOLVER: hen", "NEXT: DONE"),
        (_SUM, "NEXT: ADDER"),
        (f"{_SUM}\n1 ADDER: 12", "NEXT: DONE"),
        ("In which town is the home of Paul?", "NEXT: FINDER"),
    ),
)
ROLES = {
    "adder": FewShotPrompt(
        "You add two numbers. Reply with the two numbers.",
        (("What is 10 + 2?", "10, 2"), ("What is 5 + 10?", "5, 10")),
    ),
    "finder": FewShotPrompt(
        "You are the finder. Turn the question into a few words to search for.",
        (("In which town is the home of Mary?", "Mary home town"), ("Which animal does Paul own?", "Paul animal")),
    ),
    "solver": FewShotPrompt(
        "You are the solver. Answer with one word or number only.",
        (
            ("Mary lives in Athens. Mary keeps a hen. Paul reports to Mary.\nWhich animal does Mary own?", "hen"),
            ("12\n15\nWhich is larger, 10 + 2 or 5 + 10?", "15"),
            ("Paul keeps a crow. Paul lives in Athens.\nIn which town is the home of Paul?", "Athens"),
            ("What is 10 + 2?", "12"),
        ),
    ),
}

MAX_LINES = 4  # of the host; after them the run ends
MAX_BESIDE = 2  # agents that one line adds
SHOWN_CHARACTERS = 120  # of what an agent said, to those who read it and to the host
QUERY_CHARACTERS = 80
LARGEST = 18  # number that a task has added; of up to 18 there are enough pairs for every sum and part
ADDED_IN_EXAMPLES = ({10, 2}, {5, 10})

_NUMBERS = r"[0-9]{1,2}(?: and [0-9]{1,2})*"
_LINE = re.compile(
    rf"(?:next: ?)?(?:(?P<done>done)|(?P<roles>[a-z]+(?: and [a-z]+)*)(?: reads (?P<links>{_NUMBERS}))?)\.?"
)


class Addition(NamedTuple):
    """A line of the host that adds agents: their roles, and the agents, from 1, that all of them read."""

    roles: tuple[str, ...]
    links: tuple[int, ...] = ()


class Member(TypedDict):
    """An agent of the team.

    `line`: which line of the host, from 0, added it; `part`: which part of the question it was asked, from 0, None for
    the whole question; `links`: the agents that it read.
    """

    number: int
    role: str
    line: int
    part: int | None
    links: tuple[int, ...]
    said: str


class BuildState(TypedDict, total=False):
    """The state of the graph. `lines` holds, for each line of the host, whether it was of the language."""

    question: str
    lines: Annotated[list[bool], operator.add]
    team: Annotated[list[Member], operator.add]


class Brief(TypedDict):
    """The input of an added agent: its place in the team, and what it reads."""

    member: Member
    text: str


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled graph, in which the host and all roles call `model`."""

    async def host(state: BuildState) -> Command[Any]:
        team, number = _in_order(state.get("team", [])), len(state.get("lines", []))
        if number == MAX_LINES:
            return Command(goto=END)
        reply = await model.ainvoke(HOST.messages(_team_to_prompt(state["question"], team)))
        move = line_to_move(first_line(str(reply.text)), len(team))
        update: BuildState = {"lines": [move is not None]}
        if move is None and team:
            return Command(goto="host", update=update)
        addition = Addition(("solver",)) if move is None else move
        if not addition.roles:
            return Command(goto=END, update=update)
        return Command(goto=_to_sends(state["question"], team, addition, line=number), update=update)

    def role(name: str) -> Callable[..., Any]:
        async def node(state: Brief) -> BuildState:
            reply = await model.ainvoke(ROLES[name].messages(state["text"]))
            answer = await _use_tool(name, str(reply.text).strip())
            return {"team": [{**state["member"], "said": answer}]}

        return node

    graph = StateGraph(BuildState)
    graph.add_node("host", host, destinations=("host", *ROLES, END))
    graph.add_edge(START, "host")
    for name in ROLES:
        graph.add_node(name, role(name), input_schema=Brief)
        graph.add_edge(name, "host")
    return graph.compile(name="mashost")


async def _use_tool(role: str, text: str) -> str:
    """What an agent says, on one line: the result of its tool on what it wrote, or that itself where it has none."""
    if role == "finder":
        return " ".join(await search.ainvoke({"query": text[:QUERY_CHARACTERS]}))
    if role == "adder":
        numbers = reply_to_numbers(text)
        return str(await add.ainvoke({"a": numbers[0], "b": numbers[1]})) if numbers else "no two numbers"
    return " ".join(text.split())


def line_to_move(line: str, team_size: int) -> Addition | None:
    """A line as what it adds, nobody for DONE; None where it is not of the language.

    Capitals, a full stop and a missing NEXT: do not matter. An unknown role, more than MAX_BESIDE of them, an agent
    that is not there or is named twice, and DONE before anybody was added are outside the language.
    """
    match = _LINE.fullmatch(line.strip().lower())
    if match is None or (match["done"] and not team_size):
        return None
    roles = tuple(match["roles"].split(" and ")) if match["roles"] else ()
    links = tuple(map(int, match["links"].split(" and "))) if match["links"] else ()
    is_known = set(roles) <= set(ROLES) and all(1 <= link <= team_size for link in links)
    return Addition(roles, links) if is_known and len(roles) <= MAX_BESIDE and len(set(links)) == len(links) else None


def question_to_parts(question: str) -> list[str]:
    """`Which is larger, 3 + 4 or 2 + 5?` -> the two sums as questions; any other question is its only part."""
    match = re.fullmatch(r"Which is larger, (.+) or (.+)\?", question)
    return [f"What is {part}?" for part in match.groups()] if match else [question]


def _in_order(team: Sequence[Member]) -> list[Member]:
    return sorted(team, key=lambda member: member["number"])


def _team_to_prompt(question: str, team: Sequence[Member]) -> str:
    lines = [f"{member['number']} {member['role'].upper()}: {member['said'][:SHOWN_CHARACTERS]}" for member in team]
    return "\n".join([question, *lines])


def _to_sends(question: str, team: Sequence[Member], addition: Addition, line: int) -> list[Send]:
    """One for each added agent. As many agents side by side as the question has parts share it out."""
    parts, count = question_to_parts(question), len(addition.roles)
    is_shared_out = len(parts) == count > 1
    questions = parts if is_shared_out else [question] * count
    read = [team[link - 1]["said"][:SHOWN_CHARACTERS] for link in addition.links]
    sends = []
    for position, (name, question) in enumerate(zip(addition.roles, questions, strict=True)):
        member: Member = {
            "number": len(team) + 1 + position,
            "role": name,
            "line": line,
            "part": position if is_shared_out else None,
            "links": addition.links,
            "said": "",
        }
        sends.append(Send(name, Brief(member=member, text="\n".join([*read, question]))))
    return sends


def team_to_idle(team: Sequence[Member]) -> list[int]:
    """The numbers of the agents without which the answer would have been the same, in order.

    An agent that only said again what one of those that it read had said is idle, and needed nobody else that it read;
    where several had said so, the first of them was enough. It did more where that one had been asked a part of the
    question and it read another answer to another part: it compared them. An agent that said something of its own
    needed those that it read, but of equal answers to the same question or part the first one only. Idle are further
    all whom neither the agent that answered needed, nor anybody whom it needed, and so on.
    """
    members = {member["number"]: member for member in team}
    needed, idle, waiting = set(), set(), [max(members)]
    while waiting:
        number = waiting.pop()
        if number in needed:
            continue
        needed.add(number)
        read = [members[link] for link in sorted(members[number]["links"])]
        repeated = _first_repeated(members[number], read)
        if repeated is None:
            waiting += [member["number"] for place, member in enumerate(read) if not _is_told(member, read[:place])]
        else:
            idle.add(number)
            waiting.append(repeated["number"])
    return sorted(idle | (members.keys() - needed))


def _first_repeated(member: Member, read: Sequence[Member]) -> Member | None:
    """The first of those that an agent read whose answer it only said again; None where it did more than that."""
    for source in read:
        if _same_answer(member["said"], source["said"]) and not any(_is_compared(source, other) for other in read):
            return source
    return None


def _is_compared(member: Member, other: Member) -> bool:
    """Whether both were asked a part of the question, not the same one, and answered differently."""
    parts = member["part"], other["part"]
    return None not in parts and parts[0] != parts[1] and not _same_answer(member["said"], other["said"])


def _is_told(member: Member, earlier: Sequence[Member]) -> bool:
    """Whether an earlier one gave the same answer to the same question or part."""
    return any(member["part"] == other["part"] and _same_answer(member["said"], other["said"]) for other in earlier)


def _same_answer(text: str, second_text: str) -> bool:
    """Whether both end with one number, or, without numbers, are the same words."""
    numbers = last_number(text), last_number(second_text)
    return (
        numbers[0] == numbers[1]
        if any(number is not None for number in numbers)
        else bool(exact_match(text, second_text))
    )


def tasks() -> Iterator[dict[str, Any]]:
    """162 tasks in one fixed order: in turn a sum, a fact, and two sums to compare, which never are equal.

    No two numbers are added twice, in either order, so no task asks for a part of another one, nor for an example's.
    """
    rng = random.Random(0)
    pairs = [(a, b) for a in range(1, LARGEST + 1) for b in range(a, LARGEST + 1) if {a, b} not in ADDED_IN_EXAMPLES]
    pairs = [(a, b) if rng.random() < 0.5 else (b, a) for a, b in pairs]
    rng.shuffle(pairs)
    facts = [
        (question.format(name=person.name), answer)
        for person in people()
        for question, answer in (
            ("In which town is the home of {name}?", person.city),
            ("Which animal does {name} own?", person.pet),
        )
    ]
    rng.shuffle(facts)
    for number in range(54):
        a, b = pairs.pop()
        yield {"id": f"sum-{number}", "question": f"What is {a} + {b}?", "answer": str(a + b)}
        question, answer = facts[number]
        yield {"id": f"fact-{number}", "question": question, "answer": answer}
        a, b = pairs.pop()
        c, d = next(pair for pair in pairs if sum(pair) != a + b)
        pairs.remove((c, d))
        question = f"Which is larger, {a} + {b} or {c} + {d}?"
        yield {"id": f"larger-{number}", "question": question, "answer": str(max(a + b, c + d))}


def task_to_input(task: dict[str, Any]) -> BuildState:
    """The question only: the graph never sees the answer."""
    return {"question": task["question"]}


def reward(task: dict[str, Any], result: dict[str, Any], run: Any) -> dict[str, Any]:
    """Rewards of one episode, from its final state and its record; the configuration weighs them.

    Of the team: `correct`, 1 where the answer is the expected word, or ends with the expected number; `reward`, which
    is trained on, the same with partial credit (0.1 where the number occurs at all; the F1 of the words); `calls`, how
    many agents were added. Of each call of the host: `idle`, how many agents its line added without which the answer
    would have been the same (`team_to_idle`); `bad_line`, 1 for a line outside the language, else 0. Those are absent
    where the record does not have exactly one call for each line.
    """
    team, expected = _in_order(result["team"]), task["answer"]
    answer = team[-1]["said"]
    is_number = expected.isdecimal()
    credit = number_credit(answer, int(expected)) if is_number else f1(answer, expected)
    idle = team_to_idle(team)
    idle_by_line = [
        sum(member["line"] == line and member["number"] in idle for member in team)
        for line in range(len(result["lines"]))
    ]
    calls = [action.action_id for action in run.game().actions if action.node == "host"]
    is_complete = len(calls) == len(result["lines"])
    return {
        "correct": float(credit == 1.0) if is_number else exact_match(answer, expected),
        "reward": credit,
        "calls": float(len(team)),
        "idle": {f"step:{call}": float(count) for call, count in zip(calls, idle_by_line, strict=True)}
        if is_complete
        else None,
        "bad_line": {f"step:{call}": float(not is_line) for call, is_line in zip(calls, result["lines"], strict=True)}
        if is_complete
        else None,
    }
