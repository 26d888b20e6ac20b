"""`marft-bridge traces doctor`: a store -> its faults, printed by law, and an exit code.

Invariant: every fault is counted; of each law only so many are printed, and what was left out is said.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from marft_bridge.progress import Reporter
from marft_bridge.traces.opening import store_to_read
from marft_bridge.traces.plain import print_line, text_to_line, value_to_json
from trace_store.checkup import store_to_faults
from trace_store.doctor import Fault


def doctor(path: Path, most: int | None, as_json: bool, console: Console) -> bool:
    """Checks the store at `path`, prints what is wrong, and says whether it is sound: no error, warnings apart.

    `most`: faults of one law and level that are printed; None for all.

    Raises:
        StoreError: the store cannot be opened, or its journal cannot be read.
    """
    reporter = Reporter(Console(stderr=True, highlight=False))
    counts: Counter[tuple[str, str]] = Counter()
    shown: list[Fault] = []
    with store_to_read(path) as store:
        episodes = store.sql("SELECT count(*) FROM episodes")[0][0]
        with reporter.bars(), reporter.overall("episodes", episodes) as task:
            for fault in store_to_faults(store, task.update):
                counts[fault.level, fault.law] += 1
                if most is None or counts[fault.level, fault.law] <= most:
                    shown.append(fault)
    errors = sum(number for (level, _), number in counts.items() if level == "error")
    if as_json:
        numbers = [{"level": level, "law": law, "number": number} for (level, law), number in sorted(counts.items())]
        faults = [asdict(fault) for fault in shown]
        print_line(console, value_to_json({"episodes": episodes, "counts": numbers, "faults": faults}))
        return errors == 0
    for fault in sorted(shown, key=lambda fault: (fault.level, fault.law)):
        where = "the store" if fault.episode_id is None else f"episode {fault.episode_id}"
        print_line(console, text_to_line(f"{fault.level}  {fault.law}  {where}: {fault.message}"))
    for (level, law), number in sorted(counts.items()):
        if most is not None and number > most:
            print_line(console, f"{level}  {law}: {number - most} more; --limit 0 lists them")
    warnings = counts.total() - errors
    print_line(console, f"{episodes} episodes checked: {errors} errors, {warnings} warnings")
    return errors == 0
