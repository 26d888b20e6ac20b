"""Owns: which adapter answered is told from tokens that it decided; those that a grammar forced tell nothing.

What the trainer said of them for that is not asked again by the update that follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.tiny_policy import AGENTS, both_low, play, save_tiny_llama
from support.tiny_trajectory import action, trajectory
from support.trainer_options import trainer_options

from marft_bridge.training.served_checks import served_versions
from trace_store.records import Action
from trainers.errors import TrainError
from trainers.marft import MarftTrainer
from trainers.scoring.model import PolicyModel

FORCED = -8.0  # what either adapter thinks of a token that it did not choose


@dataclass
class _TwoAdapters:
    """The newest gives each decided token -1."""

    older: float
    trained: tuple[str, ...] = ("planner",)
    logprob: float = -1.0

    def logprobs_of(self, node: str, actions: Sequence[Action], reference: bool = False) -> list[list[float]]:
        assert (node, reference) == ("planner", False)
        return [[self.logprob if k % 2 else FORCED for k in range(len(a.sampled_ids or ()))] for a in actions]

    @contextmanager
    def lent(self, _node: str, _folder: Path) -> Iterator[None]:
        self.logprob = self.older
        yield
        self.logprob = -1.0


class _Registry:
    def versions(self, _node: str) -> list[int]:
        return [0, 1, 2]

    def get(self, _node: str, _version: int) -> Any:
        return cast(Any, type("Version", (), {"path": "."}))


def _served(decided: float, older: float = -1.5) -> dict[str, bool | None]:
    """Calls of version 2 whose every other token, the first one among them, was forced."""
    call = action("planner", (1, 2, 3, 4), logprobs=(0.0, decided, 0.0, decided), adapter_version=2)
    return served_versions(cast(Any, _TwoAdapters(older)), cast(Any, _Registry()), [trajectory("t", [call])], newest=2)


def test_forced_tokens_do_not_hide_which_adapter_answered() -> None:
    """0.05 nats from the newest and 0.45 from the one before; with forced tokens 4.0 and 4.2, which tells nothing."""
    assert _served(-1.05) == {"planner": True}
    with pytest.raises(TrainError, match="the server answered with the version before it"):
        _served(-1.45)


def test_a_grammar_that_the_newest_adapter_leans_out_of_is_not_taken_for_the_adapter_before() -> None:
    """What the grammar left of the newest's -1 is -0.1, 1.4 nats from the adapter before as well: nothing is told.

    With the adapter before at -0.1 itself that one is nearest; yet no engine that serves it lies above the newest.
    """
    assert _served(-0.1) == {"planner": None}
    assert _served(-0.1, older=-0.1) == {"planner": None}
    with pytest.raises(TrainError, match="the server answered with the version before it"):
        _served(-1.3, older=-1.3)


def test_the_calls_that_are_compared_are_of_every_turn() -> None:
    """Of 32 calls, a draft and its revision by turns, a stride of 4 would meet drafts only."""
    asked = list[Action]()

    class Noting(_TwoAdapters):
        def logprobs_of(self, node: str, actions: Sequence[Action], reference: bool = False) -> list[list[float]]:
            asked.extend(actions)
            return super().logprobs_of(node, actions, reference)

    draft, revision = (action("planner", (turn,) * 4, adapter_version=2) for turn in range(2))
    runs = [trajectory(str(number), [draft, revision]) for number in range(16)]
    served_versions(cast(Any, Noting(-1.5)), cast(Any, _Registry()), runs, newest=2)
    assert Counter(a.sampled_ids[0] for a in asked if a.sampled_ids) == {0: 8, 1: 8}  # by each of two versions
    assert len({a.episode_id for a in asked}) == 8


def test_an_update_takes_over_what_was_said_of_the_calls_by_which_the_version_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of twelve calls of each agent eight are looked at, by the adapter before and by the newest.

    By the newest they are scored once, where the update asks for the same eight; it learns the same, bit for bit, and
    says the same, as one that has to score them itself.
    """
    model_dir = save_tiny_llama(tmp_path / "tiny")
    passes: list[tuple[str | None, int]] = []
    original = PolicyModel.logprobs

    def spy(model: PolicyModel, adapter: str | None, batch: Any) -> torch.Tensor:
        if not torch.is_grad_enabled():
            passes.append((adapter, len(batch.items)))
        return original(model, adapter, batch)

    monkeypatch.setattr(PolicyModel, "logprobs", spy)
    learned = []
    for is_served in (True, False):
        options = trainer_options(device="cpu", estimator="rloo", proximal="engine", mismatch="none", lr=0.02)
        trainer = MarftTrainer(options, model_dir, AGENTS, seed=0)
        generator = torch.Generator().manual_seed(1)
        for agent in AGENTS:
            for name, weight in trainer.policies.parameters(agent).items():
                if "lora_B" in name:
                    weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
        games = [
            replace(game, actions=tuple(replace(call, adapter_version=1) for call in game.actions))
            for game in play(trainer, 12, generator, both_low)
        ]
        passes.clear()
        if is_served:
            told = served_versions(trainer.policies, cast(Any, _Registry()), games, newest=1)
            assert told == dict.fromkeys(AGENTS, True)
        agents = trainer.update(games, newest=1)["agents"]
        first, second = AGENTS
        of_served = [(None, 8), (first, 8), (None, 8), (second, 8)]
        assert passes == [*(of_served if is_served else [(first, 8), (second, 8)]), (first, 12)]
        weights = {agent: [p.tolist() for p in trainer.learners[agent].parameters] for agent in AGENTS}
        learned.append((agents, weights))
    assert learned[0] == learned[1]
