"""Owns: weights between engine and trainer, masks over actions, effective sample size.

Numbers are worked by hand.
"""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from trainers.config import Granularity
from trainers.objective.losses import ppo_loss
from trainers.scoring.effective_sample_size import effective_sample_size
from trainers.scoring.logratios import LogprobNorm, log_ratio
from trainers.scoring.mismatch import kept_actions, mismatch_weight


def f64(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


ROW = torch.tensor([0, 0, 1])  # two actions, of two tokens and of one
OLD = f64(-1.0, -2.0, -0.5)
BEHAVIOUR = OLD - f64(0.5, 0.9, -1.0)  # log rho of the tokens: 0.5, 0.9, -1


def weights(
    granularity: Granularity, norm: LogprobNorm, mode: Literal["truncate", "mask", "none"], words: Tensor | None = None
) -> Tensor:
    return mismatch_weight(OLD, BEHAVIOUR, ROW, 2, granularity, norm, mode, 2.0, words)


def test_truncated_weights_by_hand() -> None:
    # actions: sums 1.4 and -1, means 0.7 and -1, over 7 words 0.2; the cap of 2 holds e^1.4 = 4.06, e^0.7 = 2.01 and
    # e^0.9 = 2.46
    torch.testing.assert_close(weights("action", "sum", "truncate"), f64(2, math.exp(-1)))
    torch.testing.assert_close(weights("action", "token", "truncate"), f64(2, math.exp(-1)))
    words = torch.tensor([7, 1])
    torch.testing.assert_close(weights("action", "word", "truncate", words), f64(math.exp(0.2), math.exp(-1)))
    torch.testing.assert_close(weights("token", "sum", "truncate"), f64(math.exp(0.5), 2, math.exp(-1)))


def test_masked_weights_by_hand() -> None:
    # e^-1 = 0.37 is below 1 / 2
    torch.testing.assert_close(weights("action", "sum", "mask"), f64(0, 0))
    torch.testing.assert_close(weights("token", "sum", "mask"), f64(math.exp(0.5), 0, 0))


def test_a_ratio_at_the_cap_is_kept_whole_on_both_sides() -> None:
    # 2 and 1 / 2 exactly: powers of two survive log and exp in float64, which the first line makes sure of
    old = f64(math.log(2), -math.log(2))
    assert old.exp().tolist() == [2, 0.5]
    for mode in ("truncate", "mask"):
        found = mismatch_weight(old, f64(0, 0), torch.arange(2), 2, "token", "sum", mode, 2.0)
        assert found.tolist() == [2, 0.5]


def test_switched_off_every_unit_weighs_1() -> None:
    assert weights("action", "sum", "none").tolist() == [1, 1]
    assert weights("token", "sum", "none").tolist() == [1, 1, 1]


def test_equal_policies_weigh_1_in_every_mode() -> None:
    for mode in ("truncate", "mask"):
        assert mismatch_weight(OLD, OLD, ROW, 2, "action", "sum", mode, 1.5).tolist() == [1, 1]


def test_weights_are_constants_and_finite() -> None:
    old = OLD.float().requires_grad_()
    found = mismatch_weight(old, OLD.float() - 100, ROW, 2, "action", "sum", "truncate", 1e6)
    assert not found.requires_grad
    assert found.tolist() == [1e6, 1e6]


def test_decoupled_ppo_with_the_engine_as_old_policy_is_plain_ppo() -> None:
    # E_mu[pi_old / mu * ppo(pi_new / pi_old)]: with mu = pi_old the weight is 1, and value and gradient are plain PPO's
    advantage = f64(1.0, -2.0)

    def loss(new: Tensor, behaviour: Tensor) -> Tensor:
        ratio = log_ratio(new, OLD, ROW, 2, "action", "sum")
        weight = mismatch_weight(OLD, behaviour, ROW, 2, "action", "sum", "truncate", 2.0)
        return (weight * ppo_loss(ratio, advantage, 0.2, 0.28, None)[0]).sum()

    new = (OLD + f64(0.05, 0.03, -0.1)).requires_grad_()
    plain = -(1.0 * math.exp(0.08) - 2.0 * math.exp(-0.1))  # both ratios lie inside the clip
    assert loss(new, OLD).item() == pytest.approx(plain)
    (gradient,) = torch.autograd.grad(loss(new, OLD), new)
    torch.testing.assert_close(gradient, f64(-math.exp(0.08), -math.exp(0.08), 2 * math.exp(-0.1)))
    assert loss(new, BEHAVIOUR).item() != pytest.approx(plain)


def keep(
    old: Tensor,
    behaviour: Tensor,
    geometric_mask: float | None = None,
    veto: float | None = None,
    off_policy_mask: float | None = None,
    new: Tensor | None = None,
    advantage: Tensor | None = None,
) -> list[bool]:
    new = old if new is None else new
    advantage = f64(-1, -1) if advantage is None else advantage
    found = kept_actions(old, behaviour, ROW, 2, new, advantage, geometric_mask, veto, off_policy_mask)
    assert found.dtype == torch.bool
    return [bool(k) for k in found]


def test_without_a_mask_everything_is_kept() -> None:
    assert keep(OLD, OLD - 50) == [True, True]


def test_the_geometric_mask_looks_at_the_mean_ratio_per_token_on_both_sides() -> None:
    # mean log rho: (0.5 + 0.9) / 2 = 0.7 and -1; log 2 = 0.69, log 2.1 = 0.74, log 3 = 1.1
    assert keep(OLD, BEHAVIOUR, geometric_mask=2.0) == [False, False]
    assert keep(OLD, BEHAVIOUR, geometric_mask=2.1) == [True, False]
    assert keep(OLD, BEHAVIOUR, geometric_mask=3.0) == [True, True]


def test_the_geometric_mask_does_not_punish_length() -> None:
    # a hundred tokens of ratio 1.1: their product is 13 780, their mean is as that of one token
    row = torch.tensor([0] * 100 + [1])
    old = torch.full((101,), math.log(1.1), dtype=torch.float64)
    found = kept_actions(old, torch.zeros_like(old), row, 2, old, f64(1, 1), 1.2, None, None)
    assert found.tolist() == [True, True]


def test_one_impossible_token_vetoes_its_action_only() -> None:
    # rho of the tokens: 1e-3, 1, 1
    behaviour = OLD - f64(math.log(1e-3), 0, 0)
    assert keep(OLD, behaviour, veto=1e-2) == [False, True]
    assert keep(OLD, behaviour, veto=1e-4) == [True, True]


def test_the_off_policy_mask_drops_drifted_actions_of_negative_advantage_only() -> None:
    # mean(log mu - log new): (0.4 + 0.8) / 2 = 0.6, and 0.6
    new = OLD - f64(0.4, 0.8, 0.6)
    assert keep(OLD, OLD, off_policy_mask=0.5, new=new, advantage=f64(-1, 1)) == [False, True]
    assert keep(OLD, OLD, off_policy_mask=0.5, new=new, advantage=f64(0, -1)) == [True, False]
    assert keep(OLD, OLD, off_policy_mask=0.7, new=new) == [True, True]
    # the drift is from what the engine said, not from where the trainer started: log mu - log old is 0.7 and 0
    assert keep(OLD, OLD + f64(0.7, 0.7, 0), off_policy_mask=0.5) == [False, True]
    # more likely than when it was sampled is no drift away from it
    assert keep(OLD, OLD, off_policy_mask=0.5, new=OLD + 3) == [True, True]


def test_an_action_that_any_mask_drops_is_dropped() -> None:
    behaviour = OLD - f64(math.log(1e-3), -math.log(1e-3), 1.0)  # a mean of 0 and a vetoed token; a mean of 1
    assert keep(OLD, behaviour, geometric_mask=2.0) == [True, False]
    assert keep(OLD, behaviour, veto=1e-2) == [False, True]
    assert keep(OLD, behaviour, geometric_mask=2.0, veto=1e-2) == [False, False]


def test_effective_sample_size_by_hand() -> None:
    assert effective_sample_size([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert effective_sample_size([0.0, 5.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert effective_sample_size(f64(1, 2, 3)) == pytest.approx(36 / (3 * 14))


def test_nothing_to_weigh_has_no_effective_sample_size() -> None:
    assert effective_sample_size([]) is None
    assert effective_sample_size([0.0, 0.0]) is None


def test_the_effective_sample_size_has_no_scale_and_does_not_overflow() -> None:
    assert effective_sample_size([1e200, 2e200, 3e200]) == pytest.approx(36 / (3 * 14))


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_what_is_no_weight_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        effective_sample_size([1.0, bad])
