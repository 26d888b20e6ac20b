"""`python -m benchmarks.memory_peak MODEL TOKENS [again]`: two optimiser steps -> what was planned and what they took.

Calls have random ids, so that nothing is shared: each pass takes TOKENS positions, as the plan assumes. `again` turns
activation checkpointing on. What was taken is the peak resident memory of this process since the imports.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import torch
import transformers.models.llama.modeling_llama  # noqa: F401 (its import is none of the training)
from support.trainer_options import trainer_options

from benchmarks.train_peak import status
from benchmarks.train_work import advantages
from trainers.batch import ActionItem
from trainers.checks.memory_guard import MemoryGuard
from trainers.common.workers import Workers
from trainers.objective.adapter_round import AdapterRound
from trainers.objective.improve import improve
from trainers.policies.adapter_learner import AdapterLearner
from trainers.scoring.model import PolicyModel

CALL, SAMPLED = 256, 64  # tokens of a call, and those of them that are sampled
PASSES = 2


def calls(tokens: int, vocabulary: int) -> list[ActionItem]:
    """As many calls as fill `PASSES` passes; the model sees all but the last token of each."""
    pick = random.Random(0)
    rows = [[pick.randrange(vocabulary) for _ in range(CALL + 1)] for _ in range(PASSES * tokens // CALL)]
    return [ActionItem("agent", tuple(row[:-SAMPLED]), tuple(row[-SAMPLED:]), None, 0.7) for row in rows]


def main(model_dir: Path, tokens: int, again: bool) -> None:
    """Writes one line: planned and taken MiB, their ratio, the processor seconds of the second step, gradient norm."""
    options = trainer_options(
        device="cpu", proximal="engine", mismatch="none", minibatch_actions=10_000, tokens_per_microbatch=tokens,
        activation_checkpointing=again,
    )  # fmt: skip
    guard = MemoryGuard.of_agents(options, model_dir, ["agent"])
    before = status("VmRSS")
    model = PolicyModel(model_dir, ["agent"], options.lora, "cpu", 0, again)
    learner = AdapterLearner(model, "agent", lr=0.0, options=options, workers=Workers.alone())
    items = calls(tokens, model.vocabulary)
    guard.expect(items)
    data = AdapterRound(
        items=items,
        episode_A=list(range(len(items))),
        old_T=learner.logprobs(items),
        reference_T=None,
        advantage_U=[torch.tensor([value]) for value in advantages(len(items))],
        factor_A=torch.ones(len(items)),
        positive_A=torch.zeros(len(items)),
    )
    for _ in range(2):
        began = time.process_time()
        improved = improve(learner, data, torch.Generator().manual_seed(0), tick=lambda _: None)
        seconds = time.process_time() - began
    taken, plan = status("VmHWM") - before, guard.plan()
    assert plan is not None
    sys.stdout.write(
        f"{plan.total / 2**20:.0f} planned ({plan}), {taken / 2**20:.0f} MiB taken, ratio {plan.total / taken:.2f}; "
        f"{seconds:.1f} processor seconds, gradient norm {improved['grad_norm']:.6f}\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["again"])
