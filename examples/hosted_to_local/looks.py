"""Two further comparisons with the hosted desk, which are no part of the verdict:

    python -m examples.hosted_to_local.looks imitated --config bridge.toml --run runs/mine   # before any fresh rollout
    python -m examples.hosted_to_local.looks alone --config bridge.toml --run runs/mine      # each node moved alone

Both run version 1, which learned from the traces alone, as the plan's predictions are of imitation. After `alone`,
`marft-bridge plan --calibration` holds the plan's places against what moving each node cost. Invariant: tasks, rewards
and prices are those of the configuration; only the variants are others.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from marft_bridge.common.errors import BridgeError
from marft_bridge.common.progress import Reporter
from marft_bridge.comparison.command import compare
from marft_bridge.config.bridge import BridgeConfig, toml_to_config

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


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m examples.hosted_to_local.looks", description=__doc__)
    parser.add_argument("look", choices=("imitated", "alone"))
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--run", help="the run folder")
    given = parser.parse_args()
    try:
        config = toml_to_config(given.config, {"run": given.run})
        variants = imitated_variants() if given.look == "imitated" else alone_variants(config)
        changes = {"run": given.run, "compare.variants": variants}
        compare(toml_to_config(given.config, changes), Reporter(), resume=False)
    except BridgeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
