"""Owns: what an update costs, counted in tokens, passes and calls of functions, and never timed.

- An agent costs the same in whatever team: as a team grows, no agent's calls are scored for another agent's update.
- Switching to an adapter, and to none, costs the same however many adapters a model has.
- Calls are not scored twice by the same weights.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from peft.tuners.lora.layer import LoraLayer
from support.tiny_policy import make_action, make_trajectory, save_tiny_llama
from support.trainer_options import trainer_options

from trace_store.records import Trajectory
from trainers.batch import ActionItem
from trainers.common.workers import Workers
from trainers.config import LoraOptions
from trainers.errors import TrainError
from trainers.marft import MarftTrainer
from trainers.objective import update_order
from trainers.policies.adapter_learner import AdapterLearner
from trainers.scoring import hidden_states
from trainers.scoring.microbatch import items_to_microbatches
from trainers.scoring.model import PolicyModel

X = TypeVar("X")
RUNS = 4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Tokens that went through a model from now on: `forward` without a gradient, `backward` with one."""
    seen: Counter[str] = Counter()
    original = hidden_states.layout_to_hidden

    def spy(backbone: Any, layout: Any, *others: Any, **named: Any) -> torch.Tensor:
        seen["backward" if torch.is_grad_enabled() else "forward"] += len(layout.ids_N)
        return original(backbone, layout, *others, **named)

    monkeypatch.setattr(hidden_states, "layout_to_hidden", spy)
    return seen


def team(agents: int) -> tuple[str, ...]:
    return tuple(f"agent{number}" for number in range(agents))


def runs_of(nodes: Sequence[str]) -> list[Trajectory]:
    """Four runs of a chain, in which each call is read as four tokens, the first of them that run's own."""
    played = []
    for number in range(RUNS):
        calls = [make_action(node, [number + 1, 5, 6], [7, 8]) for node in nodes]
        run = make_trajectory(calls, float(number % 2))
        played.append(replace(run, episode=replace(run.episode, episode_id=f"e{number}")))
    return played


# -- agents --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agents", [2, 4, 8])
def test_an_update_of_a_chain_scores_each_agents_calls_for_itself_alone(
    model_dir: Path, tokens: Counter[str], agents: int
) -> None:
    """16 tokens an agent: once for log pi_old, once for the step, once for the ratio that weighs those after it.

    The last agent's ratio weighs nobody. If every update scored all who follow, a team of 8 would take 16 x 28 more.
    """
    options = trainer_options(device="cpu", estimator="rloo", engine_tolerance=9.0)
    trainer = MarftTrainer(options, model_dir, team(agents), seed=0)
    tokens.clear()  # of what was tried when the model was loaded
    metrics = trainer.update(runs_of(team(agents)))
    assert metrics["order"] == list(team(agents))
    assert tokens == {"forward": 16 * agents + 16 * (agents - 1), "backward": 16 * agents}


@pytest.mark.parametrize("agents", [2, 4, 8])
def test_what_an_agent_is_weighted_by_is_worked_out_for_its_own_calls_alone(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, agents: int
) -> None:
    """Three times for four calls: for the step, for the mean that is told, and for the look at the step.

    Nobody looks at the last agent's step.
    """
    weighted: list[int] = []
    original = update_order.compounded_factor

    def spy(log_factor_E: torch.Tensor, stands_A: Sequence[Any], options: Any) -> torch.Tensor:
        weighted.append(len(stands_A))
        return original(log_factor_E, stands_A, options)

    monkeypatch.setattr(update_order, "compounded_factor", spy)
    options = trainer_options(device="cpu", estimator="rloo", engine_tolerance=9.0)
    MarftTrainer(options, model_dir, team(agents), seed=0).update(runs_of(team(agents)))
    assert sum(weighted) == RUNS * (3 * agents - 1)


# -- adapters ------------------------------------------------------------------------------------------------------


def calls_of(work: Callable[[], object]) -> int:
    """Functions that are called, of Python and of C."""
    count = 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def policy(model_dir: Path, agents: int) -> PolicyModel:
    """Adapters that do something; the second one is on."""
    model = PolicyModel(model_dir, team(agents), LoraOptions(), "cpu", seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for adapter in team(agents):
            for weight in model.parameters(adapter).values():
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    for adapter in team(2):
        model.use(adapter)
    return model


def call(*sampled: int) -> ActionItem:
    return ActionItem("agent0", (1, 2, 3), sampled, None, 1.0)


@torch.no_grad()
def test_a_switch_of_adapters_and_a_pass_without_one_cost_the_same_in_every_team(model_dir: Path) -> None:
    (batch,) = items_to_microbatches([call(4, 5), call(6)], 64)
    costs = []
    for agents in (2, 8):
        model = policy(model_dir, agents)
        model.logprobs(None, batch)  # what is made once is made now
        costs.append((calls_of(lambda m=model: m.use("agent0")), calls_of(lambda m=model: m.logprobs(None, batch))))
    assert costs[0] == costs[1]


def state(model: PolicyModel) -> tuple[list[list[str]], dict[str, bool]]:
    """The active adapters of every layer, and which matrices want a gradient."""
    layers = [module for module in model.peft.modules() if isinstance(module, LoraLayer)]
    return [list(layer.active_adapters) for layer in layers], {
        n: p.requires_grad for n, p in model.peft.named_parameters()
    }


@torch.no_grad()
def test_switches_leave_a_model_as_those_of_peft_do(model_dir: Path) -> None:
    (batch,) = items_to_microbatches([call(4, 5), call(6)], 64)
    model, by_peft = policy(model_dir, 3), policy(model_dir, 3)
    for adapter in ("agent2", "agent0", "agent1"):
        with model.peft.disable_adapter():
            base_logp_T = model.logprobs(None, batch)
        assert torch.equal(model.logprobs(None, batch), base_logp_T)
        model.use(adapter)
        by_peft.peft.set_adapter(f"slot{adapter.removeprefix('agent')}")
        assert state(model) == state(by_peft)
        assert model.peft.active_adapter == by_peft.peft.active_adapter
        assert not torch.equal(model.logprobs(adapter, batch), base_logp_T)


def test_a_peft_that_keeps_the_active_adapter_elsewhere_is_refused(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = policy(model_dir, 2)
    monkeypatch.setattr(LoraLayer, "active_adapters", ["elsewhere"])
    with pytest.raises(TrainError, match=r"install peft 0\.21"):
        model.use("agent0")
    monkeypatch.setattr(LoraLayer, "disable_adapters", False)
    with pytest.raises(TrainError, match=r"install peft 0\.21"):
        model.logprobs(None, items_to_microbatches([call(4)], 64)[0])


# -- calls ---------------------------------------------------------------------------------------------------------


def learner_of(model_dir: Path, workers: Workers | None = None) -> AdapterLearner:
    return AdapterLearner(
        policy(model_dir, 2), "agent0", lr=0.1, options=trainer_options(), workers=workers or Workers.alone()
    )


def as_if_new(learner: AdapterLearner, items: Sequence[ActionItem]) -> list[list[float]]:
    """What a learner with these weights says that was never asked before."""
    fresh = AdapterLearner(learner.model, learner.adapter, lr=0.1, options=learner.options, workers=Workers.alone())
    return [logp_T.tolist() for logp_T in fresh.logprobs(items)]


def test_calls_are_scored_once_by_the_same_weights(model_dir: Path, tokens: Counter[str]) -> None:
    learner, items = learner_of(model_dir), [call(4, 5), call(6)]
    tokens.clear()
    ticks: list[int] = []
    first = learner.logprobs(items, tick=ticks.append, is_shared=False)
    again = learner.logprobs([replace(item, turn=3, behaviour=(-1.0,)) for item in items], tick=ticks.append)
    assert tokens == {"forward": 4}  # 1 2 3 and 4
    assert ticks == [2, 2]
    assert [logp_T.tolist() for logp_T in again] == [logp_T.tolist() for logp_T in first] == as_if_new(learner, items)


@pytest.mark.parametrize(
    "change",
    [
        lambda matrix: matrix.add_(0.1),
        lambda matrix: matrix.view(-1)[-1:].add_(0.1),
        lambda matrix: setattr(matrix, "data", matrix.data + 0.1),  # which no counter of torch's notes
    ],
)
def test_a_weight_that_changed_has_calls_scored_anew(model_dir: Path, change: Callable[[Any], object]) -> None:
    learner, items = learner_of(model_dir), [call(4, 5), call(6)]
    before = [logp_T.tolist() for logp_T in learner.logprobs(items)]
    with torch.no_grad():
        change(learner.parameters[-1])
    after = [logp_T.tolist() for logp_T in learner.logprobs(items)]
    assert before != after == as_if_new(learner, items)


def test_other_calls_and_the_base_model_are_scored_for_themselves(model_dir: Path) -> None:
    learner, items = learner_of(model_dir), [call(4, 5), call(6)]
    learner.logprobs(items)
    for others in (items[:1], items[::-1], [replace(items[0], temperature=0.5), items[1]]):
        assert [logp_T.tolist() for logp_T in learner.logprobs(others)] == as_if_new(learner, others)
    base = [logp_T.tolist() for logp_T in learner.logprobs(items, reference=True)]
    assert base != [logp_T.tolist() for logp_T in learner.logprobs(items)] == as_if_new(learner, items)


class _OneOfTwo(Workers):
    """A process that believes in another one, and does all of the work."""

    def __init__(self) -> None:
        super().__init__(0, 2, torch.device("cpu"))

    def turns(self, batches: Sequence[X]) -> Iterator[X | None]:
        return iter(batches)

    def gather(self, parts: Any, *others: Any, **named: Any) -> list[torch.Tensor]:
        return Workers.alone().gather(parts, *others, **named)


def test_of_several_processes_each_scores_whatever_it_is_asked(model_dir: Path, tokens: Counter[str]) -> None:
    """What one of them asked by itself the others do not know; if it left a pass out they would wait for it."""
    learner, items = learner_of(model_dir, _OneOfTwo()), [call(4, 5), call(6)]
    tokens.clear()
    for is_shared in (False, True, True):
        learner.logprobs(items, is_shared=is_shared)
    assert tokens["forward"] >= 3 * 4
