"""Owns: CoMAM's weights: how consistently an agent's own reward ranks samples as the team's does, and what it changes.

Numbers are worked by hand, and held against Kendall's tau of scipy; only the team's part of an advantage is weighed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau
from support.trainer_options import trainer_options

from marft_bridge.config.bridge import BridgeConfig
from trainers.advantages.rank_consistency import contribution_weights, rank_consistency
from trainers.advantages.returns import own_rewards_of_episodes
from trainers.batch import ActionItem, EpisodeItem, Round, episodes_to_round
from trainers.credit.credit import Credit
from trainers.rewards import EpisodeRewards

NAN = float("nan")
OWN = ({"reward": "own", "level": "agent", "weight": 1.0},)


def consistency(own: Sequence[float], team: Sequence[float], tasks: Sequence[str] | None = None) -> float | None:
    return rank_consistency(np.array(own), np.array(team), tasks or ["t"] * len(own))


@pytest.mark.parametrize(
    ("own", "team", "expected"),
    [
        ([3, 1, 2], [1, 0, 0.5], 1.0),  # all three pairs alike
        ([1, 3, 2], [1, 0, 0.5], 0.0),  # none
        ([5, 5, 5], [1, 0, 0.5], 0.5),  # ties say nothing, one way or the other
        ([1, 2, 2], [1, 0, 0.5], (0 + 0 + 0.5) / 3),
        ([1, 2, 7], [0, 1, 1], 1.0),  # the pair of like team rewards does not count
        ([1, NAN, 2], [0, 5, 1], 1.0),  # an episode without an own reward takes no part
        ([1, 2], [3, 3], None),
        ([1, NAN], [0, 1], None),
        ([1], [0], None),
        ([], [], None),
    ],
)
def test_consistency_is_the_share_of_pairs_that_are_ordered_alike(
    own: Sequence[float], team: Sequence[float], expected: float | None
) -> None:
    assert consistency(own, team) == (expected if expected is None else pytest.approx(expected))


def test_only_samples_of_one_task_are_compared_and_every_pair_counts_once() -> None:
    # a: 1 pair, alike. b: 3 pairs, none alike. Between tasks everything would be alike.
    own, team = [1, 2, 30, 20, 10], [0, 1, 10, 20, 30]
    assert consistency(own, team, ["a", "a", "b", "b", "b"]) == pytest.approx(1 / 4)


@given(st.permutations(range(7)), st.permutations(range(7)))
def test_without_ties_it_is_kendalls_tau_from_0_to_1(own: list[int], team: list[int]) -> None:
    assert consistency(own, team) == pytest.approx((1 + kendalltau(own, team).statistic) / 2)


def test_weights_have_mean_1_over_the_agents_that_have_one() -> None:
    team = np.array([1, 0, 0.5])
    own = {"a": np.array([3.0, 1, 2]), "b": np.array([1.0, 2, 2]), "c": np.array([NAN, NAN, 1])}
    # consistencies 1 and 1/6, mean 7/12; c never has two samples
    assert contribution_weights(own, team, ["t"] * 3) == pytest.approx({"a": 12 / 7, "b": 2 / 7, "c": 1.0})


def test_where_nothing_tells_or_all_go_against_the_team_every_weight_is_1() -> None:
    team = np.array([1.0, 0])
    assert contribution_weights({"a": np.array([0.0, 1])}, team, ["t"] * 2) == {"a": 1.0}
    assert contribution_weights({"a": np.array([0.0, 1])}, team, ["t", "u"]) == {"a": 1.0}
    assert contribution_weights({}, team, ["t"] * 2) == {}


def episode(team: float, private: Mapping[str, Mapping[str, float]], task: str = "t") -> EpisodeItem:
    actions = tuple(ActionItem(agent, (1, 3), (2,), (-1.0,), 1.0) for agent in ("reasoner", "actor"))
    return EpisodeItem(task, team, False, actions, ((1,), ()), EpisodeRewards({"reward": team}, {}, private))


def three_runs() -> Round:
    """One task: the reasoner's own reward rises with the team's, the actor's falls but for one tie."""
    runs = [(2.0, 0.3, 0.1), (0.0, 0.1, 0.2), (1.0, 0.2, 0.2)]
    return episodes_to_round([episode(t, {"own": {"reasoner": r, "actor": a}}) for t, r, a in runs], {})


def test_own_rewards_of_an_agent_are_added_up_and_unknown_where_one_of_them_is() -> None:
    data = episodes_to_round(
        [
            episode(0, {"x": {"reasoner": 1.0, "actor": 4.0}, "y": {"reasoner": 2.0}}),
            episode(0, {"x": {"reasoner": 5.0}}),
        ],
        {},
    )
    own = own_rewards_of_episodes(data)
    np.testing.assert_array_equal(own["reasoner"], [3.0, NAN])
    np.testing.assert_array_equal(own["actor"], [4.0, NAN])


class NeverAsked:
    """Stands in for a base model: no estimator here asks a critic."""

    width = 1


def credit(**options: Any) -> Credit:
    chosen = trainer_options(shaping=OWN, offline={"mode": "filtered"}, **options)
    model_of: Any = dict.fromkeys(("reasoner", "actor"), NeverAsked())
    return Credit(chosen, model_of, list(model_of), 0, lambda phase, total: lambda count: None)


def test_a_group_estimate_weighs_the_teams_reward_and_not_the_agents_own() -> None:
    weighed = credit(estimator="dr_mas", group_std=False, contribution="rank_consistency")
    estimate, fit = weighed.estimate(three_runs())
    # consistencies 1 and (0 + 0 + 0.5) / 3 = 1/6: weights 12/7 and 2/7. Team less its mean: 1, -1, 0.
    parts = {name: part.reshape(3, 2) for name, part in estimate.by_source.items()}
    np.testing.assert_allclose(parts["reward"], [[12 / 7, 2 / 7], [-12 / 7, -2 / 7], [0, 0]], atol=1e-12)
    np.testing.assert_allclose(parts["own"], [[0.1, -0.2 / 3], [-0.1, 0.1 / 3], [0, 0.1 / 3]], atol=1e-12)
    np.testing.assert_allclose(estimate.advantage_U, sum(estimate.by_source.values()), atol=1e-12)
    assert fit()["contribution"] == pytest.approx({"reasoner": 12 / 7, "actor": 2 / 7})


def test_a_group_is_flat_when_what_is_weighed_is() -> None:
    weighed = credit(estimator="dr_mas", skip_flat_groups=True, contribution="rank_consistency")
    plain = episodes_to_round([episode(1.0, {"own": {"reasoner": 0.5, "actor": 0.5}}, "flat")] * 2, {})
    assert [e.task_id for e in weighed.informative(plain).episodes] == []
    assert len(weighed.informative(three_runs()).episodes) == 3


def test_left_out_every_agent_gets_the_whole_team_reward() -> None:
    estimate, fit = credit(estimator="dr_mas", group_std=False).estimate(three_runs())
    np.testing.assert_allclose(estimate.by_source["reward"].reshape(3, 2), [[1, 1], [-1, -1], [0, 0]], atol=1e-12)
    assert fit()["contribution"] is None


def test_samples_of_a_task_are_needed_to_rank_them() -> None:
    options: dict[str, Any] = {
        "graph": {"app": "a:b", "nodes": ["reasoner"], "tasks": "a:c", "reward": "a:d"},
        "train": {"trainer": {"advantage": {"contribution": "rank_consistency"}, "shaping": OWN}},
    }
    with pytest.raises(ValueError, match=r"ranks samples of one task: set train\.samples_per_task to 2 or more"):
        BridgeConfig.model_validate(options)
    options["train"]["samples_per_task"] = 2
    assert BridgeConfig.model_validate(options).train.trainer.advantage.contribution == "rank_consistency"
