"""Owns: how many of its steps and how much of its rate a round is worth.

- A round with one failure among many runs moves an adapter a fraction as far as one that tells half from half, though
  AdamW's steps would have one size; and so does one telling group among many that say nothing.
- The share is worked by hand, and knows no unit.
- Passes beyond the first are left out before steps are shortened, and no better action goes unseen.
- Where the better actions are no more than the worse ones, or both signs count, the weights are those of before, bit
  for bit.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_policy import AGENTS, make_trajectory, sample_batch, save_tiny_llama
from support.trainer_options import trainer_options

import trainers.objective.update_order as update_order
from trainers.marft import MarftTrainer
from trainers.objective.adapter_round import PreparedRound
from trainers.objective.round_worth import RoundWorth, advantages_to_share, worth_of_round

RUNS = 24


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def update(model_dir: Path, failures: int, *, samples: int = 1, **options: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """Figures of the actor's round of `RUNS` calls, of which the first ones failed, and its weights afterwards."""
    fields = {"device": "cpu", "mismatch": "none", "minibatch_actions": 2, "negative_weight": 0.0, "lr": 1e-3} | options
    trainer = MarftTrainer(trainer_options(**fields), model_dir, AGENTS, seed=0)
    actions = sample_batch(trainer, "actor", [[3, 1]] * RUNS, 2, torch.Generator().manual_seed(2))
    rewards = [float(i >= failures) for i in range(RUNS)]
    played = [
        make_trajectory([a], r, task_id=str(i // samples))
        for i, (a, r) in enumerate(zip(actions, rewards, strict=True))
    ]
    figures = trainer.update(played)["agents"]["actor"]
    return figures, torch.cat([p.detach().flatten() for p in trainer.policies.parameters("actor").values()])


def test_one_failure_of_many_runs_moves_an_adapter_less_than_a_round_that_tells_half_from_half(
    model_dir: Path,
) -> None:
    nearly_right, half_right = update(model_dir, 1)[0], update(model_dir, RUNS // 2)[0]
    assert nearly_right["adapter_moved"] < half_right["adapter_moved"] / 2
    way = [figures["lr"] * figures["steps"] for figures in (nearly_right, half_right)]
    assert way[0] / (RUNS - 1) == pytest.approx(way[1] / (RUNS / 2) / math.sqrt(RUNS - 1), rel=0.1)


@pytest.mark.parametrize(
    ("right", "epochs", "steps", "rate"),
    [
        (1 / 2, 2, 1.0, 1.0),
        (4 / 5, 2, 1 / 2, 1.0),  # worth 1 / 2: one pass of the two
        (16 / 17, 2, 1 / 2, 1 / 2),  # worth 1 / 4
        (16 / 17, 4, 1 / 4, 1.0),
        (16 / 17, 1, 1.0, 1 / 4),  # one pass is whole
        (25 / 34, 2, 3 / 5, 1.0),  # a pass and a fifth of another
    ],
)
def test_passes_are_left_out_before_steps_are_shortened(right: float, epochs: int, steps: float, rate: float) -> None:
    advantages = [1 - right] * round(850 * right) + [-right] * round(850 * (1 - right))
    extent = worth_of_round(advantages, 0.0, epochs=epochs)
    assert (extent.steps, extent.rate) == (pytest.approx(steps), pytest.approx(rate))


@pytest.mark.parametrize(("minibatch_actions", "steps"), [(2, 11), (16, 2), (64, 2)])
def test_steps_that_are_rounded_up_are_so_much_shorter(model_dir: Path, minibatch_actions: int, steps: int) -> None:
    """Of 24 runs 18 are right, so that the round is worth the root of 1 / 3 of its two passes of 9, 1 and 1 steps."""
    figures = update(model_dir, 6, epochs=2, minibatch_actions=minibatch_actions)[0]
    passes = {2: 9, 16: 1, 64: 1}[minibatch_actions]
    assert figures["steps"] == steps
    assert figures["lr"] * steps == pytest.approx(1e-3 * 2 * passes * math.sqrt(1 / 3))


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_a_round_that_is_worth_little_sees_every_better_action_once(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, epochs: int
) -> None:
    learned_rows: list[int] = []
    moved_tokens = PreparedRound.moved_tokens

    def noting(prepared: PreparedRound, rows: list[int]) -> int:
        learned_rows.extend(rows)
        return moved_tokens(prepared, rows)

    monkeypatch.setattr(PreparedRound, "moved_tokens", noting)
    figures = update(model_dir, 1, epochs=epochs)[0]
    assert sorted(learned_rows) == list(range(1, RUNS))
    assert figures["steps"] == round((RUNS - 1) / 2)


@pytest.mark.parametrize("estimator", ["rloo", "grpo"])
def test_one_telling_group_among_many_is_worth_what_it_tells(model_dir: Path, estimator: str) -> None:
    nearly_right = update(model_dir, 1, samples=4, estimator=estimator)[0]
    half_right = update(model_dir, 2, samples=4, estimator=estimator)[0]
    assert nearly_right["lr"] == pytest.approx(half_right["lr"] / math.sqrt(3))
    by_step = [figures["adapter_moved"] / figures["steps"] for figures in (nearly_right, half_right)]
    assert by_step[0] < 0.7 * by_step[1]


@pytest.mark.parametrize(
    ("advantages", "negative_weight", "share"),
    [
        ([1.0, -1.0], 0.0, 1.0),
        ([3.0, -1.0, -1.0, -1.0], 0.0, 1.0),  # few successes: never more than the rate
        ([1.0, 1.0, 1.0, -3.0], 0.0, math.sqrt(1 / 3)),
        ([0.01, 0.01, 0.01, -0.03], 0.0, math.sqrt(1 / 3)),  # in another unit
        ([1.0, 1.0, 1.0, -3.0, 0.0, 0.0], 0.0, math.sqrt(1 / 3)),  # beside a group that says nothing
        ([1 / 47] * 47 + [-1.0], 0.0, math.sqrt(1 / 47)),
        ([2.0, 1.0, -1.0, -2.0], 0.0, 1.0),
        ([1.0, 1.0, 1.0, -3.0], 1.0, 1.0),
        ([1.0, 1.0, 1.0, -3.0], 0.1, math.sqrt(1 / 3 + 0.01)),
        ([0.0, 0.0], 0.0, 1.0),
        ([-1.0], 0.0, 1.0),  # nothing to learn from
        ([1.0], 0.0, 1.0),  # nothing to hold against
        ([], 0.0, 1.0),
    ],
)
def test_the_share_is_a_ratio_of_roots_of_squares(
    advantages: list[float], negative_weight: float, share: float
) -> None:
    assert advantages_to_share(advantages, negative_weight) == pytest.approx(share)


@pytest.mark.parametrize(
    ("failures", "options"), [(RUNS // 2, {}), (RUNS - 3, {}), (1, {"negative_weight": 1.0}), (1, {"kl_target": 5.0})]
)
def test_a_round_that_is_worth_its_whole_rate_is_as_before_bit_for_bit(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, failures: int, options: dict[str, Any]
) -> None:
    figures, weights = update(model_dir, failures, **options)
    monkeypatch.setattr(update_order, "worth_of_round", lambda *_: RoundWorth())
    plain_figures, plain_weights = update(model_dir, failures, **options)
    assert figures["lr"] == plain_figures["lr"]
    assert torch.equal(weights, plain_weights)
