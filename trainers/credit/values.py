"""The critics of a team, and a round of episodes to what they say: V before each decision, and after a cut.

`shared`: the agents of one base model have one critic ("shared/0", "shared/1" ... in order of their first agents), and
are told apart by a one-hot among themselves. `agent`: each has its own ("agent/<name>"), which never sees another's
observations. Hidden states of different base models never meet in one critic.

Invariant: between two calls of `forget` a base model runs once per distinct token sequence and columns asked of it.
What it costs: 4 bytes times the width of a hidden state for each observation (an action's prompt, or each decided
token: 3.5 KB a token at a width of 896), and twice that while the observations of one critic are laid end to end.
It knows nothing of rewards, advantages or adapters.

Shapes: _A one entry per action of the round; `values[i]` one entry per observation of action i: one, or one per token.
"""

# ruff: noqa: N803, N806, N815 (shape suffixes)
from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainers.advantages.arrays import Floats
from trainers.batch import ActionItem, Round
from trainers.common.workers import Workers
from trainers.config import TrainerOptions
from trainers.credit.critic import Critic
from trainers.credit.value_loss import explained_variance
from trainers.scoring.microbatch import rows_to_even_groups
from trainers.scoring.model import PolicyModel, Tick
from trainers.scoring.passes import scoring_passes

_Request = tuple[str, tuple[int, ...], tuple[int, ...]]  # agent, token sequence, columns
_ModelRequest = tuple[int, tuple[int, ...], tuple[int, ...]]  # id of the base model, token sequence, columns


@dataclass(frozen=True, slots=True)
class _View:
    """What one critic sees of a round: the observations of some actions (`rows`), laid end to end."""

    rows: tuple[int, ...]
    lengths: tuple[int, ...]  # observations per action
    features_NF: Tensor
    agent_N: Tensor  # index among the critic's agents

    def lay(self, parts: Sequence[Floats]) -> Tensor:
        """One array per action of the round to one float32 entry per observation of this view, [N]."""
        return torch.from_numpy(np.concatenate([parts[i] for i in self.rows])).float()


@dataclass(frozen=True, slots=True)
class Observed:
    """A round as the critics see it, and what they say of it."""

    agents: tuple[str, ...]  # of each action
    values: list[Floats]  # V before each decision; 0 of agents whose critic rests
    bootstrap_A: Floats  # V after the last actions of truncated episodes, 0 elsewhere
    is_cut_A: tuple[bool, ...]  # which those are
    views: Mapping[str, _View]  # by critic; those with nothing to see, and those that rest, are left out
    resting: frozenset[str] = frozenset()  # agents whose critic was not asked

    def explained_variance(self, returns: Sequence[Floats], agent: str | None = None) -> float | None:
        """How well the values explain returns, over all observations or an agent's; None where it is undefined.

        Agents whose critic rested have no values to judge.
        """
        rows = [i for i, actor in enumerate(self.agents) if agent in (None, actor) and actor not in self.resting]
        values, targets = (np.concatenate([np.zeros(0), *(x[i] for i in rows)]) for x in (self.values, returns))
        return explained_variance(torch.from_numpy(values), torch.from_numpy(targets))


class TeamCritics:
    """Critics by key, each with its agents, and the features that they read.

    Args:
        model_of: the base model of each agent.
        agents: whose actions are valued.
        seed: each critic's randomness depends on it and on the critic's key only.
        tick: (phase, total) to a function that is told how many sequences each pass took.
        workers: the processes that share the passes; None works alone. Each has all features and fits all critics.
    """

    def __init__(
        self,
        options: TrainerOptions,
        model_of: Mapping[str, PolicyModel],
        agents: Sequence[str],
        seed: int,
        tick: Callable[[str, int], Tick],
        workers: Workers | None = None,
    ) -> None:
        self._workers = workers or Workers.alone()
        self._budget = options.system.tokens_per_microbatch
        self._tick = tick
        self._model_of = {agent: model_of[agent] for agent in agents}
        self.agents_of = _sharing(self._model_of, options.advantage.critic.sharing)
        self.critics = {
            key: Critic(
                self._model_of[group[0]].width,
                len(group),
                options.advantage.critic,
                experimental=options.experimental,
                seed=_seed(seed, key),
            )
            for key, group in self.agents_of.items()
        }
        self._features: dict[_ModelRequest, Tensor] = {}

    def forget(self) -> None:
        """Frees the cached features; the next round has other observations."""
        self._features.clear()

    def note(self, item: ActionItem, features_SH: Tensor, tokens: bool) -> None:
        """Hidden states before each decided token of an action, by whoever came by them; `observe` takes them."""
        model = self._model_of[item.agent]
        if tokens:
            self._features[id(model), item.input_ids, item.columns] = features_SH.clone()
        elif item.decided[0] == 0:  # else none of them is that after the prompt
            self._features[id(model), item.prompt_ids, item.columns[:1]] = features_SH[:1].clone()

    def observe(self, data: Round, tokens: bool, resting: frozenset[str] = frozenset()) -> Observed:
        """A round to its values, per action (at the last token of the prompt) or per decided token (before it).

        Args:
            resting: keys of critics that are not asked, and whose observations nothing is computed for.
        """
        values: list[Floats] = [np.zeros(len(item.decided) if tokens else 1) for item in data.items]
        bootstrap_A: Floats = np.zeros(len(data.items))
        views = {}
        cut = _cut(data)
        rows_of = {
            key: rows
            for key, group in self.agents_of.items()
            if key not in resting and (rows := tuple(data.agents_to_rows(group)))
        }
        requests_of = {key: _rows_to_requests(data, rows, cut, tokens=tokens) for key, rows in rows_of.items()}
        features_queue = deque(self._features_of([request for part in requests_of.values() for request in part]))
        if tokens:
            self.forget()  # tokens are many, and nobody asks for the same ones twice
        for key, rows in rows_of.items():
            features = [features_queue.popleft() for _ in requests_of[key]]
            views[key], end_values = self._view(key, data, rows, cut=cut, tokens=tokens, features=features)
            value_N = self.critics[key].values(views[key].features_NF, views[key].agent_N).double().numpy()
            ends = np.cumsum(views[key].lengths)[:-1]
            for i, action_values in zip(rows, np.split(value_N, ends), strict=True):
                values[i] = action_values
            for i, value in end_values.items():
                bootstrap_A[i] = value
        return Observed(
            tuple(item.agent for item in data.items),
            values,
            bootstrap_A,
            is_cut_A=tuple(i in cut for i in range(len(data.items))),
            views=views,
            resting=frozenset(agent for key in resting for agent in self.agents_of[key]),
        )

    def warm_up(self, observed: Observed, returns: Sequence[Floats], episode_A: Sequence[int]) -> dict[str, Any]:
        """Pre-trains each critic on its observations, see `Critic.warm_up`.

        Returns:
            {"critics": {key: {"epochs", "explained_variance", "value_loss"}}, "explained_variance": over the held-out
            observations of all critics, or None}.
        """
        critics: dict[str, dict[str, Any]] = {}
        values, targets = [torch.empty(0)], [torch.empty(0)]
        for key, critic in self.critics.items():
            critics[key] = {"epochs": 0, "explained_variance": None, "value_loss": None}
            if key in observed.views:
                view = observed.views[key]
                returns_N = view.lay(returns)
                episode_N = torch.repeat_interleave(
                    torch.tensor([episode_A[i] for i in view.rows]), torch.tensor(view.lengths)
                )
                held_N = critic.held_out(episode_N)
                critics[key] = critic.warm_up(view.features_NF, view.agent_N, returns_N, held_N=held_N)
                values.append(critic.values(view.features_NF[held_N], view.agent_N[held_N]))
                targets.append(returns_N[held_N])
        return {"critics": critics, "explained_variance": explained_variance(torch.cat(values), torch.cat(targets))}

    def fit(self, observed: Observed, targets: Sequence[Floats], returns: Sequence[Floats]) -> dict[str, Any]:
        """Fits each critic to the targets of its observations.

        Explained variance is that of the values before the fit, and against returns, which are not made of values as
        targets are (but for the bootstrap of truncated episodes).

        Returns:
            {"value_loss": over all observations, "explained_variance": likewise, "critics": {key: value_loss},
            "agents": {name: explained_variance}}; None for what is undefined.
        """
        losses: dict[str, float | None] = dict.fromkeys(self.critics)
        total, count = 0.0, 0
        for key, view in observed.views.items():
            losses[key] = loss = self.critics[key].fit(view.features_NF, view.agent_N, view.lay(targets))
            if loss is not None:
                total, count = total + loss * len(view.agent_N), count + len(view.agent_N)
        return {
            "value_loss": total / count if count else None,
            "explained_variance": observed.explained_variance(returns),
            "critics": losses,
            "agents": {agent: observed.explained_variance(returns, agent) for agent in self._model_of},
        }

    def _view(
        self, key: str, data: Round, rows: tuple[int, ...], cut: set[int], tokens: bool, features: Sequence[Tensor]
    ) -> tuple[_View, dict[int, float]]:
        """The observations of some actions, and V after those of them that are cut; from `_rows_to_requests`."""
        decision_features, end_features = features[: len(rows)], features[len(rows) :]
        if tokens:
            end_features = [part[-1:] for i, part in zip(rows, decision_features, strict=True) if i in cut]
            decision_features = [
                part[:-1] if i in cut else part for i, part in zip(rows, decision_features, strict=True)
            ]
        index = {agent: k for k, agent in enumerate(self.agents_of[key])}
        index_A = {i: index[data.items[i].agent] for i in rows}
        lengths = tuple(len(part) for part in decision_features)
        agent_N = torch.repeat_interleave(torch.tensor(list(index_A.values())), torch.tensor(lengths))
        view = _View(rows, lengths, torch.cat(tuple(decision_features)), agent_N=agent_N)
        ended = [i for i in rows if i in cut]
        if not ended:
            return view, {}
        ended_values = self.critics[key].values(
            torch.cat(tuple(end_features)), torch.tensor([index_A[i] for i in ended])
        )
        return view, dict(zip(ended, ended_values.tolist(), strict=True))

    def _features_of(self, requests: Sequence[_Request]) -> list[Tensor]:
        """Hidden states, each distinct request once: the samples of one task share their first prompts.

        All agents of a base model go through it together. Where rows cannot be packed each agent's go by themselves:
        such passes share only what all of their rows begin with, which is a node's profile.
        """
        model_requests = [(id(self._model_of[agent]), sequence, columns) for agent, sequence, columns in requests]
        first_asker = dict(zip(reversed(model_requests), (agent for agent, _, _ in reversed(requests)), strict=True))
        for model in {id(model): model for model in self._model_of.values()}.values():
            missing = [w for w in dict.fromkeys(model_requests) if w[0] == id(model) and w not in self._features]
            parts: dict[str, list[_ModelRequest]] = {}
            for w in missing:
                parts.setdefault("" if model.packs else first_asker[w], []).append(w)
            tick = self._tick("features", len(missing))
            for part in parts.values():
                features = self._compute([w[1] for w in part], [w[2] for w in part], model, tick=tick)
                self._features.update(zip(part, features, strict=True))
        return [self._features[w] for w in model_requests]

    def _compute(
        self, sequences: Sequence[tuple[int, ...]], columns: Sequence[tuple[int, ...]], model: PolicyModel, tick: Tick
    ) -> list[Tensor]:
        """As `PolicyModel.features_at`, the passes dealt out to the processes."""
        workers = self._workers
        if workers.count == 1:
            return model.features_at(sequences, columns, self._budget, tick=tick)
        groups = rows_to_even_groups(sequences, self._budget, shares=workers.count, rows_to_groups=model.rows_to_groups)
        parts: list[tuple[int, Tensor]] = []
        for group in scoring_passes(model, workers, groups):
            features = model.features_in_one_pass([sequences[i] for i in group], [columns[i] for i in group])
            tick(len(group))
            parts += zip(group, (features_CH.flatten() for features_CH in features), strict=True)
        lengths = [model.width * len(part) for part in columns]
        # on the host, as a single process has them: a long round's would not fit beside the model on a card
        gathered = workers.gather(parts, lengths, model.device, kept_on=torch.device("cpu"))
        return [flat.view(-1, model.width) for flat in gathered]


def _rows_to_requests(data: Round, rows: Sequence[int], cut: set[int], tokens: bool) -> list[_Request]:
    """What is asked of the base model for some actions: before their decisions, then after those that are cut."""
    requests, ends = [], []
    for i in rows:
        item = data.items[i]
        token_ids = item.prompt_ids + item.sampled_ids
        first, last = len(item.prompt_ids) - 1, len(token_ids) - 1
        if tokens and i in cut:  # one pass for all tokens, and for what follows the last one
            requests.append((item.agent, token_ids, (*item.columns, last)))
        elif tokens:
            requests.append((item.agent, item.input_ids, item.columns))
        else:
            requests.append((item.agent, item.prompt_ids, (first,)))
            if i in cut:
                ends.append((item.agent, token_ids, (last,)))
    return [*requests, *ends]


def _sharing(model_of: Mapping[str, PolicyModel], sharing: str) -> dict[str, tuple[str, ...]]:
    """The agents of each critic, by its key."""
    if sharing == "agent":
        return {f"agent/{agent}": (agent,) for agent in model_of}
    groups: dict[int, list[str]] = {}
    for agent, model in model_of.items():
        groups.setdefault(id(model), []).append(agent)
    return {f"shared/{i}": tuple(group) for i, group in enumerate(groups.values())}


def _seed(seed: int, key: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{key}".encode()).digest()[:8], "big") >> 1


def _cut(data: Round) -> set[int]:
    """The last actions of truncated episodes: what would have followed is not known."""
    last = [not dependents for episode in data.episodes for dependents in episode.successors]
    return {i for i, e in enumerate(data.episode_A) if last[i] and data.episodes[e].truncated}
