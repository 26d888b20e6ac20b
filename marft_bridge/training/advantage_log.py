"""The advantages of a training round's actions <-> one Parquet file of the run folder.

    advantages/round-00003.parquet

A row per unit: per action (MARFT-A) or per decided token (MARFT-T), in order. `unit` is the token's position among the
sampled tokens of its action, which may have forced ones between, or 0. `advantage` is in units of the reward,
`normalised` is the one in the loss, and `by:0:NAME` is the part of `advantage` that one reward, or the baseline,
contributed; it has a number because names may differ in case only. Invariants: a file exists whole or not at all,
readable by its owner only; a round that is done again replaces its file; a file never holds more than MAX_NUMBERS: the
parts are left out first, then the last episodes. It holds ids and numbers, no text.
"""

# ruff: noqa: S608 - statements are put together from constants and quoted paths; every value is bound
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marft_bridge.common.files import replacing
from trace_store.files import make_folder

if TYPE_CHECKING:
    import duckdb

    from trainers.credit.action_credits import ActionCredit

MAX_NUMBERS = 8_000_000  # float32: 32 MB before compression
_PART_PREFIX = "by:"
_FORMAT = "(FORMAT parquet, COMPRESSION zstd, USE_TMP_FILE false)"
_IN_IDS = "episode_id IN (SELECT unnest(?::VARCHAR[]))"
_FIXED_COLUMNS = ("episode_id", "action_id", "unit", "advantage", "normalised")


@dataclass(frozen=True, slots=True)
class StoredAdvantage:
    """The advantage of one action: one number for the whole action, or one for each decided token."""

    advantage: tuple[float, ...]
    normalised: tuple[float, ...]
    by_source: dict[str, tuple[float, ...]]  # the parts of `advantage`; empty where they were too many to store
    tokens: tuple[int, ...]  # positions of the decided tokens among the sampled ones; (0,) for the whole action


def round_path(folder: Path, number: int) -> Path:
    """The file of a round, in the folder of all rounds."""
    return folder / f"round-{number:05}.parquet"


def credits_to_file(credits_of_round: Sequence[ActionCredit], folder: Path, number: int) -> None:
    """Writes, or replaces, the file of a round, atomically."""
    make_folder(folder)
    with _replacing(round_path(folder, number)) as (con, target):
        con.register("flat", _columns(credits_of_round))
        con.execute(f"COPY flat TO {target} {_FORMAT}")


@contextmanager
def _replacing(path: Path) -> Iterator[tuple[duckdb.DuckDBPyConnection, str]]:
    """A connection and the quoted path of a new file, 0600, which takes the name when the block ends."""
    import duckdb

    with replacing(path) as (_, temporary), duckdb.connect(config={"threads": 1}) as con:
        yield con, "'" + str(temporary).replace("'", "''") + "'"


def _columns(credits_of_round: Sequence[ActionCredit]) -> dict[str, Any]:
    import numpy as np

    sources = list(credits_of_round[0].by_source_U) if credits_of_round else []
    if sum(len(credit.advantage_U) for credit in credits_of_round) * (2 + len(sources)) > MAX_NUMBERS:
        sources = []
    logged = _first_episodes_within(credits_of_round, MAX_NUMBERS // (2 + len(sources)))
    lengths = [len(credit.advantage_U) for credit in logged]

    def names(values: list[str]) -> Any:
        return np.repeat(np.array(values, dtype=object), lengths)

    def numbers(values: list[Any]) -> Any:
        return np.concatenate([np.zeros(0), *values]).astype(np.float32)

    return {
        "episode_id": names([credit.episode_id for credit in logged]),
        "action_id": names([credit.action_id for credit in logged]),
        "unit": np.concatenate([np.zeros(0, np.int32), *map(_to_units, logged)], dtype=np.int32),
        "advantage": numbers([credit.advantage_U for credit in logged]),
        "normalised": numbers([credit.normalised_U for credit in logged]),
        **{
            f"{_PART_PREFIX}{i}:{source}": numbers([credit.by_source_U[source] for credit in logged])
            for i, source in enumerate(sources)
        },
    }


def _to_units(credit: ActionCredit) -> Sequence[int]:
    return range(len(credit.advantage_U)) if credit.token_U is None else credit.token_U


def _first_episodes_within(credits_of_round: Sequence[ActionCredit], max_units: int) -> list[ActionCredit]:
    """The actions of the first whole episodes that have at most `max_units` units together."""
    units: dict[str, int] = {}
    for credit in credits_of_round:
        units[credit.episode_id] = units.get(credit.episode_id, 0) + len(credit.advantage_U)
    total, episode_ids = 0, set()
    for episode_id, count in units.items():
        total += count
        if total > max_units:
            break
        episode_ids.add(episode_id)
    return [credit for credit in credits_of_round if credit.episode_id in episode_ids]


def file_to_advantages(folder: Path, number: int, episode_id: str) -> dict[str, StoredAdvantage]:
    """Action id -> its advantage, for one episode in one round.

    Raises:
        FileNotFoundError: the round has no file.
        ValueError: the file is not one that `credits_to_file` wrote.
    """
    columns, rows = _query_round(folder, number, "SELECT * FROM read_parquet(?) WHERE episode_id = ?", episode_id)
    parts = columns[len(_FIXED_COLUMNS) :]
    if tuple(columns[: len(_FIXED_COLUMNS)]) != _FIXED_COLUMNS or not all(name.count(":") >= 2 for name in parts):
        raise ValueError(f"its columns are {', '.join(columns)[:200]}")
    by_action: dict[str, list[tuple[Any, ...]]] = {}
    for row in sorted(rows, key=lambda row: row[2]):
        by_action.setdefault(row[1], []).append(row[2:])
    sources = [name.split(":", 2)[2] for name in parts]
    return {
        action_id: _stored_advantage(list(zip(*units, strict=True)), sources) for action_id, units in by_action.items()
    }


def _query_round(folder: Path, number: int, query: str, *values: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Columns and rows of a query on the file of a round; the file's path is the query's first parameter."""
    return _query_file(round_path(folder, number), query, *values)


def _query_file(path: Path, query: str, *values: str | list[str]) -> tuple[list[str], list[tuple[Any, ...]]]:
    import duckdb

    if not path.is_file():
        raise FileNotFoundError(path)
    try:
        with duckdb.connect(config={"threads": 1}) as con:
            result = con.execute(query, [str(path), *values])
            return [column[0] for column in result.description], result.fetchall()
    except duckdb.Error as error:
        raise ValueError(str(error).split("\n")[0]) from None


def _stored_advantage(columns: list[tuple[float, ...]], sources: Sequence[str]) -> StoredAdvantage:
    return StoredAdvantage(
        columns[1],
        columns[2],
        dict(zip(sources, columns[3:], strict=True)),
        tokens=tuple(int(unit) for unit in columns[0]),
    )


def count_episodes(path: Path, episode_ids: Sequence[str]) -> int:
    """How many of these episodes a round's file has rows of. Raises ValueError for a file of others."""
    query = f"SELECT count(DISTINCT episode_id) FROM read_parquet(?) WHERE {_IN_IDS}"
    _, ((count,),) = _query_file(path, query, list(episode_ids))
    return int(count)


def remove_episodes(path: Path, episode_ids: Sequence[str]) -> int:
    """Exchanges a round's file for one without these episodes -> how many it had. Raises ValueError as above."""
    import duckdb

    count = count_episodes(path, episode_ids)
    if count:
        with _replacing(path) as (con, target):
            try:
                con.execute(
                    f"COPY (SELECT * FROM read_parquet(?) WHERE NOT {_IN_IDS}) TO {target} {_FORMAT}",
                    [str(path), list(episode_ids)],
                )
            except duckdb.Error as error:
                raise ValueError(str(error).split("\n")[0]) from None
    return count


def delete_rounds_after(folder: Path, number: int) -> None:
    """Removes the files of the rounds after `number`, which a run that resumes there does again."""
    for path in folder.glob("round-*.parquet"):
        if path.name > round_path(folder, number).name:
            path.unlink()


def file_to_scale(folder: Path, number: int) -> float:
    """The 95 % quantile of the absolute normalised advantages of a round; 0.0 where all are 0.

    Raises as `file_to_advantages`.
    """
    _, rows = _query_round(
        folder, number, "SELECT coalesce(quantile_cont(abs(normalised), 0.95), 0)::DOUBLE FROM read_parquet(?)"
    )
    return float(rows[0][0])
