"""A machine, models and options -> which card each server and the trainer take, and how a card's memory is shared.

A card's memory is counted in what one process takes of it:

    server    weights / n + adapters + activations + graphs + context + KV cache, on each of its n cards
    trainer   what `trainers.checks.memory_plan` counts, and its context

The KV cache gets what is left. vLLM takes the same share of each card: the card of which the smallest part is free
decides it, and the smallest card the cache. Where server and trainer share a card and take turns, the server sleeps
while the trainer updates, so that each may have what the other needs only in its own turn.

Invariants: a pure function, the same cards and options give the same plan; nothing is planned for a server that runs
already, nor for a model whose layers are not known; what does not fit is refused with numbers and a setting that does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from marft_bridge.common.errors import ServingError
from marft_bridge.config.learner_cards import cards_to_fault
from marft_bridge.config.serve import ENGINE_RANKS, ServeOptions
from marft_bridge.devices.machine import Card, Machine
from trainers.common.byte_text import bytes_to_text

if TYPE_CHECKING:
    from trainers.checks.memory_plan import ModelShape

_GIB = 1 << 30
_USABLE = 0.92  # of a card, as vLLM itself takes: the driver and holes between allocations have the rest
CONTEXT = _GIB // 2  # of one process: CUDA's context and its libraries
GRAPHS = _GIB  # of one server: captured CUDA graphs and the workspaces of its kernels
LINKS = _GIB  # of one server on several cards: buffers of NCCL and of the all-reduce
LEAST_TOKENS = 1024  # a server that could not hold one call of so many is not started unless it was asked for
_BLOCK = 16  # tokens of one block of the cache
_LOGIT_COPIES = 12  # bytes for each number of the vocabulary: logits, probabilities and log-probs in float32


@dataclass(frozen=True, slots=True)
class EngineNeed:
    """A model server that this command starts."""

    table: str  # of its options: serve, or models.NAME.serve
    options: ServeOptions
    shape: ModelShape | None  # None: other layers than those that are known
    rank: int = 8  # of the adapters that the shape counts
    context: int | None = None  # the most tokens that the model reads
    four_bit: bool = False  # whether the server quantises the linear layers by bitsandbytes


@dataclass(frozen=True, slots=True)
class TrainerNeed:
    """The trainer, where it computes on a card."""

    resident: int | None  # bytes between updates; None: unknown
    peak: int | None  # in an update
    takes_turns: bool  # with the rollouts: train.max_staleness is 0
    advice: Callable[[int], str] = lambda _: "take a smaller base model"  # bytes that are there -> what to change
    devices: tuple[int, ...] | None = None  # train.devices
    learners: int = 1  # each of which takes as much, on a card of its own


@dataclass(frozen=True, slots=True)
class EngineShare:
    """What one model server takes of each of its cards, in bytes."""

    weights: int
    adapters: int
    rest: int  # activations, graphs, context, links
    cache: int
    tokens: int  # that the cache holds

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.adapters + self.rest + self.cache

    def __str__(self) -> str:
        parts = {"weights": self.weights, "adapters": self.adapters, "the rest": self.rest}
        text = ", ".join(f"{name} {bytes_to_text(size)}" for name, size in parts.items() if size)
        return f"{text}, KV cache {bytes_to_text(self.cache)} for {self.tokens:,} tokens"


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


@dataclass(frozen=True, slots=True)
class _Room:
    """One card as an engine meets it."""

    number: int
    card: Card
    bytes: int  # that the engine may take
    by_hand: int  # that it may be given by an option
    bound_by: _Room | None = None  # another card, whose share the engine may take of this one too, and no more

    @property
    def title(self) -> str:
        return f"card {self.number} ({self.card.name}, {bytes_to_text(self.card.total)})"

    @property
    def bound_text(self) -> str:
        """What is said behind the bytes where another card bounds them."""
        if self.bound_by is None:
            return ""
        other = self.bound_by
        return f", the same share as of {other.title}, which has {bytes_to_text(max(0, other.bytes))}"


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
    chosen = _choose_cards(machine, needs, trainer)
    learner_cards = _choose_learner_cards(machine, chosen, trainer)
    plans = [
        _plan_engine(machine, needs, position, chosen=chosen, trainer=trainer, learner_cards=learner_cards)
        for position in range(len(needs))
    ]
    for number in learner_cards:
        _refuse_large_trainer(machine, plans, trainer, card_number=number)
    remaining = iter(plans)
    return DevicePlan(machine, tuple(None if need is None else next(remaining) for need in engines), learner_cards)


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


def _choose_cards(
    machine: Machine, needs: Sequence[EngineNeed], trainer: TrainerNeed | None
) -> list[tuple[tuple[int, ...], int]]:
    """Each server's cards, and over how many of them one copy of its model is split."""
    reserved = {number for need in needs for number in need.options.devices or ()}
    everywhere = range(len(machine.cards))
    if trainer is not None and trainer.devices is not None:
        reserved.update(trainer.devices)
    # cards that somebody else uses come last
    free = sorted(
        (number for number in everywhere if number not in reserved),
        key=lambda number: 2 * machine.cards[number].free < machine.cards[number].total,
    )
    if trainer is not None and trainer.devices is None:
        # the learners': the last ones, unless servers leave others
        free = free[: max(1, len(free) - trainer.learners)]
    chosen: list[tuple[tuple[int, ...], int]] = []
    spare = list(free)
    for need in needs:
        if need.options.devices is not None:
            split = need.options.tensor_parallel or len(need.options.devices)
            chosen.append((need.options.devices, split))
        else:
            # with no card left for it, a server shares those of others
            pool = spare or free or [number for number in everywhere if number not in reserved] or list(everywhere)
            split = need.options.tensor_parallel or _least_split(machine, need, pool)
            if split > len(pool):
                raise ServingError(
                    f"{need.table}.tensor_parallel is {split}, but {len(pool)} of {len(machine.cards)} cards "
                    f"{'is' if len(pool) == 1 else 'are'} free "
                    f"for it: set it to {len(pool)}, or name the cards in {need.table}.devices"
                )
            chosen.append((tuple(pool[:split]), split))
            spare = [number for number in spare if number not in pool[:split]]
        _refuse_uneven(need, *chosen[-1])
    return chosen


def _least_split(machine: Machine, need: EngineNeed, pool: Sequence[int]) -> int:
    """The smallest power of two, over so many of these cards the model fits; the largest where it fits nowhere."""
    if need.shape is None:
        return 1
    splits = [split for split in (1, 2, 4, 8, 16) if split <= len(pool) and _divides(need.shape, split)]
    for split in splits:
        room = _even_room([_card_to_room(machine, number, held=0) for number in pool[:split]])
        fixed = _fixed(need, _largest([machine.cards[number] for number in pool[:split]]), split)
        if fixed.total + _least_tokens(need) * _token_bytes(need, split) <= room.bytes:
            return split
    return splits[-1]


def _refuse_uneven(need: EngineNeed, devices: tuple[int, ...], split: int) -> None:
    if len(devices) % split:
        raise ServingError(
            f"{need.table}.devices names {len(devices)} cards, which tensor_parallel {split} does not divide: "
            f"one copy of the model takes {split}, so name a multiple of it"
        )
    if need.shape is not None and not _divides(need.shape, split):
        fitting = max(n for n in range(1, split) if _divides(need.shape, n) and not len(devices) % n)
        copies = f", for {len(devices) // fitting} copies of the model" if len(devices) > fitting else ""
        heads, kv_heads = _heads(need.shape)
        raise ServingError(
            f"{need.table}: a model with {heads} attention heads, {kv_heads} of them for keys, cannot be split over "
            f"{split} cards: set {need.table}.tensor_parallel = {fitting}{copies}"
        )


def _choose_learner_cards(
    machine: Machine, chosen: Sequence[tuple[tuple[int, ...], int]], trainer: TrainerNeed | None
) -> tuple[int, ...]:
    if trainer is None:
        return ()
    if trainer.devices is not None:
        # torchrun may have started more learners than the options know of, which were checked without it
        if (fault := cards_to_fault(len(trainer.devices), trainer.learners)) is not None:
            raise ServingError(fault)
        return trainer.devices
    taken = {number for devices, _ in chosen for number in devices}
    free = [number for number in range(len(machine.cards)) if number not in taken]
    # the emptiest: servers of other commands, which are not planned here, have the others
    emptiest = sorted(free, key=lambda number: (-(machine.cards[number].free // _GIB), number))
    cards = emptiest or [len(machine.cards) - 1]
    if len(cards) < trainer.learners:
        remedy = f"set it to {len(cards)}"
        if trainer.learners <= len(machine.cards):
            remedy += f", or name {trainer.learners} cards in train.devices, which may be those of a server too"
        raise ServingError(
            f"train.learners is {trainer.learners}, but {len(cards)} of {len(machine.cards)} "
            f"card{'s' if len(machine.cards) > 1 else ''} {'is' if len(cards) == 1 else 'are'} there for learners, and "
            f"each takes one: {remedy}"
        )
    return tuple(sorted(cards[: trainer.learners]))


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
    shares_with_trainer = bool(shared_cards)
    options = need.options
    sized = options.gpu_memory_utilization is not None or options.kv_cache_gib is not None
    if neighbours and not sized:
        shared = min(number for _, cards, _ in neighbours for number in cards if number in devices)
        raise ServingError(
            f"several model servers share card {shared}: give each its share with "
            f"{need.table}.gpu_memory_utilization, or cards of its own with {need.table}.devices"
        )
    unknown = need.shape is None or (shares_with_trainer and trainer is not None and trainer.peak is None)
    if unknown and shares_with_trainer and not sized:
        raise ServingError(
            f"the model server and the trainer share card {shared_cards[0]}, and what this model takes is not known: "
            f"give the server its share with {need.table}.gpu_memory_utilization"
        )
    sleeps = shares_with_trainer and trainer is not None and trainer.takes_turns
    if need.shape is None or unknown:
        return EnginePlan(
            devices,
            split,
            options.gpu_memory_utilization,
            longest_call=options.max_model_len,
            sleeps=sleeps,
            share=None,
        )
    rooms = []
    for number in devices:
        card = machine.cards[number]
        held = 0
        if number in learner_cards and trainer is not None:
            held = ((trainer.resident if sleeps else trainer.peak) or 0) + CONTEXT
        held += sum(_given_bytes(need_beside, card) for need_beside in neighbours if number in need_beside[1])
        rooms.append(_card_to_room(machine, number, held=held))
    even = _even_room(rooms)
    # a cache of a given size is the same on every card, whatever share that is
    room = even if options.kv_cache_gib is None else min(rooms, key=lambda room: room.bytes)
    fixed = _fixed(need, _largest([machine.cards[number] for number in devices]), split)
    length, cache = _size_cache(
        need, room, split=split, fixed=fixed, neighbour=trainer if shares_with_trainer else None
    )
    share = replace(fixed, cache=cache, tokens=cache // _token_bytes(need, split))
    # vLLM looks whether so much is free before it starts, also where the size of the cache is given
    wanted = min(share.total, even.bytes)
    utilization = options.gpu_memory_utilization or int(1000 * wanted / even.card.total) / 1000
    return EnginePlan(devices, split, utilization, longest_call=length, sleeps=sleeps, share=share)


def _card_to_room(machine: Machine, number: int, *, held: int) -> _Room:
    """A card beside what others hold of it."""
    card = machine.cards[number]
    return _Room(number, card, bytes=_usable(card) - held, by_hand=card.free - held)


def _even_room(rooms: Sequence[_Room]) -> _Room:
    """The smallest of these cards, with the bytes that may be taken of it where every card gives the same share."""
    smallest = min(rooms, key=lambda room: (room.card.total, room.bytes))

    def at_same_share(size: int, room: _Room) -> int:
        return size * smallest.card.total // room.card.total

    binding = min(rooms, key=lambda room: at_same_share(room.bytes, room))
    return replace(
        smallest,
        bytes=at_same_share(binding.bytes, binding),
        by_hand=min(at_same_share(room.by_hand, room) for room in rooms),
        bound_by=binding if binding.card.total != smallest.card.total else None,
    )


def _size_cache(
    need: EngineNeed, room: _Room, *, split: int, fixed: EngineShare, neighbour: TrainerNeed | None
) -> tuple[int | None, int]:
    """The longest call, and the bytes of the cache, that fit into the room.

    Args:
        fixed: what the server takes without a cache.

    Raises:
        ServingError: not even one call fits, or what the options give.
    """
    options = need.options
    token_bytes = _token_bytes(need, split)
    limit = room.bytes
    beside = room.bound_text + _neighbour_text(neighbour)
    if options.gpu_memory_utilization is not None:
        limit = int(options.gpu_memory_utilization * room.card.total)
        largest = room.by_hand
        if limit > largest:
            largest_share = _floor(largest / room.card.total)
            way = f"set it to {largest_share} or less" if largest_share else _elsewhere(need)
            raise ServingError(
                f"{need.table}.gpu_memory_utilization {options.gpu_memory_utilization:g} is {bytes_to_text(limit)} of "
                f"{room.title}, and {bytes_to_text(max(0, largest))} are there for the model server"
                f"{beside}: {way}"
            )
    cache, least_tokens = limit - fixed.total, _least_tokens(need)
    if options.kv_cache_gib is not None:
        cache = int(options.kv_cache_gib * _GIB)
    held = max(0, cache) // token_bytes // _BLOCK * _BLOCK
    if held < least_tokens or fixed.total + cache > limit:
        is_call = held < least_tokens
        least = fixed.total + (least_tokens * token_bytes if is_call else cache)
        purpose = f"one call of {least_tokens:,} tokens" if is_call else f"{options.kv_cache_gib:g} GiB of KV cache"
        available = limit if options.kv_cache_gib is None or not is_call else fixed.total + cache
        way = _way_to_fit(need, room, split=split, left=limit - fixed.total, least=least, neighbour=neighbour)
        weights, adapters, rest = (bytes_to_text(size) for size in _parts(fixed))
        raise ServingError(
            f"the model server of {need.table} needs {bytes_to_text(least)} of {room.title} for {purpose} "
            f"(weights {weights}, adapters {adapters}, the rest {rest}), and "
            f"{bytes_to_text(max(0, available))} are there for it"
            f"{beside}: {way}"
        )
    length = options.max_model_len or (None if need.context is None else min(need.context, held))
    return length, cache


def _parts(share: EngineShare) -> tuple[int, int, int]:
    return share.weights, share.adapters, share.rest


def _way_to_fit(
    need: EngineNeed, room: _Room, *, split: int, left: int, least: int, neighbour: TrainerNeed | None
) -> str:
    """A setting with which the server fits.

    Args:
        left: bytes that are there for a cache.
        least: what the server needs as it is set now.
    """
    options, table = need.options, need.table
    held = max(0, left) // _token_bytes(need, split) // _BLOCK * _BLOCK
    if options.gpu_memory_utilization is not None and least <= room.by_hand:
        return f"set {table}.gpu_memory_utilization to {_ceil(least / room.card.total)} or more"
    if options.kv_cache_gib is not None and held >= _least_tokens(need):
        wanted = _least_tokens(need) * _token_bytes(need, split)
        if wanted > options.kv_cache_gib * _GIB:
            return f"set {table}.kv_cache_gib to {_ceil(wanted / _GIB)} or more"
        largest_gib = _floor(left / _GIB)
        return f"set {table}.kv_cache_gib to {largest_gib} or less" if largest_gib else _elsewhere(need)
    if options.max_model_len is not None and held >= _BLOCK:
        return f"set {table}.max_model_len to {held} or less"
    if room.bound_by is not None:
        return f"take a smaller base model, or cards of one size with more of them free ({table}.devices)"
    if neighbour is not None and not neighbour.takes_turns:
        in_turns = _usable(room.card) - (neighbour.resident or 0) - CONTEXT
        if least <= in_turns:
            return "set train.max_staleness = 0, so that the server sleeps while the trainer updates"
    card_bytes = int((_usable(room.card) - room.bytes + least) / _USABLE)
    return (
        f"take a smaller base model, a card with {bytes_to_text(card_bytes)} or more, "
        f"or several cards ({table}.devices)"
    )


def _elsewhere(need: EngineNeed) -> str:
    """The way out where the card has room for nothing that could be set."""
    return f"the card is in use; end what else has its memory, or name another card ({need.table}.devices)"


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
            held += _asleep(plan) if plan.sleeps else int((plan.utilization or 0) * card.total)
    room = _usable(card) - held - CONTEXT
    if trainer.peak > room:
        suffix = f" beside the {'sleeping ' if any(plan.sleeps for plan in plans) else ''}model server" if held else ""
        raise ServingError(
            f"training needs about {bytes_to_text(trainer.peak)} of card {card_number} ({card.name}, "
            f"{bytes_to_text(card.total)}), and {bytes_to_text(max(0, room))} are there for it{suffix}: "
            f"{trainer.advice(room)}"
        )


# -- sizes --------------------------------------------------------------------------------------------------------


def _usable(card: Card) -> int:
    return min(card.free, int(_USABLE * card.total))


def _largest(cards: Sequence[Card]) -> Card:
    """The card by which vLLM takes the most tokens in one step."""
    return max(cards, key=lambda card: card.total)


def _asleep(plan: EnginePlan) -> int:
    """What a sleeping server keeps: vLLM gives back weights, adapters and cache, and no context or graph."""
    return CONTEXT + GRAPHS + (LINKS if plan.tensor_parallel > 1 else 0)


def _fixed(need: EngineNeed, card: Card, split: int) -> EngineShare:
    """A server's part of one card without a cache."""
    shape, options = need.shape, need.options
    assert shape is not None
    size = _number_bytes(options)
    rank = next(rank for rank in ENGINE_RANKS if rank >= options.max_lora_rank)
    inner = max(layer.inner for layer in shape.layers)
    activations = _batched_tokens(card) * size * (4 * shape.width + 3 * inner // split)
    weights = size * shape.weights
    if need.four_bit:
        from trainers.checks.memory_plan import four_bit_weights_to_bytes  # late: it imports torch

        weights = four_bit_weights_to_bytes(shape, size)
        activations += size * 2 * inner * shape.width // split  # gate and up as one weight, made whole for a product
    logits = options.max_num_seqs * shape.vocabulary * _LOGIT_COPIES
    return EngineShare(
        weights=weights // split,
        # not divided by the cards: vLLM splits one of an adapter's two matrices at most
        adapters=size * options.max_loras * shape.adapter * rank // need.rank,
        rest=activations + logits + GRAPHS + CONTEXT + (LINKS if split > 1 else 0),
        cache=0,
        tokens=0,
    )


def _given_bytes(neighbour: tuple[EngineNeed, tuple[int, ...], int], card: Card) -> int:
    """What another server on the card was given by hand."""
    need, _, split = neighbour
    if need.options.gpu_memory_utilization is not None:
        return int(need.options.gpu_memory_utilization * card.total)
    cache = int((need.options.kv_cache_gib or 0) * _GIB)
    return cache + (_fixed(need, card, split).total if need.shape is not None else 0)


def _token_bytes(need: EngineNeed, split: int) -> int:
    """Bytes of one token in the cache of one card; heads of keys that are fewer than cards are on several of them."""
    assert need.shape is not None
    kv_heads = _heads(need.shape)[1]
    return _number_bytes(need.options) * sum(layer.keys for layer in need.shape.layers) // min(split, kv_heads)


def _heads(shape: ModelShape) -> tuple[int, int]:
    """How many heads queries have, and keys."""
    layer = shape.layers[0]
    return layer.heads, layer.keys // 2 // (layer.query // layer.heads)


def _divides(shape: ModelShape, split: int) -> bool:
    """Whether vLLM can split the model over so many cards."""
    heads, kv_heads = _heads(shape)
    keys_fit = not kv_heads % split if kv_heads >= split else not split % kv_heads
    return keys_fit and not heads % split and not any(layer.inner % split for layer in shape.layers)


def _number_bytes(options: ServeOptions) -> int:
    return 4 if options.dtype == "float32" else 2  # `auto` makes float16 of a model in float32


def _batched_tokens(card: Card) -> int:
    """Tokens of one step of vLLM, as it chooses them by the card."""
    return 16384 if card.total >= 160 * _GIB else 8192 if card.total >= 70 * _GIB else 2048


def _least_tokens(need: EngineNeed) -> int:
    wanted = need.options.max_model_len or min(LEAST_TOKENS, need.context or LEAST_TOKENS)
    return -(-wanted // _BLOCK) * _BLOCK


def _neighbour_text(trainer: TrainerNeed | None) -> str:
    if trainer is None:
        return ""
    held = trainer.resident if trainer.takes_turns else trainer.peak
    return f", beside training with {bytes_to_text((held or 0) + CONTEXT)}"


def _floor(value: float) -> float:
    return max(0, int(100 * value)) / 100


def _ceil(value: float) -> float:
    return -int(-100 * value // 1) / 100
