"""Held-out actions and a policy -> how likely it finds them, and how many it would answer word for word, by agent.

One teacher-forced pass, and nothing is generated: greedy decoding repeats a recorded answer exactly if and only if at
every position the likeliest token, behind the recorded ones before it, is the recorded one. Invariants: nothing of an
answer is normalised; its end token, where it was recorded, is a token like any other, and an answer without one (cut at
its limit, or with an end that nobody told) counts where greedy decoding begins with it. Forced tokens are given.
"""

# ruff: noqa: N806 (shape suffixes)
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainers.batch import ActionItem
from trainers.policies.adapter_learner import AdapterLearner
from trainers.scoring.passes import scoring_passes


@dataclass(frozen=True, slots=True)
class HeldOutFit:
    """One agent's held-out actions under a policy."""

    actions: int
    nats: float  # minus the mean log-prob of a decided token
    exact: float  # share of the actions whose greedy answer is the recorded one


def measure_held_out(learner: AdapterLearner, items: Sequence[ActionItem]) -> dict[str, HeldOutFit]:
    """The fit of every agent that has actions among these, by the learner's adapter as it is now.

    Rounding decides between tokens that are as likely as each other, so there an engine may decode the other one.
    """
    agents = sorted({item.agent for item in items})
    log_prob = dict.fromkeys(agents, 0.0)
    exact = dict.fromkeys(agents, 0.0)
    for batch in scoring_passes(learner.model, learner.workers, learner.microbatches(items)):
        logp_T, greedy_T = learner.model.logprobs_and_greedy(learner.adapter, batch)
        lengths = list(batch.lengths)
        parts = zip(batch.items, torch.split(logp_T.double(), lengths), torch.split(greedy_T, lengths), strict=True)
        for position, item_logp_T, item_greedy_T in parts:
            agent = items[position].agent
            log_prob[agent] += float(item_logp_T.sum())
            exact[agent] += float(item_greedy_T.all())
    sums = learner.workers.add([*log_prob.values(), *exact.values()])
    fits: dict[str, HeldOutFit] = {}
    for agent, log_prob_sum, exact_count in zip(agents, sums[: len(agents)], sums[len(agents) :], strict=True):
        mine = [item for item in items if item.agent == agent]
        tokens = sum(len(item.decided) for item in mine)
        fits[agent] = HeldOutFit(len(mine), nats=-log_prob_sum / tokens, exact=exact_count / len(mine))
    return fits
