"""NVIDIA's driver and CUDA_VISIBLE_DEVICES -> the cards that this process may use, in CUDA's order.

Asked with `nvidia-smi`: torch would keep a context on every card that it looks at. Invariant: what cannot be read is no
card, never a guess. It knows nothing of models.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_QUERY = "index,uuid,name,memory.total,memory.free"
_TIMEOUT_S = 30.0  # a driver that has to start takes some seconds
_ORDER = "CUDA_DEVICE_ORDER"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU, in bytes."""

    name: str
    total: int
    free: int
    visible_name: str  # what CUDA_VISIBLE_DEVICES calls it


@dataclass(frozen=True, slots=True)
class Machine:
    """The cards that this process may use; the position of a card is its number in options and in torch."""

    cards: tuple[Card, ...] = ()


def read_machine() -> Machine:
    """The cards of this machine. CUDA counts them as the driver does from here on, unless the environment says how."""
    text = _ask_driver()
    if text is None:
        return Machine()
    os.environ.setdefault(_ORDER, "PCI_BUS_ID")  # else CUDA counts the fastest card first, and the driver does not
    return rows_to_machine(text, os.environ)


def rows_to_machine(text: str, environment: Mapping[str, str]) -> Machine:
    """Answers of `nvidia-smi`, one card a line -> the cards that the environment leaves visible, in its order.

    No cards where CUDA_VISIBLE_DEVICES names something that the driver did not list, as a part of a card (MIG).
    """
    cards = {}
    for row in (line.split(", ") for line in text.splitlines() if line.strip()):
        try:
            index, uuid, name, total_mib, free_mib = row
            cards[index, uuid] = Card(name, int(total_mib) << 20, int(free_mib) << 20, visible_name=index)
        except ValueError:
            return Machine()  # a driver that does not tell the memory
    visible = environment.get(_VISIBLE)
    if visible is None:
        return Machine(tuple(cards.values()))
    return _pick_cards(cards, [name.strip() for name in visible.split(",") if name.strip()])


def visible_to_environment(visible_names: Sequence[str]) -> dict[str, str]:
    """What a process that may use these cards only has in its environment; nothing for no names."""
    if not visible_names:
        return {}
    return {_VISIBLE: ",".join(visible_names), _ORDER: os.environ.get(_ORDER, "PCI_BUS_ID")}


def _pick_cards(cards: Mapping[tuple[str, str], Card], names: Sequence[str]) -> Machine:
    picked = []
    for name in names:
        if name == "-1":  # CUDA ignores what follows
            break
        matches = [card for (index, uuid), card in cards.items() if name == index or uuid.startswith(name)]
        if len(matches) != 1:
            return Machine()
        card = matches[0]
        picked.append(Card(card.name, card.total, card.free, visible_name=name))
    return Machine(tuple(picked))


def _ask_driver() -> str | None:
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout
