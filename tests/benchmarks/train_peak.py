"""`python -m benchmarks.train_peak ours|naive MODEL`: two steps on the demo's batches -> the process's peak, in MiB."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.train_work import NaiveUpdate, OurUpdate, demo_work


def main(side: str, model_dir: Path) -> None:
    """Writes one number. The naive side takes zeros for old log-probs, so that only its own model is ever loaded."""
    work = demo_work()
    update: OurUpdate | NaiveUpdate
    if side == "ours":
        update = OurUpdate(model_dir, work)
    else:
        old = {agent: [torch.zeros(len(item.sampled_ids)) for item in items] for agent, items in work.items()}
        update = NaiveUpdate(model_dir, work, old, None)
    for _ in range(2):
        update.step()
    sys.stdout.write(f"{status('VmHWM') / 2**20}\n")


def status(name: str) -> int:
    """A size that the kernel tells of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
