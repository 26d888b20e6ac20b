"""The whole runs and forks of a round -> its figures about trees, and the line that says them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from marft_bridge.rollouts.episode_plan import episode_to_fork
from marft_bridge.training.planned_forks import Wave, prompt_count, sampled_count
from trace_store.records import Trajectory


def round_to_tree_metrics(
    chains: Sequence[Trajectory], forks: Sequence[Trajectory], episodes_per_round: int, reward: str, *, stored: bool
) -> dict[str, Any]:
    """The figures; see docs/metrics.md.

    Args:
        chains: the round's whole runs, failed ones included.
        episodes_per_round: whole runs that the round would have had without forks.
        stored: whether runs of before the round may be forked.
    """
    came_off = [fork for fork in forks if fork.episode.outcome != "failed"]
    own_ids = {each.episode.episode_id for each in (*chains, *forks)}
    stored_ids = {fork.episode.episode_id for fork in came_off if fork.episode.parent_episode not in own_ids}
    chain_tokens = sum(sampled_count(each.actions) for each in chains)
    calls = [action for fork in came_off for action in fork.actions]
    prompts = sum(map(prompt_count, calls))
    values = defaultdict[str, set[float | None]](set)
    for each in (*chains, *came_off):
        if each.episode.outcome != "failed" and each.episode.episode_id not in stored_ids:
            values[each.episode.task_id].add(each.team_reward(reward))
    differing = sum(len(earned - {None}) > 1 for earned in values.values())
    return {
        "forked_calls": len({episode_to_fork(fork.episode) for fork in came_off}),
        "forks": len(came_off),
        "failed_forks": len(forks) - len(came_off),
        "stored_forks": len(stored_ids) if stored else None,
        "sampled_tokens": chain_tokens + sum(sampled_count(each.actions) for each in forks),
        "token_budget": round(episodes_per_round * chain_tokens / len(chains)) if chains else None,
        "fork_tokens_saved_share": sum(prompt_count(call) for call in calls if call.replayed_from is not None) / prompts
        if prompts
        else None,
        "undecided_tasks": differing / len(values) if values else None,
    }


def tree_metrics_to_text(metrics: dict[str, Any], waves: Sequence[Wave]) -> str:
    """What was forked where, and how much of the budget was spent."""
    calls = Counter(f"{fork.node}:{fork.call}" for wave in waves for fork in wave)
    places = ", ".join(f"{place} {count}" for place, count in sorted(calls.items()))
    share = metrics["undecided_tasks"]
    stored = "" if metrics["stored_forks"] is None else f", {metrics['stored_forks']} of them of stored runs"
    return (
        f"{metrics['forks']} forks of {metrics['forked_calls']} calls ({places or '-'}){stored}, "
        f"{metrics['failed_forks']} failed; {metrics['sampled_tokens']} of {metrics['token_budget'] or '-'} tokens; "
        f"{'-' if share is None else f'{share:.0%}'} of the tasks undecided"
    )
