"""Counts and latencies of one proxy, per variant -> JSON for `GET /marft/live`.

Latencies are those of the latest `MAX_LATENCIES` answers. Invariant: memory does not grow with traffic. The counts live
in memory only; the calls themselves are recorded in the store.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

MAX_LATENCIES = 2048


@dataclass(slots=True)
class VariantCounts:
    """The counts of one variant."""

    requests: int = 0
    errors: int = 0  # answered with an error, or cut off by the engine
    clients_left: int = 0  # clients that went away before the end
    in_flight: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)  # answers of the hosted model, by why
    unjudged: Counter[str] = field(default_factory=Counter)  # answers that the judge gave no score, by why
    latency_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_LATENCIES))  # of answers without an error
    # until the first piece of a stream
    first_piece_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_LATENCIES))

    def to_json(self) -> dict[str, Any]:
        """The counts, with quantiles in milliseconds, None where nothing was measured."""
        return {
            "requests": self.requests,
            "errors": self.errors,
            "left": self.clients_left,
            "in_flight": self.in_flight,
            "fallbacks": dict(self.fallbacks),
            "unjudged": dict(self.unjudged),
            "latency_ms": _quantiles(self.latency_s),
            "first_piece_ms": _quantiles(self.first_piece_s),
        }


@dataclass(slots=True)
class LiveCounts:
    """All counts of one proxy."""

    variants: dict[str, VariantCounts]
    keys: Counter[str] = field(default_factory=Counter)  # where the key came from; "" for requests without one
    refused: Counter[str] = field(default_factory=Counter)  # by the code of the answer
    dropped: int = 0  # requests that were not mirrored because too many waited

    def to_json(self) -> dict[str, Any]:
        """The counts as the keys of `GET /marft/live`."""
        return {
            "variants": {name: counts.to_json() for name, counts in self.variants.items()},
            "keys": {source: count for source, count in self.keys.items() if source},
            "without_key": self.keys[""],
            "refused": dict(self.refused),
            "mirror_dropped": self.dropped,
        }


def _quantiles(seconds: Iterable[float]) -> dict[str, float] | None:
    ordered = sorted(seconds)
    if not ordered:
        return None
    return {f"p{q}": round(1000 * ordered[math.ceil(q / 100 * len(ordered)) - 1], 3) for q in (50, 95, 99)}
