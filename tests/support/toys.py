"""Small games for tiny policies: what must be learned, and how it is played with a trainer's own policies.

Each game is a function (trainer, number of episodes, generator) -> trajectories with exact log-probs, and knows nothing
of how they are learned from. Tokens of `VOCABULARY` stand for choices; what a prompt says is said there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from support.fork_toys import as_fork, as_named
from support.tiny_policy import make_trajectory, sample_batch, save_tiny_llama
from trace_store.records import Action, Reward, Trajectory
from trainers.marft import MarftTrainer

VOCABULARY = 16
"""Tokens 0..9 also stand in prompts for who is asked; 10..15 for what is told."""

OPTIONS = {
    "device": "cpu",
    "threads": 1,
    "lr": 0.01,
    "minibatch_actions": 16,
    "lora": {"rank": 4, "alpha": 16.0, "target_modules": ("q_proj", "v_proj", "o_proj")},
}
"""Of a trainer that learns the toys; what a game needs beside them is said with it."""

Game = Callable[[MarftTrainer, int, torch.Generator], list[Trajectory]]


def save_toy_model(folder: Path) -> Path:
    """A random Llama of 20000 weights; the toys are played by adapters on it."""
    return save_tiny_llama(folder, vocabulary=VOCABULARY)


def said(action: Action) -> int:
    """The first token that the agent sampled."""
    assert action.sampled_ids is not None
    return action.sampled_ids[0]


def mean_reward(trajectories: Sequence[Trajectory]) -> float:
    """Of the team."""
    return sum(t.team_reward("reward") or 0.0 for t in trajectories) / len(trajectories)


def shuffled(trajectories: Sequence[Trajectory], generator: torch.Generator) -> list[Trajectory]:
    """The same episodes, each with the rewards of another: what is earned says nothing of what was done.

    A reward of a step stays with a step, of a shorter episode with its last one.
    """
    order = torch.randperm(len(trajectories), generator=generator).tolist()
    return [
        replace(t, rewards=tuple(_moved(reward, t) for reward in trajectories[i].rewards))
        for t, i in zip(trajectories, order, strict=True)
    ]


def _moved(reward: Reward, to: Trajectory) -> Reward:
    if reward.action_id is None:
        return reward
    return replace(reward, action_id=str(min(int(reward.action_id), len(to.actions) - 1)))


def learn(
    trainer: MarftTrainer, game: Game, rounds: int, episodes: int, seed: int, control: bool = False
) -> list[list[Trajectory]]:
    """What was played before each of `rounds` updates, and after the last one.

    `control` is the same path with rewards shuffled among the episodes of a round before they are learned from.
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    played = []
    for _ in range(rounds):
        played.append(game(trainer, episodes, generator))
        trainer.update(shuffled(played[-1], generator) if control else played[-1])
    return [*played, game(trainer, 4 * episodes, generator)]


# -- two agents ------------------------------------------------------------------------------------------------------

CLIMB = {("A", "A"): 1.0, ("B", "B"): 0.6, ("A", "B"): -0.5, ("B", "A"): -0.5}


def climb_choice(action: Action) -> str:
    """A is one token of four, so that an untrained policy says B three times as often."""
    return "A" if said(action) % 4 == 0 else "B"


def climbing(sees: bool) -> Game:
    """Two agents choose A or B. Both A is best, both B is safe, and to disagree costs.

    With q the chance that the partner says A, a blind agent earns 1.5 q - 0.5 by A and 0.6 - 1.1 q by B: A pays only
    above q = 0.42, an untrained partner is at about 0.25, and so two blind agents are drawn to both B.
    With `sees` the second agent is told what the first one chose.
    """

    def play(trainer: MarftTrainer, episodes: int, generator: torch.Generator) -> list[Trajectory]:
        firsts = sample_batch(trainer, "first", [[1, 10]] * episodes, 1, generator)
        told = [11 + (climb_choice(first) == "A") if sees else 10 for first in firsts]
        seconds = sample_batch(trainer, "second", [[2, token] for token in told], 1, generator)
        return [
            make_trajectory([a, b], CLIMB[climb_choice(a), climb_choice(b)])
            for a, b in zip(firsts, seconds, strict=True)
        ]

    return play


SECRETS = 4


def secret_code(trainer: MarftTrainer, episodes: int, generator: torch.Generator) -> list[Trajectory]:
    """The planner is told a secret, one of four; the solver hears the planner's token only, and must name it.

    Tokens name secrets by their remainder, a quarter of the vocabulary each: one in four is right by chance.
    """
    secrets = torch.randint(SECRETS, (episodes,), generator=generator).tolist()
    plans = sample_batch(trainer, "planner", [[1, 10 + secret] for secret in secrets], 1, generator)
    answers = sample_batch(trainer, "solver", [[2, said(plan)] for plan in plans], 1, generator)
    return [
        make_trajectory([plan, answer], float(said(answer) % SECRETS == secret), task_id=str(secret))
        for plan, answer, secret in zip(plans, answers, secrets, strict=True)
    ]


def secret_code_in_trees(trainer: MarftTrainer, episodes: int, generator: torch.Generator) -> list[Trajectory]:
    """The same in trees: a quarter of the episodes are whole runs, and three forks leave each at its solver."""
    runs = [as_named(run, f"run{i}") for i, run in enumerate(secret_code(trainer, episodes // 4, generator))]
    parents = [run for run in runs for _ in range(3)]
    prompts = [[2, said(run.actions[0])] for run in parents]
    answers = sample_batch(trainer, "solver", prompts, 1, generator)
    forks = []
    for i, (run, answer) in enumerate(zip(parents, answers, strict=True)):
        right = float(said(answer) % SECRETS == int(run.episode.task_id))
        fork = make_trajectory([run.actions[0], answer], right, task_id=run.episode.task_id)
        forks.append(as_fork(as_named(fork, f"fork{i}"), run, 1))
    return [*runs, *forks]


def same_half(tokens: int) -> Game:
    """Both agents are told one of two tasks, the second also the first one's tokens; each must name the task's half.

    Every token of an action counts: the reward is the share of all tokens that lie in the half that the task names.
    """

    def play(trainer: MarftTrainer, episodes: int, generator: torch.Generator) -> list[Trajectory]:
        tasks = [i % 2 for i in range(episodes)]
        firsts = sample_batch(trainer, "first", [[1, 10 + task] for task in tasks], tokens, generator)
        prompts = [[2, 10 + task, *(a.sampled_ids or ())] for task, a in zip(tasks, firsts, strict=True)]
        seconds = sample_batch(trainer, "second", prompts, tokens, generator)
        played = []
        for task, a, b in zip(tasks, firsts, seconds, strict=True):
            ids = (*(a.sampled_ids or ()), *(b.sampled_ids or ()))
            share = sum(token // (VOCABULARY // 2) == task for token in ids) / len(ids)
            played.append(make_trajectory([a, b], share, task_id=str(task)))
        return played

    return play


def opposite_roles(asked: bool) -> Game:
    """The low agent must name a token of the lower half, the high one of the upper; half a point for each.

    Without `asked` both read the same prompt, and one policy for both earns exactly a half, whatever it is.
    """

    def play(trainer: MarftTrainer, episodes: int, generator: torch.Generator) -> list[Trajectory]:
        lows = sample_batch(trainer, "low", [[1, 10]] * episodes, 1, generator)
        highs = sample_batch(trainer, "high", [[2 if asked else 1, 10]] * episodes, 1, generator)
        half = VOCABULARY // 2
        return [
            make_trajectory([low, high], 0.5 * (said(low) < half) + 0.5 * (said(high) >= half))
            for low, high in zip(lows, highs, strict=True)
        ]

    return play


# -- one agent, many actions; many agents ----------------------------------------------------------------------------

TURNS = 6


def loop(pays: float, by_step: bool) -> Game:
    """One agent acts until it says STOP, one token of four, or is cut off after six turns.

    Each turn pays `pays`: in the team reward, or as a reward "turn" of that step.
    """

    def play(trainer: MarftTrainer, episodes: int, generator: torch.Generator) -> list[Trajectory]:
        acted: list[list[Action]] = [[] for _ in range(episodes)]
        running = list(range(episodes))
        for turn in range(TURNS):
            if not running:
                break
            actions = sample_batch(trainer, "worker", [[3, 10 + turn]] * len(running), 1, generator)
            for i, action in zip(running, actions, strict=True):
                acted[i].append(action)
            running = [i for i in running if said(acted[i][-1]) % 4]
        return [_turns_to_trajectory(actions, i in running, pays, by_step) for i, actions in enumerate(acted)]

    return play


def _turns_to_trajectory(actions: Sequence[Action], cut: bool, pays: float, by_step: bool) -> Trajectory:
    team = 0.0 if by_step else pays * len(actions)
    trajectory = make_trajectory(actions, team, outcome="truncated" if cut else "terminated")
    if not by_step:
        return trajectory
    steps = [Reward("e", "turn", pays, "test", 1, scope="step", action_id=str(i)) for i in range(len(actions))]
    return replace(trajectory, rewards=(*trajectory.rewards, *steps))


def mean_turns(trajectories: Sequence[Trajectory]) -> float:
    """How long the loop ran."""
    return sum(len(t.actions) for t in trajectories) / len(trajectories)


CHAIN = tuple(f"link{k}" for k in range(8))


def chain(trainer: MarftTrainer, episodes: int, generator: torch.Generator) -> list[Trajectory]:
    """Eight agents in a row pass on a bit: each hears the bit that the one before said, the first one a random bit.

    The reward is the share of agents that said what they heard, a half by chance; an even token says 0. So each agent's
    own word is an eighth of what the team earns, and the rest is noise to it.
    """
    heard = torch.randint(2, (episodes,), generator=generator).tolist()
    rows, faithful = [], [0.0] * episodes
    for k, agent in enumerate(CHAIN):
        rows.append(sample_batch(trainer, agent, [[k, 10 + bit] for bit in heard], 1, generator))
        bits = [said(action) % 2 for action in rows[-1]]
        faithful = [sum_so_far + (a == b) / len(CHAIN) for sum_so_far, a, b in zip(faithful, heard, bits, strict=True)]
        heard = bits
    return [make_trajectory(actions, share) for share, *actions in zip(faithful, *rows, strict=True)]
