r"""MARFT's chains of three, four, eight and twelve agents, on the duo's word problems.

A question goes down a line of agents, each of which reads it together with what all before it said, and the last one's
text is the answer. Tasks, input and rewards are those of `graphs.math_duo`. Invariant: what a prompt holds of the
others fits into ROOM bytes, however many they are and whatever they said: the last words of each one's first line. A
token is a byte at least, so the twelfth agent's prompt stays under 512 tokens (SmolLM2's: 508 at worst, 390 of words).

From the paper: section 5.3 announces populations of 4, 8, 12 and beyond; the roles up to eight are those of the
profiles that its authors publish with their code, in our words and shortened to what a 135M model can follow. The four
roles that twelve adds (two readers, an estimator and a critic) are ours, for no profile of that size is published.
Simplified: one pass without a way back, so a verifier corrects the answer instead of asking for another; the answer is
the last number that the last agent writes instead of a \boxed{} expression.
"""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Sequence
from typing import Annotated, Any, NamedTuple, Protocol, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from graphs.few_shot import profile_to_messages
from graphs.first_line import first_line

ROOM = 132
"""Bytes of what the agents before it said that a prompt has room for, shared out evenly."""

NUMBER = "Reply with the final number only."
EXAMPLES = ("Eva has 20 pens and gets 4 more. How many pens does Eva have now?", "What is 20 + 4?")
"""Both with the same numbers, so that an agent says the same to both."""


class Profile(NamedTuple):
    """One agent: the name of its node, what it is told to do, and what it would say to both of EXAMPLES."""

    role: str
    duty: str
    example: str


class Said(NamedTuple):
    """What one agent said."""

    role: str
    text: str


TRIO = (
    Profile("reasoner", "Guide the Actor with one short hint.", "Add 4 to 20."),
    Profile("actor", "Carry out the Reasoner's hint and say the number.", "20 + 4 = 24"),
    Profile("verifier", f"Check the Actor's number and correct it if it is wrong. {NUMBER}", "24"),
)
QUARTET = (
    Profile("decomposer", "Split the problem into its numbers and what is asked.", "20 and 4, in all"),
    Profile("planner", "Name the operation that is needed.", "Add 4 to 20."),
    Profile("executor", "Carry out the planned operation and say the number.", "20 + 4 = 24"),
    Profile("verifier", f"Check the Executor's number and correct it if it is wrong. {NUMBER}", "24"),
)
OCTET = (
    Profile("parser", "Name the numbers of the problem.", "20 and 4"),
    Profile("generator", "Say what is asked, in a few words.", "How many in all?"),
    Profile("selector", "Name the operation that is needed.", "Addition."),
    Profile("solver", "Write the calculation.", "20 + 4"),
    Profile("numeric", "Say the number that the calculation gives.", "24"),
    Profile("symbolic", "Write the calculation with its result.", "20 + 4 = 24"),
    Profile("verifier", "Check the result and say the right number.", "24"),
    Profile("aggregator", f"Put together what the others found. {NUMBER}", "24"),
)
TWELVE = (
    Profile("reader", "Say in a few words what the problem is about.", "Two numbers."),
    Profile("rereader", "Say what happens in the problem.", "More is added."),
    *OCTET[:3],
    Profile("estimator", "Say roughly how large the result is.", "About 20."),
    *OCTET[3:7],
    Profile("critic", "Say whether the result can be right.", "Yes."),
    OCTET[7],
)


class ChainState(TypedDict, total=False):
    """What the agents share: every one adds what it said."""

    question: str
    said: Annotated[list[Said], operator.add]
    answer: str


def build_trio(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Reasoner -> Actor -> Verifier."""
    return profiles_to_graph(model, "trio", TRIO)


def build_quartet(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Decomposer -> Planner -> Executor -> Verifier."""
    return profiles_to_graph(model, "quartet", QUARTET)


def build_octet(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Parser -> Generator -> Selector -> Solver -> Numeric -> Symbolic -> Verifier -> Aggregator."""
    return profiles_to_graph(model, "octet", OCTET)


def build_twelve(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The octet with two readers before it, and an estimator and a critic in it."""
    return profiles_to_graph(model, "twelve", TWELVE)


def profiles_to_graph(
    model: BaseChatModel, name: str, profiles: tuple[Profile, ...]
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Profiles -> the compiled chain, one node each in this order, which all call `model`."""
    graph = StateGraph(ChainState)
    before = START
    for place, profile in enumerate(profiles):
        graph.add_node(profile.role, _node(model, profiles[:place], profile, len(profiles)))
        graph.add_edge(before, profile.role)
        before = profile.role
    graph.add_edge(before, END)
    return graph.compile(name=name)


class _Node(Protocol):
    def __call__(self, state: ChainState) -> Awaitable[ChainState]: ...


def _node(model: BaseChatModel, before: tuple[Profile, ...], profile: Profile, size: int) -> _Node:
    title = profile.role.capitalize()
    system = f"{size} LLM agents solve a math problem together. You are the {title}. {profile.duty}"
    said = [Said(each.role, each.example) for each in before]
    examples = [(_asked(question, said, title), profile.example) for question in EXAMPLES]

    async def node(state: ChainState) -> ChainState:
        asked = _asked(state["question"], state["said"], title)
        reply = await model.ainvoke(profile_to_messages(system, examples, asked))
        text = first_line(str(reply.text))
        return {"said": [Said(profile.role, text)], "answer": text}

    return node


def _asked(question: str, said: Sequence[Said], title: str) -> str:
    lines = (f"{each.role.capitalize()}: {tail(each.text, ROOM // len(said))}" for each in said)
    return "\n".join([question, *lines, f"{title}?"])


def tail(text: str, room: int) -> str:
    """The last words of a text that fit into `room` bytes; the end of the last word where not even that one fits."""
    kept = ""
    for word in reversed(text.split()):
        longer = f"{word} {kept}" if kept else word
        if len(longer.encode()) > room:
            return kept or word.encode()[-room:].decode(errors="ignore")
        kept = longer
    return kept
