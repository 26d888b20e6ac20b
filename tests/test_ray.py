"""Owns: collecting on a Ray cluster gives what collecting on one machine gives, whatever becomes of its workers.

- Two workers on a real local cluster finish exactly the requests that a local collect finishes, with its seeds.
- A worker that is killed loses its unfinished episodes to another worker; no request is finished twice.
- A run that was stopped is resumed; what is finished is not run again.
- Driver and workers agree on configuration, code and model; what cannot work is refused in one line.
- Lines of a worker are filed whole and undamaged, or not at all.
"""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from fake_vllm import FakeVllm, running
from rich.console import Console
from safetensors.numpy import save_file

from marft_bridge.cluster.collect import connected
from marft_bridge.cluster.options import RayOptions
from marft_bridge.collect import collect
from marft_bridge.config import BridgeConfig
from marft_bridge.progress import Reporter
from marft_bridge.run_folder import RunFolder
from trace_store.records import Episode
from trace_store.store import TraceStore

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One local cluster for the tests of this file: starting one takes longer than they do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAB_KEY", "secret")  # before the workers' processes get their environment
        with connected(RayOptions(workers=2)):
            yield


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    with running(FakeVllm(key="secret")) as server:
        server.answer = lambda body: "the number is 5"
        yield server


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """As much of a model as an adapter of zeros needs."""
    folder = tmp_path / "model"
    folder.mkdir()
    layers = {f"model.layers.0.self_attn.{name}.weight": np.zeros((4, 4), np.float32) for name in ("q_proj", "v_proj")}
    save_file(layers, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


class Lab:
    """Collecting the duo on a stand-in for the model server, here and on the cluster."""

    def __init__(self, server: FakeVllm, model_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server, self.model_dir, self.folder = server, model_dir, folder
        monkeypatch.chdir(ROOT)

    def config(self, run: str, engine: str, episodes: int, **changes: Any) -> BridgeConfig:
        graph = {
            "app": "graphs.math_duo:build",
            "nodes": ["reasoner", "actor"],
            "tasks": "graphs.math_duo:tasks",
            "task_to_input": "graphs.math_duo:task_to_input",
            "reward": "graphs.math_duo:reward",
        }
        where: dict[str, Any] = {"serve": {"attach": self.server.url, "api_key_env": "LAB_KEY"}}
        if engine == "ray":
            where = {"ray": {"endpoints": [self.server.url], "api_key_env": "LAB_KEY"} | changes.pop("ray", {})}
        return BridgeConfig.model_validate(
            {
                "run": str(self.folder / run),
                "graph": graph,
                "model": {"path": str(self.model_dir)},
                "collect": {"episodes": episodes, "engine": engine, "in_flight": 4} | changes,
                **where,
            }
        )

    def collect(self, config: BridgeConfig, resume: bool = False) -> list[str]:
        self.server.adapters.clear()  # a server serves one run folder
        shown = io.StringIO()
        collect(config, Reporter(Console(file=shown, width=200)), resume)
        return shown.getvalue().splitlines()

    def episodes(self, config: BridgeConfig) -> list[Episode]:
        with TraceStore.open(RunFolder(config.run_folder).store) as store:
            store.take_in()
            rewarded = {row[0] for row in store.sql("SELECT DISTINCT episode_id FROM episode_reward")}
            found = store.episodes(run_id="collect")
        assert all(e.episode_id in rewarded for e in found if e.outcome == "terminated")
        return found


@pytest.fixture
def lab(server: FakeVllm, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: None) -> Lab:
    return Lab(server, model_dir, tmp_path, monkeypatch)


def finished(episodes: list[Episode]) -> Counter[tuple[str, int, int | None]]:
    """(task, sample, seed) of every episode that counts as finished, and how often."""
    return Counter((e.task_id, e.sample, e.seed) for e in episodes if e.outcome == "terminated")


def test_two_workers_finish_what_a_local_collect_finishes(lab: Lab) -> None:
    here, there = (lab.config(engine, engine, 24, samples_per_task=2) for engine in ("local", "ray"))
    lab.collect(here)
    said = lab.collect(there)
    local, remote = lab.episodes(here), lab.episodes(there)
    assert finished(remote) == finished(local)
    assert set(finished(remote).values()) == {1}
    assert {e.outcome for e in remote} == {"terminated"}
    assert [e.lineage for e in remote] == [e.lineage for e in local]
    assert any(line.startswith("collected 24 terminated; 48 of 48 actions trainable") for line in said)
    assert any(line.startswith("collect 24/24") for line in said)
    journal = list(RunFolder(there.run_folder).journal.glob("*"))
    assert journal == []  # taken in: nobody writes there any more


def workers() -> list[psutil.Process]:
    """The processes of this test's workers, by the thread that collects."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.name().startswith("ray::Worker"):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def test_a_killed_worker_loses_its_unfinished_episodes_to_another(lab: Lab) -> None:
    config = lab.config("run", "ray", 80)
    killed: list[int] = []

    def slowly(_: dict[str, Any]) -> str:
        time.sleep(0.1)
        if len(lab.server.asked) > 40 and not killed:
            killed.append(workers()[0].pid)
            os.kill(killed[0], signal.SIGKILL)
        return "5"

    lab.server.answer = slowly
    said = lab.collect(config)
    assert killed
    lost = [line for line in said if "unfinished episodes go to another worker" in line]
    assert len(lost) == 1
    assert f"process {killed[0]}) died" in lost[0]
    here = lab.config("here", "local", 80)
    lab.server.answer = lambda _: "5"
    lab.collect(here)
    assert finished(lab.episodes(config)) == finished(lab.episodes(here))


def test_a_stopped_run_is_resumed_without_running_anything_twice(lab: Lab) -> None:
    config = lab.config("run", "ray", 40)

    def interrupt() -> None:
        while len(lab.server.asked) < 40:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    lab.server.answer = lambda _: time.sleep(0.05) or "5"
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        lab.collect(config)
    before = finished(lab.episodes(config))
    assert 0 < before.total() < 40
    lab.collect(config, resume=True)
    after = finished(lab.episodes(config))
    assert (after.total(), set(after.values())) == (40, {1})
    assert workers() == []
