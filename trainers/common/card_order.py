"""CUDA_DEVICE_ORDER -> the numbers of cards, which mean the same card in every process that trains.

Invariant: a process counts as NVIDIA's driver does, unless its environment says how; where it counts otherwise than the
process that planned, it does not compute. CUDA reads the variable once, when it is first asked for a card.
"""

from __future__ import annotations

import os

from trainers.errors import TrainError

_VARIABLE = "CUDA_DEVICE_ORDER"
_OF_CUDA = "FASTEST_FIRST"  # where nothing is set


def count_cards_as_driver() -> None:
    """Has CUDA count the cards by their place in the machine, before it looks at any."""
    os.environ.setdefault(_VARIABLE, "PCI_BUS_ID")


def card_order() -> str:
    """How CUDA counts in this process."""
    return os.environ.get(_VARIABLE, _OF_CUDA)


def refuse_other_order(planned: str, cards: int) -> None:
    """Refuses to compute where a card's number is another card than in the process that planned.

    Args:
        planned: `card_order` of that process.
        cards: that this process sees; one has the same number however they are counted.

    Raises:
        TrainError: names both.
    """
    if cards > 1 and card_order() != planned:
        raise TrainError(
            f"CUDA counts the cards of this learner's process by {card_order()}, and those of the command by "
            f"{planned}: set {_VARIABLE} to one of them for all"
        )
