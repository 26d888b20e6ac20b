"""Owns: a teacher's log-probs of what a policy sampled.

- They are those of the whole distribution at the temperature that sampled, of the decided tokens only.
- An id that it does not know and a call longer than it reads are refused, and so is a teacher that does not fit.
"""

# ruff: noqa: N806 (shape suffixes)
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.tiny_policy import AGENTS, save_tiny_llama
from support.trainer_options import trainer_options
from transformers import AutoModelForCausalLM

from trainers.batch import ActionItem
from trainers.checks.memory_guard import MemoryGuard
from trainers.common.workers import Workers
from trainers.errors import TrainError
from trainers.scoring.teacher import TeacherModel

CPU = torch.device("cpu")
ITEMS = [
    ActionItem("actor", (1, 2, 3), (7, 8, 9), behaviour=(-1.0, -2.0), temperature=0.7, forced=(1,)),
    ActionItem("actor", (1, 2, 3, 4), (5,), behaviour=(-1.0,), temperature=1.3),
    ActionItem("reasoner", (9, 8), (7, 6), behaviour=(-1.0, -1.0), temperature=1.0),
]


def score(teacher: TeacherModel, budget: int = 2048) -> list[torch.Tensor]:
    counted: list[int] = []
    scored = teacher.logprobs(ITEMS, budget, workers=Workers.alone(), tick=counted.append)
    assert sum(counted) == len(ITEMS)
    return scored


@pytest.mark.parametrize("budget", [2048, 64])
def test_the_teacher_scores_the_decided_tokens_as_its_whole_distribution_has_them(tmp_path: Path, budget: int) -> None:
    folder = save_tiny_llama(tmp_path, seed=5, hidden=64, layers=3)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    for item, scored_T in zip(ITEMS, score(TeacherModel(folder, CPU), budget), strict=True):
        ids = torch.tensor([[*item.prompt_ids, *item.sampled_ids]])
        with torch.no_grad():
            logp = (plain(input_ids=ids).logits[0] / item.temperature).log_softmax(-1)
        start = len(item.prompt_ids)
        expected = [float(logp[start + k - 1, item.sampled_ids[k]]) for k in item.decided]
        assert scored_T.tolist() == pytest.approx(expected, abs=1e-5)
        assert not scored_T.requires_grad


def test_an_id_that_the_teacher_does_not_know_is_refused(tmp_path: Path) -> None:
    teacher = TeacherModel(save_tiny_llama(tmp_path, vocabulary=9), CPU)
    with pytest.raises(TrainError, match="knows 9 token ids, and a call holds the id 9: name a model with the token"):
        score(teacher)


def test_a_call_that_is_longer_than_the_teacher_reads_is_refused(tmp_path: Path) -> None:
    teacher = TeacherModel(save_tiny_llama(tmp_path), CPU)
    long_call = replace(ITEMS[0], prompt_ids=(1,) * 128, sampled_ids=(2, 3), behaviour=(-1.0, -1.0), forced=())
    with pytest.raises(TrainError, match="reads 128 tokens, and a call has 129: name a teacher with a longer context"):
        teacher.logprobs([long_call], 2048, workers=Workers.alone(), tick=lambda _: None)


def test_a_teacher_that_does_not_fit_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    student = save_tiny_llama(tmp_path / "student")
    teacher = save_tiny_llama(tmp_path / "teacher", hidden=256)
    guard = MemoryGuard.of_agents(trainer_options(device="cpu"), student, AGENTS)
    guard._free = lambda _: 2**40
    guard.check_teacher(teacher)
    loaded = guard.plan()
    assert loaded is not None
    guard._free = lambda _: loaded.loaded + 2**20
    with pytest.raises(TrainError, match=r"^the teacher .* takes about .* are trained .* are there for it: free"):
        guard.check_teacher(teacher)
    guard.check_teacher(save_tiny_llama(tmp_path / "small"))
