"""Owns: opponents from a league: who plays whom, that they are served, and that nothing is learned from their calls.

- The draw follows from seed, round and task; all samples of a task meet the same opponent, of the versions allowed.
- A round's opponents are served at their version, their calls are frozen, the other side's are learned from.
- What does not go with a league is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.league_rig import GAME, OPTIONS, REWARD, SIDES
from support.school_rig import School, learned, school_in

from marft_bridge.config.bridge import TrainOptions
from marft_bridge.config.league import LeagueOptions
from marft_bridge.rollouts.episode_plan import EpisodeRequest, plan_episodes
from marft_bridge.training.league_draw import OPPONENT, draw_opponents

TASKS = [{"id": f"t{n}"} for n in range(200)]


def drawn(newest: int, seed: int = 0, number: int = 5, **options: Any) -> list[EpisodeRequest]:
    planned = plan_episodes(
        TASKS,
        2 * len(TASKS),
        2,
        seed=seed,
        run_id="train",
        split="train",
        adapters=dict.fromkeys(("reasoner", "actor"), newest),
        round=number,
    )
    return draw_opponents(planned, LeagueOptions(**options), SIDES, newest=newest, seed=seed)


def test_samples_of_a_task_meet_one_opponent_and_the_rest_is_as_planned() -> None:
    requests = drawn(newest=5, share=0.5, versions=3)
    opponents: dict[str, set[str | None]] = {}
    for request in requests:
        opponents.setdefault(request.task["id"], set()).add(request.tags.get(OPPONENT))
        if OPPONENT not in request.tags:
            assert (request.adapters, request.frozen) == ({"reasoner": 5, "actor": 5}, frozenset())
            continue
        side, _, version = request.tags[OPPONENT].partition("@")
        (node,) = SIDES[side]
        assert request.frozen == {node}
        assert request.adapters == {"reasoner": 5, "actor": 5, node: int(version)}
    assert all(len(met) == 1 for met in opponents.values())
    counts = Counter(met for (met,) in opponents.values())
    assert set(counts) == {None, *(f"{side}@{version}" for side in SIDES for version in (2, 3, 4))}
    assert 70 < counts[None] < 130  # half of 200
    assert all(count > 5 for count in counts.values())


def test_the_draw_is_the_same_every_time_and_another_in_another_round() -> None:
    assert drawn(newest=5) == drawn(newest=5)
    tags = [[request.tags for request in drawn(newest=5, number=number)] for number in (5, 6)]
    assert tags[0] != tags[1]


def test_before_there_is_an_earlier_version_all_sides_are_the_newest() -> None:
    assert not any(request.tags or request.frozen for request in drawn(newest=0, share=1.0))
    assert {request.tags[OPPONENT] for request in drawn(newest=1, share=1.0, versions=9)} == {"left@0", "right@0"}


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"trainer": {}}, "league draws opponents of a side: name the sides in train.trainer.sides"),
        (
            {"trainer": GAME | {"agents": {"actor": {"frozen": True}}}},
            "two or more of train.trainer.sides need an agent that is not",
        ),
        ({"trees": {}}, "league opponents cannot be met in forks yet"),
        ({"max_staleness": 1}, "leave train.max_staleness at 0"),
    ],
)
def test_what_does_not_go_with_a_league_is_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TrainOptions.model_validate({"league": {}, "trainer": GAME} | options)
    assert line in str(caught.value)


@pytest.fixture
def school(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[School]:
    with school_in(tmp_path, monkeypatch) as made:
        yield made


def to_game(school: School) -> None:
    """Has the school's duo earn against each other: the actor wins half a chip where it says yes."""
    school.use_reward(REWARD, "game")
    school.server.answer = lambda body: "yes" if body["seed"] % 2 else "no"


@pytest.mark.slow
def test_rounds_are_played_against_earlier_versions_and_nothing_is_learned_from_those(school: School) -> None:
    to_game(school)
    school.collect(**OPTIONS)
    school.train(**OPTIONS)
    with school.store() as store:
        episodes = list(store.trajectories(run_ids=["train"]))
    met: Counter[tuple[str, bool]] = Counter()
    for each in episodes:
        side, _, version = each.episode.tags.get(OPPONENT, "").partition("@")
        for action in each.actions:
            is_opponent = action.node in SIDES.get(side, ())
            expected = int(version) if is_opponent else each.episode.round  # round r is played by version r
            assert action.adapter == f"{action.node}@{expected}"
            assert action.trainable != is_opponent
            met[side, is_opponent] += 1
    assert all(met[case] for case in (("", False), ("left", True), ("left", False), ("right", True), ("right", False)))
    opponents = {a.action_id for each in episodes for a in each.actions if not a.trainable}
    learned_ids = {action_id for data in school.rounds for episode in data.episodes for action_id in episode.action_ids}
    everything = {action.action_id for each in episodes for action in each.actions}
    assert everything - learned_ids == opponents


@pytest.mark.slow
def test_a_league_that_was_killed_in_a_round_meets_the_same_opponents_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = []
    for killed in (False, True):
        folder = tmp_path / str(killed)
        folder.mkdir()
        with school_in(folder, monkeypatch) as school:
            to_game(school)
            school.collect(**OPTIONS)
            if killed:
                school.train_until_killed(21, **OPTIONS)
            school.train(resume=killed, **OPTIONS)
            contents.append(learned(school))
    assert contents[0] == contents[1]
