"""Owns: what breaks between a command and its model server costs a clear line, and no episode.

- A server that dies or hangs is started again with its port, key and adapters, so many times, and the episodes that it
  took away are repeated; one that was attached to, or breaks too often, ends the command with the way on.
- What it answers wrongly fails one episode, with a reason that says what was wrong.
- Adapter files that changed are named before anything is served from them.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from safetensors.numpy import load_file
from support.duo_rig import COMMON, TASKS, Rig, right_answer
from support.fake_vllm import FakeVllm, running
from support.fault_server import FAULTS, write_model
from support.lora_files import write_adapter
from support.paths import ROOT, TESTS

from marft_bridge.commands.collect import collect
from marft_bridge.commands.serve import serve
from marft_bridge.common.errors import GraphError, ServingError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig, toml_to_config
from marft_bridge.config.serve import ServeOptions
from marft_bridge.live.flags import LiveOptions
from marft_bridge.live.split import Split
from marft_bridge.model_calls.call_monitor import AsyncWatchedTransport, CallsUnderWay, WatchedTransport
from marft_bridge.model_calls.node_chat_model import NodeChat
from marft_bridge.recording.episode_context import CANCELLED
from marft_bridge.rollouts.episode_plan import plan_episodes
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving import served_bases
from marft_bridge.serving import vllm_process as server_process
from marft_bridge.serving import vllm_server as serving
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.serving.model_versions import config_to_versions
from marft_bridge.serving.served_bases import serve_bases
from marft_bridge.serving.supervisor import Supervisor
from marft_bridge.serving.vllm_process import free_port
from marft_bridge.serving.vllm_server import Endpoint, ModelServer
from trace_store.store import TraceStore
from trainers.common.files import weights_to_sha256

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
        self.startup_s = 4  # of a server that is started again: longer than the client itself tries again

        def argv(options: Any, model_dir: Path, port: int, cpu: bool) -> list[str]:
            self.argv.append([str(model_dir), str(port)])
            wait = self.startup_s if len(self.argv) > 1 else 0
            script = str(TESTS / "support/fault_server.py")
            return [sys.executable, script, "--port", str(port), "--wait", str(wait)]

        monkeypatch.setattr(server_process, "server_argv", argv)

    def server(self, options: ServeOptions = ServeOptions()) -> ModelServer:  # noqa: B008 - frozen
        """A server on its own, or one that is attached to."""
        return ModelServer.start(options, self.model, adapters=self.folder.adapters, log=self.folder.server_log)

    def config(self, **changes: Any) -> BridgeConfig:
        settings = {
            "run": str(self.folder.path),
            "model.path": str(self.model),
            "collect.episodes": EPISODES,
            "collect.in_flight": 4,
            "collect.timeout_s": 60.0,
        }
        return toml_to_config(ROOT / "examples/math_duo/bridge.toml", settings | changes)

    def collect(self, changes: dict[str, Any] | None = None, *, resume: bool = False) -> str:
        self.said = io.StringIO()
        collect(self.config(**(changes or {})), Reporter(Console(file=self.said, width=1000)), resume)
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


@pytest.mark.slow
def test_a_server_that_dies_in_the_middle_is_started_again_and_no_episode_is_lost(bench: Bench) -> None:
    bench.faults.write_text(json.dumps({"die_after": 6}))
    said = bench.collect()
    assert re.search(
        r"the model server ended with exit code 9; starting it again \(1 of 2\); log \S+vllm\.log:[12]\n", said
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


@pytest.mark.slow
def test_a_server_that_hangs_looks_healthy_and_is_started_again(bench: Bench) -> None:
    bench.faults.write_text(json.dumps({"hang_after": 6}))
    began = time.monotonic()
    said = bench.collect({"serve.hang_s": 2.0})
    assert re.search(r"the model server hangs: 4 calls wait, no answer in 2 s \(serve\.hang_s\); starting it", said)
    assert sorted(bench.finished().values()) == [1] * EPISODES
    assert time.monotonic() - began < 50  # not by the episodes' own limit
    assert not any(map(lives, server_pids(bench)))


@pytest.mark.slow
def test_a_server_that_dies_too_often_ends_the_command_which_goes_on_later(bench: Bench) -> None:
    bench.faults.write_text(json.dumps({"die_after": 6, "keep": True}))
    with pytest.raises(ServingError, match=r"ended with exit code 9 after 1 restarts \(serve\.restarts\); the end of "):
        bench.collect({"serve.restarts": 1})
    done = bench.finished()
    assert 2 <= sum(done.values()) < EPISODES
    bench.faults.unlink()
    assert f"{sum(done.values())} episodes are there" in bench.collect(resume=True)
    assert sorted(bench.finished().values()) == [1] * EPISODES
    assert not any(map(lives, server_pids(bench)))


@pytest.mark.slow
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


def test_a_command_that_ends_while_its_server_is_started_again_waits_for_nothing_and_leaves_nothing(
    bench: Bench,
) -> None:
    bench.faults.write_text(json.dumps({"die_after": 0}))
    again = threading.Event()
    with bench.server() as server:
        endpoint = server.endpoint
        bench.startup_s = 600
        with Supervisor(server, 2, 60.0, CallsUnderWay(), lambda _: again.set()) as keeper:
            with pytest.raises(httpx.HTTPError):
                httpx.post(f"{endpoint.base_url}/chat/completions", json=BODY, trust_env=False, headers=key(endpoint))
            assert again.wait(20)
            began = time.monotonic()
    assert time.monotonic() - began < 10
    with pytest.raises(ServingError, match="stopped while it was starting"):
        keeper.check()
    assert len(bench.argv) == 2
    assert not any(map(lives, server_pids(bench)))


@pytest.mark.slow
@pytest.mark.parametrize("taken", [1, 3])
def test_a_free_port_that_another_process_takes_first_is_given_up_for_another(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    with running(FakeVllm("another key")) as other:
        found = [other.server_address[1]] * taken
        monkeypatch.setattr(
            serving, "free_port", lambda asked: found.pop() if found and asked is None else free_port(asked)
        )
        if taken == 1:
            with bench.server() as server:
                assert server.endpoint.base_url != f"{other.url}/v1"
                assert server.adapter_names() == []
        else:
            with pytest.raises(ServingError, match="refuses the API key"):
                bench.server()
    assert len(bench.argv) == (2 if taken == 1 else 3)
    assert not any(map(lives, server_pids(bench)))


def test_a_free_port_that_something_silent_takes_first_is_given_up_for_another(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies of it before it answers, unlike where the other answers in its place."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        found = [taken]
        monkeypatch.setattr(
            serving, "free_port", lambda asked: found.pop() if found and asked is None else free_port(asked)
        )
        bench.startup_s = 0
        with bench.server() as server:
            assert server.endpoint.base_url != f"http://127.0.0.1:{taken}/v1"
            assert server.adapter_names() == []
    assert len(bench.argv) == 2
    assert not any(map(lives, server_pids(bench)))


def test_a_server_that_dies_on_a_port_that_is_free_is_not_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "raise SystemExit(3)"
    tries: list[int] = []

    def argv(_options: Any, _model: Path, port: int, cpu: bool) -> list[str]:
        tries.append(port)
        return [sys.executable, "-c", script]

    monkeypatch.setattr(server_process, "server_argv", argv)
    with pytest.raises(ServingError, match="ended with exit code 3"):
        bench.server()
    assert len(tries) == 1


@pytest.mark.slow
def test_work_on_a_server_that_dies_is_done_once_more_and_its_own_errors_are_passed_on(bench: Bench) -> None:
    bench.faults.write_text(json.dumps({"die_after": 0}))
    with bench.server() as server:
        endpoint = server.endpoint
        done: list[str] = []

        def work() -> str:
            done.append("")
            if len(done) == 1:
                with pytest.raises(httpx.HTTPError):
                    httpx.post(
                        f"{endpoint.base_url}/chat/completions", json=BODY, trust_env=False, headers=key(endpoint)
                    )
            server.unload_adapter("none@1")
            return "never"

        with (
            Supervisor(server, 2, 60.0, CallsUnderWay(), lambda _: None) as keeper,
            pytest.raises(ServingError, match="'none@1' cannot be found"),
        ):
            keeper.run_with_restarts(work)
        assert len(done) == 2
        assert len(bench.argv) == 2


def test_a_server_is_started_here_or_not_at_all(bench: Bench) -> None:
    with running(FakeVllm()) as fake:
        attached = bench.server(ServeOptions(attach=fake.url))
        with attached, pytest.raises(ServingError, match="only a model server that was started here"):
            attached.restart()


PATIENT_APP = """
import os, time
import openai

client = openai.OpenAI(base_url=os.environ["MARFT_LIVE_URL"], api_key=os.environ["MARFT_LIVE_KEY"], max_retries=0)
answered, refused, deadline = 0, 0, time.monotonic() + 60
while answered < 6 and time.monotonic() < deadline:
    try:
        client.chat.completions.create(
            model="actor", messages=[{"role": "user", "content": "say it"}], user=f"u{answered}", temperature=1.0
        )
        answered += 1
    except openai.APIStatusError as error:
        refused += error.status_code == 502
        time.sleep(0.3)
raise SystemExit(0 if answered == 6 and refused else 1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "problem"),
    [("die_after", "exit code 9"), ("hang_after", "1 calls wait, no answer in 2 s (serve.hang_s)")],
)
def test_live_traffic_goes_on_with_its_teams_when_the_server_behind_it_is_started_again(
    bench: Bench, fault: str, problem: str
) -> None:
    bench.faults.write_text(json.dumps({fault: 3}))
    config = bench.config(**{"serve.hang_s": 2.0})
    registry = AdapterRegistry(bench.folder.adapters, weights_to_sha256(bench.model))
    for node in config.graph.nodes:
        write_adapter(registry.new_folder(node, 1), {"layers.0.q_proj": (4, 4)})
        registry.register(node, 1, None, {})
    live = LiveOptions(Split(50.0, 50.0), "0", "1", mirror=False, port=0, key_env=None, quiet_s=60.0)
    said = Reporter(Console(file=bench.said, width=1000))
    assert serve(config, said, [sys.executable, "-c", PATIENT_APP], live) == 0
    assert f"{problem}; starting it again (1 of 2); log {bench.folder.live_server_log}:" in bench.said.getvalue()
    assert not bench.folder.server_log.exists(), "of another command, whose start empties it"
    with TraceStore.open(bench.folder.store) as store:
        answered = [a for t in store.trajectories() for a in t.actions if a.sampled_ids]
    assert len(answered) == 6
    assert {a.adapter for a in answered} <= {"actor@0", "actor@1"}


def key(endpoint: Endpoint) -> dict[str, str]:
    return {"Authorization": f"Bearer {endpoint.api_key}"}


@pytest.mark.parametrize(("retries", "outcome"), [(1, "terminated"), (0, "failed")])
def test_an_attempt_that_an_outage_took_away_costs_none_of_the_retries(
    tmp_path: Path, retries: int, outcome: str
) -> None:
    calls, asked = Counter[str](), []

    def script(node: str, prompt: str, random: Any) -> str:
        calls[node] += 1
        if calls["reasoner"] <= 3 and node == "reasoner":
            raise ConnectionResetError("cut")
        return right_answer(node, prompt, random)

    def came_back(began: float) -> bool:
        asked.append(began)
        return len(asked) <= 2

    rig = Rig(tmp_path, script, retries=retries, came_back=came_back)
    tally = rig.run(plan_episodes(TASKS, 1, 1, seed=0, **COMMON))
    assert tally.outcomes == Counter({outcome: 1})
    assert tally.retried == 2 + retries
    assert asked == sorted(set(asked))  # each attempt asks since it began itself
    with rig.store() as store:
        rows = [(e.outcome, e.tags.get("attempt")) for e in store.episodes(run_id="run")]
    assert sorted(rows, key=str) == sorted(
        [("failed", None), ("failed", "2"), ("failed", "3"), ("terminated", "4")][: 3 + retries], key=str
    )


# The base model itself


@pytest.mark.parametrize("cpu", [True, False])
def test_the_base_model_is_asked_through_an_adapter_of_zeros_where_a_full_server_would_answer_as_another(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, cpu: bool
) -> None:
    monkeypatch.setattr(served_bases, "vllm_runs_on_cpu", lambda: cpu)
    config, silent = bench.config(), Reporter(Console(quiet=True))
    versions = config_to_versions(config, bench.folder.adapters, silent.say)
    log_of = bench.folder.server_log_of
    with (
        asyncio.Runner() as loop,
        serve_bases(config, versions, [config.serve], log_of=log_of, loop=loop, reporter=silent) as models,
    ):
        folder = models.served[0].server.adapters().get(models.judge.model)
    if not cpu:
        assert (models.judge.model, folder) == ("base", None)
        return
    assert folder is not None
    weights = load_file(Path(folder) / "adapter_model.safetensors")
    assert weights
    assert not any(tensor.any() for tensor in weights.values())


# An attached server goes away


@pytest.mark.slow
def test_an_attached_server_that_goes_away_ends_the_command_which_goes_on_when_it_is_back(bench: Bench) -> None:
    with running(FakeVllm()) as fake:
        fake.answer = lambda _: _gone_after(fake, 6)
        with pytest.raises(ServingError) as caught:
            bench.collect({"serve": {"attach": fake.url}})
    assert str(caught.value) == (
        f"the model server does not answer any more: {fake.url}; "
        "start it again, then this command (with --resume where it has that)"
    )
    done = sum(bench.finished().values())
    with running(FakeVllm()) as fake:
        fake.answer = lambda _: "7"
        assert f"{done} episodes are there" in bench.collect({"serve": {"attach": fake.url}}, resume=True)
    assert sorted(bench.finished().values()) == [1] * EPISODES


def _gone_after(fake: FakeVllm, calls: int) -> str:
    if len(fake.asked) == calls:
        fake.socket.close()  # nobody can connect any more
    if len(fake.asked) >= calls:
        raise ConnectionAbortedError
    return "7"


@pytest.mark.slow
def test_an_attached_server_that_hangs_ends_the_command_and_cuts_no_episode_short(bench: Bench) -> None:
    hangs = threading.Event()
    with running(FakeVllm()) as fake:

        def answer(_: dict[str, Any]) -> str:
            if len(fake.asked) > 6:
                hangs.wait(30)
            return "7"

        fake.answer, fake.samples = answer, lambda: len(fake.asked) <= 6 or hangs.wait(30)
        with pytest.raises(ServingError, match=r"hangs: 4 calls wait, .*start it again, then this command"):
            bench.collect({"serve": {"attach": fake.url, "hang_s": 2.0}})
        hangs.set()
    assert {outcome for outcome, _ in bench.outcomes()} <= {"terminated", "truncated"}
    with TraceStore.open(bench.folder.store) as store:
        assert {e.reason for e in store.episodes(run_id="collect") if e.outcome == "truncated"} == {CANCELLED}


# Malformed answers


def choice(body: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps(body | {"choices": [body["choices"][0] | changes]}).encode()


def content(body: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = body["choices"][0]["logprobs"]["content"]
    return found


MALFORMED: dict[str, tuple[Callable[[dict[str, Any]], bytes], str]] = {
    "torn": (lambda body: json.dumps(body).encode()[:-9], r"not JSON \(.*"),
    "a page": (lambda _: b"<html>busy</html>", r"not JSON \(.*"),
    "another object": (lambda _: b"{}", r"TypeError: Received response with null value for 'choices'.*"),
    "a list": (lambda _: b"[]", r"ValueError: Unexpected response type .* got list: \[\]"),
    "an error with code 200": (lambda _: b'{"error": {"message": "sorry"}}', r"ValueError: .*sorry.*"),
    "no choice": (lambda body: json.dumps(body | {"choices": []}).encode(), "no sampled token ids from the engine"),
    "no message": (lambda body: choice(body, message=None), "AttributeError: .*"),
    "no prompt ids": (
        lambda body: json.dumps(body | {"prompt_token_ids": None}).encode(),
        "no prompt token ids from the engine",
    ),
    "no ids": (lambda body: choice(body, token_ids=None), "no sampled token ids from the engine"),
    "no log-probs": (lambda body: choice(body, logprobs=None), "no log-probs.*"),
    "a log-prob too few": (
        lambda body: choice(body, logprobs={"content": content(body)[:-1]}),
        "2 sampled tokens but 1 log-probs",
    ),
    "a log-prob too many": (
        lambda body: choice(body, logprobs={"content": [*content(body), *content(body)]}),
        "2 sampled tokens but 4 log-probs",
    ),
    "a log-prob without a number": (
        lambda body: choice(body, logprobs={"content": [{"logprob": None}]}),
        "TypeError: .*",
    ),
}


@contextmanager
def chat_on(fake: FakeVllm) -> Iterator[tuple[NodeChat, asyncio.Runner]]:
    """A chat, and the loop to use it in: its client is closed there, since a call given up keeps its connection."""
    async_client = httpx.AsyncClient(trust_env=False)
    with httpx.Client(trust_env=False) as client, asyncio.Runner() as loop:
        try:
            yield (
                NodeChat(
                    model="base",
                    base_url=f"{fake.url}/v1",
                    api_key="none",
                    http_client=client,
                    http_async_client=async_client,
                ),
                loop,
            )
        finally:
            loop.run(async_client.aclose())


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_answer_fails_its_episode_with_the_reason_and_no_other(kind: str, tmp_path: Path) -> None:
    spoil, message = MALFORMED[kind]
    with running(FakeVllm()) as fake, chat_on(fake) as (chat, loop):
        fake.adapters, fake.answer = {"reasoner@0": "", "actor@3": ""}, lambda _: "7"
        fake.spoil = lambda body: spoil(body) if len(fake.asked) == 3 else None
        rig = Rig(tmp_path, model=chat, chat=chat, in_flight=1)
        tally = rig.run(plan_episodes(TASKS, 3, 1, seed=0, **COMMON), loop)
    assert tally.outcomes == Counter(terminated=2, failed=1)
    assert len(fake.asked) == 5  # the third of six failed, and the fourth was never asked: nor was anything repeated
    prefix = "ServingError: malformed answer of the model server to node 'reasoner': "
    with rig.store() as store:
        (failed,) = [e for e in store.episodes(run_id="run") if e.outcome == "failed"]
    assert re.fullmatch(re.escape(prefix) + message, failed.reason or "")


def test_a_server_that_tells_no_log_probs_at_all_stops_the_run_with_that(tmp_path: Path) -> None:
    with running(FakeVllm()) as fake, chat_on(fake) as (chat, loop):
        fake.adapters, fake.answer = {"reasoner@0": "", "actor@3": ""}, lambda _: "7"
        fake.spoil = lambda body: choice(body, logprobs=None)
        rig = Rig(tmp_path, model=chat, chat=chat)
        rig.collector._wait_for_dying_server = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
        with pytest.raises(GraphError, match="8 of 8 episodes failed, 8 of them with: ServingError: malformed answer"):
            rig.run(plan_episodes(TASKS, 100, 1, seed=0, **COMMON), loop)


# Counting calls


def test_calls_are_counted_from_their_sending_to_the_end_of_their_answer() -> None:
    calls, limits, seen = CallsUnderWay(), httpx.Limits(), []

    async def asynchronously(url: str) -> None:
        async with httpx.AsyncClient(transport=AsyncWatchedTransport(calls, limits)) as client:
            async with client.stream("POST", f"{url}/v1/chat/completions", json=BODY) as answer:
                seen.append(calls.count)
                await answer.aread()
            seen.append(calls.count)

    with running(FakeVllm()) as fake:

        def count(_: dict[str, Any]) -> str:
            seen.append(calls.count)
            return "7"

        fake.answer = count
        with httpx.Client(transport=WatchedTransport(calls, limits)) as client:
            with client.stream("POST", f"{fake.url}/v1/chat/completions", json=BODY) as answer:
                seen.append(calls.count)
                answer.read()
            seen.append(calls.count)
        asyncio.run(asynchronously(fake.url))
    with httpx.Client(transport=WatchedTransport(calls, limits)) as client, pytest.raises(httpx.ConnectError):
        client.get(fake.url)
    assert (seen, calls.count, calls.silence_s()) == ([1, 1, 0] * 2, 0, 0.0)


def test_silence_is_counted_while_calls_wait_and_ends_with_anything_heard() -> None:
    calls = CallsUnderWay()
    time.sleep(0.05)
    calls.note_start()
    assert calls.silence_s() < 0.05  # the time before the first call is none
    time.sleep(0.05)
    assert calls.silence_s() >= 0.05
    calls.note_start()
    assert calls.silence_s() >= 0.05  # another call that waits too changes nothing
    calls.note_activity()
    assert calls.silence_s() < 0.05


BODY = {"model": "base", "messages": [{"role": "user", "content": "hello"}]}
