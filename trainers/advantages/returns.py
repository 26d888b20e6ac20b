"""A round of episodes to what its actions earned of each reward, before any baseline.

Three kinds of reward are credited in three ways:

    team      arrives with each last action of D and flows back along it, with the mean over direct dependents (see
              `trainers.advantages.recurrences`).
    step      Monte-Carlo along D, each reward once: the sum of gamma^links * value over what an action led to.
    private   the value that the action's agent got in the episode, undiscounted.

Invariant: float64, without state. A private reward that was not recorded is NaN in `own_returns`: it adds nothing, and
no mean counts it as 0. Step rewards are a sum over those that arrived, which is 0 where none did. It knows nothing of
critics, groups or models.

Shapes: _A one entry per action of the round, episode after episode, each in topological order.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from trainers.advantages.arrays import Floats, laid_end_to_end, rows_by_key
from trainers.advantages.recurrences import token_gae_along_dependencies
from trainers.batch import EpisodeItem, Round
from trainers.rewards import StepReward


def episodes_of(data: Round) -> Iterator[tuple[EpisodeItem, slice]]:
    """Each episode with where its actions stand in the round."""
    start = 0
    for episode in data.episodes:
        yield episode, slice(start, start + len(episode.actions))
        start += len(episode.actions)


def reward_at_the_end(episode: EpisodeItem, reward: float) -> list[float]:
    """A team reward where it arrives: with each action on which nothing depends."""
    return [0.0 if dependents else reward for dependents in episode.successors]


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
    values, bootstrap). Of a call that several runs stand on, the mean over them, see `trainers.forest`.
    """
    if data.forest is not None:
        unrolled = team_chain(
            data.forest.unrolled,
            team_E,
            [values[row] for row in data.forest.row_B],
            bootstrap_A=bootstrap_A[list(data.forest.row_B)],
            token_lambda_A=[token_lambda_A[row] for row in data.forest.row_B],
            gamma=gamma,
            lam=lam,
            gamma_token=gamma_token,
        )
        return data.forest.fold_parts(unrolled)
    result: list[Floats] = []
    for (episode, rows), reward in zip(episodes_of(data), team_E, strict=True):
        result += token_gae_along_dependencies(
            values[rows],
            reward_at_the_end(episode, reward),
            episode.successors,
            bootstrap_A=bootstrap_A[rows],
            gamma=gamma,
            lam=lam,
            gamma_token=gamma_token,
            token_lambda_A=token_lambda_A[rows],
        )
    return result


def team_rewards(data: Round) -> dict[str, Floats]:
    """The team rewards of each action's episode, by name; [A] each. Not of the forks beneath an action."""
    names = dict.fromkeys(name for episode in data.episodes for name in episode.rewards.team)
    earned = [data.episodes[e].rewards.team for e in data.episode_A]
    return {name: np.array([rewards.get(name, 0.0) for rewards in earned], dtype=np.float64) for name in names}


def run_positions(data: Round) -> list[Hashable]:
    """Where in its run each action stands: agent, turn, and links of D from the beginning; [A].

    All of it is known before the agent acts. What a discount leaves of a later reward hangs on the links that follow,
    so with gamma below 1 only what was earned at one place can be compared.
    """
    if data.forest is not None:
        unrolled = run_positions(data.forest.unrolled)
        place_of = dict(zip(data.forest.row_B, unrolled, strict=True))  # runs through a call share what leads to it
        return [place_of[row] for row in range(len(data.items))]
    positions_A: list[Hashable] = []
    for episode in data.episodes:
        depth_A = [0] * len(episode.actions)
        for i, dependents in enumerate(episode.successors):
            for j in dependents:
                depth_A[j] = max(depth_A[j], depth_A[i] + 1)
        positions_A += [(item.agent, item.turn, depth) for item, depth in zip(episode.actions, depth_A, strict=True)]
    return positions_A


def expected_discounts(data: Round, units_A: Sequence[int], *, gamma: float, gamma_token: float) -> list[Floats] | None:
    """What a team reward of 1 at the end of its run is worth to each unit, as other runs tell; None: always 1.

    Per action it is the mean over the actions at its `run_positions` in other trees, so that it does not depend on how
    long the run became; its own where no other stood there. Within an action the tokens that follow count, as in what
    estimators without a critic make of an action's advantage (`EstimatorInput.over_units`).
    """
    if gamma == 1 and gamma_token == 1:
        return None
    zero_values = [np.zeros(count) for count in units_A]
    worth = team_chain(
        data,
        [1.0] * len(data.episodes),
        zero_values,
        bootstrap_A=np.zeros(len(zero_values)),
        token_lambda_A=[1.0] * len(zero_values),
        gamma=gamma,
        lam=1.0,
        gamma_token=gamma_token,
    )
    last_A = np.array([part[-1] for part in worth], dtype=np.float64)
    expected_A = last_A.copy()
    for rows in rows_by_key(run_positions(data)).values():
        for positions in rows_by_key([data.tree_A[i] for i in rows]).values():
            others = np.delete(rows, positions)
            if len(others):
                expected_A[rows[positions]] = last_A[others].mean()
    return [
        expected * gamma_token ** np.arange(count - 1, -1, -1, dtype=np.float64)
        for expected, count in zip(expected_A.tolist(), units_A, strict=True)
    ]


def own_returns(data: Round, gamma: float) -> dict[str, Floats]:
    """Step returns and private rewards of each action, by name; [A] each, NaN where a private one is not known."""
    if data.forest is not None:
        unrolled = own_returns(data.forest.unrolled, gamma)
        return {name: data.forest.fold(own_B) for name, own_B in unrolled.items()}
    own_by_source: dict[str, Floats] = {}
    for name in dict.fromkeys(name for episode in data.episodes for name in episode.rewards.step):
        own_by_source[name] = np.zeros(len(data.items))
        for episode, rows in episodes_of(data):
            own_by_source[name][rows] = step_returns(episode.rewards.step.get(name, ()), len(episode.actions), gamma)
    for name in dict.fromkeys(name for episode in data.episodes for name in episode.rewards.private):
        owned = [data.episodes[e].rewards.private.get(name, {}) for e in data.episode_A]
        values = [
            reward_by_agent.get(item.agent, np.nan) for reward_by_agent, item in zip(owned, data.items, strict=True)
        ]
        own_by_source[name] = np.array(values, dtype=np.float64)
    return own_by_source


def action_rewards(data: Round) -> dict[str, Floats]:
    """The step rewards that arrived with each action itself, by name; [A] each, 0 where none did.

    One that arrived with a call which is not trained counts for the last trained ones before it.
    """
    names = {name for episode in data.episodes for name in episode.rewards.step}
    return {name: own_A for name, own_A in own_returns(data, gamma=0.0).items() if name in names}


def centred_own_returns(data: Round, gamma: float) -> dict[str, Floats]:
    """`own_returns`, each less its mean over the agent's actions in other trees that have it; 0 where nothing is.

    Step returns that are discounted are compared with those of the actions at its own place (`run_positions`) only.
    """
    centred: dict[str, Floats] = {}
    agent_A: list[Hashable] = [item.agent for item in data.items]
    discounted = {name for episode in data.episodes for name in episode.rewards.step} if 0 < gamma < 1 else set[str]()
    place_A = run_positions(data) if discounted else agent_A
    for name, own_A in own_returns(data, gamma).items():
        recorded_rows = np.flatnonzero(~np.isnan(own_A))
        key_A = place_A if name in discounted else agent_A
        keys, episodes = [key_A[i] for i in recorded_rows], [data.tree_A[i] for i in recorded_rows]
        centred[name] = np.zeros(len(data.items))
        centred[name][recorded_rows] = leave_one_out_mean(own_A[recorded_rows], keys, episodes)
    return centred


def own_rewards_of_episodes(data: Round) -> dict[str, Floats]:
    """Each agent with private rewards to the sum of them in each episode; shape [E] each.

    NaN where the episode lacks one that the agent has elsewhere in the round: sums of other rewards do not compare.
    """
    rewards_by_agent: dict[str, dict[str, Floats]] = {}
    for e, episode in enumerate(data.episodes):
        for name, values in episode.rewards.private.items():
            for agent, value in values.items():
                rewards_by_name = rewards_by_agent.setdefault(agent, {})
                rewards_by_name.setdefault(name, np.full(len(data.episodes), np.nan))[e] = value
    return {
        agent: np.sum(list(rewards_by_name.values()), axis=0) for agent, rewards_by_name in rewards_by_agent.items()
    }


def returns_by_source(data: Round, gamma: float, step_gamma: float | None = None) -> dict[str, Floats]:
    """What each action earned of each reward, discounted, by the name of the reward; [A] each.

    Nothing is added for what a truncated episode might have earned later.

    Args:
        step_gamma: the discount of step rewards per link of D, see `Estimator.step_gamma`; None: gamma.
    """
    if data.forest is not None:
        unrolled = returns_by_source(data.forest.unrolled, gamma, step_gamma)
        return {name: data.forest.fold(earned_B) for name, earned_B in unrolled.items()}
    count = len(data.items)
    ones, zero_values, lambdas = [1.0] * len(data.episodes), [np.zeros(1)] * count, [1.0] * count
    chain = team_chain(
        data,
        ones,
        zero_values,
        bootstrap_A=np.zeros(count),
        token_lambda_A=lambdas,
        gamma=gamma,
        lam=1.0,
        gamma_token=1.0,
    )
    one_A = laid_end_to_end(chain)  # what a team reward of 1 is worth to each action
    own_by_source = {
        name: np.nan_to_num(own_A)
        for name, own_A in own_returns(data, gamma if step_gamma is None else step_gamma).items()
    }
    return {name: one_A * value_A for name, value_A in team_rewards(data).items()} | own_by_source


def leave_one_out_mean(
    values_A: Sequence[float] | Floats, key_A: Sequence[Hashable], episode_A: Sequence[int]
) -> Floats:
    """Values less the mean over the actions of the same key in other episodes (trees) of the round; 0 where none are.

    For rewards that no critic predicts (step and private ones). Every action of the other episodes counts once.
    Linear in the values. Shape [A].
    """
    values = np.asarray(values_A, dtype=np.float64)
    centred: Floats = np.zeros_like(values)
    for rows in rows_by_key(key_A).values():
        total = values[rows].sum()
        for positions in rows_by_key([episode_A[i] for i in rows]).values():
            other_count = len(rows) - len(positions)
            if other_count:
                mine = rows[positions]
                centred[mine] = values[mine] - (total - values[mine].sum()) / other_count
    return centred


def step_returns(rewards: Sequence[StepReward], actions: int, gamma: float) -> Floats:
    """Step rewards of one episode to what followed each action: sum over rewards of gamma^links * value. Shape [A].

    A reward reaches an action once, by the shortest way in D, whatever the number of branches between them. It does
    not reach what its action never depended on, an action beside it or after it.
    """
    returns: Floats = np.zeros(actions, dtype=np.float64)
    for reward in rewards:
        for i, links in reward.links.items():
            returns[i] += gamma**links * reward.value
    return returns
