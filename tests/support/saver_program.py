"""`saver_program KIND PHASE FOLDER`: an app with a checkpointer on SQLite, recorded in one process, forked in another.

Prints as JSON what the fork's process finds. It runs in an environment that has the checkpointer's package.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from langgraph.checkpoint.memory import InMemorySaver

from marft_bridge.forks.run_entry import RunEntry
from support.thread_rig import Lab, chain, facts


def run_phase(kind: str, phase: str, folder: Path) -> dict[str, Any]:
    """`record` runs two turns; `fork` forks the first one at its last call, by the checkpointer and by a replay."""
    path = folder / "checkpoints.sqlite"
    with ExitStack() as stack:
        runner: asyncio.Runner | None = None
        if kind == "sync":
            from langgraph.checkpoint.sqlite import SqliteSaver

            lab = Lab(folder, chain, stack.enter_context(SqliteSaver.from_conn_string(str(path))))
        else:
            from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

            runner = stack.enter_context(asyncio.Runner())
            opened = AsyncSqliteSaver.from_conn_string(str(path))
            saver = runner.run(opened.__aenter__())
            stack.callback(lambda: runner.run(opened.__aexit__(None, None, None)))
            lab = Lab(folder, chain, saver, runner)
        if phase == "record":
            lab.turns("one", "two")
            lab.recorded.recorder.journal.close()
            return {}
        before = _count(path)
        entered, start = lab.fork(0, "c")
        entry = start.entry
        replayed, start = lab.fork(0, "c", graph=chain(InMemorySaver()))
        return {
            "entered": entry.superstep_count if isinstance(entry, RunEntry) else entry,
            "replayed": isinstance(start.entry, str),
            "is_same": facts(entered) == facts(replayed),
            "is_read_only": _count(path) == before,
        }


def _count(path: Path) -> list[int]:
    with sqlite3.connect(path) as connection:
        counts = "SELECT (SELECT count(*) FROM checkpoints), (SELECT count(*) FROM writes)"
        return list(connection.execute(counts).fetchone())


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run_phase(sys.argv[1], sys.argv[2], Path(sys.argv[3]))) + "\n")
