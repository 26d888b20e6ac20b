"""Owns: the checks that training is real, each against what it must notice and what it must let pass.

- One changed weight of the base is noticed whatever its type, place and size of change; moving adapters are not.
- An adapter that should have moved and did not is an error; one that had nothing to learn from is a warning.
- Log-probs of engine and trainer: their gap by hand, misaligned tokens, and which of two adapters was served.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.tiny_policy import save_tiny_llama

from trainers.checks.reality import (
    base_fingerprint,
    check_frozen,
    check_moved,
    check_served,
    logprob_gap,
    served_is_trained,
    tensors_to_fingerprint,
)
from trainers.config import LoraOptions
from trainers.errors import TrainError
from trainers.scoring.model import PolicyModel

# Frozen weights


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    folder = save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    return PolicyModel(folder, ("reasoner", "actor"), LoraOptions(rank=2), "cpu", 0)


def test_adapters_may_move_and_be_switched(model: PolicyModel) -> None:
    before = base_fingerprint(model.peft)
    for adapter in model.adapters:
        model.use(adapter)
        with torch.no_grad():
            for parameter in model.parameters(adapter).values():
                parameter.add_(0.5)
    check_frozen(before, base_fingerprint(model.peft))


def test_one_weight_of_the_base_that_moves_by_its_last_bit_is_named(model: PolicyModel) -> None:
    before = base_fingerprint(model.peft)
    (name, weight), *_ = [(n, p) for n, p in model.peft.named_parameters() if "layers.1.mlp.down_proj" in n]
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[5, 7] = torch.nextafter(weight[5, 7], torch.tensor(9.0))
    with pytest.raises(TrainError, match=rf"^the frozen weight '{name}' changed while adapters were trained"):
        check_frozen(before, base_fingerprint(model.peft))
    with torch.no_grad():
        weight.copy_(kept)
    check_frozen(before, base_fingerprint(model.peft))


def moved(change: Callable[[torch.Tensor], None], tensor: torch.Tensor) -> bool:
    """Whether `check_frozen` notices what `change` does to a copy of `tensor`."""
    other = tensor.clone()
    change(other)
    try:
        check_frozen(tensors_to_fingerprint({"w": tensor}), tensors_to_fingerprint({"w": other}))
    except TrainError:
        return True
    return False


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_a_change_anywhere_is_noticed_in_every_type(dtype: torch.dtype) -> None:
    tensor = torch.zeros(70_001, dtype=dtype)  # an odd count, more than one chunk
    assert not moved(lambda t: None, tensor)
    for place in (0, 1, 65_535, 65_536, 70_000):

        def set_one(t: torch.Tensor, place: int = place) -> None:
            t[place] = 1

        assert moved(set_one, tensor), place


def test_changes_that_cancel_in_a_sum_or_in_an_xor_are_noticed() -> None:
    tensor = torch.arange(200_000, dtype=torch.float32)

    def same_twice(t: torch.Tensor) -> None:
        t[[3, 4]] = -t[[3, 4]]  # the same bit flips twice

    def swap(t: torch.Tensor) -> None:
        t[[10, 11]] = t[[11, 10]]

    def swap_chunks(t: torch.Tensor) -> None:
        t[0], t[65_536] = t[65_536].clone(), t[0].clone()

    assert [moved(change, tensor) for change in (same_twice, swap, swap_chunks)] == [True, True, True]


def test_another_shape_another_type_and_a_weight_too_many_are_changes() -> None:
    zeros = tensors_to_fingerprint({"w": torch.zeros(2, 3)})
    others = ({"w": torch.zeros(3, 2)}, {"w": torch.zeros(2, 3, dtype=torch.int32)}, {})
    for other in (*others, {"w": torch.zeros(2, 3), "v": torch.zeros(1)}):
        with pytest.raises(TrainError, match=r"^the frozen weight '[wv]' changed"):
            check_frozen(zeros, tensors_to_fingerprint(other))


def test_views_and_empty_tensors_have_the_fingerprint_of_their_values() -> None:
    rows = torch.arange(12.0).view(3, 4)
    assert tensors_to_fingerprint({"w": rows.T}) == tensors_to_fingerprint({"w": rows.T.clone()})
    assert tensors_to_fingerprint({"w": rows[1:]}) == tensors_to_fingerprint({"w": rows[1:].clone()})
    assert tensors_to_fingerprint({"w": torch.empty(0)})["w"][1] == (0,)


# Adapters that moved


def metrics(**changes: Any) -> dict[str, dict[str, Any]]:
    healthy = {"tokens": 40, "steps": 2, "grad_norm": 0.5, "adapter_norm": 3.0, "adapter_moved": 0.1}
    return {"reasoner": healthy, "actor": healthy | changes}


LR = {"reasoner": 1e-3, "actor": 1e-3}


def test_adapters_that_learned_pass_without_a_word() -> None:
    assert check_moved(metrics(), LR) == []


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"tokens": 0, "steps": 0, "grad_norm": None, "adapter_moved": 0.0}, "adapter 'actor' had no action"),
        ({"steps": 0, "grad_norm": None, "adapter_moved": 0.0}, "adapter 'actor' took no step"),
        ({"steps": 0, "grad_norm": 0.0, "adapter_moved": 0.0}, "adapter 'actor' took no step: it had no gradient"),
    ],
    ids=["no-action", "no-step", "no-gradient"],
)
def test_an_adapter_that_had_nothing_to_learn_is_named_and_let_pass(changes: dict[str, Any], warning: str) -> None:
    (said,) = check_moved(metrics(**changes), LR)
    assert said.startswith(warning)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapter_moved": 0.0}, r"^adapter 'actor' took 2 steps of lr 0\.001 .* did not move: raise its rate"),
        ({"adapter_norm": math.nan}, r"^adapter 'actor' holds a weight that is not finite"),
        ({"adapter_moved": math.inf}, r"^adapter 'actor' holds a weight that is not finite"),
        ({"steps": 0, "grad_norm": None}, r"^adapter 'actor' moved without a step of its own optimiser"),
        ({"tokens": 0, "steps": 0, "grad_norm": None}, r"^adapter 'actor' moved without a step of its own optimiser"),
    ],
    ids=["stuck", "nan", "inf", "moved-by-another", "moved-without-an-action"],
)
def test_an_adapter_that_cannot_have_learned_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainError, match=message) as caught:
        check_moved(metrics(**changes), LR)
    assert "\n" not in str(caught.value)


def test_a_rate_of_zero_moves_nothing_rightly() -> None:
    assert check_moved(metrics(adapter_moved=0.0), LR | {"actor": 0.0}) == []


# Log-probs


def test_the_gap_is_the_mean_over_tokens_not_over_actions() -> None:
    # Gaps of 0.1 | 0.3, 0.2, 0.0: 0.6 / 4 = 0.15 over tokens; (0.1 + 0.5 / 3) / 2 = 0.1333 over actions.
    engine, trainer = [[-1.0], [-2.0, -3.0, -4.0]], [[-1.1], [-1.7, -3.2, -4.0]]
    assert logprob_gap(engine, trainer, "actor@2") == pytest.approx(0.15, abs=1e-12)


def test_without_tokens_there_is_no_gap() -> None:
    assert logprob_gap([], [], "actor@2") is None
    assert logprob_gap([[]], [[]], "actor@2") is None


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ([[-1.0]], "log-probs of 1 tokens, the trainer of 2"),
        ([[-1.0], [-1.0]], "log-probs of 2 tokens, the trainer of 2"),  # two actions, where the trainer has one
        ([[-1.0, math.nan]], "not finite"),
        ([[-1.0, -math.inf]], "not finite"),
    ],
    ids=["tokens", "actions", "nan", "inf"],
)
def test_log_probs_of_other_tokens_are_never_compared(engine: list[list[float]], message: str) -> None:
    with pytest.raises(TrainError, match=message):
        logprob_gap(engine, [[-1.0, -1.0]], "actor@2")


@pytest.mark.parametrize(
    ("to_new", "to_old", "answer"),
    [
        (1e-5, 0.2, True),  # float32 engine, adapters 0.2 apart
        (0.2, 1e-5, False),  # the old one is served
        (0.03, 0.035, None),  # bfloat16 noise hides adapters that are 0.01 apart
        (0.0, 0.0, None),  # equal adapters
        (0.0, 1e-9, True),  # no noise at all
        (0.5, 0.6, None),  # neither of them: the gap itself says so
    ],
)
def test_the_served_adapter_is_told_only_where_the_adapters_differ_by_more_than_the_noise(
    to_new: float, to_old: float, answer: bool | None
) -> None:
    assert served_is_trained(to_new, to_old) is answer
    assert served_is_trained(to_old, to_new) is (None if answer is None else not answer)


def test_an_engine_with_the_old_adapter_is_found_out_on_real_log_probs(model: PolicyModel) -> None:
    """The engine is a bfloat16-like one: the trainer's own numbers with noise of 0.02 nats."""
    from support.tiny_policy import make_action, make_trajectory

    from trainers.batch import trajectories_to_round
    from trainers.scoring.microbatch import items_to_microbatches

    actions = [make_action("actor", [1, 2, k], [3 + k, 4, 5 + k]) for k in range(6)]
    vocabulary = {"actor": model.vocabulary}
    data = trajectories_to_round([make_trajectory(actions, 1.0)], ["actor"], "reward", vocabulary, "on_policy")
    (batch,) = items_to_microbatches(data.items, 10_000)

    def said() -> list[list[float]]:
        with torch.no_grad():
            return [part.tolist() for part in torch.split(model.logprobs("actor", batch), list(batch.lengths))]

    old = said()
    with torch.no_grad():
        for name, parameter in model.parameters("actor").items():
            parameter.add_(0.2 if "lora_B" in name else 0.0)
    new = said()
    generator = torch.Generator().manual_seed(1)
    noise = [[0.02 * float(torch.randn((), generator=generator)) for _ in action] for action in new]

    def engine(truth: list[list[float]]) -> list[list[float]]:
        return [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(truth, noise, strict=True)]

    def gaps(truth: list[list[float]]) -> tuple[float, float]:
        to_new, to_old = (logprob_gap(engine(truth), one, "actor@2") for one in (new, old))
        assert to_new is not None
        assert to_old is not None
        return to_new, to_old

    assert check_served("actor@2", *gaps(new)) is True
    with pytest.raises(TrainError, match=r"^actor@2 was asked for, but the server answered with the version before"):
        check_served("actor@2", *gaps(old))
