"""Owns: what the actions of a round were credited with is kept in the run folder, as `marft-bridge view` reads it.

Through the real `collect` and `train` on a tiny model, and by hand:

- each round has a file, its owner's alone, with every action that was learned from and a number per unit
- the numbers are the update's: their mean and deviation are those of metrics.jsonl, their parts sum to them
- a run that goes on forgets files of rounds that it will do again; train.keep_advantages = false keeps none
- a file stays within its bound: parts go first, then the last whole episodes
"""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from support.fake_vllm import running
from support.study_server import StudyServer
from support.view_rig import serving
from support.zoo_answers import DUO, sometimes_right
from support.zoo_rig import Trained, train_zoo

from marft_bridge.common.progress import Reporter
from marft_bridge.runs.learning_curve import run_to_learning_curve
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.training import advantage_log as kept_advantages
from marft_bridge.training.advantage_log import credits_to_file, delete_rounds_after, file_to_advantages, round_path
from marft_bridge.training.train import read_metrics, train
from marft_bridge.view.store_queries import run_to_curve
from trace_store.store import TraceStore
from trainers.credit.action_credits import ActionCredit


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Two rounds, the tokens of which have advantages of their own."""
    changes = {"train.trainer.granularity": "token"}
    return train_zoo(DUO, sometimes_right, tmp_path_factory.mktemp("run"), changes=changes)


def credit(episode: str, action: str, *values: float, **parts: tuple[float, ...]) -> ActionCredit:
    numbers = np.array(values)
    return ActionCredit(episode, action, numbers, 2 * numbers, {name: np.array(part) for name, part in parts.items()})


@pytest.mark.slow
def test_every_round_keeps_what_its_actions_were_credited_with(trained: Trained) -> None:
    folder = RunFolder(trained.config.run_folder).advantages
    assert sorted(path.name for path in folder.iterdir()) == ["round-00001.parquet", "round-00002.parquet"]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    for number in (1, 2):
        values: dict[str, list[float]] = {"reasoner": [], "actor": []}
        for trajectory in trained.trained:
            if trajectory.episode.round != number:
                continue
            found = file_to_advantages(folder, number, trajectory.episode.episode_id)
            assert set(found) == {action.action_id for action in trajectory.actions}
            for action in trajectory.actions:
                kept = found[action.action_id]
                assert len(kept.advantage) == len(kept.normalised) == len(action.sampled_ids or ())
                assert np.sum(list(kept.by_source.values()), axis=0) == pytest.approx(kept.advantage, abs=1e-5)
                assert set(kept.by_source) == {"reward", "baseline"}
                values[action.node] += kept.advantage
        for node, agent in trained.rounds[number]["agents"].items():
            assert np.mean(values[node]) == pytest.approx(agent["advantage_mean"], abs=1e-5)
            assert np.std(values[node]) == pytest.approx(agent["advantage_std"], abs=1e-5)


def test_the_pages_show_the_curve_of_the_report_and_every_token_in_its_shade(trained: Trained) -> None:
    folder = RunFolder(trained.config.run_folder)
    (trajectory, *_) = trained.trained
    with TraceStore.open(folder.store, read_only=True) as store:
        points = run_to_curve(store, "train", "reward")
        report = run_to_learning_curve(store, folder.metrics, "reward")
    assert points == [point.model_copy(update={"nodes": {}}) for point in report]
    with serving(folder.path) as served:
        page = served.text(f"/episode?id={trajectory.episode.episode_id}")
        assert "Mean reward over 3 rounds" in served.text("/training")
    tokens = sum(len(action.sampled_ids or ()) for action in trajectory.actions)
    assert len(re.findall(r'<span class="t a-[^"]+" title="token ', page)) == tokens
    assert "not coloured" not in page


@pytest.mark.slow
def test_a_run_that_goes_on_forgets_rounds_that_it_does_again_and_keeps_nothing_unasked(trained: Trained) -> None:
    folder = RunFolder(trained.config.run_folder)
    kept = round_path(folder.advantages, 2).read_bytes()
    round_path(folder.advantages, 3).write_bytes(kept)  # as a run leaves it that ends before its checkpoint
    with running(StudyServer(trained.config.model.path, 0, None)) as server:
        changes = {"rounds": 3, "keep_advantages": False}
        again = trained.config.model_copy(
            update={
                "serve": trained.config.serve.model_copy(update={"attach": server.url}),
                "train": trained.config.train.model_copy(update=changes),
            }
        )
        train(again, Reporter(Console(file=io.StringIO())), resume=True)
    assert [line["round"] for line in read_metrics(folder.metrics)] == [0, 1, 2, 3]
    assert sorted(path.name for path in folder.advantages.iterdir()) == ["round-00001.parquet", "round-00002.parquet"]
    assert round_path(folder.advantages, 2).read_bytes() == kept


def test_a_file_gives_back_what_was_written_whatever_the_names_are(tmp_path: Path) -> None:
    names = ("a", "A", "by:x'\"; DROP", "\u202ereward\x00"[:-1])
    parts: dict[str, tuple[float, ...]] = {name: (float(i), -0.5) for i, name in enumerate(names)}
    folder = tmp_path / "it's [a] *folder?"
    credits_to_file(
        [credit("e'1", "x", 0.5, -0.25, **parts), credit("e2", "y", 7.0, **dict.fromkeys(names, (1.0,)))], folder, 3
    )
    found = file_to_advantages(folder, 3, "e'1")
    assert found == {"x": kept_advantages.StoredAdvantage((0.5, -0.25), (1.0, -0.5), parts, tokens=(0, 1))}
    assert file_to_advantages(folder, 3, "e2")["y"].advantage == (7.0,)
    assert file_to_advantages(folder, 3, "other") == {}


def test_a_number_of_a_token_comes_back_with_the_position_of_its_token(tmp_path: Path) -> None:
    decided = replace(credit("e", "x", 0.5, -0.25), token_U=(2, 5))
    credits_to_file([decided, credit("e", "y", 1.0)], tmp_path, 1)
    found = file_to_advantages(tmp_path, 1, "e")
    assert (found["x"].tokens, found["x"].advantage) == ((2, 5), (0.5, -0.25))
    assert found["y"].tokens == (0,)


def test_a_round_that_is_done_again_replaces_its_file(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        credits_to_file([credit("e", "x", value)], tmp_path, 1)
    assert file_to_advantages(tmp_path, 1, "e")["x"].advantage == (2.0,)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(("most", "parts", "episodes"), [(24, True, 2), (23, False, 2), (11, False, 1), (5, False, 0)])
def test_a_file_stays_within_its_bound(
    most: int, parts: bool, episodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_advantages, "MAX_NUMBERS", most)
    # Two episodes of three units each; with two parts a unit takes four numbers, without them two.
    whole = [credit(name, "x", 1.0, 2.0, 3.0, a=(0.0, 1.0, 1.0), b=(1.0, 1.0, 2.0)) for name in ("e1", "e2")]
    credits_to_file(whole, tmp_path, 1)
    found = [file_to_advantages(tmp_path, 1, name) for name in ("e1", "e2")]
    assert [bool(each) for each in found] == [i < episodes for i in range(2)]
    assert all(bool(each["x"].by_source) == parts for each in found if each)


def test_what_is_not_there_or_not_ours_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        file_to_advantages(tmp_path, 1, "e")
    round_path(tmp_path, 1).write_text("no parquet")
    with pytest.raises(ValueError, match=r"."):
        file_to_advantages(tmp_path, 1, "e")


def test_a_write_that_fails_leaves_the_older_file(tmp_path: Path) -> None:
    credits_to_file([credit("e", "x", 1.0)], tmp_path, 1)
    broken = ActionCredit("e", "x", np.ones(2), np.ones(2), {"a": np.ones(3)})
    with pytest.raises(Exception, match=r"."):
        credits_to_file([broken], tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["round-00001.parquet"]
    assert file_to_advantages(tmp_path, 1, "e")["x"].advantage == (1.0,)


def test_later_rounds_are_forgotten_and_no_other_file(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        credits_to_file([credit("e", "x", 1.0)], tmp_path, number)
    (tmp_path / "notes.txt").touch()
    delete_rounds_after(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes.txt",
        "round-00001.parquet",
        "round-00002.parquet",
    ]
    delete_rounds_after(tmp_path / "none", 0)
