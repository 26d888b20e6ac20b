"""`marft-bridge traces doctor`: a store -> its faults, printed by law, and whether it is sound.

Invariant: every fault is counted; of each law at most a limit is printed, with the number of those left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from marft_bridge.common.progress import Reporter
from marft_bridge.common.terminal_text import print_line, text_to_line, value_to_json
from marft_bridge.traces.store_reader import open_for_reading
from trace_store.checkup import store_to_faults
from trace_store.doctor import Fault


def doctor(path: Path, limit: int | None, as_json: bool, console: Console) -> bool:
    """Checks the store at `path` and prints its faults. Returns whether it has no errors; warnings do not count.

    `limit`: faults of one law and level that are printed; None for all.

    Raises:
        StoreError: the store cannot be opened, or its journal cannot be read.
    """
    reporter = Reporter(Console(stderr=True, highlight=False))
    counts: Counter[tuple[str, str]] = Counter()
    listed_faults: list[Fault] = []
    with open_for_reading(path) as store:
        episodes = store.sql("SELECT count(*) FROM episodes")[0][0]
        with reporter.bars(), reporter.overall_task("episodes", episodes) as task:
            for fault in store_to_faults(store, task.update):
                counts[fault.level, fault.law] += 1
                if limit is None or counts[fault.level, fault.law] <= limit:
                    listed_faults.append(fault)
    errors = sum(count for (level, _), count in counts.items() if level == "error")
    if as_json:
        count_rows = [{"level": level, "law": law, "number": count} for (level, law), count in sorted(counts.items())]
        faults = [asdict(fault) for fault in listed_faults]
        print_line(console, value_to_json({"episodes": episodes, "counts": count_rows, "faults": faults}))
        return errors == 0
    for fault in sorted(listed_faults, key=lambda fault: (fault.level, fault.law)):
        location = "the store" if fault.episode_id is None else f"episode {fault.episode_id}"
        print_line(console, text_to_line(f"{fault.level}  {fault.law}  {location}: {fault.message}"))
    for (level, law), count in sorted(counts.items()):
        if limit is not None and count > limit:
            print_line(console, f"{level}  {law}: {count - limit} more; --limit 0 lists them")
    warnings = counts.total() - errors
    print_line(console, f"{episodes} episodes checked: {errors} errors, {warnings} warnings")
    return errors == 0
