"""Owns: a server that shares its card with the trainer sleeps while that updates.

- A sleeping server is not started again; one that died in its sleep is, when the trainer is done.
- With the real vLLM the routes reach the engine, and answers before and after are the same.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.school_rig import school_in

from marft_bridge.common.errors import ServingError
from marft_bridge.config.serve import PlacedServeOptions, ServeOptions
from marft_bridge.model_calls.call_monitor import CallsUnderWay
from marft_bridge.serving import vllm_process as server_process
from marft_bridge.serving.key_guard import SLEEP_PATH
from marft_bridge.serving.supervisor import Supervisor
from marft_bridge.serving.vllm_arguments import server_argv
from marft_bridge.serving.vllm_server import ModelServer
from trainers.marft import MarftTrainer


def test_only_a_placed_server_that_shares_its_card_is_started_to_sleep() -> None:
    """vLLM's development routes run any method of the engine and ask for no key: they stay off."""
    asleep = server_argv(PlacedServeOptions(sleeps=True), Path("model"), 1, cpu=False)
    assert "--enable-sleep-mode" in asleep
    for options in (ServeOptions(), PlacedServeOptions()):
        assert "--enable-sleep-mode" not in server_argv(options, Path("model"), 1, cpu=False)


class Server:
    """A server for the supervisor: what happens to it, in order."""

    def __init__(self, can_sleep: bool = True) -> None:
        self.can_sleep, self.attached, self.log_path = can_sleep, False, Path("/dev/null")
        self.events: list[str] = []
        self.is_dead = False
        self.started_again = threading.Event()

    def sleep(self) -> None:
        self.events.append("sleep")

    def wake(self) -> None:
        if self.is_dead:
            raise ServingError("no answer")
        self.events.append("wake")

    def end_reason(self) -> str | None:
        return "the model server ended with exit code 9" if self.is_dead else None

    def is_healthy(self) -> bool:
        return not self.is_dead

    def restart(self) -> None:
        self.is_dead = False
        self.events.append("start")
        self.started_again.set()

    def halt(self) -> None:
        """Nothing runs."""


def supervisor_of(server: Server) -> Supervisor:
    return Supervisor(server, 2, 120.0, calls=CallsUnderWay(), report=lambda _: None)  # type: ignore[arg-type]


def test_a_server_sleeps_for_the_block_and_another_is_left_alone() -> None:
    shared, alone = Server(), Server(can_sleep=False)
    for server in (shared, alone):
        with supervisor_of(server) as supervisor, supervisor.asleep():
            server.events.append("update")
    assert shared.events == ["sleep", "update", "wake"]
    assert alone.events == ["update"]


def test_a_server_that_dies_in_its_sleep_is_started_again_only_afterwards() -> None:
    """Its memory is the trainer's until then."""
    server = Server()
    with supervisor_of(server) as supervisor:
        with supervisor.asleep():
            server.is_dead = True
            assert not server.started_again.wait(1.5)  # the watcher looks every half second
            server.events.append("update")
        assert server.started_again.wait(5)
    assert server.events[:3] == ["sleep", "update", "start"]


@pytest.mark.slow
def test_training_updates_while_the_server_sleeps_and_does_all_else_while_it_is_awake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in answers 503 while it sleeps, so a rollout or an adapter that came then would fail."""
    with school_in(tmp_path, monkeypatch) as school:
        monkeypatch.setattr(ModelServer, "can_sleep", True)
        school.collect()
        slept: list[tuple[str, bool]] = []

        def note(name: str) -> None:
            real = getattr(MarftTrainer, name)

            def noted(*args: Any, **options: Any) -> Any:
                slept.append((name, school.server.sleeps))
                return real(*args, **options)

            monkeypatch.setattr(MarftTrainer, name, noted)

        for name in ("__init__", "warm_up", "replay", "update"):
            note(name)
        assert "trained" in school.train(rounds=2)
        assert slept == [(name, True) for name in ("__init__", "warm_up", "replay", "update", "update")]
        assert not school.server.sleeps
        assert {name.rpartition("@")[2] for name in school.server.adapters} >= {"3"}


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_the_routes_reach_the_real_engine(smollm2_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the worker ignores both, so this shows the way to the engine and back, and no memory."""

    def argv(*args: Any, **options: Any) -> list[str]:
        return [word for word in server_argv(*args, **options) if word != "--enable-sleep-mode"]

    monkeypatch.setattr(server_process, "server_argv", argv)
    options = PlacedServeOptions(dtype="float32", startup_timeout_s=500, sleeps=True)
    log = tmp_path / "vllm.log"
    with ModelServer.start(options, smollm2_dir, adapters=tmp_path / "adapters", log=log) as server:
        body = {"model": "base", "prompt": "The sky is", "max_tokens": 8, "temperature": 0.0, "seed": 1}
        headers = {"Authorization": f"Bearer {server.endpoint.api_key}"}

        def text() -> str:
            url = f"{server.endpoint.base_url}/completions"
            answer = httpx.post(url, json=body, headers=headers, timeout=120, trust_env=False)
            return str(answer.json()["choices"][0]["text"])

        before = text()
        root = server.endpoint.base_url.removesuffix("/v1")
        assert httpx.post(f"{root}{SLEEP_PATH}", trust_env=False).status_code == 401
        assert httpx.post(f"{root}/sleep", headers=headers, trust_env=False).status_code == 404  # vLLM's own
        server.sleep()
        server.wake()
        assert text() == before
    assert log.read_text().count("sleep mode is not supported on CPU, ignore it") == 2
