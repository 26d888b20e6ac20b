"""How many cards `train.devices` must name: one for each learner, whoever says how many learners there are."""

from __future__ import annotations


def cards_to_fault(cards: int, learners: int) -> str | None:
    """What is wrong with so many cards for so many learners; None where each has one."""
    if cards == learners:
        return None
    return (
        f"train.devices names {cards} card{'s' if cards > 1 else ''} for {learners} "
        f"learner{'s' if learners > 1 else ''}, and each has one: set learners = {cards}, or name {learners}"
    )
