"""Owns: the version that `train` names, on the whole path: rounds, best.json, who takes it, when rounds stop.

- The file holds what the store says of every request, with a result or without, and is its owner's only; what another
  hand wrote into it is refused.
- Rounds that no longer pay end the run, a resumed run stays ended, and more rounds go on.
- What the last version plays to be evaluated is evidence, and nothing learns from it.
"""

from __future__ import annotations

import io
import json
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.growth_rig import fill, trace_id
from support.sample_spans import START, chain
from support.school_rig import School, school_in

from marft_bridge.commands.export import ExportFlags, export_node
from marft_bridge.commands.status import status
from marft_bridge.common.errors import ConfigError
from marft_bridge.common.progress import Reporter
from marft_bridge.runs.named_version import NamedVersion, read_named_version, write_named_version
from marft_bridge.runs.run_folder import RunFolder, read_metrics
from marft_bridge.training.best_version import ScoredEpisode, episodes_to_evidence
from marft_bridge.training.version_naming import lines_to_stop_text, named_to_metrics, named_to_text, store_to_named
from trace_store.records import Reward
from trace_store.store import TraceStore

REPLAY = {"replay": {"share": 0.5}, "importance": {"mismatch": "truncate"}}  # earlier episodes join every round


@pytest.fixture
def school(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[School]:
    with school_in(tmp_path, monkeypatch) as opened:
        yield opened


def right_at(school: School, is_right: Callable[[int, int], bool]) -> None:
    """The actor is right where its version and the number of the task say so; the reasoner thinks on half the tasks."""

    def answer(body: Mapping[str, Any]) -> str:
        node, _, version = str(body["model"]).rpartition("@")
        number = int(str(body["messages"][-1]["content"]).split(" ")[0])
        if node == "reasoner":
            return "think" if number % 2 else "no"
        return "yes" if is_right(int(version), number) else "no"

    school.server.answer = answer


def named_in(school: School) -> NamedVersion:
    named = read_named_version(RunFolder(school.run))
    assert named is not None
    return named


@pytest.mark.slow
def test_training_names_the_version_whose_round_was_better_by_far(school: School) -> None:
    right_at(school, lambda version, number: version == 2 or number % 4 == 0)
    school.collect()
    said = school.train(rounds=3, episodes_per_round=12)
    named = named_in(school)
    assert (named.version, named.newest, named.reward) == (2, 4, "reward")
    assert [row.episodes for row in named.evidence] == [12, 12, 12, 0]
    with school.store() as store:
        played = [t.team_reward("reward") for t in store.trajectories(run_ids=["train"], round=2)]
    assert named.evidence[1].mean == pytest.approx(sum(filter(None, played)) / 12)
    assert f"best version: 2 of 4, which compare and export take: reward {named.evidence[1].estimate:.3f}" in said
    assert stat.S_IMODE(RunFolder(school.run).best.stat().st_mode) == 0o600
    last = read_metrics(RunFolder(school.run).metrics)[-1]["best"]
    assert (last["version"], last["estimate"], last["stopped"]) == (2, named.evidence[1].estimate, False)

    text = io.StringIO()
    reporter = Reporter(Console(file=text, width=300))
    for version in (None, "newest"):
        export_node(
            school.config(), "actor", school.folder / f"out-{version}", flags=ExportFlags(version), reporter=reporter
        )
    status(school.config(), reporter)
    assert "exported actor@2 (best by training's rounds) as a peft adapter" in text.getvalue()
    assert "exported actor@4 as a peft adapter" in text.getvalue()
    assert "best version: 2 of 4" in text.getvalue()


@pytest.mark.slow
def test_rounds_that_no_longer_pay_end_the_run_until_more_are_asked_for(school: School) -> None:
    """Version 1 is right on all tasks and no later one on any, so version 4 is three back once round 3 was played."""
    right_at(school, lambda version, number: version == 1)
    school.collect()
    said = school.train(rounds=6, episodes_per_round=12)
    metrics = RunFolder(school.run).metrics
    assert [line["round"] for line in read_metrics(metrics)] == [0, 1, 2, 3]
    assert "rounds end after 3 of 6, since they no longer pay: version 1 is better than version 4 with" in said
    assert named_in(school).version == 1

    said = school.train(resume=True, rounds=6, episodes_per_round=12)
    assert [line["round"] for line in read_metrics(metrics)] == [0, 1, 2, 3]
    assert "rounds end after 3 of 6" in said

    said = school.train(resume=True, rounds=9, episodes_per_round=12)
    assert [line["round"] for line in read_metrics(metrics)] == [0, 1, 2, 3, 4, 5, 6]  # three more before it may stop
    assert "rounds end after 6 of 9" in said
    assert (named_in(school).version, named_in(school).newest) == (1, 7)


@pytest.mark.slow
def test_the_evaluation_is_evidence_from_which_nothing_learns(school: School) -> None:
    right_at(school, lambda version, number: version == 2 or number % 4 == 0)
    school.collect()
    options = {"episodes_per_round": 6, "evaluation_episodes": 5, "trainer": REPLAY}
    school.train(rounds=1, **options)
    with school.store() as store:
        evaluated = store.episodes(run_id="evaluate")
    assert [(e.split, e.adapters, e.round) for e in evaluated] == [("evaluation", {"reasoner": 2, "actor": 2}, 2)] * 5
    assert len({e.task_id for e in evaluated}) == 5
    assert [row.episodes for row in named_in(school).evidence] == [6, 5]

    school.train(resume=True, rounds=1, **options)  # nothing is left to run
    school.train(resume=True, rounds=2, **options)
    with school.store() as store:
        runs = [(e.episode_id, e.round) for e in store.episodes(run_id="evaluate")]
    assert sorted(number for _, number in runs) == [2] * 5 + [3] * 5
    assert [row.episodes for row in named_in(school).evidence] == [6, 11, 5]
    assert {episode_id for episode_id, _ in runs}.isdisjoint(episode.episode_id for episode in school.learned)
    with school.store() as store:
        learned = {row[0] for row in store.sql("SELECT DISTINCT episode_id FROM adapter_episodes")}
    assert learned.isdisjoint(episode_id for episode_id, _ in runs)


# -- what counts ----------------------------------------------------------------------------------------------


def attempt(at: int, reward: float | None, task: str, version: int, *, outcome: str = "", **root: Any) -> list[Any]:
    """The spans of one attempt at a task, in the round that a version played, and its reward."""
    cut = {"OUTCOME": outcome, "OUTCOME_REASON": root.pop("reason", "too long")} if outcome else {}
    fields: dict[str, Any] = {
        "RUN_ID": "train",
        "ROUND": version,
        "TASK_ID": task,
        "ADAPTERS": json.dumps({"a": version}),
        **cut,
    }
    spans: list[Any] = chain(f"e{at}", START + at).spans(**fields | root)
    return spans if reward is None else [*spans, Reward(trace_id(f"e{at}"), "reward", reward, "test", at)]


def named_of(path: Path, episodes: list[list[Any]], rounds: int) -> NamedVersion:
    fill(path, episodes)
    with TraceStore.open(path) as store:
        return store_to_named(store, ["a"], rounds, reward="reward")


def test_each_request_of_a_version_counts_once_with_its_result_or_without(tmp_path: Path) -> None:
    episodes = [
        attempt(1, 1.0, "t1", 1),
        attempt(2, None, "t2", 1, outcome="failed"),
        attempt(3, None, "t3", 1, outcome="truncated"),
        attempt(4, None, "t4", 1, outcome="failed"),  # a connection broke, and the next attempt came to an end
        attempt(5, 0.5, "t4", 1),
        attempt(6, None, "t5", 1, outcome="failed"),  # both attempts failed
        attempt(7, None, "t5", 1, outcome="failed"),
        attempt(8, None, "t6", 1, outcome="truncated", reason="cancelled"),  # Ctrl-C says nothing of the version
        attempt(9, 0.75, "t7", 1, outcome="failed"),  # what failed was scored afterwards
        attempt(10, 0.25, "t8", 1, outcome="truncated"),  # cut short with a reward
        attempt(14, None, "t9", 1),  # it ended, and its judge did not answer
        attempt(11, 0.5, "t1", 2),
        attempt(12, 0.5, "t2", 2),
        attempt(13, None, "t1", 3, outcome="failed"),  # of a round that is not over
    ]
    named = named_of(tmp_path / "s.duckdb", episodes, 2)
    assert [(row.episodes, row.without_result, row.mean) for row in named.evidence] == [
        (7, 4, (1.0 + 0.5 + 0.25) / 7),
        (2, 0, 0.5),
        (0, 0, None),
    ]
    own_share = {1: " (57% of its own)", 2: " (0% of its own)"}.get(named.version, "")
    end = f"; 44% of the rounds' runs{own_share} came to no result, and count as the worst reward"
    assert named_to_text(named).endswith(end)


def test_where_no_run_has_a_reward_the_newest_version_is_named_and_nothing_is_said_of_the_others(
    tmp_path: Path,
) -> None:
    lost = [attempt(n, None, f"t{n}", 1 + n % 2, outcome="failed") for n in range(8)]
    named = named_of(tmp_path / "none.duckdb", lost, 2)
    assert (named.version, named.evidence) == (3, ())
    assert named_to_text(named) == "best version: 3 of 3, which compare and export take; no round tells them apart"
    # what was collected has no reward of this name, so that it says nothing of version 0
    collected = [attempt(20 + n, None, f"t{n}", 0, RUN_ID="collect") for n in range(8)]
    rewarded = [attempt(40 + n, float(n % 2), f"t{n}", 1 + n % 2) for n in range(8)]
    with_collected = named_of(tmp_path / "collected.duckdb", [*collected, *rewarded], 2)
    assert with_collected.evidence == named_of(tmp_path / "rounds.duckdb", rewarded, 2).evidence


# -- decisions without a run ----------------------------------------------------------------------------------


def fallen(newest: int) -> NamedVersion:
    """Version 1 earned everything, the others nothing."""
    episodes = [ScoredEpisode(v, f"t{n}", float(v == 1)) for v in range(1, newest) for n in range(24)]
    return NamedVersion(version=1, newest=newest, reward="reward", evidence=episodes_to_evidence(episodes, newest))


def stopped_line(number: int, stopped: bool, asked: int) -> dict[str, Any]:
    best = {"version": 1, "above_newest": 0.97, "stopped": stopped, "rounds_asked": asked}
    return {"round": number, "best": best}


@pytest.mark.parametrize(
    ("rounds", "earlier_stop", "stop_early", "stops"),
    [
        (9, None, True, True),
        (9, None, False, False),
        (6, None, True, False),  # the last round is no early stop
        (9, 3, True, True),  # three rounds ago
        (9, 4, True, False),
    ],
)
def test_a_round_stops_the_run_where_rounds_are_left_and_the_last_stop_is_three_back(
    rounds: int, earlier_stop: int | None, stop_early: bool, stops: bool
) -> None:
    lines = [stopped_line(number, number == earlier_stop, 5) for number in range(1, 6)]
    best = named_to_metrics(fallen(7), lines, rounds=rounds, stop_early=stop_early)
    assert (best["version"], best["stopped"], best["rounds_asked"]) == (1, stops, rounds)


def test_a_stop_holds_until_more_rounds_are_asked_for() -> None:
    lines = [{"round": 0}, stopped_line(3, stopped=True, asked=6)]
    assert lines_to_stop_text(lines, 6) is not None
    assert lines_to_stop_text(lines, 4) is not None
    assert lines_to_stop_text(lines, 7) is None
    assert lines_to_stop_text([*lines, stopped_line(4, stopped=False, asked=7)], 7) is None
    assert lines_to_stop_text([{"round": 3}], 6) is None  # a line of an older release
    assert lines_to_stop_text([], 6) is None


def test_the_file_reads_back_as_it_was_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert read_named_version(folder) is None
    write_named_version(folder, fallen(4))
    assert read_named_version(folder) == fallen(4)


@pytest.mark.parametrize(
    "change",
    [{"version": 9}, {"version": 0}, {"evidence": "none"}, {"newest": 5}, {"note": "mine"}, {"schema_version": 2}],
)
def test_a_file_that_another_hand_wrote_is_refused_in_one_line(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = RunFolder(tmp_path)
    write_named_version(folder, fallen(4))
    folder.best.write_text(json.dumps(json.loads(folder.best.read_text()) | change))
    with pytest.raises(ConfigError, match=r"best\.json is unreadable \(.*\); delete it, and the newest version"):
        read_named_version(folder)
