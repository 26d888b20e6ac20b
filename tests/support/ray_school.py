"""The school whose rounds are played on a Ray cluster, by workers that start stand-ins for vLLM of their own.

As a program it is such a stand-in: it answers as the school's server does, and writes a line for every call that it
answers to the file that LOG names.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.config.ray import RayOptions
from marft_bridge.rollouts.ray.connection import connect_ray
from support.fake_vllm import FakeVllm, _Handler, running
from support.paths import ROOT
from support.school_rig import School, save_school_model

LOG = "MARFT_TEST_ASKED"
ANSWER_S = 0.05  # so that both workers come to play


class Asked(NamedTuple):
    """A call that a server answered."""

    process: int
    model: str


class ClusterSchool(School):
    """A school that plays on the cluster where `train.rollouts` says so."""

    ray: dict[str, Any] = {"workers": 2, "in_flight": 2}  # noqa: RUF012
    starts_servers = False  # whether a command that plays on this machine starts its own server, too

    def config(self, heldout: float = 0.25, **train: Any) -> BridgeConfig:
        config = super().config(heldout, **train)
        if config.train.rollouts == "local" and not self.starts_servers:
            return config
        content = config.model_dump(mode="json", exclude_unset=True)
        content["serve"] = {"max_loras": 8}  # of a server of its own, with room for versions that overlap
        return BridgeConfig.model_validate(content | {"ray": self.ray})


@contextmanager
def cluster_school_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterSchool]:
    folder.mkdir()
    with running(FakeVllm()) as server:
        yield ClusterSchool(folder, save_school_model(folder / "model"), server, monkeypatch)


def write_vllm_package(folder: Path, program: str) -> None:
    """A package that `python -m vllm.entrypoints.openai.api_server` finds there in place of vLLM."""
    package = folder / "vllm/entrypoints/openai"
    package.mkdir(parents=True)
    for each in (package, package.parent, package.parent.parent):
        (each / "__init__.py").touch()
    (package / "api_server.py").write_text(program)


@contextmanager
def school_cluster(folder: Path, processors: int) -> Iterator[Path]:
    """A local cluster whose workers start this program; yields the file with what was asked."""
    write_vllm_package(folder, "from support.ray_school import main\n\nmain()\n")
    log = folder / "asked.jsonl"
    log.touch()
    with pytest.MonkeyPatch.context() as patch:  # before the workers' processes get their environment
        patch.setenv("PYTHONPATH", f"{folder}:{ROOT}:{ROOT / 'tests'}")
        patch.setenv(LOG, str(log))
        patch.setenv("RAY_raylet_start_wait_time_s", "300")  # a busy machine
        with connect_ray(RayOptions(), option="train.rollouts", processors=processors):
            yield log


def read_asked(log: Path) -> list[Asked]:
    """The calls so far, in their order."""
    return [Asked(*json.loads(line)) for line in log.read_text().splitlines()]


class _StandIn(FakeVllm):
    request_queue_size = 256
    daemon_threads = True

    def __init__(self, port: int, key: str, log: Path) -> None:
        super().__init__(key)
        self.server_close()
        ThreadingHTTPServer.__init__(self, ("127.0.0.1", port), _Handler)
        self._log = log
        self.answer = self._answer

    def _answer(self, body: dict[str, Any]) -> str:
        with self._log.open("a") as file:  # one write, so that lines of two processes do not mix
            file.write(json.dumps([os.getpid(), body["model"]]) + "\n")
        time.sleep(ANSWER_S)
        return "yes" if int(body["messages"][-1]["content"].split()[0]) % 3 else "no"


def main() -> None:
    """The process: command line and environment are those of vLLM's."""
    flags = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
    sys.stdout.write(f"Starting to load model {os.getpid()}\n")
    sys.stdout.flush()
    _StandIn(int(flags["--port"]), os.environ["VLLM_API_KEY"], Path(os.environ[LOG])).serve_forever()


if __name__ == "__main__":
    main()
