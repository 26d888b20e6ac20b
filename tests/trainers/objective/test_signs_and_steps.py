"""Owns: what a negative advantage counts, which actions are computed at all, and how a round is cut into steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_policy import AGENTS, make_trajectory, sample_batch, save_tiny_llama
from support.trainer_options import trainer_options

from trace_store.records import Trajectory
from trainers.marft import MarftTrainer

REWARDS = [1.0, 0.0, 0.2, 0.9, 0.1, 0.4, 0.8, 0.3]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def trainer_of(model_dir: Path, **options: Any) -> MarftTrainer:
    fields = {"device": "cpu", "mismatch": "none", "minibatch_actions": 1000, "max_grad_norm": 1e9} | options
    return MarftTrainer(trainer_options(**fields), model_dir, AGENTS, seed=0)


def round_of(trainer: MarftTrainer, rewards: list[float] = REWARDS) -> list[Trajectory]:
    """The actor's own calls, one an episode."""
    actions = sample_batch(trainer, "actor", [[3, 1]] * len(rewards), 2, torch.Generator().manual_seed(2))
    return [
        make_trajectory([action], reward, task_id=str(i))
        for i, (action, reward) in enumerate(zip(actions, rewards, strict=True))
    ]


def gradient(trainer: MarftTrainer, rewards: list[float]) -> torch.Tensor:
    """Of the actor's first step."""
    learner, seen = trainer.learners["actor"], list[torch.Tensor]()
    step = learner.optimizer.step

    def spy() -> None:
        seen.append(torch.cat([p.grad.flatten() for p in learner.parameters if p.grad is not None]).clone())
        step()

    learner.optimizer.step = spy  # type: ignore[method-assign, assignment]
    trainer.update(round_of(trainer, rewards))
    return seen[0]


def test_a_negative_advantage_counts_as_much_as_its_weight_says(model_dir: Path) -> None:
    whole, none, tenth = (gradient(trainer_of(model_dir, negative_weight=w), REWARDS) for w in (1.0, 0.0, 0.1))
    torch.testing.assert_close(tenth, none + 0.1 * (whole - none), atol=1e-6, rtol=1e-4)
    assert float((whole - none).norm()) > 0.1 * float(whole.norm())


def test_without_negative_ones_the_gradient_is_that_of_the_better_actions_by_plain_autograd(model_dir: Path) -> None:
    ours = gradient(trainer_of(model_dir, negative_weight=0.0, normalize="none"), REWARDS)
    trainer = trainer_of(model_dir)
    played = round_of(trainer)
    model = trainer.policies.model_of("actor")
    model.use("actor")
    loss = torch.zeros(())
    mean = sum(REWARDS) / len(REWARDS)
    for trajectory, reward in zip(played, REWARDS, strict=True):
        advantage = reward  # a new critic says 0
        assert mean > 0
        if advantage > 0:
            (action,) = trajectory.actions
            ids = torch.tensor([[*(action.prompt_ids or ()), *(action.sampled_ids or ())]])
            logp = model.peft(input_ids=ids).logits[0, 1:-1].log_softmax(-1)
            loss = loss - advantage * logp[range(2), list(action.sampled_ids or ())].mean() / len(REWARDS)
    parameters = list(trainer.policies.parameters("actor").values())
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-4)


def test_what_has_no_part_in_the_loss_is_not_computed(model_dir: Path) -> None:
    ticks: dict[str, int] = {}

    def progress(phase: str, done: int, _total: int) -> None:
        ticks[phase] = max(ticks.get(phase, 0), done)

    def computed(**options: Any) -> int:
        ticks.clear()
        trainer = trainer_of(model_dir, **options)
        trainer.progress = progress
        trainer.update(round_of(trainer))
        return ticks["update actor"]

    better = sum(reward > sum(REWARDS) / len(REWARDS) for reward in REWARDS)
    assert computed(negative_weight=0.0) == better == 3
    assert computed(negative_weight=1.0) == len(REWARDS)
    assert computed(negative_weight=0.0, entropy_coef=0.01) == len(REWARDS)  # every action has a part in the entropy


@pytest.mark.parametrize(("actions", "steps"), [(3, 1), (8, 2), (48, 12)])
def test_a_rare_agent_takes_few_steps(model_dir: Path, actions: int, steps: int) -> None:
    trainer = trainer_of(model_dir, minibatch_actions=4)
    rewards = [float(i % 2) for i in range(actions)]
    assert trainer.update(round_of(trainer, rewards))["agents"]["actor"]["steps"] == steps


def test_a_round_whose_actions_all_did_as_expected_takes_no_step(model_dir: Path) -> None:
    trainer = trainer_of(model_dir, negative_weight=0.0)
    figures = trainer.update(round_of(trainer, [0.5] * 8))["agents"]["actor"]
    assert (figures["steps"], figures["adapter_moved"]) == (0, 0.0)
