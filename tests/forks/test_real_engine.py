"""Owns: a fork on the real engine, as a user runs it: the prefix's tokens come out of the store as the parent's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import finish_command
from support.paths import ROOT

from marft_bridge.runs.run_folder import RunFolder
from trace_store.store import TraceStore

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_prefix_of_a_fork_has_the_parents_ids_and_the_engine_samples_the_rest(
    announce: Callable[[RunFolder], None], tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    run.create()
    announce(run)
    config = tmp_path / "bridge.toml"
    config.write_text((ROOT / "examples/math_duo/bridge.toml").read_text())
    finish_command("collect", config, run.path, "--episodes", "2")
    with TraceStore.open(run.store) as store:
        parent = next(store.trajectories(run_ids=["collect"]))
    place = parent.episode.episode_id
    said = finish_command("fork", config, run.path, place, "--at", "actor", "--samples", "4")
    assert f"fork-1: {place[:12]} at actor, call 1; 1 call before it given again" in said
    with TraceStore.open(run.store) as store:
        forks = list(store.trajectories(run_ids=["fork-1"], forks=True))
    assert [fork.episode.sample for fork in sorted(forks, key=lambda each: each.episode.sample)] == [0, 1, 2, 3]
    recorded, recorded_actor = parent.actions
    for fork in forks:
        assert fork.episode.outcome == "terminated"
        given, live = fork.actions
        assert given.replayed_from == recorded.action_id
        assert (given.prompt_ids, given.sampled_ids, given.logprobs) == (
            *(recorded.prompt_ids, recorded.sampled_ids, recorded.logprobs),
        )
        assert live.replayed_from is None
        assert live.prompt_ids == recorded_actor.prompt_ids, "the engine saw the recorded answer"
        assert live.trainable
        assert live.seed != recorded_actor.seed
    assert len({fork.actions[1].sampled_ids for fork in forks}) > 1
