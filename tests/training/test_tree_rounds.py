"""Owns: whole trainings whose rounds are trees.

- The update is handed the round's runs and all of their forks, as trees; no repeated call is learned from twice.
- A training that was killed among its forks learns what one learns that was left alone, bit for bit.
- A tool before a forked call is not run again.
- A round may go on from stored runs that did better than their task does; killed among these it learns the same.
- The line of a round, the terminal and the adapters' lineage know the forks.

The real `train` on a tiny model and a stand-in for its server.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.school_rig import School, learned, school_in

from marft_bridge.rollouts.episode_plan import episode_to_fork
from marft_bridge.training.planned_forks import read_waves
from marft_bridge.view.curves import lines_to_charts
from trace_store.records import REPLAYED, Trajectory


def by_seed_of_some(body: dict[str, Any]) -> str:
    """Tasks of an even number are hopeless; the samples of the others differ."""
    number = int(str(body["messages"][-1]["content"]).split(" ")[0])
    return "yes" if number % 2 and body["seed"] % 2 else "no"


def trees(estimator: str, **changes: Any) -> dict[str, Any]:
    trainer = {"advantage": {"estimator": estimator}, "offline": {"mode": "off"}, **changes.pop("trainer", {})}
    common = {"rounds": 2, "episodes_per_round": 12, "samples_per_task": 2, "trees": {"samples": 2, "share": 0.6}}
    return common | {"trainer": trainer, "without_signal": True} | changes


def lines_of(school: School) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (school.run / "metrics.jsonl").read_text().splitlines()]


# The duo with a tool between its two nodes, which notes every run of it in a file.
TOOL_APP = """
from langchain_core.tools import tool


@tool
def note(text: str) -> str:
    "Notes a text."
    with open("NOTES", "a") as file:
        file.write(text + "\\n")
    return text


def take_note(state: State) -> dict[str, Any]:
    note.invoke({"text": state["log"][0]})
    return {}


def duo(model: BaseChatModel):
    graph = StateGraph(State)
    graph.add_node("reasoner", speaker(model))
    graph.add_node("notes", take_note)
    graph.add_node("actor", speaker(model))
    for edge in [(START, "reasoner"), ("reasoner", "notes"), ("notes", "actor"), ("actor", END)]:
        graph.add_edge(*edge)
    return graph.compile()
"""


def train_with_tool(
    app: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Trajectory], list[Trajectory], list[str]]:
    """Rounds of trees of an app whose tool writes a line: all episodes, those with a call given again, the lines."""
    with school_in(tmp_path, monkeypatch) as school:
        apps, notes = school.folder / "apps.py", school.folder / "notes.txt"
        apps.write_text(apps.read_text() + app.replace("NOTES", str(notes)))
        school.server.answer = by_seed_of_some
        school.collect()
        school.train(**trees("c3"))
        with school.store() as store:
            episodes = list(store.trajectories(forks=True))
        forked_after = [each for each in episodes if any(action.replayed_from for action in each.actions)]
        return episodes, forked_after, notes.read_text().splitlines()


@pytest.mark.slow
def test_a_tool_before_a_forked_call_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    episodes, forked_after, lines = train_with_tool(TOOL_APP, tmp_path, monkeypatch)
    assert 0 < len(forked_after) < len(episodes)
    assert len(lines) == len(episodes) - len(forked_after)


@pytest.mark.slow
def test_rounds_of_an_app_that_draws_ids_have_forks_that_do_not_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing = TOOL_APP.replace('state["log"][0]', "str(uuid.uuid4())").replace("return {}", 'return {"log": [noted]}')
    drawing = "import uuid\n" + drawing.replace("    note.invoke", "    noted = note.invoke")
    episodes, forked_after, lines = train_with_tool(drawing, tmp_path, monkeypatch)
    assert 0 < len(forked_after) < len(episodes)
    assert {each.episode.outcome for each in episodes} == {"terminated"}
    assert len(lines) == len(episodes) - len(forked_after)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["c3", "at_grpo"])
def test_a_round_hands_over_its_runs_and_their_forks_and_every_sampled_call_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, estimator: str
) -> None:
    with school_in(tmp_path, monkeypatch) as school:
        school.server.answer = by_seed_of_some
        school.collect()
        said = school.train(**trees(estimator))
        lines = [line for line in lines_of(school) if line["phase"] == "online"]
        with school.store() as store:
            for line in lines:
                number = line["round"]
                stored = list(store.trajectories(run_ids=["train"], round=number, forks=True))
                forks = [each for each in stored if each.episode.fork_action is not None]
                chains = [each for each in stored if each.episode.fork_action is None]
                ids = {each.episode.episode_id for each in stored}
                handed = [each for each in school.rounds if {e.episode_id for e in each.episodes} == ids]
                assert handed  # to `update`, at least; all of it
                data = handed[-1]
                own = [a.action_id for each in stored for a in each.actions if a.replayed_from is None]
                trained = [action_id for episode in data.episodes for action_id in episode.action_ids]
                assert sorted(trained) == sorted(own)
                assert data.forest is not None
                assert len(data.forest.unrolled.items) == sum(len(each.actions) for each in stored)
                assert sum(data.forest.weight_E) == pytest.approx(len(chains))  # every fork hangs on its run
                repeated = [a for each in forks for a in each.actions if a.replayed_from is not None]
                assert {a.untrainable_reason for a in repeated} <= {REPLAYED}
                planned = [fork for wave in read_waves(school.run / "trees", number) for fork in wave]
                assert {episode_to_fork(each.episode) for each in forks} == {fork.point for fork in planned}
                assert line["episodes"] == len(stored)
                assert line["trees"]["forks"] == len(forks) == sum(fork.forks for fork in planned)
                assert f"round {number}: {len(forks)} forks of {len(planned)} calls" in said
                assert len(chains) == 4
            newest = {row[0] for row in store.sql("SELECT episode_id FROM adapter_episodes WHERE version = 3")}
            assert {each.episode.episode_id for each in stored} <= newest
        charts = {chart.name for chart in lines_to_charts({"run": lines}, {})}  # of the viewer's page
        assert {"trees.forks", "trees.fork_tokens_saved_share", "trees.undecided_tasks"} <= charts
        assert any(agent["steps"] for line in lines for agent in line["agents"].values())
        assert any(line["critic"]["flat_groups"] < 1 for line in lines)  # else training ends for want of a signal


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [7, 21])
def test_a_training_that_was_killed_among_its_forks_learns_what_it_would_have_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    contents = []
    for name in ("unbroken", "broken"):
        (tmp_path / name).mkdir()
        with school_in(tmp_path / name, monkeypatch) as school:
            school.server.answer = by_seed_of_some
            school.collect()
            if name == "broken":
                school.train_until_killed(stop_at, **trees("tree_grpo"))
                school.train(**trees("tree_grpo") | {"resume": True, "without_signal": False})
            else:
                school.train(**trees("tree_grpo"))
            contents.append(learned(school))
            with school.store() as store:
                episodes = store.episodes(run_id="train", forks=True)
                assert len({(e.round, e.seed) for e in episodes}) == len(episodes)  # none was played twice
    assert [name for name in contents[0] if contents[0][name] != contents[1].get(name)] == []


@pytest.mark.slow
def test_at_grpo_learns_from_walks_that_go_on_from_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with school_in(tmp_path, monkeypatch) as school:
        school.server.answer = by_seed_of_some
        school.collect()
        school.train(**trees("at_grpo", trees={"share": 0.7, "go_on_from": "best"}))
        planned = [fork for number in (1, 2) for wave in read_waves(school.run / "trees", number) for fork in wave]
        assert {fork.blind for fork in planned} == {True, False}
        with school.store() as store:
            forks = [e for e in store.episodes(run_id="train", forks=True) if e.fork_action is not None]
        assert {e.outcome for e in forks} == {"terminated"}
        assert {(e.parent_episode, e.fork_action) for e in forks} == {(fork.episode, fork.action) for fork in planned}


@pytest.mark.slow
def test_rounds_go_on_from_stored_runs_and_after_a_kill_learn_what_they_would_have_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = trees("at_grpo", trees={"samples": 2, "share": 0.6, "stored_share": 0.5})
    contents = []
    for name in ("unbroken", "broken"):
        (tmp_path / name).mkdir()
        with school_in(tmp_path / name, monkeypatch) as school:
            school.server.answer = by_seed_of_some
            school.collect()
            if name == "broken":
                school.train_until_killed(9, **chosen)
                said = school.train(**chosen | {"resume": True, "without_signal": False})
            else:
                said = school.train(**chosen)
            contents.append(learned(school))
            with school.store() as store:
                rounds = store.episodes(run_id="train", forks=True)
                earlier = {e.episode_id: e for e in store.episodes(run_id="collect")}
                earlier |= {e.episode_id: e for e in rounds if e.round == 1 and e.fork_action is None}
                stored = [
                    e for e in rounds if e.parent_episode in earlier and e.round != earlier[e.parent_episode].round
                ]
                better = [(store.trajectory(each.parent_episode or "")) for each in stored]
            assert {each.round for each in stored} == {1, 2}
            assert min(each.team_reward("reward") or 0.0 for each in better if each is not None) > 0  # else hopeless
            assert {version for each in stored for version in each.adapters.values()} == {1, 2}  # the round's
            assert "of them of stored runs" in said
            assert [line["trees"]["stored_forks"] for line in lines_of(school) if line["phase"] == "online"] == [
                sum(each.round == number for each in stored) for number in (1, 2)
            ]
    assert [name for name in contents[0] if contents[0][name] != contents[1].get(name)] == []


@pytest.mark.slow
def test_rounds_that_are_played_ahead_have_forks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with school_in(tmp_path, monkeypatch) as school:
        school.server.answer = by_seed_of_some
        school.collect()
        options = trees("c3", rounds=3, max_staleness=1, trainer={"importance": {"mismatch": "truncate"}})
        school.train(**options)
        assert all(line["trees"]["forks"] for line in lines_of(school) if line["phase"] == "online")


@pytest.mark.slow
def test_a_round_played_ahead_that_was_killed_among_its_forks_goes_on_by_the_version_that_began_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with school_in(tmp_path, monkeypatch) as school:
        school.server.answer = by_seed_of_some
        school.collect()
        options = trees("c3", max_staleness=1, trainer={"importance": {"mismatch": "truncate"}})
        school.train_until_killed(21, **options)
        assert len(read_waves(school.run / "trees", 2)) > 0  # its whole runs were played, by version 1
        school.server.adapters.clear()  # as of a server that starts anew
        school.train(**options | {"resume": True, "without_signal": False})
        with school.store() as store:
            episodes = store.episodes(run_id="train", forks=True)
        assert {episode.outcome for episode in episodes} == {"terminated"}
        versions = {version for each in episodes if each.round == 2 for version in each.adapters.values()}
        assert versions == {1}


@pytest.mark.slow
def test_without_the_table_no_round_has_a_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with school_in(tmp_path, monkeypatch) as school:
        school.server.answer = by_seed_of_some
        school.collect()
        school.train(**trees("tree_grpo", trees=None))
        assert not any("trees" in line for line in lines_of(school))
        assert not (school.run / "trees").exists()
        with school.store() as store:
            assert len(store.episodes(run_id="train")) == len(store.episodes(run_id="train", forks=True)) >= 24
