"""What training comes to: rollouts that recorded traces spare, and the score that the demo last ended at.

`offline_rollouts_saved_share` trains the small study's duo with and without traces, on the seeds below, and counts the
fresh rollouts until a round earns nine tenths of what the last round without traces earned. `demo_after_correct` reads
the comparison that the last `make demo` left behind: it runs for minutes, and its figure is that of its own report.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.harness import Measurement, bench
from examples.study.small.games import GAMES
from examples.study.small.model import ensure_model
from examples.study.small.run import EPISODES, run
from marft_bridge.common.errors import BridgeError

SEEDS = (300, 301, 302, 303)
NEAR_THE_END = 0.9
DEMO_REPORT = Path("runs/math_duo/report.json")


def rollouts_to(rewards: Sequence[float], level: float) -> int:
    """Fresh rollouts before the first round that earned as much; all of them where none did."""
    return EPISODES * next((number for number, reward in enumerate(rewards) if reward >= level), len(rewards))


@bench
def offline_rollouts_saved_share(folder: Path) -> Iterator[Measurement]:
    """1 - rollouts with traces / rollouts without, to the same reward; goal 0.5. The baseline is that without: 0."""
    model = ensure_model(Path(".cache"))
    needed: dict[str, list[int]] = {"defaults": [], "without traces": []}
    for seed in SEEDS:
        rewards = {condition: run(GAMES["duo"], condition, seed, model)["rewards"] for condition in needed}
        level = NEAR_THE_END * rewards["without traces"][-1]
        for condition, each in rewards.items():
            needed[condition].append(rollouts_to(each, level))
    spent = {condition: fmean(counts) for condition, counts in needed.items()}
    ratio = spent["defaults"] / spent["without traces"]
    yield Measurement(1 - ratio, "share", 0.0, ratio, parts={f"rollouts, {name}": n for name, n in spent.items()})


@bench
def demo_after_correct(folder: Path) -> Iterator[Measurement]:
    """Held-out tasks that the trained graph of the last `make demo` solves; the baseline is the graph before."""
    if not DEMO_REPORT.exists():
        raise BridgeError(f"{DEMO_REPORT}: no such file: run `make demo` first")
    scores = {variant["name"]: variant["score"]["mean"] for variant in json.loads(DEMO_REPORT.read_text())["variants"]}
    before, after = scores["before"], scores["after"]
    yield Measurement(after, "share", before, after / before)
