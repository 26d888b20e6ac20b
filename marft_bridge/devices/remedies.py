"""What does not fit on the cards -> the setting with which it does.

Where a plan is refused it names settings that may mend it, the best first; of these the first is said with which a
plan was made, and after them other cards than those that the options name. Invariant: no setting is said to help that
was not tried; what is said where none helps is a way out that needs no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from marft_bridge.common.errors import ServingError
from marft_bridge.devices.card_memory import (
    GIB,
    USABLE,
    CardRoom,
    EngineNeed,
    TrainerNeed,
    cache_to_tokens,
    least_tokens,
    splits_down_from,
    token_bytes,
    usable_bytes,
)
from trainers.common.byte_text import bytes_to_text

PlanCards = Callable[[Sequence[EngineNeed], TrainerNeed | None], tuple[Sequence[tuple[int, ...]], tuple[int, ...]]]
"""Plans what is needed: the cards of each server, and the learners'. Raises ServingError where it does not fit."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A setting with which a plan may be made."""

    text: str
    table: str | None  # of the server whose options change; None: what changes is the trainer's need
    changes: Mapping[str, Any] = field(default_factory=dict)

    def needs_with_it(
        self, needs: Sequence[EngineNeed], trainer: TrainerNeed | None
    ) -> tuple[list[EngineNeed], TrainerNeed | None]:
        """What is needed where it is set."""
        if self.table is None:
            return [*needs], None if trainer is None else replace(trainer, **self.changes)
        return [need if need.table != self.table else _with_options(need, **self.changes) for need in needs], trainer


class NoRoomError(ServingError):
    """What does not fit.

    Args:
        remedies: settings that may mend it, the best first.
        otherwise: what is said where none of them does.
    """

    def __init__(self, problem: str, remedies: Sequence[Remedy] = (), *, otherwise: str) -> None:
        super().__init__(f"{problem}: {otherwise}")
        self.problem, self.remedies, self.otherwise = problem, tuple(remedies), otherwise


def refusal_to_text(
    refusal: NoRoomError, needs: Sequence[EngineNeed], trainer: TrainerNeed | None, *, plan_cards: PlanCards
) -> str:
    """What does not fit, and what to set, of which a plan was made."""
    remedies = (remedy for remedy in refusal.remedies if _holds(plan_cards, *remedy.needs_with_it(needs, trainer)))
    first_remedy = next(remedies, None)
    setting = _other_cards_named(needs, trainer, plan_cards) if first_remedy is None else first_remedy.text
    return f"{refusal.problem}: {setting or refusal.otherwise}"


def _holds(plan_cards: PlanCards, needs: Sequence[EngineNeed], trainer: TrainerNeed | None) -> bool:
    """Whether all of it fits somewhere."""
    try:
        plan_cards(needs, trainer)
    except ServingError:
        return False
    return True


def _other_cards_named(needs: Sequence[EngineNeed], trainer: TrainerNeed | None, plan_cards: PlanCards) -> str | None:
    """The cards to name in place of those that are named; None where that does not help."""
    is_named = any(need.options.devices is not None for need in needs)
    if not is_named and (trainer is None or trainer.devices is None):
        return None
    try:
        server_cards, learner_cards = plan_cards(
            [_with_options(need, devices=None) for need in needs],
            None if trainer is None else replace(trainer, devices=None),
        )
    except ServingError:
        return None
    settings = []
    fitting_needs, fitting_trainer = [*needs], trainer
    for position, (need, devices) in enumerate(zip(needs, server_cards, strict=True)):
        if need.options.devices not in (None, devices):
            fitting_needs[position] = _with_options(need, devices=devices)
            settings.append(f"{need.table}.devices = {[*devices]}")
    if trainer is not None and trainer.devices not in (None, learner_cards):
        fitting_trainer = replace(trainer, devices=learner_cards)
        settings.append(f"train.devices = {[*learner_cards]}")
    return f"set {' and '.join(settings)}" if _holds(plan_cards, fitting_needs, fitting_trainer) else None


def _with_options(need: EngineNeed, **options: Any) -> EngineNeed:
    return replace(need, options=need.options.model_copy(update=options))


# -- settings that may mend it ------------------------------------------------------------------------------------


def smaller_needs(
    need: EngineNeed, room: CardRoom, *, split: int, left: int, least: int, neighbour: TrainerNeed | None
) -> list[Remedy]:
    """Settings with which a server may fit.

    Args:
        left: bytes that are there for a cache.
        least: what the server needs as it is set now.
        neighbour: the trainer, where it computes on this card.
    """
    options, table = need.options, need.table
    token_size = token_bytes(need, split)
    cache_bytes = least_tokens(need) * token_size
    remedies: list[Remedy] = []

    def offer(option: str, value: float, bound: str) -> None:
        if value > 0:
            remedies.append(Remedy(f"set {table}.{option} to {value} or {bound}", table, {option: value}))

    if options.gpu_memory_utilization is not None:
        offer("gpu_memory_utilization", _round_up(least / room.card.total), "more")
    if options.kv_cache_gib is not None:
        if cache_bytes > options.kv_cache_gib * GIB:
            offer("kv_cache_gib", _round_up(cache_bytes / GIB), "more")
        else:
            offer("kv_cache_gib", _round_down(left / GIB), "less")
    if options.max_model_len is not None:
        offer("max_model_len", cache_to_tokens(left, token_size), "less")
    if neighbour is not None and not neighbour.takes_turns:
        text = "set train.max_staleness = 0, so that the server sleeps while the trainer updates"
        remedies.append(Remedy(text, None, {"takes_turns": True}))
    return remedies


def largest_share(need: EngineNeed, room: CardRoom) -> list[Remedy]:
    """The largest share that a server may be given by hand; nothing where that is none."""
    share = _round_down(room.by_hand / room.card.total)
    remedy = Remedy(f"set it to {share} or less", need.table, {"gpu_memory_utilization": share})
    return [remedy] if share else []


def narrower_splits(need: EngineNeed, largest: int) -> list[Remedy]:
    """Over how many cards one copy of a model may be split instead, whatever cards these are."""
    return [
        Remedy(f"set it to {fewer}", need.table, {"tensor_parallel": fewer})
        for fewer in splits_down_from(need, largest)
    ]


def even_splits(need: EngineNeed, devices: Sequence[int], split: int) -> list[Remedy]:
    """Over how many of a server's cards one copy of its model may be split, where it cannot be over `split`."""
    remedies = []
    for fewer in splits_down_from(need, split - 1):
        # only cards that are named hold several copies
        copies = 1 if need.options.devices is None else len(devices) // fewer
        if need.options.devices is None or not len(devices) % fewer:
            text = f"set {need.table}.tensor_parallel = {fewer}"
            text += f", for {copies} copies of the model" if copies > 1 else ""
            remedies.append(Remedy(text, need.table, {"tensor_parallel": fewer}))
    return remedies


def fewer_learners(largest: int) -> list[Remedy]:
    """Fewer learners, from `largest` down."""
    return [Remedy(f"set it to {fewer}", None, {"learners": fewer}) for fewer in range(largest, 0, -1)]


# -- what is said where none of them helps ------------------------------------------------------------------------


def larger_card(need: EngineNeed, room: CardRoom, *, least: int) -> str:
    """What to take instead of a card on which a server does not fit, however it is set.

    Args:
        least: what the server needs as it is set now.
    """
    if room.bound_by is not None:
        return f"take a smaller base model, or cards of one size with more of them free ({need.table}.devices)"
    held_here = usable_bytes(room.card) - room.bytes
    if least + held_here <= int(USABLE * room.card.total):
        return emptier_card(need)
    return (
        f"take a smaller base model, a card with {bytes_to_text(int((held_here + least) / USABLE))} or more, "
        f"or several cards ({need.table}.devices)"
    )


def emptier_card(need: EngineNeed) -> str:
    """The way out where the card has room for nothing that could be set."""
    return f"the card is in use; end what else has its memory, or name another card ({need.table}.devices)"


def _round_down(value: float) -> float:
    return max(0, int(100 * value)) / 100


def _round_up(value: float) -> float:
    return -int(-100 * value // 1) / 100
