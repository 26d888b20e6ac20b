"""Rounds of `train` played by one worker on Ray against the same rounds in the command, both on the stand-in for vLLM.

What is timed is publication and rollouts of the rounds after the first, which starts the worker: the cost of the way
over the cluster and back, since both sides wait as long for answers. The update is no part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.harness import Measurement, bench

EPISODES, ROUNDS, IN_FLIGHT = 32, 5, 4


def round_seconds_of(folder: Path, rollouts: str) -> float:
    """The median seconds of publishing and playing a round, at one place."""
    import pytest
    from support.ray_school import cluster_school_in

    from marft_bridge.runs.run_folder import RunFolder, read_metrics

    with pytest.MonkeyPatch.context() as patch, cluster_school_in(folder, patch) as school:
        school.collect()
        school.starts_servers, school.ray = True, {"workers": 1, "in_flight": IN_FLIGHT}
        school.train(
            without_signal=True,
            rollouts=rollouts,
            rounds=ROUNDS,
            episodes_per_round=EPISODES,
            stop_early=False,
            trainer={"importance": {"mismatch": "truncate"}},
        )
        lines = [line["seconds"] for line in read_metrics(RunFolder(school.run).metrics) if line["round"] > 1]
    return median(seconds["publish"] + seconds["rollout"] for seconds in lines)


@bench
def ray_train_overhead(folder: Path) -> Iterator[Measurement]:
    """Publishing and playing a round by one worker on Ray, over the same in the command."""
    from support.ray_school import school_cluster

    place = folder / "path"
    place.mkdir()
    with school_cluster(place, processors=1):
        for number in range(1000):
            here, there = (round_seconds_of(folder / f"{number}-{where}", where) for where in ("local", "ray"))
            yield Measurement(there, "s", here, there / here)
