"""Owns: what breaks between a command and its model server costs a clear line, and no episode.

- A server that dies or hangs is started again with its port, key and adapters, so many times, and the episodes that it
  took away are repeated; one that was attached to, or breaks too often, ends the command with the way on.
- What it answers wrongly fails one episode, with a reason that says what was wrong.
- Adapter files that changed are named before anything is served from them.
"""

from __future__ import annotations

import io
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fault_server import FAULTS, write_model
from rich.console import Console

from marft_bridge import server_process
from marft_bridge.collect import collect
from marft_bridge.config import BridgeConfig, toml_to_config
from marft_bridge.errors import ServingError
from marft_bridge.progress import Reporter
from marft_bridge.run_folder import RunFolder
from trace_store.store import TraceStore

ROOT = Path(__file__).parents[1]
EPISODES = 12


class Bench:
    """`collect` in this process, on a model server that breaks as it is told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.faults = RunFolder(folder / "run"), folder / "faults.json"
        self.model = write_model(folder / "model")
        self.said = io.StringIO()
        self._changes: dict[str, Any] = {}
        monkeypatch.setenv(FAULTS, str(self.faults))
        self.argv: list[list[str]] = []

        def argv(options: Any, model_dir: Path, port: int, cpu: bool) -> list[str]:
            self.argv.append([str(model_dir), str(port)])
            wait = 4 if len(self.argv) == 2 else 0  # longer than the client itself tries again
            return [sys.executable, str(ROOT / "tests/fault_server.py"), "--port", str(port), "--wait", str(wait)]

        monkeypatch.setattr(server_process, "server_argv", argv)

    def config(self, **changes: Any) -> BridgeConfig:
        settings = {
            "run": str(self.folder.path),
            "model.path": str(self.model),
            "collect.episodes": EPISODES,
            "collect.in_flight": 4,
            "collect.timeout_s": 60.0,
        }
        return toml_to_config(ROOT / "examples/math_duo/bridge.toml", settings | changes)

    def collect(self, *, resume: bool = False, **changes: Any) -> str:
        self.said = io.StringIO()
        collect(self.config(**changes), Reporter(Console(file=self.said, width=1000)), resume)
        return self.said.getvalue()

    def outcomes(self) -> Counter[tuple[str, bool]]:
        """(outcome, whether it repeats an earlier one) -> episodes."""
        with TraceStore.open(self.folder.store) as store:
            return Counter((e.outcome, "attempt" in e.tags) for e in store.episodes(run_id="collect"))

    def finished(self) -> Counter[tuple[str, int]]:
        with TraceStore.open(self.folder.store) as store:
            found = store.episodes(run_id="collect")
            return Counter((e.task_id, e.sample) for e in found if e.outcome == "terminated")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def server_pids(bench: Bench) -> list[int]:
    return [int(pid) for pid in re.findall(r"load model (\d+)", bench.folder.server_log.read_text())]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# The server dies, or hangs


def test_a_server_that_dies_in_the_middle_is_started_again_and_no_episode_is_lost(bench: Bench) -> None:
    bench.faults.write_text(json.dumps({"die_after": 6}))
    said = bench.collect()
    assert re.search(
        r"the model server ended with exit code 9; starting it again \(1 of 2\); log \S+vllm\.log:1\n", said
    )
    assert re.search(r"the model server is up again with its adapters, after \d+ s\n", said)
    assert sorted(bench.finished().values()) == [1] * EPISODES
    outcomes = bench.outcomes()
    repeated = outcomes["terminated", True]
    assert 1 <= repeated == sum(count for (outcome, _), count in outcomes.items() if outcome == "failed") <= 4
    # The same server: its port, and its key, without which no adapter could have been loaded into it again.
    assert bench.argv[0] == bench.argv[1]
    assert len(bench.argv) == len(server_pids(bench)) == 2
    assert not any(map(lives, server_pids(bench)))


def test_a_server_that_hangs_looks_healthy_and_is_started_again(bench: Bench) -> None:
    bench.faults.write_text(json.dumps({"hang_after": 6}))
    began = time.monotonic()
    said = bench.collect(**{"serve.hang_s": 2.0})
    assert re.search(r"the model server hangs: 4 calls wait, no answer in 2 s \(serve\.hang_s\); starting it", said)
    assert sorted(bench.finished().values()) == [1] * EPISODES
    assert time.monotonic() - began < 50  # not by the episodes' own limit
    assert not any(map(lives, server_pids(bench)))


def test_a_server_that_dies_too_often_ends_the_command_which_goes_on_later(bench: Bench) -> None:
    bench.faults.write_text(json.dumps({"die_after": 6, "keep": True}))
    with pytest.raises(ServingError, match=r"ended with exit code 9 after 1 restarts \(serve\.restarts\); the end of "):
        bench.collect(**{"serve.restarts": 1})
    done = bench.finished()
    assert 2 <= sum(done.values()) < EPISODES
    bench.faults.unlink()
    assert f"{sum(done.values())} episodes are there" in bench.collect(resume=True)
    assert sorted(bench.finished().values()) == [1] * EPISODES
    assert not any(map(lives, server_pids(bench)))


def test_an_adapter_that_changed_on_disk_is_not_loaded_into_a_restarted_server(bench: Bench) -> None:
    bench.faults.write_text(json.dumps({"hang_after": 4}))
    weights = bench.folder.adapters / "actor/0/adapter_model.safetensors"
    config = bench.config(**{"serve.hang_s": 2.0})

    class Damaging(Reporter):
        def say(self, text: str) -> None:
            if "starting it again" in text:
                weights.write_bytes(weights.read_bytes()[:-4] + b"\1\2\3\4")
            super().say(text)

    with pytest.raises(ServingError) as caught:
        collect(config, Damaging(Console(file=io.StringIO())), False)
    assert f"did not start again: {str(weights)!r} is not what was registered" in str(caught.value)
    assert "put the file back from a copy" in str(caught.value)
    assert not any(map(lives, server_pids(bench)))
