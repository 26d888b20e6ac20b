r"""MARFT's chains of three, four, eight and twelve agents, on the duo's word problems.

A question passes along a line of agents; each reads it together with what all agents before it said, and the last one's
text is the answer. Tasks, input and rewards are those of `graphs.math_duo`. Invariant: what a prompt quotes of earlier
agents takes at most QUOTED_BYTES, however many they are and whatever they said: the last words of each one's first
line. A token is a byte at least, so the twelfth agent's prompt stays under 512 tokens (SmolLM2's: 508 at worst, 390 for
plain words).

From the paper: section 5.3 announces populations of 4, 8, 12 and beyond; the roles up to eight are those of the
profiles that its authors publish with their code, in our words and shortened to what a 135M model can follow. The four
roles that twelve adds (two readers, an estimator and a critic) are ours, for no profile of that size is published.
Simplified: one pass without a loop back, so a verifier corrects the answer instead of asking for another; the answer is
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

QUOTED_BYTES = 132
"""Bytes that a prompt quotes of earlier agents, in equal shares."""

NUMBER_ONLY = "Reply with the final number only."
EXAMPLE_QUESTIONS = ("Eva has 20 pens and gets 4 more. How many pens does Eva have now?", "What is 20 + 4?")
"""Both with the same numbers, so that one example reply of an agent answers both."""


class Profile(NamedTuple):
    """One agent: the name of its node, its instruction, and its reply to each of EXAMPLE_QUESTIONS."""

    role: str
    instruction: str
    example_reply: str


class Contribution(NamedTuple):
    """The first line of one agent's reply."""

    role: str
    text: str


TRIO = (
    Profile("reasoner", "Guide the Actor with one short hint.", "Add 4 to 20."),
    Profile("actor", "Carry out the Reasoner's hint and say the number.", "20 + 4 = 24"),
    Profile("verifier", f"Check the Actor's number and correct it if it is wrong. {NUMBER_ONLY}", "24"),
)
QUARTET = (
    Profile("decomposer", "Split the problem into its numbers and what is asked.", "20 and 4, in all"),
    Profile("planner", "Name the operation that is needed.", "Add 4 to 20."),
    Profile("executor", "Carry out the planned operation and say the number.", "20 + 4 = 24"),
    Profile("verifier", f"Check the Executor's number and correct it if it is wrong. {NUMBER_ONLY}", "24"),
)
OCTET = (
    Profile("parser", "Name the numbers of the problem.", "20 and 4"),
    Profile("generator", "Say what is asked, in a few words.", "How many in all?"),
    Profile("selector", "Name the operation that is needed.", "Addition."),
    Profile("solver", "Write the calculation.", "20 + 4"),
    Profile("numeric", "Say the number that the calculation gives.", "24"),
    Profile("symbolic", "Write the calculation with its result.", "20 + 4 = 24"),
    Profile("verifier", "Check the result and say the right number.", "24"),
    Profile("aggregator", f"Put together what the others found. {NUMBER_ONLY}", "24"),
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
    """The state that the agents share: each one adds its contribution."""

    question: str
    contributions: Annotated[list[Contribution], operator.add]
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
    """The compiled chain with one node for each profile, in this order; all nodes call `model`."""
    graph = StateGraph(ChainState)
    previous_node = START
    for position, profile in enumerate(profiles):
        graph.add_node(profile.role, _profile_to_node(model, profiles[:position], profile, chain_length=len(profiles)))
        graph.add_edge(previous_node, profile.role)
        previous_node = profile.role
    graph.add_edge(previous_node, END)
    return graph.compile(name=name)


class _Node(Protocol):
    def __call__(self, state: ChainState) -> Awaitable[ChainState]: ...


def _profile_to_node(
    model: BaseChatModel, predecessors: tuple[Profile, ...], profile: Profile, chain_length: int
) -> _Node:
    title = profile.role.capitalize()
    system = f"{chain_length} LLM agents solve a math problem together. You are the {title}. {profile.instruction}"
    example_contributions = [Contribution(agent.role, agent.example_reply) for agent in predecessors]
    examples = [
        (_build_prompt(question, example_contributions, title), profile.example_reply) for question in EXAMPLE_QUESTIONS
    ]

    async def node(state: ChainState) -> ChainState:
        prompt = _build_prompt(state["question"], state["contributions"], title)
        reply = await model.ainvoke(profile_to_messages(system, examples, prompt))
        text = first_line(str(reply.text))
        return {"contributions": [Contribution(profile.role, text)], "answer": text}

    return node


def _build_prompt(question: str, contributions: Sequence[Contribution], title: str) -> str:
    lines = (
        f"{contribution.role.capitalize()}: {text_to_tail(contribution.text, QUOTED_BYTES // len(contributions))}"
        for contribution in contributions
    )
    return "\n".join([question, *lines, f"{title}?"])


def text_to_tail(text: str, max_bytes: int) -> str:
    """The last words of a text that fit into `max_bytes`; the end of the last word where not even that one fits."""
    tail = ""
    for word in reversed(text.split()):
        extended = f"{word} {tail}" if tail else word
        if len(extended.encode()) > max_bytes:
            return tail or word.encode()[-max_bytes:].decode(errors="ignore")
        tail = extended
    return tail
