"""The calls of a store -> per node: how many, by which models, their tokens, cost and seconds.

Everything is counted by DuckDB over all calls, however many. Invariant: a number that the record lacks for some calls
is the sum over the others, with how many it leaves out; a call without a price has no cost, never a cost of 0.
"""

# ruff: noqa: S608 - statements are put together from constants; every value is bound
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from marft_bridge.config.prices import PriceTable
from marft_bridge.move_plan.considered import CALLS
from trace_store.store import TraceStore

_CALLS = f"""
SELECT node, count(*), count(*) FILTER (WHERE adapter IS NOT NULL), count(DISTINCT episode_id),
       median((ended_ns - started_ns) / 1e9), quantile_cont((ended_ns - started_ns) / 1e9, 0.9)
FROM {CALLS} GROUP BY node ORDER BY node
"""
# A price of the file stands in for the store's of the same model and day.
_COSTS = f"""
WITH given AS (
    SELECT unnest($1::VARCHAR[]) AS model, unnest($2::BIGINT[]) AS since_ns, unnest($3::DOUBLE[]) AS per_million_prompt,
           unnest($4::DOUBLE[]) AS per_million_sampled, $5::VARCHAR AS currency
),
known AS (
    FROM given UNION ALL BY NAME FROM prices ANTI JOIN given USING (model, since_ns)
),
counted AS (
    SELECT node, model, started_ns,
           CASE WHEN adapter IS NULL OR model IN (SELECT model FROM known) THEN model ELSE 'local' END AS priced,
           coalesce(prompt_tokens, len(prompt_ids)) AS prompt_tokens,
           coalesce(sampled_tokens, len(sampled_ids)) AS sampled_tokens
    FROM {CALLS}
)
SELECT c.node, c.model, k.currency, count(*) AS calls, sum(c.prompt_tokens), sum(c.sampled_tokens),
       count(c.prompt_tokens + c.sampled_tokens),
       count(c.prompt_tokens + c.sampled_tokens) FILTER (WHERE k.currency IS NOT NULL),
       sum((c.prompt_tokens * k.per_million_prompt + c.sampled_tokens * k.per_million_sampled) / 1e6)
FROM counted c ASOF LEFT JOIN known k ON c.priced = k.model AND c.started_ns >= k.since_ns
GROUP BY c.node, c.model, k.currency ORDER BY c.node, calls DESC, c.model, k.currency
"""


@dataclass(frozen=True, slots=True)
class ModelUsage:
    """The calls of a node that one model answered, at prices of one currency."""

    model: str | None  # None: the record does not name it
    calls: int
    currency: str | None  # None: without a price
    cost: float | None  # of `costed` calls; None where these are none
    costed: int


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """What one node used. Token sums are over the calls whose number is known, None where it is of no call."""

    node: str
    calls: int
    local_calls: int  # answered by an adapter of ours
    episodes: int
    seconds_median: float
    seconds_p90: float
    prompt_tokens: int | None = None
    sampled_tokens: int | None = None
    uncounted: int = 0  # calls that lack one of the two numbers
    models: tuple[ModelUsage, ...] = ()

    @property
    def tokens(self) -> int:
        """All tokens that are known."""
        return (self.prompt_tokens or 0) + (self.sampled_tokens or 0)

    @property
    def costs(self) -> dict[str, float]:
        """Currency -> what the calls with a known cost cost together."""
        costs: dict[str, float] = {}
        for usage in self.models:
            if usage.currency is not None and usage.cost is not None:
                costs[usage.currency] = costs.get(usage.currency, 0.0) + usage.cost
        return costs

    @property
    def uncosted(self) -> int:
        """Calls whose cost is not known."""
        return self.calls - sum(usage.costed for usage in self.models)


def store_to_usage(store: TraceStore, given: PriceTable | None = None) -> list[NodeUsage]:
    """What each node used, by name. `given`: prices besides those of the store."""
    prices = () if given is None else given.prices
    values = (
        [price.model for price in prices],
        [price.since_ns for price in prices],
        [price.prompt for price in prices],
        [price.sampled for price in prices],
        None if given is None else given.currency,
    )
    parts: dict[str, list[_Part]] = {}
    for node, *row in store.sql(_COSTS, values):
        parts.setdefault(node, []).append(_Part(*row))
    return [
        replace(
            NodeUsage(*row),
            prompt_tokens=_sum([part.prompt_tokens for part in parts[row[0]]]),
            sampled_tokens=_sum([part.sampled_tokens for part in parts[row[0]]]),
            uncounted=sum(part.calls - part.counted for part in parts[row[0]]),
            models=tuple(
                ModelUsage(
                    part.model,
                    part.calls,
                    part.currency,
                    cost=part.cost if part.costed else None,
                    costed=part.costed,
                )
                for part in parts[row[0]]
            ),
        )
        for row in store.sql(_CALLS)
    ]


class _Part(NamedTuple):
    """A row of `_COSTS` behind its node."""

    model: str | None
    currency: str | None
    calls: int
    prompt_tokens: int | None
    sampled_tokens: int | None
    counted: int
    costed: int
    cost: float | None


def _sum(numbers: Sequence[int | None]) -> int | None:
    """The sum of those that are known; None where none is."""
    known = [int(number) for number in numbers if number is not None]
    return sum(known) if known else None
