"""Owns: scores of teams with agents replaced become findings about agents and pairs.

- A contribution is the hand-worked one; lazy, harmful and needed agents are told apart, and few tasks settle nothing.
- Two agents that matter only together, that cover for each other, that harm together: what one at a time cannot show.
- Under no difference, findings are wrong no more often than they may be.
- Substitutes: what each form means, and which would change nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from marft_bridge.agent_credit.estimates import AgentCredit, Method, PairCredit, SampleKey, scores_to_credits
from marft_bridge.agent_credit.substitutes import refuse_no_op_substitute, text_to_substitute
from marft_bridge.common.errors import ConfigError
from marft_bridge.statistics.shapley import Team, all_teams

Value = Callable[[Team, int], float]
LEAVE: Method = "leave-one-out"


def teams_of(agents: Sequence[str], method: Method) -> list[Team]:
    full = frozenset(agents)
    return list(all_teams(agents)) if method == "shapley" else [full, *(full - {agent} for agent in agents)]


def judge(
    agents: Sequence[str],
    value: Value,
    method: Method = LEAVE,
    tasks: int = 40,
    calls: float = 1.0,
    min_contribution: float = 0.2,
) -> tuple[dict[str, AgentCredit], dict[str, PairCredit]]:
    """`value` of (team, number of the task), one sample each."""
    scores: dict[Team, dict[SampleKey, float]] = {
        team: {(f"t{n}", 0): value(team, n) for n in range(tasks)} for team in teams_of(agents, method)
    }
    singles, pairs = scores_to_credits(agents, scores, dict.fromkeys(agents, calls), method, min_contribution, seed=0)
    return {credit.agent: credit for credit in singles}, {"".join(credit.agents): credit for credit in pairs}


def roles(team: Team, n: int) -> float:
    """h is needed on three tasks of four, x spoils every second one, z is not read."""
    return float("h" in team and n % 4 != 0) - float("x" in team and n % 2)


def test_who_helps_who_harms_and_who_is_not_read_are_told_apart() -> None:
    found, pairs = judge("hxz", roles, tasks=60)
    assert pairs == {}
    assert [found[agent].contribution for agent in "hxz"] == pytest.approx([0.75, -0.5, 0.0])
    assert [
        (found[agent].improved_episodes, found[agent].worsened_episodes, found[agent].episodes) for agent in "hxz"
    ] == [
        (45, 0, 60),
        (0, 30, 60),
        (0, 0, 60),
    ]
    assert [found[agent].finding for agent in "hxz"] == ["adds", "harmful", "lazy"]
    # z: scores span -1 to 1; a share q of tasks stays unseen with (1 - q)^60 = 0.05 / 3, so q = 0.0659.
    assert found["z"].interval == pytest.approx((-0.1319, 0.1319), abs=1e-4)


def test_few_tasks_do_not_make_an_agent_lazy() -> None:
    found, _ = judge("hxz", roles, tasks=8)
    assert found["z"].finding == "not settled"
    assert judge("hxz", roles, tasks=8, min_contribution=2.0)[0]["z"].finding == "lazy"


def test_a_few_losses_do_not_make_an_agent_lazy_that_may_be_worth_more_on_tasks_nobody_saw() -> None:
    """No resample holds what was not seen: of differences that are 0 or below, the bootstrap's interval ends at 0."""
    for tasks, losses in ((2, 1), (8, 1), (32, 3)):
        spoiling: Value = lambda team, n, losses=losses: -float("z" in team and n < losses)  # type: ignore[misc]  # noqa: E731
        assert judge("hz", spoiling, tasks=tasks, min_contribution=0.05)[0]["z"].finding == "not settled"
    # 400 tasks: a share 1 - (0.05 / 2)^(1/400) = 0.0092 of tasks may be unseen, worth 1 each, which is below 0.05
    rare: Value = lambda team, n: -float("z" in team and n < 3)  # noqa: E731
    assert judge("hz", rare, tasks=400, min_contribution=0.05)[0]["z"].finding == "lazy"


def test_agents_that_add_up_do_not_cover_for_each_other_by_rounding() -> None:
    for weights in ({"f": 0.1, "c": 0.9}, {"f": 0.1, "c": 0.2}, {"f": 0.3, "c": 0.4}):
        added: Value = lambda team, _, weights=weights: 0.7 - sum(weights[agent] for agent in "fc" if agent not in team)  # type: ignore[misc]  # noqa: E731
        _, pairs = judge("fc", added, method="shapley", tasks=32)
        assert pairs["fc"].interaction == 0
        assert pairs["fc"].finding == "not settled"


def test_noise_that_hides_a_contribution_settles_nothing_and_noise_around_none_is_lazy() -> None:
    noise = (1.0, -1.0, 0.0, 0.0, 0.0)
    noisy: Value = lambda team, n: noise[n % 5] if "z" in team else 0.0  # noqa: E731
    assert judge("hz", noisy, tasks=20)[0]["z"].finding == "not settled"
    assert judge("hz", noisy, tasks=400)[0]["z"].finding == "lazy"


def test_an_agent_that_never_acts_is_said_not_to_act_rather_than_to_be_lazy() -> None:
    assert judge("hz", roles, tasks=60, calls=0.0)[0]["z"].finding == "did not act"


def test_a_score_that_is_the_same_everywhere_tells_nothing() -> None:
    found, _ = judge("hz", lambda _team, _n: 1.0)
    assert (found["h"].interval, found["h"].finding) == (None, "not settled")


def test_two_agents_that_matter_only_together_are_found() -> None:
    """Worth 1 when both are there: each one's difference is 1, both together's too, and each gets half of it."""
    found, pairs = judge("abz", lambda team, n: float({"a", "b"} <= team and n % 5 > 0), "shapley", tasks=80)
    assert [found[agent].contribution for agent in "abz"] == pytest.approx([0.4, 0.4, 0.0])
    assert [pairs["ab"].joint, pairs["ab"].interaction] == pytest.approx([0.8, 0.8])
    assert {name: pair.finding for name, pair in pairs.items()} == {
        "ab": "only together",
        "az": "not settled",
        "bz": "not settled",
    }


def test_two_agents_that_cover_for_each_other_look_lazy_one_at_a_time_and_are_found_together() -> None:
    value: Value = lambda team, n: float(bool({"a", "b"} & team) and n % 5 > 0)  # noqa: E731
    one_at_a_time, _ = judge("ab", value, tasks=80)
    assert [one_at_a_time[agent].contribution for agent in "ab"] == [0.0, 0.0]
    found, pairs = judge("ab", value, "shapley", tasks=80)
    assert [found[agent].contribution for agent in "ab"] == pytest.approx([0.4, 0.4])
    assert [found[agent].finding for agent in "ab"] == ["adds", "adds"]
    assert [pairs["ab"].joint, pairs["ab"].interaction] == pytest.approx([0.8, -0.8])
    assert pairs["ab"].finding == "cover for each other"


def test_two_agents_that_harm_only_together_are_called_colluding() -> None:
    """Either of them is enough to lead the team astray, so replacing one changes nothing."""
    astray: Value = lambda team, n: -float(bool({"a", "b"} & team) and n % 3 > 0)  # noqa: E731
    one_at_a_time, _ = judge("ab", astray, tasks=80)
    assert [one_at_a_time[agent].finding for agent in "ab"] == ["lazy", "lazy"]
    found, pairs = judge("ab", astray, "shapley", tasks=80)
    assert [found[agent].finding for agent in "ab"] == ["harmful", "harmful"]
    assert pairs["ab"].finding == "colluding"
    # One that harms by itself is harmful, and nobody's accomplice.
    _, pairs = judge("hx", roles, "shapley", tasks=80)
    assert pairs["hx"].finding == "not settled"


def test_runs_that_a_team_lacks_are_left_out_of_that_agent_only() -> None:
    full, no_a, no_b = (frozenset(team) for team in ("ab", "b", "a"))
    runs = [(f"t{n}", sample) for n in range(5) for sample in range(2)]
    scores = {full: dict.fromkeys(runs, 1.0), no_a: dict.fromkeys(runs[:4], 0.0), no_b: dict.fromkeys(runs, 0.0)}
    found, _ = scores_to_credits("ab", scores, {"a": 1.0, "b": 1.0}, LEAVE, 0.1, seed=0)
    assert [(credit.episodes, credit.tasks, credit.contribution) for credit in found] == [(4, 2, 1.0), (10, 5, 1.0)]


@pytest.mark.slow
def test_under_no_difference_a_finding_is_rare() -> None:
    """200 tables of three agents that change scores at random, equally often up and down, 24 tasks each."""
    drawn = random.Random(5)
    wrong = 0
    for _ in range(200):
        noise = [{agent: drawn.choice((-1.0, 0.0, 1.0)) for agent in "abc"} for _ in range(24)]
        found, _ = judge("abc", lambda team, n, noise=noise: sum(noise[n][a] for a in team), tasks=24)  # type: ignore[misc]
        wrong += any(credit.finding in ("adds", "harmful") for credit in found.values())
    assert wrong <= 18  # 200 x 0.05 = 10 expected at most; P(more than 18) is under 0.7%


# -- substitutes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "versions", "texts", "name"),
    [
        ("base", {"a": 3, "b": 0}, {}, "without b (base)"),
        ("version:2", {"a": 3, "b": 2}, {}, "without b (version 2)"),
        ("silent", {"a": 3}, {"b": ""}, "without b (silent)"),
        ("text:I: do not know", {"a": 3}, {"b": "I: do not know"}, "without b (text de0c0273)"),
        ("text:", {"a": 3}, {"b": ""}, "without b (text e3b0c442)"),
    ],
)
def test_a_substitute_is_a_version_or_a_text(given: str, versions: Any, texts: Any, name: str) -> None:
    substitute, on = text_to_substitute(given), frozenset({"a"})
    assert substitute.replace_agents(on, ["a", "b"], {"a": 3, "b": 1}) == (versions, texts)
    assert substitute.team_name(on, ["a", "b"]) == name
    assert substitute.replace_agents(frozenset("ab"), ["a", "b"], {"a": 3, "b": 1}) == ({"a": 3, "b": 1}, {})
    assert substitute.team_name(frozenset("ab"), ["a", "b"]) == "team"


@pytest.mark.parametrize("given", ["", "quiet", "version:", "version:-1", "version:one", "version 2", "version:²"])
def test_what_is_no_substitute_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="is none of base, silent, version:N or text:ANSWER"):
        text_to_substitute(given)


def test_a_substitute_that_would_change_nothing_is_refused() -> None:
    team = {"a": 3, "b": 0}
    with pytest.raises(ConfigError, match="node 'b' runs at version 0 already"):
        refuse_no_op_substitute(text_to_substitute("base"), ["a", "b"], team, [])
    with pytest.raises(ConfigError, match="node 'a' runs at version 3 already"):
        refuse_no_op_substitute(text_to_substitute("version:3"), ["a"], team, [])
    with pytest.raises(ConfigError, match=r"node 'judge' is in graph\.frozen"):
        refuse_no_op_substitute(text_to_substitute("version:3"), ["judge"], team, ["judge"])
    refuse_no_op_substitute(text_to_substitute("silent"), ["a", "b", "judge"], team, ["judge"])
    refuse_no_op_substitute(text_to_substitute("base"), ["a"], team, [])
