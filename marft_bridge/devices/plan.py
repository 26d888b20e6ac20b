"""A machine, models and options -> which card each server and the trainer take, and how a card's memory is shared.

What one process takes of a card is counted in `devices.card_memory`; the KV cache gets what is left. vLLM takes the
same share of each card: the card of which the smallest part is free decides it, and the smallest card the cache. Where
server and trainer share a card and take turns, the server sleeps while the trainer updates, so that each may have what
the other needs only in its own turn.

Where no cards are named, the layouts below are tried in turn, each from the largest card down; only what fits in none
is refused, with the setting with which it fits (`devices.remedies`).

Invariants: a pure function, the same cards and options give the same plan; nothing is planned for a server that runs
already, nor for a model whose layers are not known; what does not fit is refused with numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import chain, product

from marft_bridge.common.errors import ServingError
from marft_bridge.config.learner_cards import cards_to_fault
from marft_bridge.devices.card_memory import (
    CONTEXT,
    GIB,
    CardRoom,
    EngineNeed,
    EngineShare,
    TrainerNeed,
    asleep_bytes,
    attention_heads,
    beside_training,
    cache_to_tokens,
    can_split,
    card_to_room,
    even_room,
    given_bytes,
    least_split,
    least_tokens,
    share_without_cache,
    token_bytes,
    trainer_beside_server,
    usable_bytes,
)
from marft_bridge.devices.machine import Machine
from marft_bridge.devices.remedies import (
    NoRoomError,
    emptier_card,
    even_splits,
    fewer_learners,
    larger_card,
    largest_share,
    narrower_splits,
    refusal_to_text,
    smaller_needs,
)
from trainers.common.byte_text import bytes_to_text


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Where one model server runs."""

    devices: tuple[int, ...]
    tensor_parallel: int
    utilization: float | None  # of each card; None leaves vLLM's own
    longest_call: int | None  # tokens, as planned; vLLM has the last word where max_model_len is not set
    sleeps: bool  # while the trainer updates
    share: EngineShare | None

    @property
    def copies(self) -> int:
        """How many whole copies of the model the cards hold."""
        return len(self.devices) // self.tensor_parallel


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Who takes which card. A server without a plan runs already, or on the CPU."""

    machine: Machine
    engines: tuple[EnginePlan | None, ...]
    learners: tuple[int, ...]  # a card for each; none: the CPU

    def engine_text(self, position: int) -> str | None:
        """Where a server runs and what it takes there; None for one without a plan."""
        engine = self.engines[position]
        if engine is None:
            return None
        text = self.cards_to_text(engine.devices)
        if engine.copies > 1:
            text += f", {engine.copies} copies"
        if engine.utilization is not None:
            text += f", {engine.utilization:g} of {'it' if len(engine.devices) == 1 else 'each'}"
        if engine.share is not None:
            text += f" ({engine.share})"
        if engine.longest_call is not None:
            text += f", calls of up to {engine.longest_call:,} tokens"
        return f"{text}, asleep while the trainer updates" if engine.sleeps else text

    def trainer_text(self) -> str:
        """Where the trainer computes."""
        if not self.learners:
            return "CPU"
        text = self.cards_to_text(self.learners)
        return text if len(self.learners) == 1 else f"{text}, a learner on each"

    def cards_to_text(self, numbers: Sequence[int]) -> str:
        """`card 0 (NVIDIA L4, 22.5 GiB)`, or `cards 0, 1 (...)`."""
        cards = [self.machine.cards[number] for number in numbers]
        kinds = dict.fromkeys(f"{card.name}, {bytes_to_text(card.total)}" for card in cards)
        return f"card{'s' if len(cards) > 1 else ''} {', '.join(map(str, numbers))} ({'; '.join(kinds)})"


class _Layout(Enum):
    """Where cards come from that nobody named."""

    APART = "the servers have the largest cards, the learners the emptiest of the others"
    TRAINER_FIRST = "the learners have the largest cards"
    SHARED = "both have the largest cards"


def plan_devices(
    machine: Machine, engines: Sequence[EngineNeed | None], trainer: TrainerNeed | None = None
) -> DevicePlan:
    """Who takes which card, and how much of it.

    Args:
        engines: None for one that takes no card of this command's, as it runs already or on the CPU.
        trainer: None where it takes none.

    Raises:
        ServingError: a card is named that is not there; something does not fit.
    """
    needs = [engine for engine in engines if engine is not None]
    _refuse_absent(machine, needs, trainer)
    if not machine.cards:
        return DevicePlan(machine, (None,) * len(engines), ())
    try:
        plans, learner_cards = _plan_somewhere(machine, needs, trainer)
    except NoRoomError as refusal:
        plan_cards = partial(_plan_cards, machine)
        raise ServingError(refusal_to_text(refusal, needs, trainer, plan_cards=plan_cards)) from None
    remaining = iter(plans)
    return DevicePlan(machine, tuple(None if need is None else next(remaining) for need in engines), learner_cards)


def _plan_cards(
    machine: Machine, needs: Sequence[EngineNeed], trainer: TrainerNeed | None
) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """The cards of each server, and the learners'. Raises ServingError where it does not fit."""
    plans, learner_cards = _plan_somewhere(machine, needs, trainer)
    return [plan.devices for plan in plans], learner_cards


def _plan_somewhere(
    machine: Machine, needs: Sequence[EngineNeed], trainer: TrainerNeed | None
) -> tuple[list[EnginePlan], tuple[int, ...]]:
    """The first layout in which all fits: what each server takes, and the learners' cards.

    Raises:
        ServingError: of the first layout, where none does.
    """
    first_refusal: ServingError | None = None
    layouts: Iterable[_Layout] = _Layout if trainer is not None and len(machine.cards) > 1 else (_Layout.APART,)
    for layout, others_last in product(layouts, (True, False)):
        ordered = _by_size(machine, others_last)
        # what is shared may be any card: the largest is not the emptiest where servers have cards by name
        for start in range(len(ordered) if layout is _Layout.SHARED else 1):
            shifted = ordered[start:] + ordered[:start]
            try:
                return _plan_layout(machine, needs, trainer, layout=layout, ordered=shifted)
            except ServingError as refusal:
                first_refusal = first_refusal or refusal
    assert first_refusal is not None
    raise first_refusal


def _plan_layout(
    machine: Machine,
    needs: Sequence[EngineNeed],
    trainer: TrainerNeed | None,
    *,
    layout: _Layout,
    ordered: Sequence[int],
) -> tuple[list[EnginePlan], tuple[int, ...]]:
    """The same in one layout.

    Args:
        ordered: the cards, the best for a server first.
    """
    chosen, learner_cards = _choose_cards(machine, needs, trainer, layout=layout, ordered=ordered)
    plans = [
        _plan_engine(machine, needs, position, chosen=chosen, trainer=trainer, learner_cards=learner_cards)
        for position in range(len(needs))
    ]
    for number in learner_cards:
        _refuse_large_trainer(machine, plans, trainer, card_number=number)
    _refuse_small_host(machine, needs, plans)
    return plans, learner_cards


# -- which cards --------------------------------------------------------------------------------------------------


def _refuse_absent(machine: Machine, needs: Sequence[EngineNeed], trainer: TrainerNeed | None) -> None:
    named = [(f"{need.table}.devices", need.options.devices or ()) for need in needs]
    if trainer is not None and trainer.devices is not None:
        named.append(("train.devices", trainer.devices))
    count = len(machine.cards)
    for option, numbers in named:
        if absent := [number for number in numbers if number >= count]:
            present = f"are cards 0 to {count - 1}" if count > 1 else "is card 0 only" if count else "is no card here"
            remedy = "name one that is there" if count else "leave it out"
            raise ServingError(f"{option} names card {absent[0]}, but there {present}: {remedy}")
    # torchrun may have started more learners than the options know of, which were checked without it
    named_cards = trainer.devices if trainer is not None else None
    fault = cards_to_fault(len(named_cards), trainer.learners) if trainer is not None and named_cards else None
    if fault is not None:
        raise ServingError(fault)


def _choose_cards(
    machine: Machine,
    needs: Sequence[EngineNeed],
    trainer: TrainerNeed | None,
    *,
    layout: _Layout,
    ordered: Sequence[int],
) -> tuple[list[tuple[tuple[int, ...], int]], tuple[int, ...]]:
    """Each server's cards, with over how many of them one copy of its model is split, and the learners' cards."""
    of_servers = {number for need in needs for number in need.options.devices or ()}
    learner_cards: tuple[int, ...] = ()
    if trainer is not None:
        if trainer.devices is not None:
            learner_cards = trainer.devices
        elif layout is not _Layout.APART:
            allowed = [n for n in ordered if layout is _Layout.SHARED or n not in of_servers]
            learner_cards = _first_cards(machine, allowed, trainer)
    reserved = of_servers if layout is _Layout.SHARED else of_servers | {*learner_cards}
    free = [number for number in ordered if number not in reserved]
    if trainer is not None and not learner_cards:
        # the learners': the last ones, unless servers leave others
        free = free[: max(1, len(free) - trainer.learners)]
    held = {} if trainer is None else dict.fromkeys(learner_cards, trainer_beside_server(trainer))
    chosen: dict[int, tuple[tuple[int, ...], int]] = {}
    spare = list(free)
    # on unlike cards the largest model chooses first, on like ones the first table
    is_alike = len({usable_bytes(card) // GIB for card in machine.cards}) == 1
    weights = [0 if is_alike or need.shape is None else need.shape.weights for need in needs]
    by_weights = sorted(range(len(needs)), key=lambda position: -weights[position])
    for position in by_weights:
        need = needs[position]
        if need.options.devices is not None:
            split = need.options.tensor_parallel or len(need.options.devices)
            chosen[position] = need.options.devices, split
        else:
            # with no card left for it, a server shares those of others
            pool = spare or free or [number for number in ordered if number not in of_servers] or ordered
            split = need.options.tensor_parallel or least_split(machine, need, pool, held=held)
            if split > len(pool):
                raise NoRoomError(
                    f"{need.table}.tensor_parallel is {split}, but {len(pool)} of {len(machine.cards)} cards "
                    f"{'is' if len(pool) == 1 else 'are'} free for it",
                    narrower_splits(need, min(split - 1, len(machine.cards))),
                    otherwise="take a smaller base model, or more cards",
                )
            chosen[position] = tuple(pool[:split]), split
            spare = [number for number in spare if number not in pool[:split]]
        _refuse_uneven(need, *chosen[position])
    if trainer is not None and not learner_cards:
        taken = {number for devices, _ in chosen.values() for number in devices}
        # the emptiest: servers of other commands, which are not planned here, have the others
        emptiest = sorted(
            (number for number in range(len(machine.cards)) if number not in taken),
            key=lambda number: (-(machine.cards[number].free // GIB), number),
        )
        learner_cards = _first_cards(machine, emptiest or ordered[:1], trainer)
    return [chosen[position] for position in range(len(needs))], learner_cards


def _by_size(machine: Machine, others_last: bool) -> list[int]:
    """The cards, the one with the most room first.

    Args:
        others_last: whether cards that somebody else uses come last.
    """

    def rank(number: int) -> tuple[bool, int, int]:
        card = machine.cards[number]
        # by whole GiB, so that what a screen takes does not move a server
        return others_last and 2 * card.free < card.total, -(usable_bytes(card) // GIB), number

    return sorted(range(len(machine.cards)), key=rank)


def _first_cards(machine: Machine, cards: Sequence[int], trainer: TrainerNeed) -> tuple[int, ...]:
    """A card for each learner, of these."""
    if len(cards) < trainer.learners:
        raise NoRoomError(
            f"train.learners is {trainer.learners}, but {len(cards)} of {len(machine.cards)} "
            f"card{'s' if len(machine.cards) > 1 else ''} {'is' if len(cards) == 1 else 'are'} there for learners, and "
            f"each takes one",
            fewer_learners(min(trainer.learners - 1, len(machine.cards))),
            otherwise="take a smaller base model, or more cards",
        )
    return tuple(sorted(cards[: trainer.learners]))


def _refuse_uneven(need: EngineNeed, devices: tuple[int, ...], split: int) -> None:
    if len(devices) % split:
        raise ServingError(
            f"{need.table}.devices names {len(devices)} cards, which tensor_parallel {split} does not divide: "
            f"one copy of the model takes {split}, so name a multiple of it"
        )
    if need.shape is not None and not can_split(need.shape, split):
        heads, kv_heads = attention_heads(need.shape)
        raise NoRoomError(
            f"{need.table}: a model with {heads} attention heads, {kv_heads} of them for keys, cannot be split over "
            f"{split} cards",
            even_splits(need, devices, split),
            otherwise="take a smaller base model, or other cards",
        )


# -- how much of each ---------------------------------------------------------------------------------------------


def _plan_engine(
    machine: Machine,
    needs: Sequence[EngineNeed],
    position: int,
    *,
    chosen: Sequence[tuple[tuple[int, ...], int]],
    trainer: TrainerNeed | None,
    learner_cards: tuple[int, ...],
) -> EnginePlan:
    devices, split = chosen[position]
    need = needs[position]
    neighbours = [
        (other_need, *cards_and_split)
        for other_need, cards_and_split in zip(needs, chosen, strict=True)
        if other_need is not need and {*cards_and_split[0]} & {*devices}
    ]
    shared_cards = [number for number in devices if number in learner_cards]
    beside = trainer if shared_cards else None
    options = need.options
    sized = options.gpu_memory_utilization is not None or options.kv_cache_gib is not None
    if neighbours and not sized:
        raise ServingError(
            f"several model servers share card {_shared_card(devices, neighbours)}: give each its share with "
            f"{need.table}.gpu_memory_utilization, or cards of its own with {need.table}.devices"
        )
    unknown = need.shape is None or (beside is not None and beside.peak is None)
    if unknown and (neighbours or beside is not None) and options.gpu_memory_utilization is None:
        # beside a cache of a given size vLLM still wants 0.92 of the card to be free
        others = (
            f"the model server and the trainer share card {shared_cards[0]}"
            if beside is not None
            else f"several model servers share card {_shared_card(devices, neighbours)}"
        )
        raise ServingError(
            f"{others}, and what this model takes is not known: give the server its share with "
            f"{need.table}.gpu_memory_utilization{'' if options.kv_cache_gib is None else ', in place of kv_cache_gib'}"
        )
    sleeps = beside is not None and beside.takes_turns
    rooms = []
    for number in devices:
        held = trainer_beside_server(trainer) if number in shared_cards and trainer is not None else 0
        card = machine.cards[number]
        held += sum(given_bytes(other_need, card, cut) for other_need, cards, cut in neighbours if number in cards)
        rooms.append(card_to_room(machine, number, held=held))
    even = even_room(rooms)
    if need.shape is None or unknown:
        if options.gpu_memory_utilization is not None:
            _refuse_large_share(need, even, neighbour=beside)
        return EnginePlan(
            devices,
            split,
            options.gpu_memory_utilization,
            longest_call=options.max_model_len,
            sleeps=sleeps,
            share=None,
        )
    # a cache of a given size is the same on every card, whatever share that is
    room = even if options.kv_cache_gib is None else min(rooms, key=lambda room: room.bytes)
    without_cache = share_without_cache(need, [machine.cards[number] for number in devices], split)
    length, cache = _size_cache(need, room, split=split, without_cache=without_cache, neighbour=beside)
    share = replace(without_cache, cache=cache, tokens=cache // token_bytes(need, split))
    # vLLM looks whether so much is free before it starts, also where the size of the cache is given
    wanted = min(share.total, even.bytes)
    utilization = options.gpu_memory_utilization or int(1000 * wanted / even.card.total) / 1000
    return EnginePlan(devices, split, utilization, longest_call=length, sleeps=sleeps, share=share)


def _shared_card(devices: Sequence[int], neighbours: Sequence[tuple[EngineNeed, tuple[int, ...], int]]) -> int:
    """The first of these cards that another server has too."""
    return min(number for number in chain.from_iterable(cards for _, cards, _ in neighbours) if number in devices)


def _size_cache(
    need: EngineNeed, room: CardRoom, *, split: int, without_cache: EngineShare, neighbour: TrainerNeed | None
) -> tuple[int | None, int]:
    """The longest call, and the bytes of the cache, that fit into the room.

    Args:
        without_cache: what the server takes beside it.

    Raises:
        ServingError: not even one call fits, or what the options give.
    """
    options = need.options
    token_size, tokens_of_call = token_bytes(need, split), least_tokens(need)
    least_call = without_cache.total + tokens_of_call * token_size
    limit = room.bytes
    if options.gpu_memory_utilization is not None:
        limit = int(options.gpu_memory_utilization * room.card.total)
        if least_call <= room.by_hand:
            _refuse_large_share(need, room, neighbour=neighbour)
        limit = min(limit, room.by_hand)  # no share holds a call, which is what is said below
    cache = limit - without_cache.total
    if options.kv_cache_gib is not None:
        cache = int(options.kv_cache_gib * GIB)
    held = cache_to_tokens(cache, token_size)
    if held < tokens_of_call or without_cache.total + cache > limit:
        is_call = held < tokens_of_call
        least = least_call if is_call else without_cache.total + cache
        purpose = f"one call of {tokens_of_call:,} tokens" if is_call else f"{options.kv_cache_gib:g} GiB of KV cache"
        available = limit if options.kv_cache_gib is None or not is_call else without_cache.total + cache
        raise NoRoomError(
            f"the model server of {need.table} needs {bytes_to_text(least)} of {room.title} for {purpose} "
            f"(weights {bytes_to_text(without_cache.weights)}, adapters {bytes_to_text(without_cache.adapters)}, "
            f"the rest {bytes_to_text(without_cache.rest)}), and "
            f"{bytes_to_text(max(0, available))} are there for it{room.bound_text}{beside_training(neighbour)}",
            smaller_needs(need, room, split=split, left=limit - without_cache.total, least=least, neighbour=neighbour),
            otherwise=larger_card(need, room, least=least),
        )
    length = options.max_model_len or (None if need.context is None else min(need.context, held))
    return length, cache


def _refuse_large_share(need: EngineNeed, room: CardRoom, *, neighbour: TrainerNeed | None) -> None:
    """Refuses a share given by hand that is not there."""
    share = need.options.gpu_memory_utilization
    if share is None or int(share * room.card.total) <= room.by_hand:
        return
    raise NoRoomError(
        f"{need.table}.gpu_memory_utilization {share:g} is {bytes_to_text(int(share * room.card.total))} of "
        f"{room.title}, and {bytes_to_text(max(0, room.by_hand))} are there for the model server"
        f"{room.bound_text}{beside_training(neighbour)}",
        largest_share(need, room),
        otherwise=emptier_card(need),
    )


def _refuse_large_trainer(
    machine: Machine, plans: Sequence[EnginePlan], trainer: TrainerNeed | None, card_number: int
) -> None:
    """Refuses an update that does not fit beside what the servers hold of its card meanwhile."""
    if trainer is None or trainer.peak is None:
        return
    card = machine.cards[card_number]
    held = 0
    for plan in plans:
        if card_number in plan.devices:
            held += asleep_bytes(plan.tensor_parallel) if plan.sleeps else int((plan.utilization or 0) * card.total)
    room = usable_bytes(card) - held - CONTEXT
    if trainer.peak > room:
        suffix = f" beside the {'sleeping ' if any(plan.sleeps for plan in plans) else ''}model server" if held else ""
        raise NoRoomError(
            f"training needs about {bytes_to_text(trainer.peak)} of card {card_number} ({card.name}, "
            f"{bytes_to_text(card.total)}), and {bytes_to_text(max(0, room))} are there for it{suffix}",
            otherwise=trainer.advice(room),
        )


def _refuse_small_host(machine: Machine, needs: Sequence[EngineNeed], plans: Sequence[EnginePlan]) -> None:
    """Refuses servers that sleep and whose weights and adapters main memory does not hold meanwhile."""
    sleeping = [
        (need.table, len(plan.devices) * (plan.share.weights + plan.share.adapters))
        for need, plan in zip(needs, plans, strict=True)
        if plan.sleeps and plan.share is not None
    ]
    sleeping_bytes = sum(size for _, size in sleeping)
    if machine.host_free is not None and sleeping_bytes > machine.host_free:
        tables = " and ".join(table for table, _ in sleeping)
        raise NoRoomError(
            f"the model server of {tables} sleeps while the trainer updates, and what it holds then takes "
            f"{bytes_to_text(sleeping_bytes)} of main memory, of which {bytes_to_text(machine.host_free)} are free",
            otherwise="free some, take a smaller base model, or give trainer and server cards of their own",
        )
