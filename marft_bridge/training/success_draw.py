"""What older episodes earned -> how likely each is drawn to be imitated again beside a round's fresh ones.

Invariant: a weight follows from rewards and rounds alone; it is 0 where the episode earned no more than its task
usually does, so that a rare success of a hard task is drawn soon, and what is solved by now hardly ever (ExGRPO, arXiv
2510.02245; RLEP, arXiv 2507.07451).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from marft_bridge.training.task_draw import PRIOR_STRENGTH, TaskReward

AGE_DECAY = 0.8
"""What a round leaves of an episode's weight."""


def rewards_to_draw_weights(rewards: Sequence[TaskReward], number: int) -> list[float]:
    """Each older episode's weight in round `number`: how much more than its task it earned, by its age.

    What a task earns is the mean of its episodes, each counting AGE_DECAY to the power of its age, drawn towards the
    mean of all by PRIOR_STRENGTH episodes.
    """
    decays = [AGE_DECAY ** (number - reward.round) for reward in rewards]
    total = math.fsum(decays)
    if total == 0:
        return []
    mean = math.fsum(decay * reward.value for decay, reward in zip(decays, rewards, strict=True)) / total
    value_sums, decay_sums = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for decay, reward in zip(decays, rewards, strict=True):
        value_sums[reward.task_id].append(decay * reward.value)
        decay_sums[reward.task_id].append(decay)
    usual = {
        task_id: (PRIOR_STRENGTH * mean + math.fsum(values)) / (PRIOR_STRENGTH + math.fsum(decay_sums[task_id]))
        for task_id, values in value_sums.items()
    }
    return [
        decay * max(0.0, reward.value - usual[reward.task_id]) for decay, reward in zip(decays, rewards, strict=True)
    ]
