"""Owns: the coefficient of each offline mode, and the weighted log-likelihood that they share.

Numbers are worked by hand; the gradient is checked by finite differences in float64.
"""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from trainers.config import OfflineOptions
from trainers.offline.losses import OfflineMode, imitation_loss, offline_coefficients


def f64(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


ADVANTAGE = f64(2.0, -1.0, 0.0, -1.0)
LOG_RATIO = f64(math.log(3), math.log(3), 0.0, math.log(0.5))  # ratios 3, 3, 1, 0.5


def test_filtered_actions_count_1() -> None:
    assert offline_coefficients("filtered", ADVANTAGE, None, OfflineOptions(mode="filtered")).tolist() == [1, 1, 1, 1]


def test_awr_by_hand() -> None:
    # beta 0.5: e^4 = 54.6 is capped at 10, e^-2, e^0, e^-2
    options = OfflineOptions(mode="awr", beta=0.5, max_weight=10.0)
    found = offline_coefficients("awr", ADVANTAGE, None, options)
    torch.testing.assert_close(found, f64(10, math.exp(-2), 1, math.exp(-2)))
    assert found[0].item() == 10


def test_asymre_takes_its_advantage_as_it_is() -> None:
    assert offline_coefficients("asymre", ADVANTAGE, None, OfflineOptions(mode="asymre")).tolist() == ADVANTAGE.tolist()


def test_topr_tapers_the_negative_ones_only() -> None:
    # 2 at full weight although its ratio is 3; -1 * min(3, 1); 0; -1 * 0.5
    found = offline_coefficients("topr", ADVANTAGE, LOG_RATIO, OfflineOptions(mode="topr"))
    torch.testing.assert_close(found, f64(2, -1, 0, -0.5))


@pytest.mark.parametrize("mode", ["importance", "vtrace"])
def test_importance_and_vtrace_weigh_both_signs_up_to_the_cap(mode: OfflineMode) -> None:
    options = OfflineOptions(mode=mode, ratio_cap=2.0)
    torch.testing.assert_close(offline_coefficients(mode, ADVANTAGE, LOG_RATIO, options), f64(4, -2, 0, -0.5))


def test_a_ratio_or_an_advantage_beyond_all_bounds_gives_a_finite_coefficient() -> None:
    advantage, gone = torch.tensor([1.0, -1.0]), torch.tensor([1e4, 1e4])
    capped = OfflineOptions(mode="importance", ratio_cap=3.0)
    assert offline_coefficients("topr", advantage, gone, OfflineOptions(mode="topr")).tolist() == [1, -1]
    assert offline_coefficients("importance", advantage, gone, capped).tolist() == [3, -3]
    assert offline_coefficients("awr", torch.tensor([1e6, -1e6]), None, OfflineOptions()).tolist() == [10, 0]


@pytest.mark.parametrize("mode", get_args(OfflineMode))
def test_coefficients_are_constants(mode: OfflineMode) -> None:
    advantage, ratio = ADVANTAGE.clone().requires_grad_(), LOG_RATIO.clone().requires_grad_()
    ratios = ratio if mode in ("topr", "importance", "vtrace") else None
    assert not offline_coefficients(mode, advantage, ratios, OfflineOptions()).requires_grad


@pytest.mark.parametrize("mode", ["topr", "importance", "vtrace"])
def test_a_mode_over_ratios_cannot_do_without_them(mode: OfflineMode) -> None:
    with pytest.raises(ValueError, match=f"'{mode}' needs log-ratios"):
        offline_coefficients(mode, ADVANTAGE, None, OfflineOptions(mode=mode))


@pytest.mark.parametrize("mode", ["filtered", "awr", "asymre"])
def test_a_mode_without_ratios_refuses_them(mode: OfflineMode) -> None:
    with pytest.raises(ValueError, match=f"'{mode}' does not read log-ratios"):
        offline_coefficients(mode, ADVANTAGE, LOG_RATIO, OfflineOptions(mode=mode))


def test_a_mode_that_learns_nothing_has_no_coefficients() -> None:
    with pytest.raises(ValueError, match="'off' is not an offline mode"):
        offline_coefficients("off", ADVANTAGE, None, OfflineOptions(mode="off"))  # type: ignore[arg-type]


def test_the_loss_by_hand() -> None:
    # tokens -1, -2 of action 0 (coefficient 3), -0.5 of action 1 (coefficient -2); shares 0.1, 0.1, 0.4
    logp, row = f64(-1, -2, -0.5).requires_grad_(), torch.tensor([0, 0, 1])
    coefficient, share = f64(3, -2).requires_grad_(), f64(0.1, 0.1, 0.4).requires_grad_()
    loss = imitation_loss(logp, row, coefficient, share)
    assert loss.item() == pytest.approx(0.3 * 1 + 0.3 * 2 - 0.8 * 0.5)
    reached = torch.autograd.grad(loss, (logp, coefficient, share), allow_unused=True)
    torch.testing.assert_close(reached[0], f64(-0.3, -0.3, 0.8))
    assert [g is not None for g in reached] == [True, False, False]
    assert torch.autograd.gradcheck(lambda x: imitation_loss(x, row, coefficient, share), logp)
