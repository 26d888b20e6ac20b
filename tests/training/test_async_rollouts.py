"""Owns: rounds are played in order, each once, beside the main thread, and never run on after it has left;
how old an episode is when it is learned from is read from its records, and bounded.

That rollouts and updates really run at the same time is seen on the real server, in test_end_to_end.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.sample_spans import chain

from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.training.async_rollouts import BackgroundRollouts
from marft_bridge.training.served_checks import check_staleness
from trace_store.assemble import spans_to_trajectory
from trace_store.records import Trajectory
from trainers.errors import TrainError

WAIT_S = 10.0


class Rounds:
    """Notes which rounds were planned and played, and on which thread; a round in `held` waits to be let go."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.threads: dict[int, str] = {}
        self.begun, self.held = threading.Event(), threading.Event()

    def plan(self, number: int, *, hold: bool = False, error: BaseException | None = None) -> Callable[[], None]:
        self.said.append(f"plan {number}")

        def play() -> None:
            self.threads[number] = threading.current_thread().name
            if hold:
                self.begun.set()
                assert self.held.wait(WAIT_S)
            if error is not None:
                raise error
            self.said.append(f"play {number}")

        return play


def test_a_round_that_was_started_is_played_once_on_the_other_thread_and_any_other_here() -> None:
    rounds = Rounds()
    with BackgroundRollouts(lambda: None) as ahead:
        ahead.finish(1, lambda: rounds.plan(1))
        ahead.start(2, lambda: rounds.plan(2))
        ahead.start(2, lambda: rounds.plan(2))
        ahead.start(3, lambda: rounds.plan(3))
        ahead.finish(2, lambda: rounds.plan(2))
        ahead.finish(3, lambda: rounds.plan(3))
    assert [said for said in rounds.said if said.startswith("play")] == ["play 1", "play 2", "play 3"]
    assert sorted(said for said in rounds.said if said.startswith("plan")) == ["plan 1", "plan 2", "plan 3"]
    assert rounds.threads[1] == threading.main_thread().name
    assert rounds.threads[2] == rounds.threads[3] != rounds.threads[1]


def test_the_main_thread_goes_on_while_a_round_is_played() -> None:
    rounds = Rounds()
    with BackgroundRollouts(lambda: None) as ahead:
        ahead.start(1, lambda: rounds.plan(1, hold=True))
        assert rounds.begun.wait(WAIT_S)  # it plays, and we are here
        assert "play 1" not in rounds.said
        rounds.held.set()
        ahead.finish(1, lambda: rounds.plan(1))
    assert rounds.said == ["plan 1", "play 1"]


def test_what_went_wrong_in_a_round_reaches_who_asks_for_it() -> None:
    rounds = Rounds()
    with BackgroundRollouts(lambda: None) as ahead:
        ahead.start(1, lambda: rounds.plan(1, error=TrainError("no server")))
        with pytest.raises(TrainError, match="no server"):
            ahead.finish(1, lambda: rounds.plan(1))


def test_leaving_ends_the_round_that_runs_and_begins_no_other() -> None:
    rounds = Rounds()
    stops: list[int] = []

    def stop() -> None:
        stops.append(1)
        rounds.held.set()

    def interrupted() -> None:
        with BackgroundRollouts(stop) as ahead:
            ahead.start(1, lambda: rounds.plan(1, hold=True))
            ahead.start(2, lambda: rounds.plan(2))
            assert rounds.begun.wait(WAIT_S)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert stops
    assert "play 2" not in rounds.said
    assert not any(thread.name.startswith("rollouts") for thread in threading.enumerate() if thread.is_alive())


def by_versions(*versions: int | None) -> Trajectory:
    trajectory = spans_to_trajectory(chain().spans())
    first = trajectory.actions[0]
    actions = [replace(first, node="actor", adapter_version=version) for version in versions]
    return replace(trajectory, actions=tuple(actions))


def test_staleness_is_what_the_records_say_and_never_above_the_bound() -> None:
    episodes = [by_versions(3), by_versions(2, 3)]
    assert check_staleness(episodes, ["actor"], 3, 1, "round 2") == {"mean": pytest.approx(1 / 3), "max": 1}
    assert check_staleness([by_versions(None)], ["actor"], 3, 0, "round 2") is None
    assert check_staleness(episodes, ["reasoner"], 9, 0, "round 2") is None  # no call of a node that is trained
    with pytest.raises(TrainError, match="round 2 holds calls that were sampled 1 versions before the newest"):
        check_staleness(episodes, ["actor"], 3, 0, "round 2")


def configured(**importance: str) -> BridgeConfig:
    graph = {"app": "a:b", "nodes": ["x"], "tasks": "t.jsonl", "reward": "a:r"}
    train = {"max_staleness": 1, "trainer": {"importance": importance}}
    return BridgeConfig.model_validate({"graph": graph, "serve": {"max_loras": 4}, "train": train})


@pytest.mark.parametrize("importance", [{"proximal": "engine", "mismatch": "none"}, {"mismatch": "none"}])
def test_stale_episodes_are_refused_where_nothing_weights_them(importance: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"set train.trainer.importance.proximal to 'recomputed'"):
        configured(**importance)
    assert configured().train.max_staleness == 1  # the defaults do weight them


def test_the_versions_of_rounds_under_way_need_places_in_the_server() -> None:
    graph = {"app": "a:b", "nodes": ["x", "y"], "tasks": "t.jsonl", "reward": "a:r"}
    with pytest.raises(ValueError, match=r"2 nodes with 2 \+ 1 versions need 6"):
        BridgeConfig.model_validate({"graph": graph, "serve": {"max_loras": 5}, "train": {"max_staleness": 1}})
