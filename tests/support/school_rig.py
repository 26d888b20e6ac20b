"""The real `collect` and `train` in one process, on a tiny model and a stand-in for its server."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from marft_bridge.commands.collect import collect
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.rollouts.episode_plan import EpisodeRequest
from marft_bridge.rollouts.session import Session
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.training import train as training
from support.compare_rig import APPS, NODES
from support.fake_vllm import END_OF_TURN, FakeVllm, running
from support.tiny_policy import save_tiny_llama
from trace_store.records import Episode, Trajectory
from trace_store.store import TraceStore
from trainers import marft
from trainers.batch import Round, trajectories_to_round
from trainers.errors import TrainError

TASKS = [{"id": f"t{n}", "number": n, "topic": "any"} for n in range(40)]
Task = dict[str, Any]


def learned(school: School) -> dict[str, Any]:
    """The weights of all versions, the checkpoint, and the metrics without times."""
    folder = RunFolder(school.run)
    files = [*folder.adapters.rglob("adapter_model.safetensors"), *folder.checkpoint.iterdir(), folder.best]
    contents: dict[str, Any] = {str(path.relative_to(school.run)): path.read_bytes() for path in files}
    for line in map(json.loads, folder.metrics.read_text().splitlines()):
        line.pop("seconds", None)
        line.get("warm_up", {}).pop("seconds", None)
        line.get("replay", {}).pop("seconds", None)
        contents |= {f"{line['phase']} {line['round']} {name}": value for name, value in line.items()}
    return contents


def runs_until(count: int, real: Any) -> Any:
    """A `Session.run` that ends after `count` episodes in all, as a kill would."""
    left = [count]

    def run(session: Session, requests: Sequence[EpisodeRequest], title: str, reward: str, **options: int) -> Any:
        mine = requests[: left[0]]
        left[0] -= len(mine)
        tally = real(session, mine, title, reward, **options) if mine else None
        if len(mine) < len(requests):
            raise TrainError("killed")
        return tally

    return run


class School:
    """A run folder of the duo on a tiny model, and every episode that reached a batch."""

    reward = "reward"  # a function of apps.py

    def __init__(self, folder: Path, model: Path, server: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.model, self.server = folder, model, server
        self.run, self.tasks = folder / "run", folder / "tasks.jsonl"
        self.write(TASKS)
        (folder / "apps.py").write_text(APPS.replace("HOSTED", server.url))
        # The actor is right on two of three tasks, so that runs earn differently.
        server.answer = lambda body: "yes" if int(body["messages"][-1]["content"].split()[0]) % 3 else "no"
        self.learned: list[Episode] = []
        self.rounds: list[Round] = []
        real = trajectories_to_round

        def watched(trajectories: list[Trajectory], *rest: Any, **options: Any) -> Any:
            self.learned += [trajectory.episode for trajectory in trajectories]
            self.rounds.append(real(trajectories, *rest, **options))
            return self.rounds[-1]

        monkeypatch.setattr(marft, "trajectories_to_round", watched)

    def write(self, tasks: list[Task]) -> None:
        self.tasks.write_text("".join(json.dumps(task) + "\n" for task in tasks))

    def use_reward(self, source: str, name: str) -> None:
        """Has the app's runs paid by the function of that name, which the source defines."""
        apps = self.folder / "apps.py"
        apps.write_text(apps.read_text() + source)
        self.reward = name

    def config(self, heldout: float = 0.25, **train: Any) -> BridgeConfig:
        apps = self.folder / "apps.py"
        trainer = {"lora": {"rank": 4}, "importance": {"mismatch": "none", "engine_tolerance": 1e3}}
        for name, value in train.pop("trainer", {}).items():
            trainer[name] = {**trainer.get(name, {}), **value} if isinstance(value, dict) else value
        return BridgeConfig.model_validate(
            {
                "run": str(self.run),
                "graph": {
                    "app": f"{apps}:duo",
                    "nodes": list(NODES),
                    "tasks": str(self.tasks),
                    "task_to_input": f"{apps}:to_input",
                    "reward": f"{apps}:{self.reward}",
                    "heldout": heldout,
                },
                "model": {"path": str(self.model)},
                "serve": {"attach": self.server.url},
                "sampling": {"max_tokens": 8},
                "collect": {"episodes": 20, "in_flight": 4},
                "train": {"rounds": 1, "episodes_per_round": 6, "trainer": trainer} | train,
                "compare": {"metric": "correct", "mixed_teams": "off", "kl_actions": 0},
            }
        )

    def collect(self, **options: Any) -> str:
        text = io.StringIO()
        collect(self.config(**options), Reporter(Console(file=text, width=300)), resume=False)
        return text.getvalue()

    def train(self, resume: bool = False, without_signal: bool = False, **options: Any) -> str:
        text = io.StringIO()
        reporter = Reporter(Console(file=text, width=300))
        training.train(self.config(**options), reporter, resume, without_signal=without_signal)
        return text.getvalue()

    def train_until_killed(self, episodes: int, **options: Any) -> None:
        """`train`, killed once it has played so many episodes in all."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Session, "run", runs_until(episodes, Session.run))
            with pytest.raises(TrainError, match="killed"):
                self.train(**options)

    def store(self) -> TraceStore:
        store = TraceStore.open(self.run / "store.duckdb")
        store.take_in()
        return store

    def played(self, run_id: str) -> set[str]:
        with self.store() as store:
            return {episode.task_id for episode in store.episodes(run_id=run_id)}


def save_school_model(folder: Path) -> Path:
    """A random Llama that knows every token of the school's server."""
    model = save_tiny_llama(folder, vocabulary=END_OF_TURN + 1)
    (model / "tokenizer.json").write_text("{}")
    return model


@contextmanager
def school_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[School]:
    with running(FakeVllm()) as server:
        yield School(folder, save_school_model(folder / "model"), server, monkeypatch)
