"""A sound store of recorded runs, ways to damage it, and the commands of `marft-bridge traces` on it."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import pytest
from rich.console import Console

from marft_bridge import cli
from marft_bridge.rollouts.episode_plan import plan_episodes
from support.duo_rig import COMMON, TASKS, Rig
from support.growth_rig import fill
from trace_store.records import AdapterRow, Reward, RunRow, SpanRow


def sound_store(folder: Path) -> Path:
    """Three episodes of the real duo graph on a scripted model, with the rows that its commands write beside them."""
    path = folder / "store.duckdb"
    path.touch(0o600)
    path.write_bytes(_sound_file())
    return path


@cache
def _sound_file() -> bytes:
    """Recorded once: the tests damage copies."""
    with TemporaryDirectory() as folder:
        return _record(Path(folder)).read_bytes()


def _record(folder: Path) -> Path:
    rig = Rig(folder)
    rig.run(plan_episodes(TASKS[:3], 3, 1, seed=1, **COMMON))
    with rig.store() as store:
        store.put_run(RunRow("run", "collect", 1))
        store.put_adapter(AdapterRow("actor", 3, 2, "adapters/actor/3", "a" * 64, "b" * 64, 3))
        store.put_adapter(AdapterRow("actor", 2, 1, "adapters/actor/2", "c" * 64, "b" * 64, 2))
        store.put_adapter(AdapterRow("actor", 1, 0, "adapters/actor/1", "d" * 64, "b" * 64, 1))
    return rig.path


def store_of(path: Path, *records: SpanRow | Reward) -> Path:
    """A store with these records taken in from a journal."""
    fill(path, [records])
    return path


def damage(path: Path, *statements: str) -> None:
    """Changes a store in a way in which nothing of ours does."""
    with duckdb.connect(str(path)) as con:
        for statement in statements:
            con.execute(statement)


def traces(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    code = cli.run(["traces", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def terminal(**options: Any) -> Console:
    """A terminal that keeps what is written to it: `terminal().file.getvalue()`."""
    return Console(file=io.StringIO(), force_terminal=True, highlight=False, **({"width": 160} | options))


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
