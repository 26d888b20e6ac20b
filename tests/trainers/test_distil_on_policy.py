"""Owns: rounds in which a teacher scores what the trained policies say (`MarftTrainer.distil_on_policy`).

- The policy comes nearer to the teacher from round to round, by the exact KL over the vocabulary too; rewards, forced
  tokens and the base model have no part in it.
- What it reports, before and after, is the KL of each agent.
- A round without a decided token moves nothing; one without a call is refused.
"""

# ruff: noqa: N806 (shape suffixes)
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

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


def make_trainer(tmp_path: Path, **options: object) -> MarftTrainer:
    chosen = {"lr": 0.01, "epochs": 2, "minibatch_actions": 16, "target_modules": None, **options}
    targets = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
    lora = {"rank": 8, "target_modules": targets}
    chosen.pop("target_modules")
    return MarftTrainer(
        trainer_options(device="cpu", lora=lora, **chosen), save_tiny_llama(tmp_path / "student"), AGENTS, seed=0
    )


def play(trainer: MarftTrainer, episodes: int, generator: torch.Generator) -> list[Trajectory]:
    """Each agent says three tokens; nobody earns anything."""
    said = {agent: sample_batch(trainer, agent, [prompt] * episodes, 3, generator) for agent, prompt in PROMPTS.items()}
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
    for number in range(6):
        result = trainer.distil_on_policy(play(trainer, 64, generator), teacher)
        assert (trainer.rounds, result["mode"], result["episodes"]) == (number + 1, "distil_on_policy", 64)
        for agent in AGENTS:
            figures = result["agents"][agent]
            reported[agent].append((figures["teacher_kl_before"], figures["teacher_kl"]))
            exact[agent].append(exact_kl(trainer, teacher, agent))
    print(exact, reported)
    for agent in AGENTS:
        assert exact[agent][-1] < 0.5 * exact[agent][0]
        assert reported[agent][-1][0] < 0.5 * reported[agent][0][0]
        assert all(after < before for before, after in reported[agent][:3])
