"""Owns: what a teacher's log-probs make of a policy's own tokens (on-policy distillation), as pure functions.

- A token's advantage is log p_teacher - log p_policy, of the policy as it is at that step, whatever the options say of
  rewards; there is no gradient through it.
- The expected gradient of the surrogate is that of the exact KL(policy || teacher), also after steps.
- The reported KL is that one where tokens come as often as they are sampled.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.trainer_options import trainer_options
from torch import Tensor

from trainers.batch import ActionItem
from trainers.config import TrainerOptions
from trainers.objective.adapter_round import AdapterRound, PreparedRound
from trainers.objective.distillation import mean_reverse_kl, options_to_distil, to_teacher
from trainers.objective.minibatch_loss import scored_to_loss
from trainers.scoring.microbatch import items_to_microbatches

WIDE = options_to_distil(trainer_options(clip_low=0.999, clip_high=1e6, mismatch="none"))


def surrogate(
    new_T: Tensor,
    old: list[float],
    teacher: list[float],
    options: TrainerOptions,
    *,
    engine: list[float] | None = None,
) -> Tensor:
    """The loss of one call with these log-probs, as the optimiser forms it. `engine`: None is as `old`."""
    item = ActionItem("actor", (1,), tuple(range(len(old))), behaviour=tuple(engine or old), temperature=1.0)
    data = AdapterRound(
        items=[item],
        episode_A=[0],
        old_T=[torch.tensor(old)],
        reference_T=None,
        advantage_U=[to_teacher(torch.tensor(old), torch.tensor(teacher))],
        factor_A=torch.ones(1),
        positive_A=torch.zeros(1),
        teacher_T=[torch.tensor(teacher)],
    )
    model: Any = SimpleNamespace(device=torch.device("cpu"))
    (batch,) = items_to_microbatches([item], 64)
    loss, _ = scored_to_loss(PreparedRound(data, options, model).scored(batch, new_T, None), options)
    return loss


def log(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def test_a_token_counts_by_what_the_teacher_finds_it_likelier_than_the_policy_of_this_step() -> None:
    new_T = torch.tensor(log(0.5, 0.6), requires_grad=True)
    loss = surrogate(new_T, log(0.5, 0.5), log(0.25, 0.75), WIDE)
    loss.backward()  # type: ignore[no-untyped-call]
    # ratios 1 and 1.2, advantages log(0.25 / 0.5) and log(0.75 / 0.6), each token half of the round
    first, second = 1.0 * math.log(0.5), 1.2 * math.log(1.25)
    assert float(loss.detach()) == pytest.approx(-(first + second) / 2)
    assert new_T.grad is not None
    assert new_T.grad.tolist() == pytest.approx([-first / 2, -second / 2])


def test_where_policy_and_teacher_agree_nothing_pulls_and_beyond_the_clip_nothing_does_either() -> None:
    clipped = options_to_distil(trainer_options(clip_low=0.2, clip_high=0.28, mismatch="none"))
    new_T = torch.tensor(log(0.5, 0.9, 0.1), requires_grad=True)
    loss = surrogate(new_T, log(0.5, 0.5, 0.5), log(0.5, 0.95, 0.05), clipped)
    loss.backward()  # type: ignore[no-untyped-call]
    assert new_T.grad is not None
    assert new_T.grad.tolist() == [0, 0, 0]


def test_the_engines_mismatch_weighs_a_token_as_in_every_round() -> None:
    options = options_to_distil(trainer_options(mismatch="truncate", mismatch_cap=2.0))
    old, teacher, engine = log(0.4, 0.4), log(0.2, 0.8), log(0.1, 0.8)
    loss = surrogate(torch.tensor(old), old, teacher, options, engine=engine)
    # the trainer finds the first token four times as likely as the engine did, capped at 2, and the second half so
    assert float(loss) == pytest.approx(-(2 * math.log(0.5) + 0.5 * math.log(2)) / 2)


@pytest.mark.parametrize("steps", [0.0, 0.7])
def test_the_expected_gradient_is_that_of_the_exact_reverse_kl_at_every_step(steps: float) -> None:
    generator = torch.Generator().manual_seed(3)
    old_V, step_V, teacher_V = (torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(3))
    logits_V = (old_V + steps * step_V).requires_grad_()
    exact = (logits_V.softmax(0) * (logits_V.log_softmax(0) - teacher_V.log_softmax(0))).sum()
    (exact_gradient_V,) = torch.autograd.grad(exact, logits_V)
    p_old, p_teacher = old_V.log_softmax(0), teacher_V.log_softmax(0)
    expected_V = torch.zeros(6, dtype=torch.float64)
    for token in range(6):  # every token, as often as the policy of the start samples it
        new_T = logits_V.log_softmax(0)[token : token + 1]
        loss = surrogate(new_T, [float(p_old[token])], [float(p_teacher[token])], WIDE)
        expected_V += p_old[token].exp() * torch.autograd.grad(loss, logits_V)[0]
    assert float(exact_gradient_V.abs().max()) > 0.05
    assert expected_V.tolist() == pytest.approx(exact_gradient_V.tolist(), abs=1e-6)


def test_the_reported_kl_is_the_exact_one_where_tokens_come_as_often_as_they_are_sampled() -> None:
    old, new, teacher = log(0.5, 0.25, 0.25), log(0.2, 0.5, 0.3), log(0.1, 0.1, 0.8)
    sampled = (0, 0, 1, 2)
    exact = 0.2 * math.log(0.2 / 0.1) + 0.5 * math.log(0.5 / 0.1) + 0.3 * math.log(0.3 / 0.8)

    def calls(logp_V: list[float]) -> list[Tensor]:
        """Of two calls of two tokens each."""
        return list(torch.tensor([logp_V[token] for token in sampled]).split(2))

    assert mean_reverse_kl(calls(old), calls(new), calls(teacher)) == pytest.approx(exact, rel=1e-5)
    at_start = 0.5 * math.log(0.5 / 0.1) + 0.25 * math.log(0.25 / 0.1) + 0.25 * math.log(0.25 / 0.8)
    assert mean_reverse_kl(calls(old), calls(old), calls(teacher)) == pytest.approx(at_start, rel=1e-5)
    assert mean_reverse_kl([], [], []) is None


def test_what_is_meant_for_rewards_has_no_part_in_it() -> None:
    options = trainer_options(
        granularity="action", negative_weight=0.0, kl_target=1.0, update="sequential", entropy_coef=0.1, kl_coef=0.1
    )
    chosen = options_to_distil(options)
    assert (chosen.granularity, chosen.loss_weighting, chosen.objective.negative_weight) == ("token", "token", 1)
    assert (chosen.objective.kl_target, chosen.objective.update) == (None, "simultaneous")
    assert (chosen.experimental.entropy_coef, chosen.experimental.kl_coef) == (0, 0)
    assert (chosen.optimizer, chosen.importance) == (options.optimizer, options.importance)
