"""Rows of one table -> their records by episode, made a few episodes at a time.

A query for many episodes costs little more than one for a few, but a number takes ten times more memory as a Python
object than in a column. So rows are fetched together, kept as columns, and become records a few episodes at a time,
which also lets the processor's caches and the allocator reuse what the last ones left.
Invariant: with pyarrow and without it the records are equal; without it they take more time and memory.
"""

# ruff: noqa: S608 - statements are put together from constants; every value is bound
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from itertools import accumulate, pairwise
from operator import le
from typing import Any, Generic, Protocol

import duckdb

from trace_store.rows import R, arrow_to_reader, record_maker
from trace_store.schema import Table

MAX_PLAIN_EPISODES = 4  # up to so many, setting Arrow up costs more than it saves


class _Columns(Protocol):
    """The result of a query, by column."""

    def episode_ids(self) -> list[str]:
        """The column `episode_id`."""

    def rearrange(self, row_numbers: Sequence[int]) -> None:
        """Puts the rows into the order of these row numbers."""

    def read_columns(self, begin: int, end: int) -> Mapping[str, Sequence[Any]]:
        """The columns of the rows from `begin` up to `end`, by name."""


class RowsByEpisode(Generic[R]):
    """The rows of one table that match a condition; within an episode they keep the order of the query."""

    def __init__(
        self,
        con: duckdb.DuckDBPyConnection,
        record_class: type[R],
        table: Table,
        condition: str,
        values: Sequence[Any],
        episode_ids: Sequence[str],
    ) -> None:
        """`condition`, with `values` bound to it, follows FROM in the query; rows of other episodes are dropped."""
        names = [field.name for field in fields(record_class)]
        query = "SELECT " + ", ".join(f'"{name}"' for name in names) + f" FROM {table.name} {condition}"
        use_arrow = len(episode_ids) > MAX_PLAIN_EPISODES and find_spec("pyarrow") is not None
        self._columns: _Columns = (_ArrowColumns if use_arrow else _PlainColumns)(con, query, values)
        self._to_records: Callable[[Mapping[str, Sequence[Any]]], list[R]] = record_maker(record_class, table)
        self._rank = {episode_id: rank for rank, episode_id in enumerate(episode_ids)}
        episode_count = len(episode_ids)
        ranks = [self._rank.get(episode_id, episode_count) for episode_id in self._columns.episode_ids()]
        if not all(map(le, ranks, ranks[1:])):
            self._columns.rearrange(sorted(range(len(ranks)), key=ranks.__getitem__))
        row_counts = Counter(ranks)
        self._bounds = list(accumulate(map(row_counts.__getitem__, range(episode_count)), initial=0))

    def read_records(self, episode_ids: Sequence[str]) -> list[list[R]]:
        """The records of each episode; `episode_ids` are consecutive ones of those given at construction."""
        first = self._rank[episode_ids[0]]
        bounds = self._bounds[first : first + len(episode_ids) + 1]
        begin, end = bounds[0], bounds[-1]
        records = self._to_records(self._columns.read_columns(begin, end)) if begin < end else []
        return [records[start - begin : stop - begin] for start, stop in pairwise(bounds)]


class _ArrowColumns:
    def __init__(self, con: duckdb.DuckDBPyConnection, query: str, values: Sequence[Any]) -> None:
        self._table = con.sql(query, params=list(values)).to_arrow_table().combine_chunks()
        self._readers: dict[str, Callable[[int, int], Sequence[Any]]] = {}

    def episode_ids(self) -> list[str]:
        episode_ids: list[str] = self._table.column("episode_id").to_pylist()
        return episode_ids

    def rearrange(self, row_numbers: Sequence[int]) -> None:
        self._table = self._table.take(list(row_numbers)).combine_chunks()

    def read_columns(self, begin: int, end: int) -> Mapping[str, Sequence[Any]]:
        if not self._readers:  # there are rows, so each column is one chunk
            for name, column in zip(self._table.column_names, self._table.columns, strict=True):
                (chunk,) = column.chunks
                self._readers[name] = arrow_to_reader(chunk)
        return {name: read(begin, end) for name, read in self._readers.items()}


class _PlainColumns:
    def __init__(self, con: duckdb.DuckDBPyConnection, query: str, values: Sequence[Any]) -> None:
        answer = con.execute(query, list(values))
        self._names = [column[0] for column in answer.description or ()]
        self._rows = answer.fetchall()

    def episode_ids(self) -> list[str]:
        position = self._names.index("episode_id")
        return [row[position] for row in self._rows]

    def rearrange(self, row_numbers: Sequence[int]) -> None:
        self._rows = [self._rows[row_number] for row_number in row_numbers]

    def read_columns(self, begin: int, end: int) -> Mapping[str, Sequence[Any]]:
        return dict(zip(self._names, zip(*self._rows[begin:end], strict=True), strict=True))
