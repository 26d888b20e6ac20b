"""A profile, worked examples and a question to the messages of one call.

A small instruct model that is told a form in words writes prose; shown it in earlier turns, it mostly keeps to it, and
then there is something to learn from. What is asked comes last. The examples are of no task. They have no ids, so the
record takes none of them for what an agent said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

Example = tuple[str, str]
"""What is asked, and a good answer."""


class FewShot(NamedTuple):
    """What an agent is told to do, and the examples that show it."""

    duty: str
    examples: tuple[Example, ...]

    def messages(self, asked: str) -> list[BaseMessage]:
        """The chat that ends with what is asked now."""
        return profile_to_messages(self.duty, self.examples, asked)


def profile_to_messages(profile: str, examples: Sequence[Example], question: str) -> list[BaseMessage]:
    """System message, a turn of user and model for each example, and the question."""
    turns = [message for asked, said in examples for message in (HumanMessage(asked), AIMessage(said))]
    return [SystemMessage(profile), *turns, HumanMessage(question)]
