"""A round of episodes to what its actions earned of each reward, before any baseline.

Three kinds of reward are credited in three ways:

    team      arrives with each last action of D and flows back along it, with the mean over direct dependents (see
              `trainers.gae`).
    step      Monte-Carlo along D, each reward once: the sum of gamma^links * value over what an action led to.
    private   the value that the action's agent got in the episode, undiscounted.

Invariant: float64, without state. A private reward that was not recorded is NaN in `own_returns`: it adds nothing, and
no mean counts it as 0. Step rewards are a sum over those that arrived, which is 0 where none did. It knows nothing of
critics, groups or models.

Shapes: _A one entry per action of the round, episode after episode, each in topological order.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from trainers.batch import EpisodeItem, Round
from trainers.gae import Floats, step_returns, token_gae_along_dependencies
from trainers.group_estimators import leave_one_out_mean


def episodes_of(data: Round) -> Iterator[tuple[EpisodeItem, slice]]:
    """Each episode with where its actions stand in the round."""
    start = 0
    for episode in data.episodes:
        yield episode, slice(start, start + len(episode.actions))
        start += len(episode.actions)


def reward_at_the_end(episode: EpisodeItem, reward: float) -> list[float]:
    """A team reward where it arrives: with each action on which nothing depends."""
    return [0.0 if after else reward for after in episode.successors]


def team_chain(
    data: Round,
    team_E: Sequence[float],
    values: Sequence[Floats],
    bootstrap_A: Floats,
    token_lambda_A: Sequence[float],
    *,
    gamma: float,
    lam: float,
    gamma_token: float,
) -> list[Floats]:
    """A team reward of each episode to the advantages of each action's units, see `token_gae_along_dependencies`.

    One unit per action is the action level. With values of 0 and lambdas of 1 they are returns. Linear in (team reward,
    values, bootstrap).
    """
    result: list[Floats] = []
    for (episode, rows), reward in zip(episodes_of(data), team_E, strict=True):
        result += token_gae_along_dependencies(
            values[rows],
            reward_at_the_end(episode, reward),
            episode.successors,
            bootstrap_A[rows],
            gamma,
            lam,
            gamma_token,
            token_lambda_A[rows],
        )
    return result


def team_rewards(data: Round) -> dict[str, Floats]:
    """The team rewards of each action's episode, by name; [A] each."""
    names = dict.fromkeys(name for episode in data.episodes for name in episode.rewards.team)
    earned = [data.episodes[e].rewards.team for e in data.episode_A]
    return {name: np.array([each.get(name, 0.0) for each in earned], dtype=np.float64) for name in names}


def own_returns(data: Round, gamma: float) -> dict[str, Floats]:
    """Step returns and private rewards of each action, by name; [A] each, NaN where a private one is not known."""
    found: dict[str, Floats] = {}
    for name in dict.fromkeys(name for episode in data.episodes for name in episode.rewards.step):
        found[name] = np.zeros(len(data.items))
        for episode, rows in episodes_of(data):
            found[name][rows] = step_returns(episode.rewards.step.get(name, ()), len(episode.actions), gamma)
    for name in dict.fromkeys(name for episode in data.episodes for name in episode.rewards.private):
        owned = [data.episodes[e].rewards.private.get(name, {}) for e in data.episode_A]
        values = [own.get(item.agent, np.nan) for own, item in zip(owned, data.items, strict=True)]
        found[name] = np.array(values, dtype=np.float64)
    return found


def centred_own_returns(data: Round, gamma: float) -> dict[str, Floats]:
    """`own_returns`, each less its mean over the agent's actions in other episodes that have it; 0 where nothing is."""
    centred: dict[str, Floats] = {}
    for name, own_A in own_returns(data, gamma).items():
        known = np.flatnonzero(~np.isnan(own_A))
        agents, episodes = [data.items[i].agent for i in known], [data.episode_A[i] for i in known]
        centred[name] = np.zeros(len(data.items))
        centred[name][known] = leave_one_out_mean(own_A[known], agents, episodes)
    return centred


def own_rewards_of_episodes(data: Round) -> dict[str, Floats]:
    """Each agent with private rewards to the sum of them in each episode; shape [E] each.

    NaN where the episode lacks one that the agent has elsewhere in the round: sums of other rewards do not compare.
    """
    found: dict[str, dict[str, Floats]] = {}
    for e, episode in enumerate(data.episodes):
        for name, values in episode.rewards.private.items():
            for agent, value in values.items():
                own = found.setdefault(agent, {})
                own.setdefault(name, np.full(len(data.episodes), np.nan))[e] = value
    return {agent: np.sum(list(own.values()), axis=0) for agent, own in found.items()}


def returns_by_source(data: Round, gamma: float) -> dict[str, Floats]:
    """What each action earned of each reward, discounted, by the name of the reward; [A] each.

    Nothing is added for what a truncated episode might have earned later.
    """
    count = len(data.items)
    ones, nothing, lambdas = [1.0] * len(data.episodes), [np.zeros(1)] * count, [1.0] * count
    chain = team_chain(data, ones, nothing, np.zeros(count), lambdas, gamma=gamma, lam=1.0, gamma_token=1.0)
    one_A = laid_end_to_end(chain)  # what a team reward of 1 is worth to each action
    own = {name: np.nan_to_num(own_A) for name, own_A in own_returns(data, gamma).items()}
    return {name: one_A * value_A for name, value_A in team_rewards(data).items()} | own


def laid_end_to_end(parts: Sequence[Floats]) -> Floats:
    """One array per action to one array; empty where there is none."""
    return np.concatenate([np.zeros(0), *parts])
