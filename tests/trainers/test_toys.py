"""Owns: that the trainer learns, by its own path from sampled episodes to better policies, what small games ask for.

Every game is played by tiny random policies, three seeds each, and has a negative control on the same path: rewards
shuffled among the episodes of a round, the opposite reward, or an agent that is not told what it would need.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from support.tiny_policy import sample_batch
from support.toys import (
    CHAIN,
    OPTIONS,
    TURNS,
    VOCABULARY,
    chain,
    climbing,
    learn,
    loop,
    mean_reward,
    mean_turns,
    opposite_roles,
    said,
    same_half,
    save_toy_model,
    secret_code,
    secret_code_in_trees,
)
from support.trainer_options import trainer_options

from trace_store.records import Trajectory
from trainers.advantages.estimator import estimators
from trainers.config import Granularity
from trainers.marft import MarftTrainer

SEEDS = [0, 1, 2]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_toy_model(tmp_path_factory.mktemp("toys") / "model")


def _trainer(model_dir: Path, names: tuple[str, ...], seed: int, **options: Any) -> MarftTrainer:
    return MarftTrainer(trainer_options(**(OPTIONS | options)), model_dir, names, seed)


def test_the_batched_sampler_draws_from_the_policy_whose_log_probs_it_tells(model_dir: Path) -> None:
    trainer = _trainer(model_dir, ("a", "b"), 0)
    with torch.no_grad():
        for name, parameter in trainer.policies.parameters("b").items():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    prompts = [[1, 10 + i % 2, 3] for i in range(4000)]
    actions = sample_batch(trainer, "b", prompts, 2, torch.Generator().manual_seed(0))
    for action, scored in zip(actions[:50], trainer.policies.logprobs_of("b", actions[:50]), strict=True):
        assert action.logprobs == pytest.approx(tuple(scored), abs=1e-5)
    model = trainer.policies.model
    model.use("b")
    for told in (10, 11):
        drawn = [a.sampled_ids[0] for a in actions if a.prompt_ids[1] == told]  # type: ignore[index]
        probability = model.peft(input_ids=torch.tensor([[1, told, 3]])).logits[0, -1].softmax(-1).double()
        drawn_share = torch.bincount(torch.tensor(drawn), minlength=len(probability)).double() / len(drawn)
        assert bool(
            ((drawn_share - probability).abs() < 5 * (probability * (1 - probability) / len(drawn)).sqrt() + 1e-9).all()
        )


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_planner_and_solver_agree_on_a_code_for_a_secret(model_dir: Path, seed: int) -> None:
    reached = {}
    for control in (False, True):
        trainer = _trainer(model_dir, ("planner", "solver"), seed)
        reached[control] = mean_reward(learn(trainer, secret_code, 20, 128, seed, control)[-1])
    assert reached[False] > 0.5  # 0.25 by chance
    assert reached[True] < 0.35


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["c3", "tree_grpo", "at_grpo"])
def test_rounds_of_trees_teach_the_code_too(model_dir: Path, estimator: str) -> None:
    for seed, control in [(0, True), *((seed, False) for seed in SEEDS)]:
        trainer = _trainer(model_dir, ("planner", "solver"), seed, estimator=estimator)
        reached = mean_reward(learn(trainer, secret_code_in_trees, 20, 128, seed, control)[-1])
        assert reached < 0.35 if control else reached > 0.5  # 0.25 by chance


@pytest.mark.slow
@pytest.mark.parametrize("by_step", [False, True], ids=["team reward", "step reward"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_loop_becomes_as_short_as_turns_cost_and_as_long_as_they_pay(
    model_dir: Path, by_step: bool, seed: int
) -> None:
    shaping = [{"reward": "turn", "level": "step", "weight": 1.0}] if by_step else []
    turns = {}
    for pays in (-0.2, 0.2):
        trainer = _trainer(model_dir, ("worker",), seed, weighting="episode", shaping=shaping)
        played = learn(trainer, loop(pays, by_step), 15, 32, seed)
        assert 2.5 < mean_turns(played[0]) < 4.8  # STOP is one token of four
        turns[pays] = mean_turns(played[-1])
    assert turns[-0.2] < 1.7
    assert turns[0.2] > TURNS - 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_eight_agents_in_a_chain_learn_to_pass_on_what_they_hear(model_dir: Path, seed: int) -> None:
    reached = {}
    for control in (False, True):
        played = learn(_trainer(model_dir, CHAIN, seed), chain, 8, 48, seed, control)
        reached[control] = mean_reward(played[-1])
    assert reached[False] > 0.7  # 0.5 by chance
    assert reached[True] < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_one_shared_adapter_learns_the_role_that_the_prompt_names(model_dir: Path, seed: int) -> None:
    agents = {"low": {"adapter": "both"}, "high": {"adapter": "both"}}
    reached = {}
    for asked in (True, False):
        trainer = _trainer(model_dir, ("low", "high"), seed, agents=agents)
        reached[asked] = mean_reward(learn(trainer, opposite_roles(asked), 12, 48, seed)[-1])
    assert reached[True] > 0.85
    assert reached[False] < 0.6  # 0.5, and a sample of 192 episodes


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_frozen_agent_stays_as_it_is_while_its_partner_learns(model_dir: Path, tmp_path: Path, seed: int) -> None:
    game, names = same_half(1), ("first", "second")
    both = _trainer(model_dir, names, seed)
    learn(both, game, 2, 48, seed)
    both.policies.save_adapter("first", tmp_path / "first@2")
    trainer = _trainer(model_dir, names, seed, agents={"first": {"frozen": True}})
    trainer.policies.load_adapter("first", tmp_path / "first@2")
    before = {name: p.detach().clone() for name, p in trainer.policies.parameters("first").items()}
    played = learn(trainer, game, 10, 48, seed)
    assert all(torch.equal(p, before[name]) for name, p in trainer.policies.parameters("first").items())
    assert trainer.policies.adapter_norm("first") > 0
    assert _own_share(played[0], 1) < 0.75
    assert _own_share(played[-1], 1) > 0.85
    assert abs(_own_share(played[-1], 0) - _own_share(played[0], 0)) < 0.3  # samples of 48 and 192 of one policy


def _own_share(trajectories: Sequence[Trajectory], position: int) -> float:
    """How often one agent of `same_half` named its task's half."""
    right = [int(t.episode.task_id) == said(t.actions[position]) // (VOCABULARY // 2) for t in trajectories]
    return sum(right) / len(right)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_partner_that_sees_the_first_choice_leads_a_team_out_of_the_safe_trap(model_dir: Path, seed: int) -> None:
    # the first agent moves slowly, so that the second has learned to follow before the first has given A up
    agents = {"first": {"lr": OPTIONS["lr"] / 3}}
    reached = {}
    for sees in (True, False):
        trainer = _trainer(model_dir, ("first", "second"), seed, update="sequential", agents=agents)
        reached[sees] = mean_reward(learn(trainer, climbing(sees), 25, 64, seed)[-1])
    assert reached[True] > 0.85  # both A pays 1
    assert 0.4 < reached[False] < 0.65  # both B pays 0.6


@pytest.mark.slow
@pytest.mark.parametrize("granularity", get_args(Granularity))
@pytest.mark.parametrize(
    "estimator",
    [
        name
        for name, each in estimators().items()
        if not each.needs_forks and not each.needs_sides and not each.pays_calls_alone
    ],
)
def test_every_estimator_of_whole_runs_teaches_a_game_of_two(model_dir: Path, estimator: str, granularity: str) -> None:
    game = same_half(2 if granularity == "token" else 1)
    for seed, control in [(0, True), *((seed, False) for seed in SEEDS)]:
        trainer = _trainer(model_dir, ("first", "second"), seed, estimator=estimator, granularity=granularity)
        reached = mean_reward(learn(trainer, game, 10, 48, seed, control)[-1])
        assert reached < 0.65 if control else reached > 0.7  # 0.5 by chance
