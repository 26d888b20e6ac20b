"""Recorded rewards and D -> how much hangs on a node's answers: what they reach, and what goes along with them.

Reach is a share of rewarded episodes: those in which, by D, an answer of the node leads to a last call of the run, the
one that ended last or one of the same superstep. Two associations tell more, and neither is a cause: the mean reward
where the node answered less that where it did not; and, between two runs of one task, how much farther apart the
rewards are where its answers differ than where they are the same. `marft-bridge credit` replaces the node, and so
measures a cause; where it has, its figures are read.

Invariant: at most MAX_EPISODES rewarded episodes are read, drawn by the seed, whatever the size of the store; a task
is one cluster of every interval; what the record cannot tell is None.
"""

# ruff: noqa: S608 - statements are put together from constants; every value is bound
from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from marft_bridge.move_plan.considered import EPISODES
from marft_bridge.rewards.agent_credit import CREDIT_REWARDS, read_credit_values
from marft_bridge.statistics.means import MeanInterval, difference_interval, mean_interval, pass_at_k
from trace_store.store import TraceStore

MAX_EPISODES = 5_000
RUNS_OF_A_TASK = 8  # that are compared with each other, at most

_DRAWN = f"""
SELECT e.episode_id, e.task_id, r.value FROM {EPISODES} e JOIN episode_reward r USING (episode_id)
WHERE r.name = $1 AND isfinite(r.value) ORDER BY md5(e.episode_id || ':' || $2), e.episode_id LIMIT $3
"""
_ACTIONS = f"""
SELECT a.episode_id, a.action_id, a.node, a.step, a.ended_ns, md5(a.completion)
FROM actions a SEMI JOIN ({_DRAWN}) d USING (episode_id) ORDER BY a.episode_id, a."index"
"""
_EDGES = f"SELECT x.episode_id, x.src, x.dst, x.exact FROM edges x SEMI JOIN ({_DRAWN}) d USING (episode_id)"


@dataclass(slots=True)
class _Call:
    action_id: str
    node: str
    step: int | None
    ended_ns: int
    answer: str | None  # a digest

    @property
    def graph(self) -> str:
        """The subgraph that its node lies in, whose supersteps are counted by themselves; "" for the outermost."""
        return self.node.rpartition("/")[0]


@dataclass(slots=True)
class _Run:
    """One rewarded episode."""

    task_id: str
    reward: float
    calls: list[_Call] = field(default_factory=list)
    edges: list[tuple[str, str, bool]] = field(default_factory=list)

    def answers_of(self, node: str) -> tuple[str | None, ...]:
        """Digests of the node's answers, in order; empty where it made no call."""
        return tuple(call.answer for call in self.calls if call.node == node)

    def reaching(self, *, exact: bool) -> set[str] | None:
        """The nodes with a call that leads to a last one; None where nothing is known of D, which has several calls."""
        if len(self.calls) > 1 and not self.edges:
            return None
        sources: dict[str, list[str]] = defaultdict(list)
        for src, dst, is_exact in self.edges:
            if is_exact or not exact:
                sources[dst].append(src)
        pending = [call.action_id for call in self._last_calls()]
        reached: set[str] = set()
        while pending:
            action_id = pending.pop()
            if action_id not in reached:
                reached.add(action_id)
                pending += sources[action_id]
        return {call.node for call in self.calls if call.action_id in reached}

    def _last_calls(self) -> list[_Call]:
        """The call that ended last, and those beside it: of the same superstep of the same graph."""
        last = max(self.calls, key=lambda call: call.ended_ns)
        if last.step is None:
            return [last]
        return [call for call in self.calls if (call.step, call.graph) == (last.step, last.graph)]


@dataclass(frozen=True, slots=True)
class NodeLinks:
    """What hangs on the answers of one node."""

    node: str
    episodes: int  # rewarded ones whose D is known
    # Share of them that its answers reach, tasks weighing the same, upper bounds of D included; None without any.
    reach: MeanInterval | None
    reach_exact: float | None  # the share by exact edges alone
    acted: MeanInterval | None  # mean reward where it answered less that where it did not; None where it always did
    answers: MeanInterval | None  # in units of reward, see above; None without runs of one task to compare
    credit: MeanInterval | None = None  # of `marft-bridge credit`


@dataclass(frozen=True, slots=True)
class RewardLinks:
    """Of all nodes, and of which episodes."""

    reward: str | None
    rewarded: int  # episodes that were read
    without_edges: int  # of them without any edge, though they have several calls
    is_drawn: bool  # whether the store has more than were read
    nodes: Mapping[str, NodeLinks]


def store_to_links(store: TraceStore, nodes: Sequence[str], reward: str | None, seed: int) -> RewardLinks:
    """What hangs on the answers of each node, by the reward of this name; None: there is none to look at."""
    measured = _read_credits(store, reward)
    runs = {} if reward is None else _read_runs(store, reward, seed)
    any_reach = {key: run.reaching(exact=False) for key, run in runs.items()}
    exact_reach = {key: run.reaching(exact=True) for key, run in runs.items()}
    known = [key for key, reach in any_reach.items() if reach is not None]
    tasks = [runs[key].task_id for key in known]
    by_node = {}
    for node in nodes:
        shares = [float(node in (any_reach[key] or ())) for key in known]
        exact_shares = [float(node in (exact_reach[key] or ())) for key in known]
        by_node[node] = NodeLinks(
            node=node,
            episodes=len(known),
            reach=pass_at_k(shares, tasks, 1) if known else None,
            reach_exact=pass_at_k(exact_shares, tasks, 1).mean if known else None,
            acted=_acted(node, list(runs.values())),
            answers=_answers(node, list(runs.values())),
            credit=measured.get(node),
        )
    return RewardLinks(reward, len(runs), len(runs) - len(known), is_drawn=len(runs) == MAX_EPISODES, nodes=by_node)


def _read_runs(store: TraceStore, reward: str, seed: int) -> dict[str, _Run]:
    values = (reward, str(seed), MAX_EPISODES)
    runs = {episode_id: _Run(task_id, value) for episode_id, task_id, value in store.sql(_DRAWN, values)}
    for episode_id, *call in store.sql(_ACTIONS, values):
        runs[episode_id].calls.append(_Call(*call))
    for episode_id, *edge in store.sql(_EDGES, values):
        runs[episode_id].edges.append((edge[0], edge[1], edge[2]))
    return {key: run for key, run in runs.items() if run.calls}


def _acted(node: str, runs: Sequence[_Run]) -> MeanInterval | None:
    acted = [bool(run.answers_of(node)) for run in runs]
    if len(set(acted)) < 2:
        return None
    return difference_interval([run.reward for run in runs], acted, clusters=[run.task_id for run in runs])


def _answers(node: str, runs: Sequence[_Run]) -> MeanInterval | None:
    """Mean over tasks: |difference in reward| of two runs with different answers, less that with the same ones."""
    by_task: dict[str, list[_Run]] = defaultdict(list)
    for run in runs:
        answers = run.answers_of(node)
        if answers and None not in answers and len(by_task[run.task_id]) < RUNS_OF_A_TASK:
            by_task[run.task_id].append(run)
    differences = []
    for task_runs in by_task.values():
        gaps: dict[bool, list[float]] = {True: [], False: []}
        for one, other in itertools.combinations(task_runs, 2):
            gaps[one.answers_of(node) != other.answers_of(node)].append(abs(one.reward - other.reward))
        if gaps[True] and gaps[False]:
            differences.append(sum(gaps[True]) / len(gaps[True]) - sum(gaps[False]) / len(gaps[False]))
    return mean_interval(differences) if differences else None


def _read_credits(store: TraceStore, reward: str | None) -> dict[str, MeanInterval]:
    """Node -> what the latest `credit` on this reward measured that it adds: Shapley values where there are any."""
    for name in reversed(CREDIT_REWARDS):
        run = read_credit_values(store, name, reward)
        if run is not None:
            return {
                node: mean_interval([value for _, value in pairs], clusters=[task for task, _ in pairs])
                for node, pairs in run.values.items()
            }
    return {}


def choose_reward(store: TraceStore, named: str | None, usual: str | None = None) -> tuple[str | None, list[str]]:
    """The team reward to look at, and the names of all that the store has.

    The one that is named, if the store has it, else none. Without a name the usual one where the store has it, else the
    only one there is, else none.
    """
    query = f"SELECT DISTINCT r.name FROM episode_reward r SEMI JOIN {EPISODES} e USING (episode_id) ORDER BY 1"
    names = [str(name) for (name,) in store.sql(query)]
    if named is not None:
        return (named if named in names else None), names
    return (usual if usual in names else names[0] if len(names) == 1 else None), names
