"""Servers, a trainer and cards -> the bytes that each of them takes of a card, and those that are there for it.

A card's memory is counted in what one process takes of it:

    server    weights / n + adapters + activations + graphs + context + KV cache, on each of its n cards
    trainer   what `trainers.checks.memory_plan` counts, and its context

vLLM takes the same share of each of a server's cards: the card of which the smallest part is free decides it.

Invariant: pure functions of what is described; who takes which card is decided by `devices.plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from marft_bridge.config.serve import ENGINE_RANKS, ServeOptions
from marft_bridge.devices.machine import Card, Machine
from trainers.common.byte_text import bytes_to_text

if TYPE_CHECKING:
    from trainers.checks.memory_plan import ModelShape

GIB = 1 << 30
USABLE = 0.92  # of a card, as vLLM itself takes: the driver and holes between allocations have the rest
CONTEXT = GIB // 2  # of one process: CUDA's context and its libraries
GRAPHS = GIB  # of one server: captured CUDA graphs and the workspaces of its kernels
LINKS = GIB  # of one server on several cards: buffers of NCCL and of the all-reduce
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
class CardRoom:
    """One card as an engine meets it."""

    number: int
    card: Card
    bytes: int  # that the engine may take
    by_hand: int  # that it may be given by an option
    bound_by: CardRoom | None = None  # another card, whose share the engine may take of this one too, and no more

    @property
    def title(self) -> str:
        """The card in a message."""
        return f"card {self.number} ({self.card.name}, {bytes_to_text(self.card.total)})"

    @property
    def bound_text(self) -> str:
        """What is said behind the bytes where another card bounds them."""
        if self.bound_by is None:
            return ""
        other = self.bound_by
        return f", the same share as of {other.title}, which has {bytes_to_text(max(0, other.bytes))}"


# -- what is there ------------------------------------------------------------------------------------------------


def usable_bytes(card: Card) -> int:
    """What is free of a card, without the part that is never planned."""
    return min(card.free, int(USABLE * card.total))


def card_to_room(machine: Machine, number: int, *, held: int) -> CardRoom:
    """A card beside what others hold of it."""
    card = machine.cards[number]
    return CardRoom(number, card, bytes=usable_bytes(card) - held, by_hand=card.free - held)


def even_room(rooms: Sequence[CardRoom]) -> CardRoom:
    """The smallest of these cards, with the bytes that may be taken of it where every card gives the same share."""
    smallest = min(rooms, key=lambda room: (room.card.total, room.bytes))

    def at_same_share(size: int, room: CardRoom) -> int:
        return size * smallest.card.total // room.card.total

    binding = min(rooms, key=lambda room: at_same_share(room.bytes, room))
    return replace(
        smallest,
        bytes=at_same_share(binding.bytes, binding),
        by_hand=min(at_same_share(room.by_hand, room) for room in rooms),
        bound_by=binding if binding.card.total != smallest.card.total else None,
    )


# -- what is taken ------------------------------------------------------------------------------------------------


def trainer_beside_server(trainer: TrainerNeed) -> int:
    """What a learner has of its card while a server works there."""
    return ((trainer.resident if trainer.takes_turns else trainer.peak) or 0) + CONTEXT


def beside_training(trainer: TrainerNeed | None) -> str:
    """What is said of it behind the bytes that it leaves."""
    return "" if trainer is None else f", beside training with {bytes_to_text(trainer_beside_server(trainer))}"


def asleep_bytes(split: int) -> int:
    """What a sleeping server keeps: vLLM gives back weights, adapters and cache, and no context or graph.

    Args:
        split: cards of one copy of the model.
    """
    return CONTEXT + GRAPHS + (LINKS if split > 1 else 0)


def share_without_cache(need: EngineNeed, cards: Sequence[Card], split: int) -> EngineShare:
    """A server's part of each of these cards without a cache."""
    shape, options = need.shape, need.options
    assert shape is not None
    size = _number_bytes(options)
    rank = next(rank for rank in ENGINE_RANKS if rank >= options.max_lora_rank)
    inner = max(layer.inner for layer in shape.layers)
    activations = _batched_tokens(cards) * size * (4 * shape.width + 3 * inner // split)
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


def given_bytes(need: EngineNeed, card: Card, split: int) -> int:
    """What a server was given of a card by hand."""
    if need.options.gpu_memory_utilization is not None:
        return int(need.options.gpu_memory_utilization * card.total)
    cache = int((need.options.kv_cache_gib or 0) * GIB)
    return cache + (share_without_cache(need, [card], split).total if need.shape is not None else 0)


def token_bytes(need: EngineNeed, split: int) -> int:
    """Bytes of one token in the cache of one card; heads of keys that are fewer than cards are on several of them."""
    assert need.shape is not None
    kv_heads = attention_heads(need.shape)[1]
    return _number_bytes(need.options) * sum(layer.keys for layer in need.shape.layers) // min(split, kv_heads)


def cache_to_tokens(cache: int, token_size: int) -> int:
    """How many tokens a cache holds, in whole blocks; none where less than nothing is left for it."""
    return max(0, cache) // token_size // _BLOCK * _BLOCK


def least_tokens(need: EngineNeed) -> int:
    """The tokens that a server's cache must hold, in whole blocks: one call."""
    wanted = need.options.max_model_len or min(LEAST_TOKENS, need.context or LEAST_TOKENS)
    return -(-wanted // _BLOCK) * _BLOCK


def _number_bytes(options: ServeOptions) -> int:
    return 4 if options.dtype == "float32" else 2  # `auto` makes float16 of a model in float32


def _batched_tokens(cards: Sequence[Card]) -> int:
    """Tokens of one step of vLLM, as it chooses them by the largest card."""
    largest = max(card.total for card in cards)
    return 16384 if largest >= 160 * GIB else 8192 if largest >= 70 * GIB else 2048


# -- over how many cards ------------------------------------------------------------------------------------------


def attention_heads(shape: ModelShape) -> tuple[int, int]:
    """How many heads queries have, and keys."""
    layer = shape.layers[0]
    return layer.heads, layer.keys // 2 // (layer.query // layer.heads)


def can_split(shape: ModelShape, split: int) -> bool:
    """Whether vLLM can split the model over so many cards."""
    heads, kv_heads = attention_heads(shape)
    keys_fit = not kv_heads % split if kv_heads >= split else not split % kv_heads
    return keys_fit and not heads % split and not any(layer.inner % split for layer in shape.layers)


def splits_down_from(need: EngineNeed, largest: int) -> list[int]:
    """Over how many cards vLLM can split the model, from `largest` down."""
    return [split for split in range(largest, 0, -1) if need.shape is None or can_split(need.shape, split)]


def least_split(machine: Machine, need: EngineNeed, pool: Sequence[int], *, held: Mapping[int, int]) -> int:
    """The smallest power of two, over so many of these cards the model fits; the largest where it fits nowhere.

    Args:
        held: bytes that learners have of their cards.
    """
    if need.shape is None:
        return 1
    splits = [split for split in (1, 2, 4, 8, 16) if split <= len(pool) and can_split(need.shape, split)]
    for split in splits:
        room = even_room([card_to_room(machine, number, held=held.get(number, 0)) for number in pool[:split]])
        without_cache = share_without_cache(need, [machine.cards[number] for number in pool[:split]], split)
        share = need.options.gpu_memory_utilization
        limit = room.bytes if share is None else min(room.by_hand, int(share * room.card.total))
        if without_cache.total + least_tokens(need) * token_bytes(need, split) <= limit:
            return split
    return splits[-1]
