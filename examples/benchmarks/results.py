"""A finished run folder of a benchmark -> what the report needs of it: one small JSON object, the run's benchmark.json.

Invariants: the same store and report give the same numbers; what was not measured is None. The file is written last, so
a run that has one is finished, and its `config_sha256` says of which configuration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import duckdb

from examples.study.results import HeldOut, Result
from marft_bridge.common.files import write_atomically
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.training.advantage_log import round_path
from trace_store.store import TraceStore

FILE = "benchmark.json"

# Episodes by round; of each its calls, its tokens, which are None where the engine counted none, and two of its
# rewards. Means are taken in the order of the values, since the order of rows is not told, and a sum of floats hangs
# on it.
_ROUNDS = """
WITH counted AS (
         SELECT episode_id, count(*) AS calls, sum(sampled_tokens) FILTER (replayed_from IS NULL) AS tokens,
                coalesce(sum(sampled_tokens) FILTER (replayed_from IS NOT NULL), 0) AS repeated
         FROM actions GROUP BY episode_id
     ),
     paid AS (
         SELECT episode_id, max(value) FILTER (name = ?) AS reward, max(value) FILTER (name = 'correct') AS correct
         FROM rewards WHERE scope = 'episode' GROUP BY episode_id
     )
SELECT coalesce(e.round, 0) AS number, count(*), avg(p.reward ORDER BY p.reward) FILTER (WHERE e.fork_action IS NULL),
       avg(p.correct ORDER BY p.correct) FILTER (WHERE e.fork_action IS NULL), sum(c.tokens),
       avg(c.calls ORDER BY c.calls) FILTER (WHERE e.fork_action IS NULL), sum(c.repeated)
FROM episodes e LEFT JOIN counted c USING (episode_id) LEFT JOIN paid p USING (episode_id)
WHERE e.run_id IN ('collect', 'train') AND e.split = 'train' GROUP BY number ORDER BY number
"""


_TEACHING_CALLS = (
    "SELECT count(*) FROM (SELECT DISTINCT episode_id, action_id FROM read_parquet(?) WHERE advantage <> 0)"
)


@dataclass(frozen=True, slots=True)
class BenchmarkRound:
    """One round: 0 is what was collected before training."""

    number: int
    episodes: int
    reward: float | None
    """Mean of the reward that is trained on."""
    correct: float | None
    """Share of its episodes that were solved."""
    sampled_tokens: int | None
    calls: float | None
    """Of a whole run, on average."""
    repeated_tokens: int | None
    """Of answers that were given again to forks, and so not sampled."""
    teaching_calls: int | None
    """Calls whose advantage is not 0; None for round 0, and where advantages are not kept."""


@dataclass(frozen=True, slots=True)
class BenchmarkRun:
    """One training run on one benchmark."""

    game: str
    level: str
    model: str
    condition: str
    seed: int
    config_sha256: str
    setting_sha256: str
    """Of the configuration without its seed: equal for runs that may be averaged."""
    code_sha256: str | None
    """Of the program that ran; None where it changed meanwhile, or may have."""
    seconds: float | None
    """None where the run was interrupted."""
    rounds: tuple[BenchmarkRound, ...]
    heldout: HeldOut


def folder_to_rounds(folder: RunFolder, reward: str) -> tuple[BenchmarkRound, ...]:
    """The rounds of a run's store.

    Args:
        folder: of a run that was trained.
        reward: name of the reward that was trained on.
    """
    with TraceStore.open(folder.store, wait_s=60) as store:
        rows = store.sql(_ROUNDS, (reward,))
    return tuple(
        BenchmarkRound(
            number=number,
            episodes=episodes,
            reward=mean,
            correct=correct,
            sampled_tokens=_whole(tokens),
            calls=calls,
            repeated_tokens=_whole(repeated),
            teaching_calls=_count_teaching_calls(round_path(folder.advantages, number)),
        )
        for number, episodes, mean, correct, tokens, calls, repeated in rows
    )


def _count_teaching_calls(path: Path) -> int | None:
    if not path.exists():
        return None
    with duckdb.connect(config={"threads": 1}) as connection:
        found = connection.execute(_TEACHING_CALLS, (str(path),)).fetchone()
    return None if found is None else int(found[0])


def _whole(count: float | None) -> int | None:
    return None if count is None else int(count)


def result_to_run(
    result: Result, rounds: tuple[BenchmarkRound, ...], *, game: str, level: str, model: str, setting_sha256: str
) -> BenchmarkRun:
    """What the study's runner found out of a folder, with the rounds' solved episodes and tokens."""
    return BenchmarkRun(
        game=game,
        level=level,
        model=model,
        condition=result.condition,
        seed=result.seed,
        config_sha256=result.config_sha256,
        setting_sha256=setting_sha256,
        code_sha256=result.code_sha256,
        seconds=result.seconds,
        rounds=rounds,
        heldout=result.heldout,
    )


def run_to_json(run: BenchmarkRun) -> dict[str, Any]:
    """As plain JSON values."""
    return {**asdict(run), "rounds": [asdict(each) for each in run.rounds]}


def json_to_run(content: Mapping[str, Any]) -> BenchmarkRun:
    """The inverse of `run_to_json`.

    Raises:
        KeyError, TypeError: it is no such object.
    """
    rounds = tuple(BenchmarkRound(**each) for each in content["rounds"])
    return BenchmarkRun(**{**content, "rounds": rounds, "heldout": HeldOut(**content["heldout"])})


def write_run(folder: Path, run: BenchmarkRun) -> None:
    """Marks the run in `folder` as finished."""
    write_atomically(folder / FILE, json.dumps(run_to_json(run), indent=1, allow_nan=False) + "\n")


def read_run(folder: Path) -> BenchmarkRun | None:
    """The result of a run folder; None while it is not finished."""
    try:
        text = (folder / FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return json_to_run(json.loads(text))
