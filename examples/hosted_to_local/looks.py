"""Two further comparisons with the hosted desk, which are no part of the verdict:

    python -m examples.hosted_to_local.looks imitated --config bridge.toml --run runs/mine   # before any fresh rollout
    python -m examples.hosted_to_local.looks alone --config bridge.toml --run runs/mine      # each node moved alone

Both run version 1, which learned from the traces alone, as the plan's predictions are of imitation. `alone` ends in
the rank correlation of the plan's places (in the store that --plan names) and what moving each node alone costs.
Invariant: tasks, rewards and prices are those of the configuration; only the variants are others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marft_bridge.common.errors import BridgeError
from marft_bridge.common.progress import Reporter
from marft_bridge.comparison.command import compare
from marft_bridge.comparison.records import Report
from marft_bridge.config.bridge import BridgeConfig, toml_to_config
from marft_bridge.statistics.ranks import rank_correlation
from trace_store.store import TraceStore

HOSTED = {"name": "hosted", "own_models": True}


def imitated_variants() -> list[dict[str, Any]]:
    """The hosted desk, and the local one as imitation left it."""
    return [HOSTED, {"name": "imitated", "adapters": 1}]


def alone_variants(config: BridgeConfig) -> list[dict[str, Any]]:
    """The hosted desk, and it with each node moved alone."""
    return [
        HOSTED,
        *({"name": node, "app": config.graph.app, "nodes": [node], "adapters": 1} for node in config.graph.nodes),
    ]


def report_to_losses(report: Report) -> dict[str, float]:
    """Node -> what the score loses when it alone is moved."""
    return {contrast.variant: -contrast.diff for contrast in report.contrasts}


def places_of_plan(store_path: Path) -> dict[str, float]:
    """Node -> its place in the newest plan that the store keeps."""
    with TraceStore.open(store_path, read_only=True) as store:
        rows = [row for row in store.predictions() if row.quantity == "place"]
    newest = max((row.created_ns for row in rows), default=0)
    return {row.node: row.value for row in rows if row.created_ns == newest}


def order_to_line(places: Mapping[str, float], losses: Mapping[str, float]) -> str:
    """How well the plan's order agrees with what was measured, in one line."""
    nodes = sorted(places.keys() & losses.keys())
    if len(nodes) < 3:
        return f"the plan names a place for {len(nodes)} of these nodes: too few for a rank correlation"
    correlation = rank_correlation([places[node] for node in nodes], [losses[node] for node in nodes])
    if correlation is None:
        return "no rank correlation: moving any node alone costs the same"
    return f"rank correlation of place and loss over {len(nodes)} nodes: {correlation:+.2f}"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m examples.hosted_to_local.looks", description=__doc__)
    parser.add_argument("look", choices=("imitated", "alone"))
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--run", help="the run folder")
    parser.add_argument("--plan", type=Path, help="the store that holds the plan, for `alone`")
    given = parser.parse_args()
    try:
        config = toml_to_config(given.config, {"run": given.run})
        variants = imitated_variants() if given.look == "imitated" else alone_variants(config)
        changes = {"run": given.run, "compare.variants": variants}
        report = compare(toml_to_config(given.config, changes), Reporter(), resume=False)
    except BridgeError as error:
        sys.exit(str(error))
    if given.look == "alone" and given.plan is not None:
        print(order_to_line(places_of_plan(given.plan), report_to_losses(report)))


if __name__ == "__main__":
    main()
