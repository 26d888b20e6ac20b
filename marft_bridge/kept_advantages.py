"""What the actions of a training round were credited with <-> one Parquet file of the run folder.

    advantages/round-00003.parquet

A row per unit: per action (MARFT-A) or per sampled token (MARFT-T), in order. `advantage` is in units of the reward,
`normalised` is what the loss took, and `by:0:NAME` the part of `advantage` that one reward, or the baseline,
contributed; it has a number because names may differ in case only. Invariants: a file is there whole or not at all,
and is its owner's alone; a round that is done again replaces its file; a file never holds more than MOST_NUMBERS: the
parts go first, then the last episodes. It holds ids and numbers,
no text, and knows neither trainer nor store.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainers.credited import ActionCredit

MOST_NUMBERS = 8_000_000  # 32 MB before compression
_PART = "by:"
_FIRST = ("episode_id", "action_id", "unit", "advantage", "normalised")


@dataclass(frozen=True, slots=True)
class KeptAdvantage:
    """What one action was credited with: one number for the whole action, or one for each sampled token."""

    advantage: tuple[float, ...]
    normalised: tuple[float, ...]
    by_source: dict[str, tuple[float, ...]]  # empty where the parts were too many to keep


def round_path(folder: Path, number: int) -> Path:
    """The file of a round, in the folder of all of them."""
    return folder / f"round-{number:05}.parquet"


def credits_to_file(of_round: Sequence[ActionCredit], folder: Path, number: int) -> None:
    """Writes, or replaces, the file of a round."""
    import duckdb

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".round-")  # created 0600
    try:
        with duckdb.connect(config={"threads": 1}) as con:
            con.register("flat", _columns(of_round))
            target = temporary.replace("'", "''")
            con.execute(f"COPY flat TO '{target}' (FORMAT parquet, COMPRESSION zstd, USE_TMP_FILE false)")
        os.fsync(handle)
        Path(temporary).replace(round_path(folder, number))
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)


def _columns(of_round: Sequence[ActionCredit]) -> dict[str, Any]:
    import numpy as np

    sources = list(of_round[0].by_source_U) if of_round else []
    if sum(len(credit.advantage_U) for credit in of_round) * (2 + len(sources)) > MOST_NUMBERS:
        sources = []
    kept = _within(of_round, MOST_NUMBERS // (2 + len(sources)))
    lengths = [len(credit.advantage_U) for credit in kept]

    def names(values: list[str]) -> Any:
        return np.repeat(np.array(values, dtype=object), lengths)

    def numbers(values: list[Any]) -> Any:
        return np.concatenate([np.zeros(0), *values]).astype(np.float32)

    return {
        "episode_id": names([credit.episode_id for credit in kept]),
        "action_id": names([credit.action_id for credit in kept]),
        "unit": np.concatenate([np.zeros(0, np.int32), *(np.arange(n, dtype=np.int32) for n in lengths)]),
        "advantage": numbers([credit.advantage_U for credit in kept]),
        "normalised": numbers([credit.normalised_U for credit in kept]),
        **{
            f"{_PART}{i}:{source}": numbers([credit.by_source_U[source] for credit in kept])
            for i, source in enumerate(sources)
        },
    }


def _within(of_round: Sequence[ActionCredit], most: int) -> list[ActionCredit]:
    """The first whole episodes of at most `most` units together."""
    units: dict[str, int] = {}
    for credit in of_round:
        units[credit.episode_id] = units.get(credit.episode_id, 0) + len(credit.advantage_U)
    total, kept = 0, set()
    for episode_id, count in units.items():
        total += count
        if total > most:
            break
        kept.add(episode_id)
    return [credit for credit in of_round if credit.episode_id in kept]


def file_to_advantages(folder: Path, number: int, episode_id: str) -> dict[str, KeptAdvantage]:
    """Action id -> what it was credited with, of one episode in one round.

    Raises:
        FileNotFoundError: nothing was kept of the round.
        ValueError: the file is not one that `credits_to_file` wrote.
    """
    columns, rows = _asked(folder, number, "SELECT * FROM read_parquet(?) WHERE episode_id = ?", episode_id)
    parts = columns[len(_FIRST) :]
    if tuple(columns[: len(_FIRST)]) != _FIRST or not all(name.count(":") >= 2 for name in parts):
        raise ValueError(f"its columns are {', '.join(columns)[:200]}")
    by_action: dict[str, list[tuple[Any, ...]]] = {}
    for row in sorted(rows, key=lambda row: row[2]):
        by_action.setdefault(row[1], []).append(row[3:])
    sources = [name.split(":", 2)[2] for name in parts]
    return {action_id: _kept(list(zip(*units, strict=True)), sources) for action_id, units in by_action.items()}


def _asked(folder: Path, number: int, query: str, *values: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Columns and rows of a query on the file of a round, whose path is its first parameter."""
    import duckdb

    path = round_path(folder, number)
    if not path.is_file():
        raise FileNotFoundError(path)
    try:
        with duckdb.connect(config={"threads": 1}) as con:
            found = con.execute(query, [str(path), *values])
            return [column[0] for column in found.description], found.fetchall()
    except duckdb.Error as error:
        raise ValueError(str(error).split("\n")[0]) from None


def _kept(columns: list[tuple[float, ...]], sources: Sequence[str]) -> KeptAdvantage:
    return KeptAdvantage(columns[0], columns[1], dict(zip(sources, columns[2:], strict=True)))


def forget_rounds_after(folder: Path, number: int) -> None:
    """Removes the files of later rounds, which a run that goes on from `number` will do again."""
    for path in folder.glob("round-*.parquet"):
        if path.name > round_path(folder, number).name:
            path.unlink()


def file_to_scale(folder: Path, number: int) -> float:
    """How large normalised advantages of a round are: all but 5 % of their sizes are below. 0.0 where all are 0.

    Raises as `file_to_advantages`.
    """
    found = _asked(
        folder, number, "SELECT coalesce(quantile_cont(abs(normalised), 0.95), 0)::DOUBLE FROM read_parquet(?)"
    )
    return float(found[1][0][0])
