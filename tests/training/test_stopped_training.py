"""Owns: a training run that was stopped and resumed learns what one learns that was left alone, bit for bit.

The run is stopped when an episode has ended and its reward is not stored yet, with others of the round still running:
so the store then holds an episode that is to be replaced, and the round's others in another order than planned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.school_rig import learned, school_in

from marft_bridge.rewards.scoring import Score
from marft_bridge.rollouts.collector import Collector
from marft_bridge.runs.run_folder import RunFolder, read_metrics
from trainers import checkpoint

OPTIONS: dict[str, Any] = {"rounds": 2, "trainer": {"replay": {"share": 0.5}, "importance": {"mismatch": "truncate"}}}


@pytest.mark.slow
def test_a_stop_between_the_offline_line_and_its_checkpoint_leaves_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with school_in(tmp_path, monkeypatch) as school:
        school.collect()
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "save", stop)
            with pytest.raises(KeyboardInterrupt):
                school.train(without_signal=True)
        metrics = RunFolder(school.run).metrics
        assert [line["round"] for line in read_metrics(metrics)] == [0]
        school.train(resume=True)
        assert [line["round"] for line in read_metrics(metrics)] == [0, 1]


def stop_before_reward(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """As Ctrl-C or a kill when the `number`th episode has ended and its reward is not stored."""
    store_rewards, calls = Collector._store_rewards, list[str]()

    async def stopping(self: Collector, episode_id: str, score: Score) -> None:
        calls.append(episode_id)
        if len(calls) == number:
            raise KeyboardInterrupt
        await store_rewards(self, episode_id, score)

    monkeypatch.setattr(Collector, "_store_rewards", stopping)


# anyio leaves it where the loop is ended in the middle of a connection.
@pytest.mark.filterwarnings("ignore:coroutine 'connect_tcp.<locals>.try_connect' was never awaited:RuntimeWarning")
@pytest.mark.slow
def test_a_stop_between_an_episode_and_its_reward_changes_nothing_that_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "alone").mkdir()
    with school_in(tmp_path / "alone", monkeypatch) as alone:
        alone.collect()
        alone.train(without_signal=True, **OPTIONS)
    (tmp_path / "stopped").mkdir()
    with school_in(tmp_path / "stopped", monkeypatch) as stopped:
        stopped.collect()
        with monkeypatch.context() as patch:
            stop_before_reward(patch, 3)
            with pytest.raises(KeyboardInterrupt):
                stopped.train(without_signal=True, **OPTIONS)
        stopped.train(resume=True, **OPTIONS)
    with stopped.store() as store:
        assert len(store.episodes(run_id="train", round=1)) > 6  # the replaced one, and perhaps others that had ended
    expected, actual = learned(alone), learned(stopped)
    assert [name for name in expected if expected[name] != actual.get(name)] == []
