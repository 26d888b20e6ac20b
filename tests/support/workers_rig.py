"""Several real processes for a test: `in_processes` starts them with torchrun, and accelerate joins them.

A function under test takes the process's `Workers` and an argument, and returns JSON values; it stands at the top level
of a module beside the tests, so that each process can import it:

    def sum_of_ranks(workers: Workers, argument: Any) -> float:
        return workers.add([float(workers.rank)])[0]

    results = in_processes(2, ["my_rig:sum_of_ranks"], tmp_path)      # {"my_rig:sum_of_ranks": [1.0, 1.0]}

The processes start once (some five seconds) and run the functions one after another, so one call serves many laws. An
error in any process fails the call with what the processes said.

To compare a whole update in 1 and in 2 processes: put into such a function what builds the tiny model (write it to
`argument["folder"]` before the call: two processes must not write the same files), `MarftTrainer` with these `workers`,
a fixed list of trajectories and one `update`; return the metrics and the adapter's values as lists of numbers (a
float32 survives JSON exactly). Call it as `in_processes(1, ...)` and `in_processes(2, ...)`. Expect bit-equal results
between the two ranks, and values within rounding (1e-6) between 1 and 2 processes: the micro-batches are added in
another order. Choose `tokens_per_microbatch` small enough that there are several micro-batches, an odd number of them,
so that one process has a turn without a batch.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.paths import ROOT


def in_processes(count: int, functions: Sequence[str], folder: Path, argument: Any = None) -> dict[str, list[Any]]:
    """Runs "module:function" in `count` processes; returns what each returned, by rank.

    Args:
        folder: empty, for files between the processes and this one.
        argument: JSON value that every function is given.
    """
    (folder / "argument.json").write_text(json.dumps([argument, list(functions)]))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", "--master-addr=127.0.0.1"]
    launch += [f"--master-port={port}", __file__, str(folder)]
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(launch, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    by_rank = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]
    return {function: [results[function] for results in by_rank] for function in functions}


def _main(folder: Path) -> None:
    from trainers.common.workers import Workers

    argument, functions = json.loads((folder / "argument.json").read_text())
    workers = Workers.of_accelerate("cpu")
    results = {}
    for name in functions:
        module, _, function = name.partition(":")
        results[name] = getattr(importlib.import_module(module), function)(workers, argument)
    (folder / f"{workers.rank}.json").write_text(json.dumps(results))
    workers.close()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
