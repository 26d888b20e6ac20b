"""Owns: what one node was taught of erased runs is named by its store, with the number of its episodes.

It is found by the runs that it tells, and where these are gone already, by the subject; erasing there leaves nothing.
"""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from rich.console import Console
from support.chat_rig import save_chat_model
from support.distil_rig import distil_team, duo, one_config, record_team

from marft_bridge.erasure.command import EraseRequest, Erasure, _erasure_to_lines, erase
from marft_bridge.traces.copies import Copies, read_copies


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


def erase_all(path: Path, dry_run: bool = False) -> Erasure:
    request = EraseRequest(None, time.time_ns(), ())
    return erase(path, request, dry_run, False, Console(file=io.StringIO()))


def test_the_store_that_was_distilled_from_erased_runs_is_named(tmp_path: Path, model: Path) -> None:
    team, one = tmp_path / "team/store.duckdb", tmp_path / "one/store.duckdb"
    with record_team(tmp_path / "team", [duo()]) as store:
        assert len(list(store.episodes())) == 1
    distil_team(one_config(tmp_path / "one", model), tmp_path / "team")
    assert read_copies(team, Copies.DISTILLED) == [one.resolve()]
    assert erase_all(team, dry_run=True).distilled_left == {str(one.resolve()): 1}
    erased = erase_all(team)
    assert erased.distilled_left == {str(one.resolve()): 1}
    (line,) = [line for line in _erasure_to_lines(erased) if "distilled from it" in line]
    assert line == f"left: {one} has 1 episodes distilled from it; erase there too, with --store {one}"
    assert erase_all(team).distilled_left == {}  # nothing of the team is erased any more
    assert erase_all(one).rows["episodes"] == 1


def test_a_distilled_store_that_is_gone_is_named_all_the_same(tmp_path: Path, model: Path) -> None:
    with record_team(tmp_path / "team", [duo()]):
        pass
    distil_team(one_config(tmp_path / "one", model), tmp_path / "team")
    (tmp_path / "one/store.duckdb").rename(tmp_path / "elsewhere.duckdb")
    (tmp_path / "one/store.duckdb").write_text("no database")
    erased = erase_all(tmp_path / "team/store.duckdb")
    assert list(erased.distilled_left.values()) == [None]
    assert any("cannot be looked into; see to it yourself" in line for line in _erasure_to_lines(erased))
