"""`python -m benchmarks [NAME]`: runs every bench or one, prints a table, writes runs/bench/latest.json.

A name may have stars, as in 'round_seconds*'.
"""

from __future__ import annotations

import sys
import tempfile
from fnmatch import filter as matching
from pathlib import Path

from rich.console import Console

from benchmarks import (  # noqa: F401 - makes their benches known
    learners,
    learning,
    live_split,
    ray_rounds,
    replay_speed,
    rollout_memory,
    rollout_reference,
    rollout_speed,
    round_seconds,
    single_steps,
    startup,
    store_ingest,
    store_read,
    trace_overhead,
    train_flops,
    train_step,
    train_trl,
    tree_rounds,
)
from benchmarks.harness import (
    BENCHES,
    Measurement,
    bench_to_measurements,
    figures_to_file,
    measurements_to_figure,
    print_figures,
)
from marft_bridge.common.errors import USER_ERRORS

RESULTS = Path("runs/bench")


def main(arguments: list[str]) -> int:
    """0; 1 when a bench failed, after the others have run; 2 when there is none of that name."""
    console = Console()
    unknown = [name for name in arguments if not matching(BENCHES, name)]
    if unknown:
        console.print(f"no bench is called {', '.join(unknown)}; there are: {', '.join(BENCHES)}", markup=False)
        return 2
    RESULTS.mkdir(parents=True, exist_ok=True)
    measured: dict[str, list[Measurement]] = {}
    failed = False
    for name in dict.fromkeys(found for asked in arguments or ["*"] for found in matching(BENCHES, asked)):
        # On the disk of the results: the default for temporary files may be memory, where a sync costs nothing.
        with tempfile.TemporaryDirectory(dir=RESULTS, prefix=f".{name}-") as folder, console.status(name):
            try:
                measured[name] = bench_to_measurements(BENCHES[name], Path(folder))
            except USER_ERRORS as error:
                console.print(f"{name}: {error}", markup=False)
                failed = True
    figures_to_file([measurements_to_figure(name, each) for name, each in measured.items()], RESULTS / "latest.json")
    print_figures(console, measured)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
