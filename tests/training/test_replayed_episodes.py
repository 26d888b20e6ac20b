"""Owns: which stored episodes join a round as replay.

Only those that can be learned from are drawn: a draw of an episode that failed, or was stopped before its reward was
there, would leave a round with less replay than was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest
from support.school_rig import School, school_in

from marft_bridge.runs.run_folder import read_metrics


@pytest.fixture
def school(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[School]:
    with school_in(tmp_path, monkeypatch) as opened:
        yield opened


@pytest.mark.slow
def test_what_cannot_be_learned_from_is_not_drawn(school: School) -> None:
    school.collect()
    with school.store() as store:
        stored = [episode.episode_id for episode in store.episodes(run_id="collect")]
    assert len(stored) == 20
    failed, unrewarded, fine = stored[:6], stored[6:14], stored[14:]
    with duckdb.connect(str(school.run / "store.duckdb")) as con:
        con.execute("UPDATE episodes SET outcome = 'failed', reason = 'a test' WHERE episode_id IN ?", [failed])
        con.execute("DELETE FROM rewards WHERE episode_id IN ?", [unrewarded])
    trainer = {"importance": {"mismatch": "truncate"}, "replay": {"share": 0.5, "max_staleness": 4}}
    school.train(without_signal=True, trainer=trainer)  # so few episodes are left that nothing is forecast
    lines = read_metrics(school.run / "metrics.jsonl")
    assert [line.get("replayed") for line in lines] == [None, 6]  # as many as the six fresh ones
    replayed = [episode.episode_id for episode in school.learned[-12:] if episode.run_id == "collect"]
    assert sorted(replayed) == sorted(fine)


@pytest.mark.slow
def test_successes_of_before_are_those_that_earned_more_than_their_task_usually_does(school: School) -> None:
    school.collect()
    with school.store() as store:
        stored = list(store.episodes(run_id="collect"))
    best = {episode.episode_id for episode in stored[::5]}
    with duckdb.connect(str(school.run / "store.duckdb")) as con:
        con.execute("UPDATE rewards SET value = 0.0")
        con.execute("UPDATE rewards SET value = 50.0 WHERE episode_id IN ?", [sorted(best)])
    school.train(trainer={"replay": {"successes": 0.5}})
    lines = read_metrics(school.run / "metrics.jsonl")
    assert [line.get("replayed") for line in lines] == [None, len(best)]
    replayed = {episode.episode_id for episode in school.learned[-6 - len(best) :] if episode.run_id == "collect"}
    assert replayed == best
