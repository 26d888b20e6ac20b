"""A configuration of examples/zoo/ -> some rounds of the real `collect` and `train`, in this process, in seconds.

Graph, spans, store, credit, update, published adapters and all checks between engine and trainer are real. The model
server is a stand-in: a script says what each node answers, and the log-probs are those of a tiny model with the
adapter that was asked for. So what is learned never changes what is said, but it can be read from the adapters.
"""

from __future__ import annotations

import io
import random
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from marft_bridge.commands.collect import collect
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig, toml_to_config
from marft_bridge.runs.run_folder import RunFolder, read_metrics
from marft_bridge.serving.adapter_registry import AdapterRegistry, safe_node_name
from marft_bridge.training.train import train
from support.fake_vllm import Answer, running
from support.paths import ROOT
from support.study_server import StudyServer
from support.tiny_policy import save_tiny_llama
from trace_store.records import Action, Trajectory
from trace_store.store import TraceStore

ZOO = ROOT / "examples/zoo"

Script = Callable[[str, list[dict[str, Any]], random.Random], Answer]
"""(node, messages of the request, a generator seeded by the request) -> what the model says: a text, or tool calls as
[(name, arguments)]. `node` is "" where a node outside the trained ones asks the base model."""


@dataclass(frozen=True)
class Trained:
    """What came out."""

    config: BridgeConfig
    collected: list[Trajectory]
    trained: list[Trajectory]  # of all rounds
    rounds: list[dict[str, Any]]  # of metrics.jsonl, the replay first
    norms: dict[str, float]  # trained node -> the norm of its newest adapter's product, 0.0 where it never moved
    said: str  # by the commands
    _server: StudyServer

    def pull(self, node: str, value: Callable[[Trajectory], float | None] | None = None) -> float:
        """How far training pulled `node` towards what paid: a correlation over its actions in all rounds.

        Between the gain of an action's mean log-prob per token from version 0 to the newest, and the value of its
        episode: the team reward that is trained on, unless `value` says otherwise. Above 0 where training went the
        right way; about 0 where what the node says does not matter. nan where all values are equal.
        """
        name = self.config.train.trainer.reward
        worth = value or (lambda trajectory: trajectory.team_reward(name))
        pairs = [
            (action, paid)
            for trajectory in self.trained
            if (paid := worth(trajectory)) is not None
            for action in trajectory.actions
        ]
        return self._correlation(node, pairs)

    def pull_to(self, node: str, reward: str) -> float:
        """The same against a reward that single calls have, by its name, instead of their episode's."""
        pairs = [
            (action, paid.value)
            for trajectory in self.trained
            for action in trajectory.actions
            for paid in trajectory.rewards
            if paid.name == reward and paid.action_id == action.action_id
        ]
        return self._correlation(node, pairs)

    def _correlation(self, node: str, pairs: Sequence[tuple[Action, float]]) -> float:
        own = [(self._gain(node, action), paid) for action, paid in pairs if action.node == node and action.sampled_ids]
        gains, paid_for = np.array(own, float).T
        if np.ptp(paid_for) == 0:
            return float("nan")
        return float(np.corrcoef(gains, paid_for)[0, 1])

    def _gain(self, node: str, action: Action) -> float:
        folders = (RunFolder(self.config.run_folder).adapters / safe_node_name(node)).iterdir()
        newest = max(int(folder.name) for folder in folders)
        prompt, sampled = list(action.prompt_ids or ()), list(action.sampled_ids or ())
        after, before = (
            np.mean(self._server.score(AdapterRegistry.served_name(node, version), prompt, sampled, 1.0))
            for version in (newest, 0)
        )
        return float(after - before)


PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "objective": {"negative_weight": 1.0},
    "optimizer": {"lr": 1.5e-3, "epochs": 1, "minibatch_actions": 8},
    "offline": {"epochs": 1},
}
"""The published update, of which the laws about graphs are told: both signs of an advantage, one pass, plain values."""


def _with_published(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """The trainer's table with what it leaves out taken from the published update."""
    tables = {name: {**fields, **trainer.get(name, {})} for name, fields in PUBLISHED.items()}
    advantage = dict(trainer.get("advantage", {}))
    if advantage.get("estimator", "gae") == "gae":
        advantage["critic"] = {"shrink": False, **advantage.get("critic", {})}
        tables["advantage"] = advantage
    if tables["offline"].get("mode") == "off":
        del tables["offline"]["epochs"]
    return {**trainer, **tables}


def train_zoo(
    config: Path,
    script: Script,
    folder: Path,
    *,
    rounds: int = 2,
    episodes: int = 8,
    changes: Mapping[str, Any] | None = None,
) -> Trained:
    """Collects `episodes` episodes and trains `rounds` rounds of as many.

    Args:
        config: a file of examples/zoo/. All of it is used as it is, but for the model, the server, the sizes, and the
            update where it leaves that to the defaults: see `PUBLISHED`.
        folder: an empty one.
        changes: further options, as {"train.trainer.optimizer.lr": 1e-2}.
    """
    model = save_tiny_llama(folder / "model", vocabulary=257)
    (model / "tokenizer.json").write_text("{}")
    toml_to_config(config)  # the file itself is right
    raw = tomllib.loads(config.read_text())
    with running(_ZooServer(model, folder / "run/adapters", script)) as server:
        raw["serve"] = {"attach": server.url}
        sizes = {
            "run": str(folder / "run"),
            "model.path": str(model),
            "collect.episodes": episodes,
            "collect.in_flight": 4,
            "train.rounds": rounds,
            "train.episodes_per_round": episodes,
            "train.trainer.system.tokens_per_microbatch": 8192,
        }
        for path, value in (sizes | dict(changes or {})).items():
            _set(raw, path, value)
        raw["train"]["trainer"] = _with_published(raw["train"]["trainer"])  # last: it fits what the changes chose
        chosen = BridgeConfig.model_validate(raw)
        text = io.StringIO()
        reporter = Reporter(Console(file=text, width=200))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            collect(chosen, reporter, resume=False)
            train(chosen, reporter, resume=False, without_signal=True)  # what is held is not whether it can be learned
        finally:
            torch.set_num_threads(threads)
        run = RunFolder(folder / "run")
        with TraceStore.open(run.store, read_only=True) as store:
            collected, trained = (list(store.trajectories(run_ids=[name])) for name in ("collect", "train"))
        rows = read_metrics(run.metrics)
        norms = {  # the newest of each: in an alternating update only one adapter has figures
            node: float(agent["adapter_norm"])
            for row in rows
            for node, agent in row.get("agents", {}).items()
            if "adapter_norm" in agent
        }
        return Trained(chosen, collected, trained, rows, norms, text.getvalue(), server)


class _ZooServer(StudyServer):
    """Answers by the script; still knows adapters that were retired, so that what was learned can be read later."""

    def __init__(self, model: Path, adapters: Path, script: Script) -> None:
        super().__init__(str(model), 0, None)
        self._root, self._script = adapters, script
        self.answer = self._say
        self.auto_tools = True

    def _say(self, body: dict[str, Any]) -> Answer:
        node, _, version = str(body["model"]).rpartition("@")
        chance = random.Random(f"{body.get('seed')} {body['messages']}")
        return self._script(node if version.isdecimal() else "", body["messages"], chance)

    def score(self, name: str, prompt: list[int], sampled: list[int], temperature: float) -> list[float]:
        """As the study's server does, through any version that was ever registered."""
        node, _, version = name.rpartition("@")
        self.adapters.setdefault(name, str(self._root / node / version))
        return super().score(name, prompt, sampled, temperature)


def _set(raw: dict[str, Any], path: str, value: Any) -> None:
    *tables, last = path.split(".")
    for table in tables:
        raw = raw.setdefault(table, {})
    raw[last] = value
