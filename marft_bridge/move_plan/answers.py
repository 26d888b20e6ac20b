"""The answers of hosted calls -> how constrained each node's answers are: formats, lengths, how many differ.

Counted by DuckDB over all answers, however many. An answer is a number, JSON (also in a fence of three backticks), or
text; a choice where a node gave few answers, each of them often. Invariant: an answer that was not recorded counts as
none of these, and is counted.
"""

# ruff: noqa: S608 - statements are put together from constants; every value is bound
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from marft_bridge.move_plan.considered import HOSTED
from trace_store.store import TraceStore

FEW_CHOICES = 12
"""A node with at most so many different answers, each given `TIMES_EACH` times on average, makes a choice."""
TIMES_EACH = 5

_ANSWERS = f"""
WITH answered AS (
    SELECT node, trim(regexp_replace(trim(completion), '^```[a-z]*\\s|```$', '', 'g')) AS answer,
           coalesce(sampled_tokens, len(sampled_ids)) AS tokens
    FROM {HOSTED}
),
formats AS (
    SELECT node, answer, tokens, hash(answer) AS same,
           CASE WHEN regexp_full_match(answer, '[-+]?[0-9][0-9,]*([.][0-9]+)?') THEN 'number'
                WHEN left(answer, 1) IN ('{{', '[') AND json_valid(answer) THEN 'json' ELSE 'text' END AS format
    FROM answered WHERE answer <> ''
),
times AS (
    SELECT node, max(times) AS most, count(*) AS different FROM
    (SELECT node, same, count(*) AS times FROM formats GROUP BY node, same) GROUP BY node
)
SELECT a.node, a.calls, coalesce(f.answered, 0), coalesce(f.numbers, 0), coalesce(f.json, 0), coalesce(t.different, 0),
       coalesce(t.most, 0), f.characters_median, f.characters_p90, a.tokens_median, a.tokens_p90
FROM (
    SELECT node, count(*) AS calls, median(tokens) AS tokens_median, quantile_cont(tokens, 0.9) AS tokens_p90
    FROM answered GROUP BY node
) a
LEFT JOIN (
    SELECT node, count(*) AS answered, count(*) FILTER (WHERE format = 'number') AS numbers,
           count(*) FILTER (WHERE format = 'json') AS json, median(length(answer)) AS characters_median,
           quantile_cont(length(answer), 0.9) AS characters_p90
    FROM formats GROUP BY node
) f USING (node)
LEFT JOIN times t USING (node)
ORDER BY a.node
"""


@dataclass(frozen=True, slots=True)
class NodeAnswers:
    """How constrained the answers of one node are."""

    node: str
    calls: int  # hosted ones
    answered: int  # of them with a text that was recorded; a call for a tool may have none
    numbers: int
    json: int
    different: int  # answers that differ, white space around them aside
    most: int  # times that the commonest was given
    characters_median: float | None
    characters_p90: float | None
    tokens_median: float | None  # of the calls whose number of sampled tokens is known
    tokens_p90: float | None
    drawn: int = 0  # calls that were drawn, and whose answer can be read
    call_tools: int = 0  # of these, those whose answer calls a tool

    @property
    def is_choice(self) -> bool:
        """Whether it gave few answers, each of them often."""
        return 0 < self.different <= FEW_CHOICES and self.answered >= TIMES_EACH * self.different

    @property
    def form(self) -> str:
        """What nine answers in ten are: tool calls, a choice, numbers, JSON or text; "not recorded" without any."""
        if self.drawn and self.call_tools >= 0.9 * self.drawn:
            return "tool calls"
        if not self.answered:
            return "not recorded"
        if self.is_choice:
            return "a choice"
        shares = {"numbers": self.numbers / self.answered, "JSON": self.json / self.answered}
        return next((name for name, share in shares.items() if share >= 0.9), "text")


def store_to_answers(store: TraceStore, tool_calls: Mapping[str, tuple[int, int]]) -> dict[str, NodeAnswers]:
    """Node -> its answers; a node without a hosted call is absent. `tool_calls`: see `count_tool_calls`."""
    by_node = {row[0]: NodeAnswers(*row) for row in store.sql(_ANSWERS)}
    for node, (drawn, call_tools) in tool_calls.items():
        by_node[node] = replace(by_node[node], drawn=drawn, call_tools=call_tools)
    return by_node
