r"""MARFT's chains of three, four, eight and twelve agents, on the duo's word problems.

A question goes down a line of agents, each of which reads it together with what all before it said, and the last one's
text is the answer. Tasks, input and rewards are those of `graphs.math_duo`. Invariant: a prompt holds at most
TAIL_WORDS words and TAIL_LETTERS letters of each predecessor, the last ones, so that the twelfth agent's prompt stays
under 512 tokens whatever was said.

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

TAIL_WORDS = 6
TAIL_LETTERS = 24

NUMBER = "Reply with the final number only."
EXAMPLE = "Eva has 20 pens and gets 30 more. How many pens does Eva have now?"


class Profile(NamedTuple):
    """One agent: the name of its node, what it is told to do, and what it would say to EXAMPLE."""

    role: str
    duty: str
    example: str


class Said(NamedTuple):
    """What one agent said."""

    role: str
    text: str


TRIO = (
    Profile("reasoner", "Guide the Actor with one short hint.", "Add 30 to 20."),
    Profile("actor", "Carry out the Reasoner's hint and say the number.", "20 + 30 = 50"),
    Profile("verifier", f"Check the Actor's number and correct it if it is wrong. {NUMBER}", "50"),
)
QUARTET = (
    Profile("decomposer", "Split the problem into its numbers and what is asked.", "20 and 30, how many in all"),
    Profile("planner", "Name the operation that is needed.", "Add 30 to 20."),
    Profile("executor", "Carry out the planned operation and say the number.", "20 + 30 = 50"),
    Profile("verifier", f"Check the Executor's number and correct it if it is wrong. {NUMBER}", "50"),
)
OCTET = (
    Profile("parser", "Name the numbers of the problem.", "20 and 30"),
    Profile("generator", "Say what is asked, in a few words.", "How many in all."),
    Profile("selector", "Name the operation that is needed.", "Addition."),
    Profile("solver", "Write the calculation.", "20 + 30"),
    Profile("numeric", "Say the number that the calculation gives.", "50"),
    Profile("symbolic", "Write the calculation with its result.", "20 + 30 = 50"),
    Profile("verifier", "Check the result and say the right number.", "50"),
    Profile("aggregator", f"Put together what the others found. {NUMBER}", "50"),
)
TWELVE = (
    Profile("reader", "Say in a few words what the problem is about.", "Pens that Eva has."),
    Profile("rereader", "Say what happens in the problem.", "Eva gets more pens."),
    *OCTET[:3],
    Profile("estimator", "Say roughly how large the result is.", "About 50."),
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
    example = _asked(EXAMPLE, [Said(each.role, each.example) for each in before], title)

    async def node(state: ChainState) -> ChainState:
        asked = _asked(state["question"], state["said"], title)
        reply = await model.ainvoke(profile_to_messages(system, [(example, profile.example)], asked))
        return {"said": [Said(profile.role, str(reply.text))], "answer": str(reply.text)}

    return node


def _asked(question: str, said: Sequence[Said], title: str) -> str:
    return "\n".join([question, *(f"{each.role.capitalize()}: {tail(each.text)}" for each in said), f"{title}?"])


def tail(text: str) -> str:
    """The last words of a text, at most TAIL_WORDS of them and TAIL_LETTERS letters."""
    return " ".join(text.split()[-TAIL_WORDS:])[-TAIL_LETTERS:]
