"""Helpers of the trainer's tests: a tiny random Llama on disk, hand-made trajectories, and a two-agent game."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from support import tiny_trajectory
from trace_store.records import Action, Edge, Episode, Outcome, Reward, Trajectory
from trainers.marft import MarftTrainer

VOCABULARY = 32
AGENTS = ("reasoner", "actor")


def save_tiny_llama(
    folder: Path, seed: int = 0, vocabulary: int = VOCABULARY, hidden: int = 32, layers: int = 2
) -> Path:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_action(node: str, prompt: Sequence[int], sampled: Sequence[int], **changes: object) -> Action:
    return tiny_trajectory.action(node, sampled, prompt_ids=tuple(prompt), **changes)


def make_trajectory(
    actions: Sequence[Action],
    reward: float | None,
    edges: Sequence[tuple[int, int]] | None = None,
    task_id: str = "t",
    outcome: Outcome = "terminated",
) -> Trajectory:
    """Actions in order; each depends on the one before unless `edges` (positions) says otherwise."""
    episode = Episode(
        episode_id="e",
        run_id="run",
        task_id=task_id,
        split="train",
        sample=0,
        round=0,
        variant=None,
        seed=None,
        adapters={},
        outcome=outcome,
        reason=None if outcome == "terminated" else "test",
        started_ns=0,
        ended_ns=1,
        span_count=1,
    )
    numbered = tuple(replace(a, action_id=str(i), index=i) for i, a in enumerate(actions))
    pairs = [(i, i + 1) for i in range(len(actions) - 1)] if edges is None else edges
    rewards = () if reward is None else (Reward("e", "reward", reward, "test", 1),)
    return Trajectory(episode, numbered, tuple(Edge("e", str(i), str(j), "data") for i, j in pairs), rewards)


@torch.no_grad()
def sample(trainer: MarftTrainer, agent: str, prompt: list[int], tokens: int, generator: torch.Generator) -> Action:
    """Tokens from the agent's policy with its own log-probs, by plain full-logit steps."""
    model = trainer.policies.model_of(agent)
    model.use(trainer.policies.adapter_of(agent))
    ids, logprobs = list(prompt), []
    for _ in range(tokens):
        logits = model.peft(input_ids=torch.tensor([ids])).logits[0, -1]
        logp = logits.log_softmax(-1)
        token = int(torch.multinomial(logp.exp(), 1, generator=generator))
        ids.append(token)
        logprobs.append(float(logp[token]))
    return make_action(agent, prompt, ids[len(prompt) :], logprobs=tuple(logprobs))


@torch.no_grad()
def sample_batch(
    trainer: MarftTrainer, agent: str, prompts: Sequence[Sequence[int]], tokens: int, generator: torch.Generator
) -> list[Action]:
    """As `sample`, for many prompts of one length at once; the draws differ from those of one after another."""
    model = trainer.policies.model_of(agent)
    model.use(trainer.policies.adapter_of(agent))
    ids = torch.tensor(prompts)
    said = []
    for _ in range(tokens):
        logp = model.peft(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1].log_softmax(-1)
        drawn = torch.multinomial(logp.exp(), 1, generator=generator)
        said.append(logp.gather(1, drawn))
        ids = torch.cat([ids, drawn], 1)
    rows = zip(prompts, ids[:, -tokens:].tolist(), torch.cat(said, 1).tolist(), strict=True)
    return [make_action(agent, prompt, sampled, logprobs=tuple(logprobs)) for prompt, sampled, logprobs in rows]


def play(
    trainer: MarftTrainer, episodes: int, generator: torch.Generator, score: Callable[[Action, Action], float]
) -> list[Trajectory]:
    """The reasoner says one token about the task, the actor sees it and says another."""
    played = []
    for i in range(episodes):
        task = 4 + i % 4
        first = sample(trainer, "reasoner", [1, task], 1, generator)
        second = sample(trainer, "actor", [2, task, *(first.sampled_ids or ())], 1, generator)
        trajectory = make_trajectory([first, second], score(first, second), task_id=str(task))
        played.append(replace(trajectory, episode=replace(trajectory.episode, episode_id=f"e{i}")))
    return played


def both_low(first: Action, second: Action) -> float:
    """1 when both agents named a token of the lower half: a quarter of the time for uniform policies."""
    assert first.sampled_ids is not None
    assert second.sampled_ids is not None
    return float(first.sampled_ids[0] < VOCABULARY // 2 and second.sampled_ids[0] < VOCABULARY // 2)
