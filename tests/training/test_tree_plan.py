"""Owns: the forks of a round follow from its runs, and take what is left of its tokens.

- A round of trees samples as many tokens as its whole runs would have, to within half a run; waves by hand.
- A round that was stopped anywhere goes on with the same forks, and plays none twice.
- Forks that fail are rows, count towards the budget, and are not begun for ever; what cannot be forked is passed over.
- A round is read once, not once a wave, and what is kept of it is what the store has.

On a scripted duo and a real store.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import fork_toys
from support.duo_rig import COMMON, TASKS, Rig

from marft_bridge.common.errors import GraphError
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.rollouts import episode_plan
from marft_bridge.rollouts.episode_plan import EpisodeRequest, plan_episodes, replaced_attempts
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.training import tree_plan
from marft_bridge.training.fork_draw import CallSpot, SiblingRewards, draw_forks, spots_to_weights
from marft_bridge.training.planned_forks import (
    PlannedFork,
    Wave,
    actions_to_spots,
    forks_in_planned_order,
    known_runs_to_reach,
    read_waves,
    sampled_count,
)
from marft_bridge.training.round_plan import RoundPlan, plan_round
from marft_bridge.training.round_runs import RoundRuns
from marft_bridge.training.tree_metrics import round_to_tree_metrics, tree_metrics_to_text
from marft_bridge.training.tree_plan import ForkRules, KnownBefore, RoundForks, StoredRun, siblings_of_rounds
from trace_store.records import BLIND_FORK, RETOKENISED, Reward, Trajectory
from trace_store.store import TraceStore
from trainers.batch import trajectories_to_round

REASON, ACT = CallSpot("reasoner", 1), CallSpot("actor", 1)
WORDS = {"reasoner": "a plan ", "actor": "1"}


def script(node: str, _prompt: str, chance: Any) -> str:
    """The reasoner says seven characters and up to three more; the actor two."""
    return f"{WORDS[node]}{'x' * chance.randrange(4) if node == 'reasoner' else chance.randrange(10)}"


def config(seed: int = 3, episodes: int = 8, samples_per_task: int = 2, **trees: Any) -> BridgeConfig:
    return BridgeConfig.model_validate(
        {
            "seed": seed,
            "graph": {"app": "a:b", "nodes": ["reasoner", "actor"], "tasks": "t.jsonl", "reward": "a:r"},
            "train": {"episodes_per_round": episodes, "samples_per_task": samples_per_task, "trees": trees},
        }
    )


class Play:
    """One round of the duo as trees, as a process plays it that began just now."""

    def __init__(self, folder: Path, chosen: BridgeConfig, rule: Any = script, **options: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.rig, self.config = Rig(folder, rule, **options), chosen
        registry = AdapterRegistry(folder / "adapters", "0" * 64)
        self.rules = ForkRules(chosen, registry, folder / "trees", "run", is_heldout=lambda _: False)
        self.plan: RoundPlan = plan_round(TASKS, chosen.train, chosen.seed, **COMMON, round=1)
        self.known = KnownBefore({task["id"]: 1.0 for task in TASKS}, {REASON: 1.0, ACT: 1.0}, siblings=[])
        self.runs = RoundRuns("run", 1)
        self.wave_sizes: list[int] = []

    def go_on(self, stop_after: int | None = None) -> None:
        """Plays to the end, or until `stop_after` episodes of this process are stored."""
        self.rig.run([request for request in self.plan.planned if request.key not in self.stored_keys()])
        played: list[EpisodeRequest] = list(self.plan.planned)
        while wave := self.next_wave(played):
            self.wave_sizes.append(len(wave))
            wave = wave if stop_after is None else wave[:stop_after]
            self.rig.run(wave)
            played += wave
            if stop_after is not None and (stop_after := stop_after - len(wave)) == 0:
                return

    def forks_of(self, store: TraceStore) -> RoundForks:
        return RoundForks(self.rules, store, self.plan, known=lambda: self.known, runs=self.runs)

    def next_wave(self, played: Sequence[EpisodeRequest]) -> list[EpisodeRequest]:
        with self.rig.store() as store:
            return self.forks_of(store).next_wave(played)

    def requests_of(self, fork: PlannedFork) -> list[EpisodeRequest]:
        """Of a planned fork, as they are played."""
        with self.rig.store() as store:
            return self.forks_of(store)._to_requests(fork)

    def stored_keys(self) -> set[Any]:
        with self.rig.store() as store:
            return {(e.task_id, e.sample, None, 1, None) for e in store.episodes(run_id="run")}

    def trajectories(self) -> list[Trajectory]:
        with self.rig.store() as store:
            return list(store.trajectories(run_ids=["run"], forks=True))

    def chains(self) -> list[Trajectory]:
        return [each for each in self.trajectories() if each.episode.fork_action is None]

    def forks(self) -> list[Trajectory]:
        with self.rig.store() as store:
            replaced = replaced_attempts(store, "run")
        return forks_in_planned_order(self.trajectories(), self.waves(), replaced)

    def waves(self) -> list[Wave]:
        return read_waves(self.rules.folder, 1)

    def picture(self) -> list[tuple[Any, ...]]:
        """The forks without ids that are drawn anew in each run."""
        parents = {f.episode: (f.task, f.sample) for wave in self.waves() for f in wave}
        calls = {f.point.action_id: (f.node, f.call) for wave in self.waves() for f in wave}
        return [
            (
                parents[each.episode.parent_episode or ""],
                calls[each.episode.fork_action or ""],
                each.episode.sample,
                each.episode.seed,
                [action.completion for action in each.actions],
            )
            for each in self.forks()
        ]


def test_without_trees_a_round_has_all_its_runs_and_with_them_their_share_in_whole_groups() -> None:
    assert config().train.chains_per_round == 4
    assert config(share=0.2).train.chains_per_round == 6  # 6.4 runs: three groups of two
    assert config(share=0.25).train.chains_per_round == 6
    assert config(share=0.99).train.chains_per_round == 2  # one group at least
    assert replace_trees(config(), None).train.chains_per_round == 8
    assert [r.key for r in plan_round(TASKS, config().train, 3, **COMMON, round=1).requests] == [
        r.key for r in plan_round(TASKS, replace_trees(config(), None).train, 3, **COMMON, round=1).planned[:4]
    ]


def replace_trees(chosen: BridgeConfig, trees: Any) -> BridgeConfig:
    return chosen.model_copy(update={"train": chosen.train.model_copy(update={"trees": trees})})


def test_a_wave_looks_through_the_stored_episodes_no_oftener_for_having_many_forked_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()
    finished = episode_plan.finished_keys

    def counted(store: TraceStore, run_id: str) -> Any:
        asked.append(run_id)
        return finished(store, run_id)

    monkeypatch.setattr(episode_plan, "finished_keys", counted)
    play = Play(tmp_path, config(samples=1))
    play.go_on()
    # a wave that is planned asks once of the waves before it and once of its own; the last that finds nothing, once
    assert len(asked) <= 2 * len(play.wave_sizes) + 1
    assert sum(len(wave) for wave in play.waves()) > len(play.wave_sizes)


def test_an_episode_of_a_round_is_read_once_however_many_waves_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, original = Counter[str](), TraceStore.trajectories

    def counted(store: TraceStore, **options: Any) -> Iterator[Trajectory]:
        for trajectory in original(store, **options):
            read[trajectory.episode.episode_id] += 1
            yield trajectory

    play = Play(tmp_path, config(samples=1))
    monkeypatch.setattr(TraceStore, "trajectories", counted)
    play.go_on()
    assert len(play.wave_sizes) > 2
    assert set(read.values()) == {1}
    assert len(read) == 4 + sum(play.wave_sizes)


def test_what_is_kept_of_a_round_is_what_its_store_has_now(tmp_path: Path) -> None:
    """Without what forks are not planned by: token ids, log-probs, texts and edges."""
    play = Play(tmp_path, config(samples=1))
    play.go_on()
    first, second, *rest = (each.episode.episode_id for each in play.trajectories())
    runs = RoundRuns("run", 1)

    def rewards() -> dict[str, float | None]:
        with play.rig.store() as store:
            stored = list(store.trajectories(run_ids=["run"], forks=True))
            kept = runs.read(store)
        assert [each.episode for each in kept] == [each.episode for each in stored]
        assert [each.rewards for each in kept] == [each.rewards for each in stored]
        assert [sampled_count(each.actions) for each in kept] == [sampled_count(each.actions) for each in stored]
        assert {(a.prompt_ids, a.sampled_ids, a.logprobs, a.completion) for e in kept for a in e.actions} == {
            (None, None, None, None)
        }
        return {each.episode.episode_id: each.team_reward("reward") for each in kept}

    rewards()
    with play.rig.store() as store:
        store.put_rewards([Reward(first, "reward", 17.0, "later", time.time_ns())])
        for table in ("rewards", "actions", "edges", "episodes"):
            store.sql(f"DELETE FROM {table} WHERE episode_id = ?", (second,))  # noqa: S608 - constants
    now = rewards()
    assert now[first] == 17.0
    assert now.keys() == {first, *rest}


def test_waves_by_hand(tmp_path: Path) -> None:
    """Every answer has the same length: the reasoner's 8 tokens, the actor's 3, the end of a turn included."""
    play = Play(tmp_path, config(samples=2), lambda node, _prompt, _chance: WORDS[node] + "1" * (node == "actor"))
    play.go_on()
    assert {sampled_count(each.actions) for each in play.chains()} == {11}
    # 8 runs would have 88 tokens, and 4 have 44; a fork costs 3 or 11
    cost = {"actor": 3, "reasoner": 11}
    order = draw_forks([(f"t{n}", s) for n in range(2) for s in range(2)], play.known.task_weights, SPOTS, "3/forks/1")
    left, position, waves = 44.0, 0, []
    while position < len(order):
        wave: list[tuple[str, int, str, int]] = []
        spent = 0
        while position < len(order):
            choice = order[position]
            count = min(2, int((left - spent) / cost[choice.spot.node] + 0.5))
            if count < 1 or (wave and spent + count * cost[choice.spot.node] > left / 2):
                break
            wave.append((choice.task_id, choice.sample, choice.spot.node, count))
            spent += count * cost[choice.spot.node]
            position += 1
        if not wave:
            break
        waves.append(wave)
        left -= spent
    assert [[(f.task, f.sample, f.node, f.forks) for f in wave] for wave in play.waves()] == waves
    assert len(waves) > 1
    assert abs(left) <= 11 / 2
    assert {f.tokens for wave in play.waves() for f in wave if f.node == "actor"} == {3}


SPOTS = {REASON: 1.0, ACT: 1.0}


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "share"), [(1, 0.3), (2, 0.3), (1, 0.6), (3, 0.6)])
def test_trees_sample_as_many_tokens_as_whole_runs_to_within_one(tmp_path: Path, seed: int, share: float) -> None:
    play = Play(tmp_path, config(seed, episodes=16, share=share))
    play.go_on()
    chain_tokens = [sampled_count(each.actions) for each in play.chains()]
    total = sum(chain_tokens) + sum(sampled_count(each.actions) for each in play.forks())
    mean = sum(chain_tokens) / len(chain_tokens)
    assert abs(total - 16 * mean) <= mean
    assert {each.episode.tags.get(BLIND_FORK) for each in play.forks()} == {"yes"}


@pytest.mark.parametrize(
    "stop_after", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)]
)
def test_a_round_that_was_stopped_goes_on_with_the_same_forks(tmp_path: Path, stop_after: int) -> None:
    whole, stopped = Play(tmp_path / "whole", config()), Play(tmp_path / "stopped", config())
    whole.go_on()
    stopped.go_on(stop_after)
    begun = stopped.waves()
    stopped.go_on()
    assert stopped.waves()[: len(begun)] == begun
    assert whole.picture() == stopped.picture()
    assert len(whole.picture()) > 5
    assert len({each[3] for each in whole.picture()}) == len(whole.picture())  # each has a seed of its own
    assert len(stopped.trajectories()) == len(whole.trajectories())


@pytest.mark.slow
def test_a_fork_that_failed_is_a_row_and_counts_as_what_it_should_have_cost(tmp_path: Path) -> None:
    play = Play(tmp_path, config())
    play.rig.run(list(play.plan.planned))
    wave = play.next_wave(play.plan.planned)
    play.rig.policy.script = failing
    play.go_on()
    assert {each.episode.outcome for each in play.forks()} == {"failed"}
    planned = sum(fork.forks for wave in play.waves() for fork in wave)
    assert len(play.forks()) == planned >= len(wave)
    costs = sum(fork.forks * fork.tokens for wave in play.waves() for fork in wave)
    chain_tokens = sum(sampled_count(each.actions) for each in play.chains())
    assert costs == pytest.approx(chain_tokens, abs=chain_tokens / 4)
    assert play.next_wave([*play.plan.planned, *wave]) != []  # in a process of its own they are tried again


def failing(_node: str, _prompt: str, _chance: Any) -> str:
    raise ConnectionResetError("cut")


def test_runs_that_failed_and_calls_that_were_not_made_are_passed_over(tmp_path: Path) -> None:
    def cut_short(node: str, prompt: str, chance: Any) -> str:
        if "1 + 1?" in prompt and node == "actor":
            raise ConnectionResetError("cut")
        return script(node, prompt, chance)

    play = Play(tmp_path, config(), cut_short)
    play.known = replace(play.known, reach={REASON: 1.0, ACT: 1.0, CallSpot("actor", 2): 1.0})
    play.go_on()
    assert Counter(each.episode.outcome for each in play.chains()) == {"terminated": 2, "failed": 2}
    assert {(fork.task, fork.call) for wave in play.waves() for fork in wave} == {("t0", 1)}


def test_a_round_of_which_no_run_can_be_forked_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise GraphError("fork: another base model answered")

    monkeypatch.setattr(tree_plan, "refuse_other_models", refuse)
    with pytest.raises(
        GraphError, match=r"^train.trees: no call of round 1 can be forked: another base model answered"
    ):
        Play(tmp_path, config()).go_on()


# -- from the best ------------------------------------------------------------------------------------------------


class Lines(Play):
    """A duo that is paid by the last digits of both answers, so that runs beneath a call differ."""

    def __init__(self, folder: Path, chosen: BridgeConfig) -> None:
        super().__init__(folder, chosen, digits, reward=lambda _, result: {"reward": float(result["answer"][-1])})


def digits(_node: str, _prompt: str, chance: Any) -> str:
    return f"so {chance.randrange(10)}"


def test_a_walk_goes_on_from_whichever_run_earned_most_and_only_its_first_forks_are_blind(tmp_path: Path) -> None:
    play = Lines(tmp_path, config(episodes=16, samples=2, share=0.7, go_on_from="best"))
    play.go_on()
    runs = {each.episode.episode_id: each for each in play.trajectories()}
    steps: dict[tuple[str, int], list[PlannedFork]] = {}
    for fork in (fork for wave in play.waves() for fork in wave):
        steps.setdefault((fork.task, fork.sample), []).append(fork)
    assert len(play.chains()) == 4
    went_on = 0
    for walk in steps.values():
        assert [(step.node, step.blind) for step in walk] == [("reasoner", True), ("actor", False)][: len(walk)]
        first = walk[0]
        forks = [each for each in play.forks() if each.episode.fork_action == first.action]
        beneath = [runs[first.episode], *forks]
        earned = [each.team_reward("reward") or 0.0 for each in beneath]
        if len(walk) > 1:
            best = beneath[earned.index(max(earned))]
            assert walk[1].episode == best.episode.episode_id
            assert walk[1].action == best.actions[1].action_id
            went_on += best.episode.fork_action is not None
            seconds = [each for each in play.forks() if each.episode.fork_action == walk[1].action]
            for each in seconds:
                assert each.episode.tags == {}
                assert each.actions[0].completion == best.actions[0].completion
                assert each.actions[1].replayed_from is None
        assert {each.episode.tags.get(BLIND_FORK) for each in forks} == {"yes"}
    assert went_on  # a fork was forked


@pytest.mark.slow
def test_what_a_walk_chose_by_its_outcome_teaches_its_own_calls_only(tmp_path: Path) -> None:
    play = Lines(tmp_path, config(episodes=16, samples=2, share=0.7, go_on_from="best"))
    play.go_on()
    agents = dict.fromkeys(("reasoner", "actor"), 10**6)
    stored = [*play.chains(), *play.forks()]
    data = trajectories_to_round(stored, tuple(agents), "reward", agents, "imitation")
    assert data.forest is not None
    attached = [e for e, episode in enumerate(data.episodes) if episode.fork is None or episode.fork.blind]
    assert sum(data.forest.weight_E[e] for e in attached) == pytest.approx(len(play.chains()))
    sampled = [a.action_id for each in stored for a in each.actions if a.replayed_from is None]
    assert sorted(action_id for episode in data.episodes for action_id in episode.action_ids) == sorted(sampled)


@pytest.mark.slow
def test_a_walk_that_was_stopped_goes_on_from_the_same_runs(tmp_path: Path) -> None:
    chosen = config(episodes=16, samples=2, share=0.7, go_on_from="best")
    whole, stopped = Lines(tmp_path / "whole", chosen), Lines(tmp_path / "stopped", chosen)
    whole.go_on()
    stopped.go_on(3)
    stopped.go_on()
    assert [(w.task, w.sample, w.node, w.forks) for wave in whole.waves() for w in wave] == [
        (w.task, w.sample, w.node, w.forks) for wave in stopped.waves() for w in wave
    ]
    assert [each[2:] for each in whole.picture()] == [each[2:] for each in stopped.picture()]


# -- from stored runs ---------------------------------------------------------------------------------------------


class Begun(Play):
    """A round before which four runs were collected, by other versions."""

    def __init__(self, folder: Path, chosen: BridgeConfig, **options: Any) -> None:
        super().__init__(folder, chosen, **options)
        self.rig.run(plan_episodes(TASKS[4:], 4, 1, seed=chosen.seed, **EARLIER))
        with self.rig.store() as store:
            self.collected = {each.episode_id: each for each in store.episodes(run_id="collect")}
        stored = {each.task_id: StoredRun(each.episode_id, 1.0) for each in self.collected.values()}
        self.known = replace(self.known, stored=stored)

    def parents(self) -> list[PlannedFork]:
        return [fork for wave in self.waves() for fork in wave if fork.stored]


EARLIER = COMMON | {"run_id": "collect", "adapters": {"reasoner": 0, "actor": 2}}


def test_a_part_of_the_forks_goes_on_from_stored_runs_before_those_of_the_round(tmp_path: Path) -> None:
    """Every answer has the same length, as in the waves by hand: a whole run has 11 tokens, a fork of the actor 3."""
    play = Begun(
        tmp_path,
        config(samples=2, stored_share=0.5),
        rule=lambda node, _prompt, _chance: WORDS[node] + "1" * (node == "actor"),
    )
    play.go_on()
    order = [f"{fork.stored:d}" for wave in play.waves() for fork in wave]
    assert order == sorted(order, reverse=True)
    # 44 tokens are for forks and 22 of them for stored runs: 6 of 22, 6 of 16, 6 of 10; of the last 4 not two forks
    assert [(f.node, f.forks, f.tokens) for f in play.parents()] == [("actor", 2, 3)] * 3
    assert len({fork.episode for fork in play.parents()}) == 3
    assert {fork.episode for fork in play.parents()} < set(play.collected)
    stored = [each for each in play.forks() if each.episode.parent_episode in play.collected]
    assert len(stored) == 6
    for each in stored:
        assert each.episode.adapters == COMMON["adapters"]  # of the round, not of the run that it goes on from
        assert (each.episode.run_id, each.episode.round, each.episode.tags) == ("run", 1, {})
        assert [action.replayed_from is None for action in each.actions] == [False, True]
    total = sum(sampled_count(each.actions) for each in (*play.chains(), *play.forks()))
    assert abs(total - 88) <= 11 / 2


def test_a_fork_of_a_stored_run_teaches_its_own_calls_beside_its_siblings_at_the_turns_that_they_have(
    tmp_path: Path,
) -> None:
    play = Begun(tmp_path, config(samples=2, stored_share=1.0))
    play.go_on()
    forks = [each for each in play.forks() if each.episode.parent_episode in play.collected]
    agents = dict.fromkeys(("reasoner", "actor"), 10**6)
    data = trajectories_to_round([*play.chains(), *play.forks()], tuple(agents), "reward", agents, "imitation")
    assert data.forest is not None
    points = {each.episode.fork_action for each in forks}
    assert sum(data.forest.weight_E) == pytest.approx(len(play.chains()) + len(points))  # a group counts as one run
    own = {each.episode.episode_id for each in forks}
    assert {len(episode.actions) for episode in data.episodes if episode.episode_id in own} == {1}

    parent = fork_toys.run("a", [("x", 1), ("y", 2), ("x", 3), ("x", 4)], 1.0)
    fork = fork_toys.fork("c", parent, 2, [("x", 5), ("x", 6), ("y", 7)], 0.0)
    fork = replace(fork, episode=replace(fork.episode, tags={}))
    names = {"x": 10**6, "y": 10**6}
    for round_of in ([fork], [parent, fork]):  # without the run that it left, and with it
        items = trajectories_to_round(round_of, tuple(names), "reward", names, "imitation").items
        assert [(item.agent, item.turn) for item in items][-3:] == [("x", 1), ("x", 2), ("y", 1)]


@pytest.mark.parametrize("stop_after", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_round_that_was_stopped_among_forks_of_stored_runs_plays_the_rest_of_them(
    tmp_path: Path, stop_after: int
) -> None:
    play = Begun(tmp_path, config(samples=2, stored_share=0.6))
    play.go_on(stop_after)
    begun = play.waves()
    play.go_on()
    assert play.waves()[: len(begun)] == begun
    planned = [fork for wave in play.waves() for fork in wave]
    played = Counter(each.episode.fork_action for each in play.trajectories() if each.episode.fork_action)
    assert played == {fork.action: fork.forks for fork in planned}
    assert len({each.episode.seed for each in play.forks()}) == len(play.forks())


def test_stored_runs_of_one_call_or_that_cannot_be_forked_leave_their_part_to_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = Begun(tmp_path, config(samples=2, stored_share=0.5))

    def refuse(run: Any, *_: Any) -> None:
        if run.episode_id in play.collected:
            raise GraphError("fork: another base model answered")

    monkeypatch.setattr(tree_plan, "refuse_other_models", refuse)
    play.go_on()
    assert play.parents() == []
    assert play.forks()


def test_a_stored_run_without_a_call_is_passed_over_and_one_that_is_erased_is_not_begun_again(tmp_path: Path) -> None:
    play = Begun(tmp_path, config(samples=2, stored_share=0.5))
    silent = replace(play.known.stored["t4"], weight=1e9)  # drawn first
    play.known = replace(play.known, stored={**play.known.stored, "t4": silent})
    with play.rig.store() as store:
        store.sql("DELETE FROM edges WHERE episode_id = ?", (silent.episode_id,))
        store.sql("DELETE FROM actions WHERE episode_id = ?", (silent.episode_id,))
    play.go_on(2)
    begun = play.parents()[-1].episode
    assert silent.episode_id not in {fork.episode for fork in play.parents()}
    gone = next(name for name, run in play.known.stored.items() if run.episode_id == begun)
    play.known = replace(play.known, stored={n: run for n, run in play.known.stored.items() if n != gone})
    play.go_on()
    assert max(Counter(fork.episode for fork in play.parents()).values()) == 1
    assert [fork for wave in play.waves() for fork in wave if not fork.stored]


# -- what is known ------------------------------------------------------------------------------------------------


def test_calls_are_numbered_by_node_and_only_those_that_are_trained_count() -> None:
    run = fork_toys.run("a", [("x", 1), ("y", 2), ("x", 3)], 1.0)
    untrainable = replace(run.actions[0], trainable=False)
    assert list(actions_to_spots(run.actions, ("x",))) == [CallSpot("x", 1), CallSpot("x", 2)]
    assert list(actions_to_spots((untrainable, *run.actions[1:]), ("x",))) == [CallSpot("x", 2)]
    other = fork_toys.run("b", [("x", 1)], 0.0)
    failed = replace(other, episode=replace(other.episode, outcome="failed"))
    known = {CallSpot("x", 1): 1.0, CallSpot("x", 2): 0.5}
    assert known_runs_to_reach([run, other, failed], [other], ("x",)) == known
    assert known_runs_to_reach([], [run, other, failed], ("x",)) == known


def test_a_first_round_after_foreign_traces_alone_has_forks() -> None:
    run = fork_toys.run("a", [("x", 1), ("y", 2)], 1.0)
    actions = tuple(replace(each, trainable=False, untrainable_reason=RETOKENISED) for each in run.actions)
    reach = known_runs_to_reach([], [replace(run, actions=actions)], ("x", "y"))
    assert reach == {CallSpot("x", 1): 1.0, CallSpot("y", 1): 1.0}
    assert draw_forks([("t", 0)], {"t": 1.0}, spots_to_weights(reach, []), key="k")
    assert known_runs_to_reach([run], [replace(run, actions=actions[:1])], ("x", "y")) == reach  # a round says it


@pytest.mark.slow
def test_siblings_of_earlier_rounds_are_the_run_and_its_forks(tmp_path: Path) -> None:
    play = Play(tmp_path, config(samples=2))
    play.go_on()
    earned = {each.episode.episode_id: each.team_reward("reward") for each in play.trajectories()}
    expected = Counter[Any]()
    for fork in (fork for wave in play.waves() for fork in wave):
        forks = [each for each in play.forks() if each.episode.fork_action == fork.action]
        values = sorted(earned[each.episode.episode_id] or 0.0 for each in forks)
        expected[SiblingRewards(CallSpot(fork.node, fork.call), (earned[fork.episode] or 0.0, *values))] += 1
    with play.rig.store() as store:
        assert Counter(siblings_of_rounds(store, "run", 1, "reward")) == expected
        assert siblings_of_rounds(store, "run", 0, "reward") == []
    # of a fork in a later round neither its run nor what was forked there before is a sibling
    first = next(fork for wave in play.waves() for fork in wave)
    later = [replace(request, round=2) for request in play.requests_of(first)]
    play.rig.run(later)
    with play.rig.store() as store:
        of_rounds = Counter(siblings_of_rounds(store, "run", 2, "reward"))
        assert (of_rounds - expected).total() == 1
        ((group, _),) = (of_rounds - expected).items()
        assert len(group.values) == len(later)
    assert expected


# -- figures ------------------------------------------------------------------------------------------------------


def test_the_figures_of_a_round_by_hand() -> None:
    parent = fork_toys.run("a", [("x", 1), ("y", 2), ("x", 3)], 1.0)
    other = fork_toys.run("b", [("x", 1)], 0.0, task="u")
    fork = fork_toys.fork("c", parent, 1, [("y", 4), ("x", 5)], 0.0)
    failed = fork_toys.fork("d", parent, 2, [("x", 5)], 0.0)
    failed = replace(failed, episode=replace(failed.episode, outcome="failed"))
    metrics = round_to_tree_metrics(
        [parent, other], [fork, failed], episodes_per_round=4, reward="reward", stored=False
    )
    # prompts have 1, 2, 3 tokens, one more than the calls before: of 1 + 2 + 3 of the fork the first is given again
    assert metrics == {
        "forked_calls": 1,
        "forks": 1,
        "failed_forks": 1,
        "stored_forks": None,
        "sampled_tokens": 4 + 2 + 1,
        "token_budget": 8,
        "fork_tokens_saved_share": pytest.approx(1 / 6),
        "undecided_tasks": 0.5,
    }
    wave = (PlannedFork("t", 0, "y", 1, episode="a", action="a.1", forks=1, tokens=2),)
    assert tree_metrics_to_text(metrics, [wave]) == (
        "1 forks of 1 calls (y:1 1), 1 failed; 7 of 8 tokens; 50% of the tasks undecided"
    )
    assert round_to_tree_metrics([], [], 4, "reward", stored=False)["fork_tokens_saved_share"] is None
    stored = round_to_tree_metrics([other], [fork], episodes_per_round=4, reward="reward", stored=True)
    assert (stored["stored_forks"], stored["undecided_tasks"]) == (1, 0.0)  # its run is none of the round
    assert "1 forks of 1 calls (y:1 1), 1 of them of stored runs, 0 failed" in tree_metrics_to_text(stored, [wave])
