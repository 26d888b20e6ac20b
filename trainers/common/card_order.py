"""CUDA_DEVICE_ORDER -> the numbers of cards, which mean the same card in every process that trains.

The variable is set here only. Invariant: the process that plans counts as NVIDIA's driver does, and so does every other
one, unless its environment says how; where it counts otherwise than the one that planned, it does not compute. CUDA
reads the variable once, when it is first asked for a card.
"""

from __future__ import annotations

import os

from trainers.errors import TrainError

ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
DRIVER_ORDER = "PCI_BUS_ID"
_OF_CUDA = "FASTEST_FIRST"  # where nothing is set


def count_cards_as_driver(*, overrule: bool = False) -> None:
    """Has CUDA count the cards by their place in the machine, before it looks at any.

    Args:
        overrule: also where the environment says otherwise. Not where others number the cards for this process, as Ray
            does: they count by that environment.
    """
    if overrule:
        os.environ[ORDER_VARIABLE] = DRIVER_ORDER
    else:
        os.environ.setdefault(ORDER_VARIABLE, DRIVER_ORDER)


def card_order() -> str:
    """How CUDA counts in this process."""
    return os.environ.get(ORDER_VARIABLE, _OF_CUDA)


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
            f"{planned}: set {ORDER_VARIABLE} to one of them for all"
        )
