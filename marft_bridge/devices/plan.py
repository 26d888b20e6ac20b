"""A machine, models and options -> which card each server and the trainer take, and how a card's memory is shared.

A card's memory is counted in what one process takes of it:

    server    weights / n + adapters + activations + graphs + context + KV cache, on each of its n cards
    trainer   what `trainers.checks.memory_plan` counts, and its context

The KV cache gets what is left. vLLM takes the same share of each card: the card of which the smallest part is free
decides it, and the smallest card the cache. Where server and trainer share a card and take turns, the server sleeps
while the trainer updates, so that each may have what the other needs only in its own turn.

Where no cards are named, the layouts below are tried in turn, each from the largest card down; only what fits in none
is refused.

Invariants: a pure function, the same cards and options give the same plan; nothing is planned for a server that runs
already, nor for a model whose layers are not known; what does not fit is refused with numbers, and a setting is named
only after a plan was made with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain, product
from typing import TYPE_CHECKING, Any

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


class _Layout(Enum):
    """Where cards come from that nobody named."""

    APART = "the servers have the largest cards, the learners the emptiest of the others"
    TRAINER_FIRST = "the learners have the largest cards"
    SHARED = "both have the largest cards"


@dataclass(frozen=True, slots=True)
class _Way:
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
        return [need if need.table != self.table else _with(need, **self.changes) for need in needs], trainer


class _NoRoomError(ServingError):
    """What does not fit.

    Args:
        ways: settings that may mend it, the best first.
        otherwise: what is said where none of them does.
    """

    def __init__(self, problem: str, ways: Sequence[_Way] = (), *, otherwise: str) -> None:
        super().__init__(f"{problem}: {otherwise}")
        self.problem, self.ways, self.otherwise = problem, tuple(ways), otherwise


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
    except _NoRoomError as refusal:
        way = _way_that_holds(machine, needs, trainer, ways=refusal.ways) or refusal.otherwise
        raise ServingError(f"{refusal.problem}: {way}") from None
    remaining = iter(plans)
    return DevicePlan(machine, tuple(None if need is None else next(remaining) for need in engines), learner_cards)


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


def _way_that_holds(
    machine: Machine, needs: Sequence[EngineNeed], trainer: TrainerNeed | None, *, ways: Sequence[_Way]
) -> str | None:
    """What to set, of which a plan was made; first the ways, then other cards than those that are named."""
    for way in ways:
        if _holds(machine, *way.needs_with_it(needs, trainer)):
            return way.text
    is_named = any(need.options.devices is not None for need in needs)
    if not is_named and (trainer is None or trainer.devices is None):
        return None
    try:
        plans, learner_cards = _plan_somewhere(
            machine,
            [_with(need, devices=None) for need in needs],
            None if trainer is None else replace(trainer, devices=None),
        )
    except ServingError:
        return None
    settings = []
    fitting_needs, fitting_trainer = [*needs], trainer
    for position, (need, plan) in enumerate(zip(needs, plans, strict=True)):
        if need.options.devices not in (None, plan.devices):
            fitting_needs[position] = _with(need, devices=plan.devices)
            settings.append(f"{need.table}.devices = {[*plan.devices]}")
    if trainer is not None and trainer.devices not in (None, learner_cards):
        fitting_trainer = replace(trainer, devices=learner_cards)
        settings.append(f"train.devices = {[*learner_cards]}")
    return f"set {' and '.join(settings)}" if _holds(machine, fitting_needs, fitting_trainer) else None


def _holds(machine: Machine, needs: Sequence[EngineNeed], trainer: TrainerNeed | None) -> bool:
    """Whether all of it fits somewhere."""
    try:
        _plan_somewhere(machine, needs, trainer)
    except ServingError:
        return False
    return True


def _with(need: EngineNeed, **options: Any) -> EngineNeed:
    return replace(need, options=need.options.model_copy(update=options))


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
    held = {} if trainer is None else dict.fromkeys(learner_cards, _beside(trainer))
    chosen: dict[int, tuple[tuple[int, ...], int]] = {}
    spare = list(free)
    # on unlike cards the largest model chooses first, on like ones the first table
    is_alike = len({_usable(card) // _GIB for card in machine.cards}) == 1
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
            split = need.options.tensor_parallel or _least_split(machine, need, pool, held=held)
            if split > len(pool):
                raise _NoRoomError(
                    f"{need.table}.tensor_parallel is {split}, but {len(pool)} of {len(machine.cards)} cards "
                    f"{'is' if len(pool) == 1 else 'are'} free for it",
                    [
                        _Way(f"set it to {fewer}", need.table, {"tensor_parallel": fewer})
                        for fewer in _smaller_splits(need, min(split - 1, len(machine.cards)))
                    ],
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
            key=lambda number: (-(machine.cards[number].free // _GIB), number),
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
        return others_last and 2 * card.free < card.total, -(_usable(card) // _GIB), number

    return sorted(range(len(machine.cards)), key=rank)


def _first_cards(machine: Machine, cards: Sequence[int], trainer: TrainerNeed) -> tuple[int, ...]:
    """A card for each learner, of these."""
    if len(cards) < trainer.learners:
        raise _NoRoomError(
            f"train.learners is {trainer.learners}, but {len(cards)} of {len(machine.cards)} "
            f"card{'s' if len(machine.cards) > 1 else ''} {'is' if len(cards) == 1 else 'are'} there for learners, and "
            f"each takes one",
            [
                _Way(f"set it to {fewer}", None, {"learners": fewer})
                for fewer in range(min(trainer.learners - 1, len(machine.cards)), 0, -1)
            ],
            otherwise="take a smaller base model, or more cards",
        )
    return tuple(sorted(cards[: trainer.learners]))


def _least_split(machine: Machine, need: EngineNeed, pool: Sequence[int], *, held: Mapping[int, int]) -> int:
    """The smallest power of two, over so many of these cards the model fits; the largest where it fits nowhere.

    Args:
        held: bytes that learners have of their cards.
    """
    if need.shape is None:
        return 1
    splits = [split for split in (1, 2, 4, 8, 16) if split <= len(pool) and _divides(need.shape, split)]
    for split in splits:
        room = _even_room([_card_to_room(machine, number, held=held.get(number, 0)) for number in pool[:split]])
        fixed = _fixed(need, _largest([machine.cards[number] for number in pool[:split]]), split)
        share = need.options.gpu_memory_utilization
        limit = room.bytes if share is None else min(room.by_hand, int(share * room.card.total))
        if fixed.total + _least_tokens(need) * _token_bytes(need, split) <= limit:
            return split
    return splits[-1]


def _smaller_splits(need: EngineNeed, largest: int) -> list[int]:
    """Over how many cards vLLM can split the model, from `largest` down."""
    return [split for split in range(largest, 0, -1) if need.shape is None or _divides(need.shape, split)]


def _refuse_uneven(need: EngineNeed, devices: tuple[int, ...], split: int) -> None:
    if len(devices) % split:
        raise ServingError(
            f"{need.table}.devices names {len(devices)} cards, which tensor_parallel {split} does not divide: "
            f"one copy of the model takes {split}, so name a multiple of it"
        )
    if need.shape is not None and not _divides(need.shape, split):
        heads, kv_heads = _heads(need.shape)
        ways = []
        for fewer in _smaller_splits(need, split - 1):
            # only cards that are named hold several copies
            copies = 1 if need.options.devices is None else len(devices) // fewer
            if need.options.devices is None or not len(devices) % fewer:
                text = f"set {need.table}.tensor_parallel = {fewer}"
                text += f", for {copies} copies of the model" if copies > 1 else ""
                ways.append(_Way(text, need.table, {"tensor_parallel": fewer}))
        raise _NoRoomError(
            f"{need.table}: a model with {heads} attention heads, {kv_heads} of them for keys, cannot be split over "
            f"{split} cards",
            ways,
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
        held = _beside(trainer) if number in shared_cards and trainer is not None else 0
        card = machine.cards[number]
        held += sum(_given_bytes(need_beside, card) for need_beside in neighbours if number in need_beside[1])
        rooms.append(_card_to_room(machine, number, held=held))
    even = _even_room(rooms)
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
    fixed = _fixed(need, _largest([machine.cards[number] for number in devices]), split)
    length, cache = _size_cache(need, room, split=split, fixed=fixed, neighbour=beside)
    share = replace(fixed, cache=cache, tokens=cache // _token_bytes(need, split))
    # vLLM looks whether so much is free before it starts, also where the size of the cache is given
    wanted = min(share.total, even.bytes)
    utilization = options.gpu_memory_utilization or int(1000 * wanted / even.card.total) / 1000
    return EnginePlan(devices, split, utilization, longest_call=length, sleeps=sleeps, share=share)


def _shared_card(devices: Sequence[int], neighbours: Sequence[tuple[EngineNeed, tuple[int, ...], int]]) -> int:
    """The first of these cards that another server has too."""
    return min(number for number in chain.from_iterable(cards for _, cards, _ in neighbours) if number in devices)


def _beside(trainer: TrainerNeed) -> int:
    """What a learner has of its card while a server works there."""
    return ((trainer.resident if trainer.takes_turns else trainer.peak) or 0) + CONTEXT


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
    token_bytes, least_tokens = _token_bytes(need, split), _least_tokens(need)
    least_call = fixed.total + least_tokens * token_bytes
    limit = room.bytes
    if options.gpu_memory_utilization is not None:
        limit = int(options.gpu_memory_utilization * room.card.total)
        if least_call <= room.by_hand:
            _refuse_large_share(need, room, neighbour=neighbour)
        limit = min(limit, room.by_hand)  # no share holds a call, which is what is said below
    cache = limit - fixed.total
    if options.kv_cache_gib is not None:
        cache = int(options.kv_cache_gib * _GIB)
    held = max(0, cache) // token_bytes // _BLOCK * _BLOCK
    if held < least_tokens or fixed.total + cache > limit:
        is_call = held < least_tokens
        least = least_call if is_call else fixed.total + cache
        purpose = f"one call of {least_tokens:,} tokens" if is_call else f"{options.kv_cache_gib:g} GiB of KV cache"
        available = limit if options.kv_cache_gib is None or not is_call else fixed.total + cache
        weights, adapters, rest = (bytes_to_text(size) for size in _parts(fixed))
        raise _NoRoomError(
            f"the model server of {need.table} needs {bytes_to_text(least)} of {room.title} for {purpose} "
            f"(weights {weights}, adapters {adapters}, the rest {rest}), and "
            f"{bytes_to_text(max(0, available))} are there for it{room.bound_text}{_neighbour_text(neighbour)}",
            _ways_to_fit(need, room, split=split, left=limit - fixed.total, least=least, neighbour=neighbour),
            otherwise=_other_cards(need, room, least=least),
        )
    length = options.max_model_len or (None if need.context is None else min(need.context, held))
    return length, cache


def _parts(share: EngineShare) -> tuple[int, int, int]:
    return share.weights, share.adapters, share.rest


def _refuse_large_share(need: EngineNeed, room: _Room, *, neighbour: TrainerNeed | None) -> None:
    """Refuses a share given by hand that is not there."""
    share = need.options.gpu_memory_utilization
    if share is None or int(share * room.card.total) <= room.by_hand:
        return
    largest = _floor(room.by_hand / room.card.total)
    way = _Way(f"set it to {largest} or less", need.table, {"gpu_memory_utilization": largest})
    raise _NoRoomError(
        f"{need.table}.gpu_memory_utilization {share:g} is {bytes_to_text(int(share * room.card.total))} of "
        f"{room.title}, and {bytes_to_text(max(0, room.by_hand))} are there for the model server"
        f"{room.bound_text}{_neighbour_text(neighbour)}",
        [way] if largest else [],
        otherwise=_elsewhere(need),
    )


def _ways_to_fit(
    need: EngineNeed, room: _Room, *, split: int, left: int, least: int, neighbour: TrainerNeed | None
) -> list[_Way]:
    """Settings with which the server may fit.

    Args:
        left: bytes that are there for a cache.
        least: what the server needs as it is set now.
    """
    options, table = need.options, need.table
    cache_bytes = _least_tokens(need) * _token_bytes(need, split)
    held = max(0, left) // _token_bytes(need, split) // _BLOCK * _BLOCK
    ways: list[_Way] = []

    def offer(option: str, value: float, bound: str) -> None:
        if value > 0:
            ways.append(_Way(f"set {table}.{option} to {value} or {bound}", table, {option: value}))

    if options.gpu_memory_utilization is not None:
        offer("gpu_memory_utilization", _ceil(least / room.card.total), "more")
    if options.kv_cache_gib is not None:
        if cache_bytes > options.kv_cache_gib * _GIB:
            offer("kv_cache_gib", _ceil(cache_bytes / _GIB), "more")
        else:
            offer("kv_cache_gib", _floor(left / _GIB), "less")
    if options.max_model_len is not None:
        offer("max_model_len", held, "less")
    if neighbour is not None and not neighbour.takes_turns:
        text = "set train.max_staleness = 0, so that the server sleeps while the trainer updates"
        ways.append(_Way(text, None, {"takes_turns": True}))
    return ways


def _other_cards(need: EngineNeed, room: _Room, *, least: int) -> str:
    """What is said where no setting makes the server fit."""
    if room.bound_by is not None:
        return f"take a smaller base model, or cards of one size with more of them free ({need.table}.devices)"
    held_here = _usable(room.card) - room.bytes
    if least + held_here <= int(_USABLE * room.card.total):
        return _elsewhere(need)
    return (
        f"take a smaller base model, a card with {bytes_to_text(int((held_here + least) / _USABLE))} or more, "
        f"or several cards ({need.table}.devices)"
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
        raise _NoRoomError(
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
        raise _NoRoomError(
            f"the model server of {tables} sleeps while the trainer updates, and what it holds then takes "
            f"{bytes_to_text(sleeping_bytes)} of main memory, of which {bytes_to_text(machine.host_free)} are free",
            otherwise="free some, take a smaller base model, or give trainer and server cards of their own",
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
    return "" if trainer is None else f", beside training with {bytes_to_text(_beside(trainer))}"


def _floor(value: float) -> float:
    return max(0, int(100 * value)) / 100


def _ceil(value: float) -> float:
    return -int(-100 * value // 1) / 100
