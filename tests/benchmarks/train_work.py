"""A recorded round of the demo -> one optimiser step per agent: by the trainer, and naively as one writes it first.

Both sides get the same actions, advantages, old log-probs and adapters, take every step with learning rate 0, and hand
back the norms of their gradients, which the benches hold against each other: only equal work is compared. Neither
side scores the old policy, the reference or the critic's features: what is compared is forward, backward and step.

Naive is: rows in the order in which they were sampled, sixteen at a time, padded to their longest with an attention
mask; logits, in float32, of every position; log-softmax over all of them; the clipped surrogate; backward; AdamW.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from support.trainer_options import trainer_options
from torch import Tensor
from transformers import AutoModelForCausalLM

from trainers.batch import ActionItem
from trainers.common.workers import Workers
from trainers.objective.adapter_round import AdapterRound
from trainers.objective.improve import improve
from trainers.policies.adapter_learner import AdapterLearner
from trainers.scoring.model import PolicyModel

AGENTS = ("reasoner", "actor")
EPISODES = 22  # a third of the demo's round: what one of its optimiser steps takes
NAIVE_ROWS = 16
TEMPERATURE = 0.7
OPTIONS = trainer_options(proximal="engine", mismatch="none", minibatch_actions=10_000, tokens_per_microbatch=1024)
VOCABULARY = 49152

Work = dict[str, list[ActionItem]]


def demo_work(episodes: int = EPISODES) -> Work:
    """The first episodes of a round that the demo recorded, by agent, in the order in which they were sampled."""
    recorded = json.loads((Path(__file__).parent / "duo_round.json").read_text())[:episodes]
    work: Work = {agent: [] for agent in AGENTS}
    for episode in recorded:
        for action in episode["actions"]:
            work[action["agent"]].append(_item(action["agent"], action["prompt_ids"], action["sampled_ids"]))
    return work


def unshared_work(episodes: int = EPISODES) -> Work:
    """Actions of the demo's lengths with random ids, so that no two of them begin alike."""
    pick = random.Random(0)
    return {
        agent: [
            _item(agent, *([pick.randrange(VOCABULARY) for _ in ids] for ids in (item.prompt_ids, item.sampled_ids)))
            for item in items
        ]
        for agent, items in demo_work(episodes).items()
    }


def _item(agent: str, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> ActionItem:
    return ActionItem(agent, tuple(prompt_ids), tuple(sampled_ids), None, TEMPERATURE)


def sampled_tokens(work: Work) -> int:
    """What the speed of an update is counted in."""
    return sum(len(item.sampled_ids) for items in work.values() for item in items)


class OurUpdate:
    """The trainer's own optimiser loop on the work."""

    def __init__(self, model_dir: Path, work: Work) -> None:
        self.model = PolicyModel(model_dir, AGENTS, OPTIONS.lora, "cpu", seed=0)
        self.learners = {
            agent: AdapterLearner(self.model, agent, lr=0.0, options=OPTIONS, workers=Workers.alone())
            for agent in AGENTS
        }
        self.rounds = {agent: self._round(agent, items) for agent, items in work.items()}

    def _round(self, agent: str, items: list[ActionItem]) -> AdapterRound:
        return AdapterRound(
            items=items,
            episode_A=list(range(len(items))),
            old_T=self.learners[agent].logprobs(items),
            reference_T=None,
            advantage_U=[torch.tensor([value]) for value in advantages(len(items))],
            factor_A=torch.ones(len(items)),
            positive_A=torch.zeros(len(items)),
        )

    def step(self) -> dict[str, float]:
        """One optimiser step of every agent; the norms of their gradients."""
        norms = {}
        for agent, learner in self.learners.items():
            improved = improve(learner, self.rounds[agent], torch.Generator().manual_seed(0), tick=lambda _: None)
            norms[agent] = improved["grad_norm"]
        return norms


class NaiveUpdate:
    """The same with nothing but transformers and peft; adapters are those of `weights`, or fresh ones."""

    def __init__(self, model_dir: Path, work: Work, old: dict[str, list[Tensor]], weights: PolicyModel | None) -> None:
        base: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)
        lora = OPTIONS.lora
        config = LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.target_modules), task_type="CAUSAL_LM"
        )
        self.peft: Any = get_peft_model(base, config, adapter_name=AGENTS[0])
        for agent in AGENTS[1:]:
            self.peft.add_adapter(agent, config)
        self.work, self.old, self.parameters = work, old, {}
        for agent in AGENTS:
            named = {n.replace(f".{agent}.", "."): p for n, p in self.peft.named_parameters() if f".{agent}." in n}
            with torch.no_grad():
                for name, parameter in weights.parameters(agent).items() if weights is not None else ():
                    named[name].copy_(parameter)
            self.parameters[agent] = list(named.values())
        self.optimizers = {agent: torch.optim.AdamW(self.parameters[agent], lr=0.0) for agent in AGENTS}
        self.peft.train()

    def step(self) -> dict[str, float]:
        """One optimiser step of every agent; the norms of their gradients."""
        norms = {}
        for agent in AGENTS:
            self.peft.set_adapter(agent)
            items, old, values = self.work[agent], self.old[agent], advantages(len(self.work[agent]))
            self.optimizers[agent].zero_grad()
            for first in range(0, len(items), NAIVE_ROWS):
                rows = slice(first, first + NAIVE_ROWS)
                loss = self._loss(items[rows], old[rows], torch.tensor(values[rows])) / len(items)
                loss.backward()
            norms[agent] = float(torch.nn.utils.clip_grad_norm_(self.parameters[agent], OPTIONS.max_grad_norm))
            self.optimizers[agent].step()
        return norms

    def _loss(self, items: Sequence[ActionItem], old_T: Sequence[Tensor], advantage_B: Tensor) -> Tensor:
        rows = [torch.tensor(item.prompt_ids + item.sampled_ids) for item in items]
        ids_BL = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths_B1 = torch.tensor([[len(row)] for row in rows])
        prompts_B1 = torch.tensor([[len(item.prompt_ids)] for item in items])
        column_L = torch.arange(ids_BL.shape[1])
        logits_BLV = self.peft(input_ids=ids_BL, attention_mask=(column_L < lengths_B1).long(), use_cache=False).logits
        logp_BLV = torch.log_softmax(logits_BLV[:, :-1] / TEMPERATURE, dim=-1)
        new_BL = logp_BLV.gather(2, ids_BL[:, 1:, None]).squeeze(2)
        sampled_BL = ((column_L >= prompts_B1) & (column_L < lengths_B1))[:, 1:]
        old_BL = torch.zeros_like(new_BL)
        old_BL[sampled_BL] = torch.cat(list(old_T))
        gap_B = ((new_BL - old_BL) * sampled_BL).sum(dim=1) / sampled_BL.sum(dim=1)
        ratio_B = gap_B.exp()
        clipped_B = ratio_B.clamp(1 - OPTIONS.clip_low, 1 + OPTIONS.clip_high)
        return -torch.minimum(ratio_B * advantage_B, clipped_B * advantage_B).sum()


def advantages(count: int) -> list[float]:
    """Values of both signs."""
    return [(-1.0) ** i * (1 + i % 3) for i in range(count)]


def step_to_seconds(update: OurUpdate | NaiveUpdate) -> tuple[float, dict[str, float]]:
    """Wall-clock time of one step, and its gradient norms."""
    began = time.perf_counter()
    norms = update.step()
    return time.perf_counter() - began, norms
