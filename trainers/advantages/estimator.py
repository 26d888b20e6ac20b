"""A round of episodes to advantages: the one interface of every estimator, and how an option finds its class.

An estimator is one file of this folder, or a class of the user's: it declares what it needs and computes advantages;
nothing else names it. Invariant: `estimate` changes nothing; what an estimator keeps between rounds changes in `commit`
alone, so that a round which is refused leaves no trace. It knows nothing of models, critics or optimisers: values come
to it as numbers. Needs no torch.

Shapes: _A one entry per action of the round, episode after episode, each in topological order of D; _U one per unit: an
action (MARFT-A), or a sampled token (MARFT-T), action after action.
"""

# ruff: noqa: N803, N806, N815 (shape suffixes)
from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

import trainers.advantages
from trace_store.import_name import load_object
from trainers.advantages.arrays import Floats, laid_end_to_end
from trainers.advantages.estimate import BASELINE, Estimate
from trainers.advantages.group_baselines import Baseline, flat_groups
from trainers.advantages.returns import action_rewards, returns_by_source, team_rewards
from trainers.advantages.settings import EstimatorSettings, Normalization
from trainers.batch import Round


@dataclass(frozen=True, slots=True)
class EstimatorInput:
    """A round as an estimator sees it."""

    data: Round
    units_A: tuple[int, ...]  # units of each action
    factor_A: Floats  # of the team reward for the action's agent; 1 unless agents contribute differently
    values: Sequence[Floats] | None = None  # of each action: V before each of its units; None without a critic
    bootstrap_A: Floats | None = None  # V after the last actions of truncated episodes, 0 elsewhere; likewise
    side_of: Mapping[str, str] | None = None  # agent -> its side in a game of several; None where all are one team
    least_deviation: float = 0.0  # of returns, below which a spread is small for this run; 0: nothing tells yet

    def over_units(self, part_A: Floats, gamma_token: float) -> Floats:
        """What is known per action to its units, times gamma_token for each token that follows. [A] to [U]."""
        following_U = laid_end_to_end([np.arange(n - 1, -1, -1, dtype=np.float64) for n in self.units_A])
        return np.repeat(part_A, self.units_A) * gamma_token**following_U

    def returns_by_source(self, gamma: float, step_gamma: float | None = None) -> dict[str, Floats]:
        """What each action earned of each reward, discounted; of the team's with its agent's factor. [A] each."""
        team, earned = team_rewards(self.data), returns_by_source(self.data, gamma, step_gamma)
        return {name: part_A * self.factor_A if name in team else part_A for name, part_A in earned.items()}


@dataclass(frozen=True, slots=True)
class Estimated:
    """What an estimator says of a round."""

    estimate: Estimate  # over units, before normalisation
    targets: Sequence[Floats] | None = None  # of the critics, per action; None without a critic
    flat_groups: float | None = None  # share of the groups that cannot say what was better; None without groups
    state: Mapping[str, float] = field(default_factory=dict)  # to be kept, see `Estimator.commit`


class Estimator(ABC):
    """Where advantages come from. A subclass declares what it needs, and is found by its `name`."""

    name: ClassVar[str]
    """What the option `estimator` calls it."""
    needs_critic: ClassVar[bool] = False
    """Whether it reads values of observations."""
    needs_groups: ClassVar[bool] = False
    """Whether it compares samples of one task, so that there must be several."""
    needs_forks: ClassVar[bool] = False
    """Whether calls that have no sibling teach it nothing, so that a round must hold episodes that fork others."""
    compares_siblings: ClassVar[bool] = False
    """Whether, in a round with forks, it compares a call with its siblings only, the calls that answer its prompt."""
    per_agent: ClassVar[bool] = True
    """Whether an agent's returns are compared with that agent's only, so that agents may earn differently."""
    compares_depths: ClassVar[bool] = False
    """Whether calls that lie at different depths of D are compared with each other, so that a discount would make the
    early calls of the best run look worse than the late calls of the worst."""
    pays_calls_alone: ClassVar[bool] = False
    """Whether a step reward reaches the call that it arrived with only, and not the calls that this one depended on."""
    adds_step_rewards: ClassVar[bool] = False
    """Whether a step reward is added to the advantage of the call that it arrived with as it is, compared with
    nothing; it reaches no other call then."""
    needs_sides: ClassVar[bool] = False
    """Whether it reads what the other sides of a game earned. Of every other estimator the advantages of a side depend
    on its own rewards only."""
    keeps_state: ClassVar[bool] = False
    """Whether it remembers earlier rounds."""
    normalization: ClassVar[Normalization] = "none"
    """What `normalize` is where it is left out."""
    reads: ClassVar[tuple[str, ...]] = ()
    """Options that have an effect with this estimator, and not with every other."""

    def __init__(self, settings: EstimatorSettings) -> None:
        self.settings = settings
        self.state: dict[str, float] = {}

    @abstractmethod
    def estimate(self, round_input: EstimatorInput) -> Estimated:
        """Advantages of a round before normalisation."""

    def groups(self, data: Round) -> list[Hashable] | None:  # noqa: ARG002 - for subclasses
        """The group of each action, [A]: equal keys are compared with each other. None for an estimator without."""
        return None

    def samples(self, data: Round) -> Sequence[Hashable]:
        """The sample that each action is of, [A]: a group can say something where two of its samples differ."""
        return data.tree_A

    @classmethod
    def teaches_alone(
        cls,
        by_call: Sequence[float],  # noqa: ARG003 - for subclasses, as are the others
        by_run: Sequence[float],  # noqa: ARG003
        normalization: str,  # noqa: ARG003
        *,
        penalties_teach: bool,  # noqa: ARG003
    ) -> bool:
        """Whether a run teaches something though nothing that it is compared with earned otherwise.

        Args:
            by_call: what each of its calls earned by itself.
            by_run: what the team and each agent earned by the whole run.
            normalization: of advantages, over a round.
            penalties_teach: see `EstimatorSettings`.
        """
        return False

    @property
    def step_gamma(self) -> float:
        """The discount of a step reward per link of D; 0 leaves it to the call that it arrived with."""
        return 0.0 if self.pays_calls_alone or self.adds_step_rewards else self.settings.gamma

    def compared_by_source(self, round_input: EstimatorInput) -> dict[str, Floats]:
        """What each action earned of each reward, of those that are compared between samples. [A] each."""
        earned = round_input.returns_by_source(self.settings.gamma, self.step_gamma)
        if not self.adds_step_rewards:
            return earned
        added = action_rewards(round_input.data)
        return {name: part_A for name, part_A in earned.items() if name not in added}

    @property
    def in_deviations(self) -> bool:
        """Whether its advantages are in deviations of what was earned already, before normalisation."""
        return "group_std" in self.reads and self.settings.group_std

    def commit(self, state: Mapping[str, float]) -> None:
        """Takes over the state of an `Estimated`, once the round was learned from."""
        self.state = dict(state)


class BaselineEstimator(Estimator):
    """An estimator without a critic: gain * (return - baseline), of each whole return.

    The return is the discounted team return (a truncated episode is not bootstrapped) plus step and private rewards.
    At token granularity the advantage of an action is repeated over its tokens, times gamma_token for each that
    follows. A mean over a group is taken of each reward apart, so that a reward that is always the same contributes
    nothing; `BASELINE` is what no reward explains.
    """

    @abstractmethod
    def baseline(self, returns_A: Floats, data: Round) -> Baseline:
        """What returns are compared with, and by how much.

        Where the baseline is not linear in the returns, the parts of the rewards do not add up to the whole:
        `BASELINE` takes the rest.
        """

    def estimate(self, round_input: EstimatorInput) -> Estimated:
        """See the class."""
        count = len(round_input.data.items)
        sources = self.compared_by_source(round_input)
        return_A = sum_of(sources, count)
        baseline = self.compare(return_A, round_input)
        shares = {name: self.baseline(part_A, round_input.data).baseline_A for name, part_A in sources.items()}
        groups = self.groups(round_input.data)
        flat = None if groups is None else flat_groups(return_A, groups, self.samples(round_input.data))[0]
        return Estimated(self.split(round_input, sources, baseline, shares=shares), flat_groups=flat)

    def compare(self, return_A: Floats, round_input: EstimatorInput) -> Baseline:
        """The baseline of a round; where it is divided by a deviation, by none that is small for this run."""
        baseline = self.baseline(return_A, round_input.data)
        return baseline.with_least_deviation(round_input.least_deviation) if self.in_deviations else baseline

    def split(
        self,
        round_input: EstimatorInput,
        sources: Mapping[str, Floats],
        baseline: Baseline,
        shares: Mapping[str, Floats],
    ) -> Estimate:
        """Advantages over units with the part of each that came from each reward."""
        count = len(round_input.data.items)
        advantage_A = baseline.advantages(sum_of(sources, count))
        by_source = {name: baseline.gain_A * (part_A - shares[name]) for name, part_A in sources.items()}
        by_source[BASELINE] = advantage_A - sum_of(by_source, count)
        gamma_token = self.settings.gamma_token
        units = {name: round_input.over_units(part_A, gamma_token) for name, part_A in by_source.items()}
        return Estimate(round_input.over_units(advantage_A, gamma_token), units)


def sum_of(parts: Mapping[str, Floats], count: int) -> Floats:
    """The sum of arrays of `count` entries; zeros where there is none."""
    total: Floats = np.sum([np.zeros(count), *parts.values()], axis=0)
    return total


@cache
def estimators() -> dict[str, type[Estimator]]:
    """The estimators of this folder by name, each from the file that is called as it."""
    class_by_name = {}
    for module in pkgutil.iter_modules(trainers.advantages.__path__, f"{trainers.advantages.__name__}."):
        for candidate in vars(import_module(module.name)).values():
            is_defined_here = (
                isinstance(candidate, type) and issubclass(candidate, Estimator) and candidate.__module__ == module.name
            )
            if is_defined_here and (name := vars(candidate).get("name")):
                class_by_name[str(name)] = candidate
    return dict(sorted(class_by_name.items()))


def name_to_estimator(name: str) -> type[Estimator]:
    """The class that the option `estimator` names: one of this folder, or `package.module:Class` or `file.py:Class`.

    Raises:
        ValueError: there is none; the message lists those that there are.
    """
    if ":" not in name:
        if name not in estimators():
            raise ValueError(f"{name!r} is no estimator; there are {', '.join(estimators())}, or module:Class")
        return estimators()[name]
    estimator_class: Any = load_object(name)
    if not (isinstance(estimator_class, type) and issubclass(estimator_class, Estimator)):
        raise ValueError(  # noqa: TRY004 - pydantic turns it into a line
            f"{name!r} is not a class that extends trainers.advantages.estimator.Estimator"
        )
    return estimator_class
