"""A finished run folder -> what the report needs of it: one small JSON object, the run's result.json.

Invariants: the same store and metrics give the same numbers; what was not measured is None. The file is written last,
so a run that has one is finished, and its `config_sha256` says of which configuration.
It knows neither conditions nor how results are compared.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from marft_bridge.common.files import write_atomically
from marft_bridge.runs.run_folder import RunFolder, read_metrics
from trace_store.store import TraceStore

RESULT = "result.json"

_ROUNDS = """
SELECT coalesce(e.round, 0) AS number, count(r.value), avg(r.value) FILTER (WHERE e.fork_action IS NULL),
       (max(e.ended_ns) - min(e.started_ns)) / 1e9
FROM episodes e LEFT JOIN rewards r ON r.episode_id = e.episode_id AND r.scope = 'episode' AND r.name = ?
WHERE e.run_id IN ('collect', 'train') AND e.split = 'train' GROUP BY number ORDER BY number
"""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """One round: 0 is what was collected before training, round r > 0 was sampled by version r of the adapters."""

    number: int
    episodes: int
    """Episodes with a reward."""
    reward: float | None
    """Their mean."""
    rollout_s: float | None
    """From the start of the first to the end of the last; None in a run that was interrupted."""
    update_s: float | None
    """Of the update that followed; for round 0 of critic pre-training and imitation."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Means over held-out tasks, before (no adapter changes anything) and after.

    After is the version that training named as its best; in docs/study.md, which is older than that choice, the last.
    """

    metric: str
    pairs: int
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Result:
    """One run of one condition."""

    condition: str
    seed: int
    config_sha256: str
    rounds: tuple[RoundResult, ...]
    heldout: HeldOut
    seconds: float | None
    """Wall time of training and comparison, server included; None where the run was interrupted."""
    code_sha256: str | None
    """Of the program that ran, see `code_to_sha256`; None where it changed meanwhile, or may have."""
    cores: int | None
    """CPU cores that the run was allowed to use; None where the run was interrupted."""


def code_to_sha256() -> str:
    """Of every Python file of the packages, wherever they lie; what a run does follows from these and its options."""
    digest = hashlib.sha256()
    for package in ("graphs", "marft_bridge", "trace_store", "trainers"):
        spec = importlib.util.find_spec(package)
        assert spec is not None  # this module imports from them
        for root in spec.submodule_search_locations or ():
            for path in sorted(Path(root).rglob("*.py")):
                digest.update(f"{package}/{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def text_sha256(text: str) -> str:
    """Of a run's configuration file."""
    return hashlib.sha256(text.encode()).hexdigest()


def folder_to_result(
    folder: RunFolder,
    condition: str,
    seed: int,
    config: str,
    reward: str,
    seconds: float | None,
    code: str | None,
    cores: int | None,
) -> Result:
    """What a run folder holds after `train` and `compare`.

    Args:
        config: text of the run's configuration.
        reward: name of the reward that was trained on.
        seconds: None says that the run was interrupted, which its times then include.
        code: hash of the code that ran; None where that is not one.
        cores: how many it was allowed; None where that is not known of all of it.

    Raises:
        OSError, ValueError, KeyError: the folder's files are not those of a finished run.
    """
    updates = {line["round"]: line for line in read_metrics(folder.metrics)}
    with TraceStore.open(folder.store, wait_s=60) as store:
        rows = store.sql(_ROUNDS, (reward,))
    rounds = tuple(
        RoundResult(number, episodes, mean, None if seconds is None else took, _update_seconds(updates.get(number)))
        for number, episodes, mean, took in rows
    )
    report = json.loads((folder.path / "report.json").read_text(encoding="utf-8"))
    (compared,) = report["contrasts"]
    heldout = HeldOut(report["metric"], compared["n"], compared["mean_a"], compared["mean_b"])
    return Result(condition, seed, text_sha256(config), rounds, heldout, seconds, code, cores)


def _update_seconds(line: Mapping[str, Any] | None) -> float | None:
    if line is None:
        return None
    if "seconds" not in line:  # the offline phase
        return float(line["warm_up"]["seconds"] + line["replay"]["seconds"])
    taken = [line["seconds"][part] for part in ("score", "update")]
    return None if None in taken else float(sum(taken))


def result_to_json(result: Result) -> dict[str, Any]:
    """As plain JSON values."""
    return {**asdict(result), "rounds": [asdict(each) for each in result.rounds]}


def json_to_result(content: Mapping[str, Any]) -> Result:
    """The inverse of `result_to_json`.

    Raises:
        KeyError, TypeError: it is no such object.
    """
    rounds = tuple(RoundResult(**each) for each in content["rounds"])
    return Result(**{**content, "rounds": rounds, "heldout": HeldOut(**content["heldout"])})


def write_result(folder: Path, result: Result) -> None:
    """Marks the run in `folder` as finished."""
    write_atomically(folder / RESULT, json.dumps(result_to_json(result), indent=1, allow_nan=False) + "\n")


def read_result(folder: Path) -> Result | None:
    """The result of a run folder; None while it is not finished."""
    try:
        text = (folder / RESULT).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return json_to_result(json.loads(text))
