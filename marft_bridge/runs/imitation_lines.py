"""The line of the offline phase in metrics.jsonl -> lines of text: what each node imitated, how well, and what not.

Invariants: all stored calls of a node are in its lines, as imitated or under the reason why they were not; a figure
that is absent, as in files of earlier releases, is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def updates_to_imitation_lines(updates: Iterable[Mapping[str, Any]]) -> list[str]:
    """The lines of the offline phase among these updates; none where it has not ended, or where it was off."""
    offline = next((line for line in updates if line.get("phase") == "offline"), {})
    replay = offline.get("replay", {})
    if replay.get("mode") in (None, "off"):
        return []
    return [line for node, agent in replay["agents"].items() if "actions" in agent for line in _to_lines(node, agent)]


def _to_lines(node: str, agent: Mapping[str, Any]) -> list[str]:
    drops: Mapping[str, int] = agent.get("drops", {})
    stored = f" of {agent['actions'] + sum(drops.values())}" if "drops" in agent else ""
    parts = [f"learned from {agent['actions']}{stored} stored calls"]
    if agent["actions"] and "epochs" in agent:
        stop = "" if agent.get("stopped_by") is None else f", stopped by {agent['stopped_by']}"
        if agent["epochs"] == 0 and stop:
            parts = [f"tried {agent['actions']}{stored} stored calls; nothing kept"]
        else:
            parts.append(f"{agent['epochs']} pass{'' if agent['epochs'] == 1 else 'es'}")
        parts[-1] += stop
    lines = [f"offline, {node}: {'; '.join(parts)}"]
    if agent.get("held_out_exact") is not None:
        lines.append(
            f"offline, {node}: {agent['held_out_actions']} held-out calls, before and after: "
            f"{agent['held_out_nats_before']:.3f} and {agent['held_out_nats']:.3f} nats a token; "
            f"{agent['held_out_exact_before']:.0%} and {agent['held_out_exact']:.0%} answered word for word"
        )
    lines += [f"offline, {node}: not {count}: {reason}" for reason, count in sorted(drops.items())]
    return lines
