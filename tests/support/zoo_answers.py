"""What scripted models answer in tests of the zoo that more than one file has; see `zoo_rig.Script`."""

from __future__ import annotations

import random
import re
from typing import Any

from support.fake_vllm import Answer
from support.paths import ROOT

DUO = ROOT / "examples/math_duo/bridge.toml"


def sometimes_right(node: str, messages: list[dict[str, Any]], chance: random.Random) -> Answer:
    """A reasoner that always says the same, and an actor that is right half the time."""
    if node == "reasoner":
        return "add them"
    numbers = [int(number) for number in re.findall(r"\d+", str(messages[1]["content"]).split("\n")[0])]
    return str(sum(numbers[:2]) + (chance.random() < 0.5))


def half_right(node: str, messages: list[dict[str, Any]], chance: random.Random) -> str:
    """Each agent is right, or writes nonsense, by the toss of a coin; the supervisor ends as soon as there is a value.

    What is right is short, what is wrong is other bytes, so that an adapter can tell them apart.
    """
    asked = messages[-1]["content"]
    right = chance.random() < 0.5
    if node != "supervisor":
        numbers = re.findall(r"\d+", asked.splitlines()[0])
        return f"{numbers[0]}, {numbers[1]}" if right else "zzzz zzzz"
    if " = " in asked:
        return "DONE"
    return ("ADDER" if "plus" in asked else "MULTIPLIER") if right else "zzzz zzzz"
