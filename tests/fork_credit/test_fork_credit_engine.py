"""Owns: credit by forks on the real engine, as a user runs it: levels share seeds; what they give again is exact."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import finish_command
from support.paths import ROOT

from marft_bridge.runs.run_folder import RunFolder
from trace_store.store import TraceStore

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


def test_forks_around_each_call_run_on_the_engine_with_the_seeds_of_their_numbers(
    announce: Callable[[RunFolder], None], tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    run.create()
    announce(run)
    config = tmp_path / "bridge.toml"
    config.write_text((ROOT / "examples/math_duo/bridge.toml").read_text())
    finish_command("collect", config, run.path, "--episodes", "2")
    flags = ("--by", "forks", "--substitute", "silent", "--forks", "16", "--json")
    output = finish_command("credit", config, run.path, *flags)
    findings, _ = json.JSONDecoder().raw_decode(output[output.index("{\n") :])
    assert (findings["runs"], findings["forks"], findings["failures"]) == (2, 16, {})
    assert [(each["node"], each["number"]) for each in findings["calls"]] == [("reasoner", 1), ("actor", 1)]
    with TraceStore.open(run.store) as store:
        parents = {each.episode.episode_id: each for each in store.trajectories(run_ids=["collect"])}
        forks = list(store.trajectories(run_ids=["credit-forks-1"], forks=True))
    seeds = defaultdict(set)
    for fork in forks:
        parent = parents[fork.episode.parent_episode or ""]
        for mine, recorded in zip(fork.actions, parent.actions, strict=True):
            if mine.replayed_from is not None:
                assert (mine.prompt_ids, mine.sampled_ids, mine.logprobs) == (
                    *(recorded.prompt_ids, recorded.sampled_ids, recorded.logprobs),
                )
            elif mine.sampled_ids is not None:
                seeds[fork.episode.parent_episode, fork.episode.sample, mine.node].add(mine.seed)
    assert len(seeds) == 2 * 2 * 2
    assert {len(each) for each in seeds.values()} == {1}
    assert len({each for found in seeds.values() for each in found}) == 8
