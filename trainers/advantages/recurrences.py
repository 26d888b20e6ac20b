"""Values, rewards and dependencies of one episode to advantages along D, per action and per token.

Three recurrences that walk the dependencies D backwards: GAE over actions (MARFT-A; paper, section 4.1.1: a graph run
re-modelled as a sequence), GAE over tokens (MARFT-T), and V-trace for actions that another policy sampled.

Invariant: where several actions directly depend on one, what follows it is their mean, in values and in advantages.
Arithmetic is float64, without state or randomness. It knows nothing of models or outcomes: the caller says what was
truncated, by `bootstrap_A`.

Shapes: _A one entry per action of an episode, in a topological order of D; `values[i]` one entry per sampled token of
action i.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainers.advantages.arrays import Floats
from trainers.dependencies import Successors


def gae_along_dependencies(
    values_A: Sequence[float] | Floats,
    rewards_A: Sequence[float] | Floats,
    successors: Successors,
    bootstrap_A: Sequence[float] | Floats,
    gamma: float,
    lam: float,
) -> Floats:
    """Values and rewards of one episode to the advantage of every action.

    With succ(i) the actions that directly depend on i::

        delta_i = r_i + gamma * mean_{j in succ(i)} V_j - V_i
        A_i     = delta_i + gamma * lam * mean_{j in succ(i)} A_j

    An action on which nothing depends has delta_i = r_i + gamma * bootstrap_i - V_i and A_i = delta_i.

    Why the mean and not the sum: V_j estimates the team reward that follows j, and every branch leads to the same
    team reward. A sum would count that reward once per branch, so an action would look better for being
    followed by more of them. With the mean, gamma = lam = 1 and the team reward R on the last actions,
    A_i = R - V_i for every action of any graph.

    On a chain this is MARFT's recurrence over agents and then steps (paper, section 4.1.1 and equation 5). Links
    inside an episode are never masked: the reference implementation masks the first step after an episode's
    end with the previous episode's flag, and so loses that step's credit.

    Args:
        values_A: V of the rollout observation of each action.
        rewards_A: reward that arrives with each action; the team reward belongs on the last actions.
        successors: direct dependents, see `edges_to_successors`.
        bootstrap_A: V after a last action of a truncated episode; 0 where the episode terminated. Read only for
            actions without dependents.
        gamma: discount per link of D.
        lam: lambda of GAE.

    Returns:
        Advantages, shape [A]. The critic's targets are A + V.
    """
    values = np.asarray(values_A, dtype=np.float64)
    advantages: Floats = np.zeros(len(successors), dtype=np.float64)
    for i in reversed(range(len(successors))):
        dependents = list(successors[i])
        if dependents:
            delta = rewards_A[i] + gamma * values[dependents].mean() - values[i]
            advantages[i] = delta + gamma * lam * advantages[dependents].mean()
        else:
            advantages[i] = rewards_A[i] + gamma * bootstrap_A[i] - values[i]
    return advantages


def token_gae_along_dependencies(
    values: Sequence[Floats],
    rewards_A: Sequence[float] | Floats,
    successors: Successors,
    bootstrap_A: Sequence[float] | Floats,
    gamma: float,
    lam: float,
    gamma_token: float,
    token_lambda_A: Sequence[float] | Floats,
) -> list[Floats]:
    """Values per token and rewards per action of one episode to the advantage of every sampled token (MARFT-T).

    Inside action i, with t its sampled tokens::

        delta_t = gamma_token * V_{t+1} - V_t
        A_t     = delta_t + gamma_token * token_lambda_i * A_{t+1}

    At its last token the link leads to the first token of the actions that directly depend on it::

        delta = r_i + gamma * mean_{j in succ(i)} V_{j,0} - V_last
        A     = delta + gamma * lam * mean_{j in succ(i)} A_{j,0}

    or, where nothing depends on it, A = r_i + gamma * bootstrap_i - V_last. With one token per action this is
    `gae_along_dependencies`.

    The paper's one gamma is two here, so that a link of D and a token are discounted apart: 0.99 per token, as the
    reference implementation has it, leaves 0.6 % of a reward 512 tokens away.

    Args:
        values: for each action, V before each of its sampled tokens (of the prompt for the first), shape [tokens].
        token_lambda_A: lambda inside each action; see `adaptive_lambda`.
        gamma, lam: discount and lambda per link of D.
        gamma_token: discount per token.

    Returns:
        For each action, the advantages of its tokens, shape [tokens]. The critic's targets are A + V.

    Raises:
        ValueError: an action has no sampled token.
    """
    if any(len(value_T) == 0 for value_T in values):
        raise ValueError("an action without sampled tokens has no value before its first one")
    first_A = [float(value_T[0]) for value_T in values]
    last_A = [float(value_T[-1]) for value_T in values]
    advantages: list[Floats] = [np.zeros(len(value_T), dtype=np.float64) for value_T in values]
    for i in reversed(range(len(successors))):
        dependents = successors[i]
        if dependents:
            delta = rewards_A[i] + gamma * np.mean([first_A[j] for j in dependents]) - last_A[i]
            running = float(delta + gamma * lam * np.mean([advantages[j][0] for j in dependents]))
        else:
            running = float(rewards_A[i] + gamma * bootstrap_A[i] - last_A[i])
        V_T = np.asarray(values[i], dtype=np.float64).tolist()  # plain floats: a loop over them is several times faster
        decay = gamma_token * token_lambda_A[i]
        reversed_advantages = [running]
        for t in reversed(range(len(V_T) - 1)):
            running = gamma_token * V_T[t + 1] - V_T[t] + decay * running
            reversed_advantages.append(running)
        advantages[i][:] = reversed_advantages[::-1]
    return advantages


def vtrace_along_dependencies(
    values_A: Sequence[float] | Floats,
    rewards_A: Sequence[float] | Floats,
    successors: Successors,
    bootstrap_A: Sequence[float] | Floats,
    ratio_A: Sequence[float] | Floats,
    gamma: float,
    rho_bar: float,
    c_bar: float,
) -> tuple[Floats, Floats]:
    """Values, rewards and importance ratios of one stored episode to V-trace's targets and policy advantages.

    IMPALA (Espeholt et al., 2018), equation 1 and section 4.2, with one action as one step and the mean over direct
    dependents in place of the next step::

        rho_i = min(rho_bar, ratio_i)        c_i = min(c_bar, ratio_i)
        delta_i = rho_i * (r_i + gamma * mean_j V_j - V_i)
        v_i     = V_i + delta_i + gamma * c_i * mean_j (v_j - V_j)
        A_i     = rho_i * (r_i + gamma * mean_j v_j - V_i)

    Where nothing depends on i, bootstrap_i stands for mean_j V_j and mean_j v_j. With ratios of 1 and caps of 1 or more
    v_i is the return TD(1) along D. `rho_bar` decides whose value function the targets converge to, `c_bar` only how
    fast.

    Args:
        values_A, rewards_A, successors, bootstrap_A, gamma: as for `gae_along_dependencies`.
        ratio_A: pi(a) / mu(a), the target policy against the one that sampled.

    Returns:
        The critic's targets v and the advantages A, which have rho in them already; both of shape [A].

    Raises:
        ValueError: rho_bar < c_bar, for which the contraction of the V-trace operator is not proven.
    """
    if rho_bar < c_bar:
        raise ValueError(f"V-trace needs rho_bar >= c_bar, not {rho_bar} and {c_bar}")
    values = np.asarray(values_A, dtype=np.float64)
    ratios = np.asarray(ratio_A, dtype=np.float64)
    rho, c = np.minimum(ratios, rho_bar), np.minimum(ratios, c_bar)
    targets: Floats = np.zeros(len(successors), dtype=np.float64)
    advantages: Floats = np.zeros(len(successors), dtype=np.float64)
    for i in reversed(range(len(successors))):
        dependents = list(successors[i])
        value_after = values[dependents].mean() if dependents else bootstrap_A[i]
        target_after = targets[dependents].mean() if dependents else bootstrap_A[i]
        delta = rho[i] * (rewards_A[i] + gamma * value_after - values[i])
        targets[i] = values[i] + delta + gamma * c[i] * (target_after - value_after)
        advantages[i] = rho[i] * (rewards_A[i] + gamma * target_after - values[i])
    return targets, advantages


def adaptive_lambda(tokens: int, alpha: float) -> float:
    """Number of tokens of an action to its lambda: 1 - 1 / (alpha * tokens), and 0 where that is negative.

    VAPO's length-adaptive GAE: the powers of lambda sum to 1 / (1 - lambda) = alpha * tokens, so that what follows an
    action reaches the same share of its tokens whether it is short or long. alpha is 0.05 there, which gives actions
    of up to 20 tokens lambda 0.
    """
    return max(0.0, 1.0 - 1.0 / (alpha * tokens))
