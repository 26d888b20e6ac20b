"""Outcomes of graphs on tasks -> what may be claimed from them: pure functions on arrays.

- `paired`: two variants on the same tasks -> difference, interval, p-value.
- `non_inferiority`: two variants and a margin -> p-value of being worse by the margin or more.
- `families`: several variants and metrics -> adjusted p-values and simultaneous intervals.
- `group_sequential`, `anytime`: outcomes as they come in -> whether one may stop.
- `means`: one variant -> mean, avg@k, pass@k, with intervals.
- `decided_variance`: rewards of runs and of their forks before and after a call -> how much that call decided.
- `fork_worth`: rewards of an episode and of its forks at a call -> what the recorded answer was worth.
- `group_spread`: outcomes of runs by task -> how likely fresh groups of runs are to differ.
- `planning`: paired differences -> minimum detectable effect, and the number of tasks that settles an effect.
- `bradley_terry`, `elo`: games or pairs of several players -> how strong each is, with intervals.
- `shapley`: scores of teams with some agents replaced -> what each agent contributes.

docs/statistics.md says which to use when, with measured error rates.
"""

from marft_bridge.statistics.anytime import ConfidenceSequence, confidence_sequence
from marft_bridge.statistics.families import Contrast, FamilyMember, compare_family, holm
from marft_bridge.statistics.group_sequential import Monitored, monitor, repeated_interval, spent_error
from marft_bridge.statistics.means import MeanInterval, avg_at_k, mean_interval, pass_at_k, pass_at_k_by_task
from marft_bridge.statistics.non_inferiority import (
    NON_INFERIORITY,
    non_inferiority_p_value,
    tasks_for_non_inferiority,
    totals_to_non_inferiority_p_value,
)
from marft_bridge.statistics.paired import (
    INTERVAL,
    MCNEMAR,
    SIGN_FLIP,
    SIGNED_RANK,
    PairedResult,
    mcnemar_exact,
    paired_difference,
)
from marft_bridge.statistics.planning import TasksToSettle, minimum_detectable_effect, tasks_to_settle

__all__ = [
    "INTERVAL",
    "MCNEMAR",
    "NON_INFERIORITY",
    "SIGNED_RANK",
    "SIGN_FLIP",
    "ConfidenceSequence",
    "Contrast",
    "FamilyMember",
    "MeanInterval",
    "Monitored",
    "PairedResult",
    "TasksToSettle",
    "avg_at_k",
    "compare_family",
    "confidence_sequence",
    "holm",
    "mcnemar_exact",
    "mean_interval",
    "minimum_detectable_effect",
    "monitor",
    "non_inferiority_p_value",
    "paired_difference",
    "pass_at_k",
    "pass_at_k_by_task",
    "repeated_interval",
    "spent_error",
    "tasks_for_non_inferiority",
    "tasks_to_settle",
    "totals_to_non_inferiority_p_value",
]
