"""Owns: rounds in which a teacher scores what the trained policies say (`MarftTrainer.distil_on_policy`).

- The policy comes nearer to the teacher from round to round, by the exact KL over the vocabulary too; rewards, forced
  tokens and the base model have no part in it.
- What it reports, before and after, is the KL of each agent.
- A round without a decided token moves nothing; one without a call is refused.
"""

# ruff: noqa: N806 (shape suffixes)
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_policy import AGENTS, make_action, make_trajectory, sample_batch, save_tiny_llama
from support.trainer_options import trainer_options
from transformers import AutoModelForCausalLM

from trace_store.records import Trajectory
from trainers.errors import TrainError
from trainers.marft import MarftTrainer

PROMPTS = {"reasoner": [1, 4], "actor": [2, 5]}


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    return save_tiny_llama(tmp_path / "teacher", seed=7, hidden=64, layers=3)


def make_trainer(tmp_path: Path, **options: Any) -> MarftTrainer:
    lora = {"rank": 8, "target_modules": ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")}
    chosen = trainer_options(device="cpu", lora=lora, **{"lr": 0.003, "epochs": 2, **options})
    return MarftTrainer(chosen, save_tiny_llama(tmp_path / "student"), AGENTS, seed=0)


def play(trainer: MarftTrainer, episodes: int, generator: torch.Generator, tokens: int = 3) -> list[Trajectory]:
    """Each agent says some tokens; nobody earns anything."""
    said = {
        agent: sample_batch(trainer, agent, [prompt] * episodes, tokens, generator) for agent, prompt in PROMPTS.items()
    }
    return [make_trajectory([said[agent][i] for agent in AGENTS], None, task_id=f"t{i}") for i in range(episodes)]


@torch.no_grad()
def exact_kl(trainer: MarftTrainer, teacher: Path, agent: str) -> float:
    """KL(policy || teacher) of the first token over the whole vocabulary, by plain passes of both models."""
    model = trainer.policies.model_of(agent)
    model.use(trainer.policies.adapter_of(agent))
    ids = torch.tensor([PROMPTS[agent]])
    ours_V = model.peft(input_ids=ids).logits[0, -1].log_softmax(-1)
    theirs_V = AutoModelForCausalLM.from_pretrained(teacher)(input_ids=ids).logits[0, -1].log_softmax(-1)
    return float((ours_V.exp() * (ours_V - theirs_V)).sum())


def test_the_policy_comes_nearer_to_the_teacher_from_round_to_round(tmp_path: Path, teacher: Path) -> None:
    trainer = make_trainer(tmp_path)
    generator = torch.Generator().manual_seed(1)
    exact = {agent: [exact_kl(trainer, teacher, agent)] for agent in AGENTS}
    reported: dict[str, list[tuple[float, float]]] = {agent: [] for agent in AGENTS}
    for number in range(8):
        result = trainer.distil_on_policy(play(trainer, 64, generator), teacher)
        assert (trainer.rounds, result["mode"], result["episodes"]) == (number + 1, "distil_on_policy", 64)
        for agent in AGENTS:
            figures = result["agents"][agent]
            reported[agent].append((figures["teacher_kl_before"], figures["teacher_kl"]))
            exact[agent].append(exact_kl(trainer, teacher, agent))
    for agent in AGENTS:
        assert exact[agent][-1] < 0.25 * exact[agent][0]
        assert reported[agent][-1][0] < 0.6 * reported[agent][0][0]
        assert all(after < before for before, after in reported[agent])
    assert result["agents"]["actor"]["steps"] == 2 * 64 // 16
    assert result["agents"]["actor"]["tokens"] == 64 * 3


def test_what_is_reported_before_and_after_is_the_kl_of_each_agent(tmp_path: Path, teacher: Path) -> None:
    trainer = make_trainer(tmp_path, epochs=1, minibatch_actions=64)
    played = play(trainer, 512, torch.Generator().manual_seed(2), tokens=1)
    before = {agent: exact_kl(trainer, teacher, agent) for agent in AGENTS}
    result = trainer.distil_on_policy(played, teacher)
    for agent in AGENTS:
        figures, after = result["agents"][agent], exact_kl(trainer, teacher, agent)
        assert figures["teacher_kl_before"] == pytest.approx(before[agent], rel=0.15)
        assert figures["teacher_kl"] == pytest.approx(after, rel=0.15)
        assert figures["advantage_mean"] == pytest.approx(-before[agent], rel=0.15)
        assert after < 0.9 * before[agent]


def test_a_forced_token_is_not_scored_and_pulls_nothing(tmp_path: Path, teacher: Path) -> None:
    weights = []
    for name, ending in (("with", (9,)), ("without", ())):
        trainer = make_trainer(tmp_path / name)
        trainer.policies.model.peft.double()
        trainer.policies.note_frozen()
        sampled = sample_batch(trainer, "actor", [[1, 4]] * 16, 2, torch.Generator().manual_seed(3))
        actions = [
            replace(
                action,
                sampled_ids=(*(action.sampled_ids or ()), *ending),
                logprobs=(*(action.logprobs or ()), *(0.0 for _ in ending)),
            )
            for action in sampled
        ]
        result = trainer.distil_on_policy([make_trajectory([action], None) for action in actions], teacher)
        assert result["agents"]["actor"]["tokens"] == 32
        weights.append([p.detach().clone() for p in trainer.policies.parameters("actor").values()])
    for ours, theirs in zip(*weights, strict=True):  # read once, to tell whether it was forced: in other rows
        torch.testing.assert_close(ours, theirs, atol=1e-8, rtol=0)


def test_a_round_without_a_decision_moves_nothing_and_one_without_a_call_is_refused(
    tmp_path: Path, teacher: Path
) -> None:
    trainer = make_trainer(tmp_path)
    forced = make_action("actor", [1, 4], [7], logprobs=(0.0,))
    result = trainer.distil_on_policy([make_trajectory([forced], 1.0)], teacher)
    assert (trainer.rounds, result["agents"], result["mode"]) == (1, {}, "distil_on_policy")
    assert result["warnings"] == [
        "every token of this round was forced (its log-prob by the engine is 0), so nothing was learned"
    ]
    unknown = make_action("actor", [1, 4], [7], logprobs=None, trainable=False, untrainable_reason="no log-probs")
    with pytest.raises(TrainError, match="no action of this round can be trained on: 1 x action: no log-probs"):
        trainer.distil_on_policy([make_trajectory([unknown], 1.0)], teacher)
    assert trainer.rounds == 1


def test_options_that_are_about_rewards_change_nothing(tmp_path: Path, teacher: Path) -> None:
    weights = []
    for name, options in (
        ("plain", {}),
        ("other", {"negative_weight": 0.0, "kl_target": 0.1, "granularity": "action"}),
    ):
        trainer = make_trainer(tmp_path / name, **options)
        trainer.distil_on_policy(play(trainer, 16, torch.Generator().manual_seed(4)), teacher)
        weights.append(
            trainer.policies.parameters("reasoner")["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
        )
    assert torch.equal(weights[0], weights[1])
