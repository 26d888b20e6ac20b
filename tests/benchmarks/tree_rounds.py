"""Rounds of trees: what they come to against chains at equal sampled tokens, and the prompt tokens that forks spare.

Both train the games of the small study, on the seeds below, with half of a round's tokens on forks. A fork spares the
prompts of the calls that it is given again; what an engine's cache spares of the others is not in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from benchmarks.harness import Measurement, bench
from examples.study.small.games import GAMES
from examples.study.small.model import ensure_model
from examples.study.small.trees import BASE, run

SEEDS = (310, 311)
TREES = "trees"


@bench
def tree_vs_chain_area(folder: Path) -> Iterator[Measurement]:
    """Area under the curve of held-out scores, over all games; the baseline is that of chains."""
    model = ensure_model(Path(".cache"))
    areas: dict[str, list[float]] = {TREES: [], BASE: []}
    parts = {}
    for game in GAMES.values():
        for condition, mine in areas.items():
            mine += [run(game, condition, seed, model)["area"] for seed in SEEDS]
            parts[f"{game.name}, {condition}"] = fmean(mine[-len(SEEDS) :])
    trees, chains = fmean(areas[TREES]), fmean(areas[BASE])
    yield Measurement(trees, "share", chains, trees / chains, parts=parts)


@bench
def fork_tokens_saved_share(folder: Path) -> Iterator[Measurement]:
    """Of the prompt tokens of forks' calls, those that were given again; over all games."""
    model = ensure_model(Path(".cache"))
    spared = {}
    for game in GAMES.values():
        figures = run(game, TREES, SEEDS[0], model)
        spared[game.name] = sum(figures["prompt_tokens_spared"]) / sum(figures["prompt_tokens"])
    share = fmean(spared.values())
    yield Measurement(share, "share", 0.0, 1 - share, parts=spared)
