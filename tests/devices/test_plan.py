"""Owns: the share of a model server on several cards: vLLM takes the same fraction of each, and it fits every one.

- On unlike cards the fraction is what the card allows of which the smallest part is free, and the cache is sized by the
  smallest card; equal cards are planned as one. Where no fraction serves all, it is refused with the numbers of both.
- Servers that share a card without a share of their own are refused with that card's number.
- Every learner has a card of its own, whoever says how many there are.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from marft_bridge.common.errors import ServingError
from marft_bridge.config.serve import ServeOptions
from marft_bridge.devices.card_memory import CONTEXT, EngineNeed, TrainerNeed
from marft_bridge.devices.machine import Card, Machine
from marft_bridge.devices.plan import EnginePlan, plan_devices
from trainers.checks.memory_plan import LayerShape, ModelShape

GIB = 2**30
_LAYER = LayerShape(
    normed=4096,
    read=1,
    low=1,
    query=4096,
    keys=2048,
    heads=32,
    inner=14336,
    plain_silu=True,
    adapter=100_000,
    linear=(1,),
)
SHAPE = ModelShape(weights=8_000_000_000, vocabulary=128_256, width=4096, layers=(_LAYER,) * 32)


def machine_of(*cards: tuple[str, float, float]) -> Machine:
    """Cards of (name, GiB, GiB that are free)."""
    return Machine(
        tuple(
            Card(name, int(total * GIB), int(free * GIB), str(number))
            for number, (name, total, free) in enumerate(cards)
        )
    )


def planned(machine: Machine, trainer: TrainerNeed | None = None, **options: Any) -> EnginePlan:
    devices = tuple(range(len(machine.cards)))
    need = EngineNeed("serve", ServeOptions(**{"devices": devices} | options), SHAPE, context=8192)
    (plan,) = plan_devices(machine, [need], trainer).engines
    assert plan is not None
    return plan


UNLIKE = (("L40S", 48, 47), ("H100", 80, 45))


@pytest.mark.parametrize(
    ("cards", "options", "utilization"),
    [
        (UNLIKE, {}, 0.562),  # 45 / 80
        (UNLIKE, {"tensor_parallel": 1}, 0.562),  # each copy takes the same fraction
        (tuple(reversed(UNLIKE)), {}, 0.562),
        ((("L40S", 48, 47), ("H100", 80, 30)), {}, 0.375),
        ((("L40S", 48, 20), ("H100", 80, 79)), {}, 0.416),  # 20 / 48
        ((("L40S", 48, 47), ("L40S", 48, 47)), {}, 0.919),  # equal cards, as before
        ((("L40S", 48, 47), ("L40S", 48, 30)), {}, 0.625),
        ((("L40S", 48, 47),), {}, 0.919),
    ],
)
def test_the_share_that_vllm_takes_of_each_card_is_free_on_each(
    cards: tuple[tuple[str, float, float], ...], options: dict[str, Any], utilization: float
) -> None:
    machine = machine_of(*cards)
    plan = planned(machine, **options)
    assert plan.utilization == utilization
    assert plan.share is not None
    for card in machine.cards:
        assert plan.utilization * card.total <= card.free
        # what it counts with is there on each, but for the three digits of the fraction
        assert plan.share.total <= (plan.utilization + 0.001) * card.total


def test_a_cache_of_a_given_size_needs_no_more_of_a_larger_card() -> None:
    machine = machine_of(("L40S", 48, 47), ("H100", 80, 30))
    plan = planned(machine, kv_cache_gib=12)
    assert plan.share is not None
    assert plan.utilization is not None
    assert plan.share.cache == 12 * GIB
    assert 0.375 * 48 * GIB < plan.share.total <= 30 * GIB  # more than the largest share of the smaller card
    assert all(plan.utilization * card.total <= card.free for card in machine.cards)


@pytest.mark.parametrize(
    ("free", "options", "message"),
    [
        (
            *((47, 13), {}),
            r"needs \d+\.\d GiB of card 0 \(L40S, 48\.0 GiB\) for one call .*, and 7\.8 GiB are there for it, the same "
            r"share as of card 1 \(H100, 80\.0 GiB\), which has 13\.0 GiB: set serve\.devices = \[0\]$",
        ),
        (
            *((14, 13), {}),  # not on one of them alone either
            r"and 7\.8 GiB are there for it, the same share as of card 1 .*: take a smaller base model, or cards",
        ),
        (
            *((47, 20), {"gpu_memory_utilization": 0.5}),
            r"0\.5 is 24\.0 GiB of card 0 \(L40S, 48\.0 GiB\), and 12\.0 GiB are there for the model server, the same "
            r"share as of card 1 \(H100, 80\.0 GiB\), which has 20\.0 GiB: set it to 0\.25 or less",
        ),
    ],
)
def test_where_no_share_serves_both_cards_it_is_refused_with_the_numbers_of_both(
    free: tuple[int, int], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ServingError) as refused:
        planned(machine_of(("L40S", 48, free[0]), ("H100", 80, free[1])), **options)
    assert re.search(message, str(refused.value)), str(refused.value)
    assert "\n" not in str(refused.value)


def test_beside_the_servers_share_of_a_larger_card_an_update_fits_too() -> None:
    machine = machine_of(("L40S", 48, 47), ("H100", 80, 79))
    trainer = TrainerNeed(resident=20 * GIB, peak=30 * GIB, takes_turns=False, devices=(1,))
    plan = planned(machine, trainer)
    assert plan.utilization is not None
    beside = int(0.92 * 80 * GIB) - int(plan.utilization * 80 * GIB) - CONTEXT
    assert beside >= 30 * GIB
    # in turns the share is that beside what stays on the card between updates
    in_turns = planned(machine, replace(trainer, takes_turns=True))
    assert in_turns.utilization is not None
    assert in_turns.utilization > plan.utilization


def test_a_model_is_split_over_more_cards_where_the_same_share_of_fewer_does_not_hold_it() -> None:
    machine = machine_of(("L40S", 48, 47), ("H100", 80, 41), ("L40S", 48, 40), ("L40S", 48, 40))  # the largest first
    need = EngineNeed("serve", ServeOptions(), replace(SHAPE, weights=25_000_000_000), context=8192)
    (plan,) = plan_devices(machine, [need]).engines  # half of it is 23.3 GiB, and 41 / 80 of 48 GiB are 24.6
    assert plan is not None
    assert plan.tensor_parallel == 4


@pytest.mark.parametrize(("share", "refused"), [(0.5, None), (0.54, None), (0.9, 0.54), (1.0, 0.54)])
def test_a_server_of_unknown_size_gets_no_more_than_the_trainer_leaves(share: float, refused: float | None) -> None:
    machine = machine_of(("L4", 24, 23.6))  # less 10 and a context: 13.1 of 24
    trainer = TrainerNeed(resident=10 * GIB, peak=14 * GIB, takes_turns=True)
    need = EngineNeed("serve", ServeOptions(gpu_memory_utilization=share), None)
    if refused is None:
        (plan,) = plan_devices(machine, [need], trainer).engines
        assert plan is not None
        assert plan.utilization == share
        return
    with pytest.raises(ServingError, match=rf"and 13\.1 GiB are there .* with 10\.5 GiB: set it to {refused} or less$"):
        plan_devices(machine, [need], trainer)
    need = EngineNeed("serve", ServeOptions(gpu_memory_utilization=refused), None)
    assert plan_devices(machine, [need], trainer).learners == (0,)


def test_no_share_is_named_that_does_not_hold_a_call() -> None:
    machine = machine_of(("L4", 24, 23.6))
    trainer = TrainerNeed(resident=10 * GIB, peak=14 * GIB, takes_turns=True)
    with pytest.raises(ServingError, match=r"needs \d+\.\d GiB of card 0 .* for one call .*, and 13\.1 GiB are there"):
        planned(machine, trainer, gpu_memory_utilization=0.9)


@pytest.mark.parametrize(("first", "second"), [((0, 1), (1, 2)), ((1, 2), (0, 1)), ((0, 2, 1), (1, 3))])
def test_the_card_that_several_servers_share_is_named(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    machine = machine_of(*[("L4", 22, 22)] * 4)
    needs = [
        EngineNeed(table, ServeOptions(devices=devices, tensor_parallel=1), None)
        for table, devices in (("serve", first), ("models.b.serve", second))
    ]
    with pytest.raises(ServingError, match=r"^several model servers share card 1: give each its share with serve\."):
        plan_devices(machine, needs)


def test_learners_for_which_too_few_cards_are_named_are_refused() -> None:
    """The number may be torchrun's, of which the options know nothing when they are checked."""
    machine = machine_of(*[("L4", 22, 22)] * 4)
    trainer = TrainerNeed(resident=GIB, peak=2 * GIB, takes_turns=True, devices=(0,), learners=2)
    with pytest.raises(ServingError, match=r"^train\.devices names 1 card for 2 learners, and each has one: "):
        plan_devices(machine, [], trainer)
    assert plan_devices(machine, [], replace(trainer, devices=(0, 2))).learners == (0, 2)


def test_the_larger_of_two_models_has_the_larger_card_whichever_table_comes_first() -> None:
    machine = machine_of(("L4", 24, 24), ("L40S", 48, 48), ("L4", 24, 24))
    small, large = replace(SHAPE, weights=1_700_000_000), replace(SHAPE, weights=14_000_000_000)
    trainer = TrainerNeed(resident=8 * GIB, peak=16 * GIB, takes_turns=True)
    for shapes in ((small, large), (large, small)):
        needs = [
            EngineNeed(table, ServeOptions(), shape, context=8192)
            for table, shape in zip(("serve", "models.b.serve"), shapes, strict=True)
        ]
        plan = plan_devices(machine, needs, trainer)
        cards = {
            need.shape: None if engine is None else engine.devices
            for need, engine in zip(needs, plan.engines, strict=True)
        }
        assert cards[large] == (1,)
        assert {cards[small], plan.learners} == {(0,), (2,)}


def test_a_trainer_shares_whichever_card_has_room_beside_its_server() -> None:
    machine = machine_of(("L4", 24, 23), ("L4", 24, 23))
    trainer = TrainerNeed(resident=6 * GIB, peak=10 * GIB, takes_turns=True)
    needs = [
        EngineNeed(table, ServeOptions(devices=devices, gpu_memory_utilization=share), None)
        for table, devices, share in (("serve", (0,), 0.9), ("models.b.serve", (1,), 0.4))
    ]
    assert plan_devices(machine, needs, trainer).learners == (1,)
