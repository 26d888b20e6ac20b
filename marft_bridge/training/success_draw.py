"""What older episodes earned -> how likely each is drawn: to be imitated again, or to be gone on from, beside a round.

Invariant: a weight follows from rewards and rounds alone; it is 0 where the episode earned no more than its task
usually does, so that a rare success of a hard task is drawn soon, and what is solved by now hardly ever (ExGRPO, arXiv
2510.02245; RLEP, arXiv 2507.07451).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marft_bridge.runs.run_folder import COLLECT, TRAIN
from marft_bridge.training.task_draw import PRIOR_STRENGTH, TaskReward, uniform_of
from trace_store.store import TraceStore

# Episodes of this run's rounds, and the collected ones, which version 0 sampled. Episodes that failed, or have no
# reward, are not drawn: nothing could be learned from them.
_OLDER = """
SELECT e.episode_id, e.task_id, CASE WHEN run_id = $4 THEN 0 ELSE round END, arg_max(r.value, r.created_ns),
       json_keys(any_value(e.adapters))
FROM episodes e JOIN rewards r USING (episode_id)
WHERE (run_id = $1 AND $2 <= round AND round < $3 OR run_id = $4 AND split = 'train' AND $2 <= 0)
  AND outcome <> 'failed' AND fork_action IS NULL AND r.scope = 'episode' AND r.name = $5
GROUP BY e.episode_id, run_id, round, task_id, sample, started_ns
ORDER BY run_id = $4, round, task_id, sample, started_ns, e.episode_id
"""

AGE_DECAY = 0.8
"""What a round leaves of an episode's weight."""


@dataclass(frozen=True, slots=True)
class OlderRun:
    """A whole run of before a round."""

    episode_id: str
    earned: TaskReward
    nodes: frozenset[str]  # of which it says at which version they ran
    name: str  # round, task, and the number of the run among these: the same in another execution, other than the id


def older_runs(store: TraceStore, *, oldest: int, before: int, reward: str) -> list[OlderRun]:
    """The whole runs from one round on that another one may draw, by round; 0 is what was collected."""
    rows = store.sql(_OLDER, (TRAIN, oldest, before, COLLECT, reward))
    numbers = Counter[tuple[int, str]]()
    runs = []
    for episode_id, task_id, number, value, nodes in rows:
        if math.isfinite(value):
            name = f"{number}/{task_id}/{numbers[number, task_id]}"
            runs.append(OlderRun(episode_id, TaskReward(task_id, number, value), nodes=frozenset(nodes), name=name))
            numbers[number, task_id] += 1
    return runs


def draw_order(weights: Mapping[str, float], key: str) -> list[str]:
    """Names above weight 0, drawn without replacement with chances in proportion; see `task_draw.order_tasks`."""
    times = {name: -math.log(uniform_of(f"{key}/{name}")) / weight for name, weight in weights.items() if weight > 0}
    return sorted(times, key=lambda name: (times[name], name))


def rewards_to_draw_weights(
    rewards: Sequence[TaskReward], number: int, foreign: Sequence[TaskReward] = ()
) -> list[float]:
    """Each older episode's weight in round `number`: how much more than its task it earned, by its age.

    What a task earns is the mean of its episodes, each counting AGE_DECAY to the power of its age, drawn towards the
    mean of all by PRIOR_STRENGTH episodes.

    Args:
        foreign: what runs of other programs earned, whose weights stand behind those of `rewards`. They say nothing of
            what a task usually earns here, unless nothing else does.
    """
    evidence = rewards or foreign
    decays = [AGE_DECAY ** (number - reward.round) for reward in evidence]
    total = math.fsum(decays)
    if total == 0:
        return []
    mean = math.fsum(decay * reward.value for decay, reward in zip(decays, evidence, strict=True)) / total
    value_sums, decay_sums = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for decay, reward in zip(decays, evidence, strict=True):
        value_sums[reward.task_id].append(decay * reward.value)
        decay_sums[reward.task_id].append(decay)
    usual = {
        task_id: (PRIOR_STRENGTH * mean + math.fsum(values)) / (PRIOR_STRENGTH + math.fsum(decay_sums[task_id]))
        for task_id, values in value_sums.items()
    }
    return [
        AGE_DECAY ** (number - reward.round) * max(0.0, reward.value - usual.get(reward.task_id, mean))
        for reward in (*rewards, *foreign)
    ]
