"""A customer's opening words -> a decision, by an agent that asks the customer and looks into the shop's books.

The customer is a script with hidden facts (a problem, an order number) and a manner. The agent's every turn is one
line: `ASK problem`, `ASK order`, `LOOKUP 47` or `DECIDE REFUND`, and it has MAX_TURNS of them. Any other line costs a
turn. A touchy customer answers only who says please or thanks.

After DoctorAgent-RL (arXiv 2505.19630): a doctor that asks a simulated patient turn by turn, within a budget, and is
paid for the diagnosis and for how it got there. Theirs: the dialogue as the decision process, the simulated person,
rewards apart for the decision, the facts that were found, and the turns. Simplified: a customer service with a tool
instead of a consultation, a script instead of a patient model, commands instead of free questions, no first phase of
supervised training. The manners, the reward for politeness and the weights are ours.

Invariant: the agent sees a hidden fact only after a turn that asked for it. `find_leaks` checks every run: one whose
simulator told more has neither `reward` nor `correct`, so nothing is learned from it and no comparison counts it.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from graphs.few_shot import FewShotPrompt
from graphs.first_line import first_line
from graphs.local_corpus import text_to_words

_OPENING = "Customer: Hello, it is about my cup.\nNext?"
_PROBLEM = "Customer: Hello, it is about my cup.\nYou: ASK problem, please\nCustomer: It is broken.\n"
_ORDER = f"{_PROBLEM}You: ASK order, please\nCustomer: It is order 10.\n"
AGENT = FewShotPrompt(
    "You serve customers of a shop. ASK problem and order, LOOKUP the order, then DECIDE: "
    "too late: DECLINE, broken: REPLACE, unwanted: REFUND. Reply with one line.",
    (
        (_OPENING, "ASK problem, please"),
        (f"{_PROBLEM}Next?", "ASK order, please"),
        (f"{_ORDER}Next?", "LOOKUP 10"),
        (f"{_ORDER}You: LOOKUP 10\nShop: Order 10 is in time.\nNext?", "DECIDE REPLACE"),
        (f"{_ORDER}You: LOOKUP 10\nShop: Order 10 is too late.\nNext?", "DECIDE DECLINE"),
        (
            f"{_ORDER}You: LOOKUP 10\nShop: Order 10 is in time.\nNext?".replace("broken", "unwanted"),
            "DECIDE REFUND",
        ),
    ),
)

Fact = Literal["problem", "order"]
"""What the customer knows and tells who asks."""

MAX_TURNS = 6
SHOWN_CHARACTERS = 40  # of a turn of the agent, in later prompts
WRONG_DECISION = 0.1  # what a decision that is not the right one is worth

PROBLEMS = {"broken": "REPLACE", "unwanted": "REFUND"}  # what is decided of it where the order is in time
DECISIONS = (*PROBLEMS.values(), "DECLINE")
MANNERS = ("plain", "chatty", "touchy")
GOODS = ("lamp", "chair", "clock", "vase", "desk", "globe", "drum", "flute", "mirror", "kettle")
FACTS = ("problem", "order", "standing")  # to be found: the first two from the customer, the last from the books
ORDERS = tuple(str(number) for number in range(11, 100))  # 10 is left to the examples
OTHER_VALUES: Mapping[Fact, Sequence[str]] = {"problem": tuple(PROBLEMS), "order": ORDERS}
"""All that each fact of the customer might be."""

_COURTESY = frozenset({"please", "thanks", "thank"})
_CHATTER = "Such a nice shop you have."
_REFUSAL = "Ask me nicely."


class Person(TypedDict):
    """What the customer knows, and how they talk."""

    goods: str
    problem: str
    order: str
    manner: str


class Move(TypedDict):
    """One line of the agent. `kind` is ASK, LOOKUP or DECIDE, or NONE where it is none of these."""

    kind: Literal["ASK", "LOOKUP", "DECIDE", "NONE"]
    subject: str
    is_polite: bool


class Exchange(TypedDict):
    """What one turn brought: the fact that it asked for, "" for none; who answered; and the answer.

    `leaked`: other facts that the answer followed from, see `leaked_facts`.
    """

    fact: str
    source: Literal["customer", "shop"]
    answer: str
    leaked: list[Fact]


class DialogueState(TypedDict, total=False):
    """The state that the nodes share. The agent reads `opening` and `transcript` only."""

    opening: str
    person: Person
    transcript: Annotated[list[str], operator.add]
    moves: Annotated[list[Move], operator.add]
    exchanges: Annotated[list[Exchange], operator.add]


Simulator = Callable[[Person, Move], str]
"""What a customer answers to a move: a script, which must not tell a fact that the move did not ask for."""


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled dialogue, in which the agent calls `model`."""
    return build_with_simulator(model, person_to_answer)


def build_with_simulator(
    model: BaseChatModel, simulator: Simulator, is_deterministic: bool = True
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The same with another script in the customer's place. A model is not meant: a simulator is given none to call.

    Args:
        is_deterministic: whether it answers the same to the same person and move. Of a script that draws its words,
            only leaks in the fact's own words are found.
    """

    async def agent(state: DialogueState) -> DialogueState:
        lines = [f"Customer: {state['opening']}", *state.get("transcript", []), "Next?"]
        reply = await model.ainvoke(AGENT.messages("\n".join(lines)))
        # A small model repeats the mark of its own lines, which says nothing.
        line = first_line(str(reply.text)).removeprefix("You:").strip()
        return {"transcript": [f"You: {line[:SHOWN_CHARACTERS]}"], "moves": [text_to_move(line)]}

    async def customer(state: DialogueState) -> DialogueState:
        move = state["moves"][-1]
        answer = simulator(state["person"], move)
        leaked = leaked_facts(simulator, state["person"], move, answer=answer) if is_deterministic else []
        exchange: Exchange = {"fact": move["subject"], "source": "customer", "answer": answer, "leaked": leaked}
        return {"transcript": [f"Customer: {answer}"], "exchanges": [exchange]}

    async def shop(state: DialogueState) -> DialogueState:
        move = state["moves"][-1]
        is_lookup = move["kind"] == "LOOKUP"
        answer = await look_up.ainvoke({"order": move["subject"]}) if is_lookup else "That is no command."
        exchange: Exchange = {
            "fact": "standing" if is_lookup else "",
            "source": "shop",
            "answer": answer,
            "leaked": [],
        }
        return {"transcript": [f"Shop: {answer}"], "exchanges": [exchange]}

    def route_after_agent(state: DialogueState) -> Literal["customer", "shop", "__end__"]:
        kind = state["moves"][-1]["kind"]
        if kind == "DECIDE" or len(state["moves"]) == MAX_TURNS:
            return "__end__"
        return "customer" if kind == "ASK" else "shop"

    graph = StateGraph(DialogueState)
    graph.add_node("agent", agent)
    graph.add_node("customer", customer)
    graph.add_node("shop", shop)
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", route_after_agent, {"customer": "customer", "shop": "shop", "__end__": END})
    graph.add_edge("customer", "agent")
    graph.add_edge("shop", "agent")
    return graph.compile(name="service_dialogue")


def text_to_move(text: str) -> Move:
    """The command that a line is. What follows it is read for its subject and for courtesy only."""
    words = text_to_words(text)
    is_polite = not _COURTESY.isdisjoint(words)
    verb, rest = (words[0], words[1:]) if words else ("", [])
    if verb == "ask" and (subjects := [word for word in rest if word in ("problem", "order")]):
        return {"kind": "ASK", "subject": subjects[0], "is_polite": is_polite}
    if verb == "lookup" and (orders := [word for word in rest if re.fullmatch(r"[0-9]{1,9}", word)]):
        return {"kind": "LOOKUP", "subject": orders[0], "is_polite": is_polite}
    if verb == "decide" and (decisions := [word.upper() for word in rest if word.upper() in DECISIONS]):
        return {"kind": "DECIDE", "subject": decisions[0], "is_polite": is_polite}
    return {"kind": "NONE", "subject": "", "is_polite": is_polite}


def person_to_answer(person: Person, move: Move) -> str:
    """What the customer answers. A touchy one tells nothing to who is not polite."""
    if person["manner"] == "touchy" and not move["is_polite"]:
        return _REFUSAL
    answer = f"It is {person['problem']}." if move["subject"] == "problem" else f"It is order {person['order']}."
    return f"{_CHATTER} {answer}" if person["manner"] == "chatty" else answer


@tool
def look_up(order: str) -> str:
    """Says whether an order of the shop is in time to be sent back."""
    return f"Order {order} is {'too late' if is_too_late(order) else 'in time'}."


def is_too_late(order: str) -> bool:
    """The shop's books: an order whose number is divisible by three was paid too long ago."""
    return int(order) % 3 == 0


def leaked_facts(simulator: Simulator, person: Person, move: Move, answer: str) -> list[Fact]:
    """The facts that a move did not ask for and its answer depends on, in whatever words.

    With some other value of such a fact the answer would have been another one, so it tells something of it.
    """

    def changes_answer(fact: Fact, value: str) -> bool:
        other: Person = {**person, "problem": value} if fact == "problem" else {**person, "order": value}
        return simulator(other, move) != answer

    return [
        fact
        for fact, values in OTHER_VALUES.items()
        if fact != move["subject"] and any(changes_answer(fact, value) for value in values if value != person[fact])
    ]


def find_leaks(person: Mapping[str, str], opening: str, exchanges: Sequence[Exchange]) -> list[Fact]:
    """The hidden facts of the customer that they told before anybody asked, each time, in order.

    A fact is told where its value stands in their words, or where the answer follows from it, see `leaked_facts`.
    """
    leaks: list[Fact] = [fact for fact in OTHER_VALUES if person[fact] in text_to_words(opening)]
    asked_facts: set[str] = set()
    for part in exchanges:
        if part["source"] == "customer":
            asked_facts.add(part["fact"])
            words = text_to_words(part["answer"])
            told_facts = [fact for fact in OTHER_VALUES if person[fact] in words or fact in part["leaked"]]
            leaks += [fact for fact in told_facts if fact not in asked_facts]
    return leaks


def exchanges_to_facts(person: Mapping[str, str], exchanges: Sequence[Exchange]) -> list[str | None]:
    """By exchange, the fact that it brought for the first time, or None. Another order's standing is none."""
    new_facts: list[str | None] = []
    for part in exchanges:
        words = text_to_words(part["answer"])
        is_told = part["fact"] in FACTS and person["order" if part["fact"] == "standing" else part["fact"]] in words
        new_facts.append(part["fact"] if is_told and part["fact"] not in new_facts else None)
    return new_facts


def tasks() -> Iterator[dict[str, Any]]:
    """180 customers in one fixed order, for each of the decisions 60, and 60 of each manner.

    No two are alike but for their goods, on which nothing depends.
    """
    rng = random.Random(0)
    earlier_people: set[tuple[str, str, str]] = set()
    late, in_time = ([order for order in ORDERS if is_too_late(order) is late] for late in (True, False))
    for number in range(180):
        decision = DECISIONS[number % 3]
        problem = next((name for name, due in PROBLEMS.items() if due == decision), rng.choice(tuple(PROBLEMS)))
        goods, manner = GOODS[number % len(GOODS)], MANNERS[number // 3 % 3]
        orders = late if decision == "DECLINE" else in_time
        order = rng.choice([order for order in orders if (problem, order, manner) not in earlier_people])
        earlier_people.add((problem, order, manner))
        person: Person = {"goods": goods, "problem": problem, "order": order, "manner": manner}
        yield {"id": f"customer-{number}", "person": person, "decision": decision}


def task_to_input(task: dict[str, Any]) -> DialogueState:
    """The opening, and what the simulated customer knows: the graph never sees the decision."""
    return {"opening": f"Hello, it is about my {task['person']['goods']}.", "person": task["person"]}


def reward(task: dict[str, Any], result: dict[str, Any], run: Any) -> dict[str, Any]:
    """Rewards of one episode, each apart; the configuration weighs them.

    Of the team: `correct`, 1 for the right decision; `reward`, which is trained on, the same, and WRONG_DECISION for a
    wrong decision; both absent where the simulator leaked; `facts`, the share of the three facts that were found;
    `turns` and `leaks`, counts. Of each call: `fact`, 1/3 where it brought a new fact, else 0; `turn`, 1; `rudeness`, 1
    for a question to the customer without please or thanks, 0 for one with it. Those of calls are absent where the
    record does not have exactly one call for each turn.
    """
    moves, exchanges = result["moves"], result.get("exchanges", [])
    last = moves[-1]
    is_decided, is_right = last["kind"] == "DECIDE", last["subject"] == task["decision"]
    leaks = find_leaks(task["person"], result["opening"], exchanges)
    new_facts = exchanges_to_facts(task["person"], exchanges)
    fact_count = sum(fact is not None for fact in new_facts)
    calls = [action.action_id for action in run.game().actions if action.node == "agent"]
    is_complete = len(calls) == len(moves)
    # The last turn brings nothing: it decides, or the budget is spent.
    by_call = {f"step:{call}": 0.0 for call in calls} | {
        f"step:{call}": (fact is not None) / len(FACTS) for call, fact in zip(calls, new_facts, strict=False)
    }
    rudeness = {
        f"step:{call}": float(not move["is_polite"])
        for call, move in zip(calls, moves, strict=False)
        if move["kind"] == "ASK"
    }
    return {
        "correct": None if leaks else float(is_decided and is_right),
        "reward": None if leaks else (1.0 if is_right else WRONG_DECISION) * is_decided,
        "facts": fact_count / len(FACTS),
        "turns": float(len(moves)),
        "leaks": float(len(leaks)),
        "fact": by_call if is_complete else None,
        "turn": {f"step:{call}": 1.0 for call in calls} if is_complete else None,
        "rudeness": (rudeness or None) if is_complete else None,
    }
