"""A profile, worked examples and a question -> the messages of one model call.

A small instruct model that is told an answer format in words writes prose anyway; shown it in earlier turns, it mostly
follows it, so that some samples earn a reward to learn from. Invariants: the question comes last; no example is one
of the tasks; the messages have no ids, so a recorder attributes none of the examples to an agent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

Example = tuple[str, str]
"""(question, good answer)."""


class FewShotPrompt(NamedTuple):
    """The profile of an agent (what it has to do), and the examples that show it."""

    profile: str
    examples: tuple[Example, ...]

    def messages(self, question: str) -> list[BaseMessage]:
        """The chat that ends with this question."""
        return profile_to_messages(self.profile, self.examples, question)


def profile_to_messages(profile: str, examples: Sequence[Example], question: str) -> list[BaseMessage]:
    """The system message, a user and a model turn for each example, and the question."""
    turns = [turn for example, answer in examples for turn in (HumanMessage(example), AIMessage(answer))]
    return [SystemMessage(profile), *turns, HumanMessage(question)]
