"""Owns: what breaks on the real vLLM, killed, hung and filled, under real rounds of the duo.

- A round in which the engine is killed, or hangs, is complete in the end, on the same port, key and adapters; a server
  that was started again gives the log-probs of the one before: no cached prefix of other weights was ever used.
- More adapters than slots: each call is answered with its own weights. A call finishes on the version that it began
  with, however soon that is retired and its slot taken.
- A damaged adapter and a malformed answer cost a line and an episode.
- When it cannot be started again the command ends with its log, and what was acknowledged is in the store.

The collector's own end (SIGKILL, Ctrl-C) is in test_end_to_end.py, attaching in test_faults.py. One engine for all, in
the order of the file: starting it takes most of a minute.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from support.lora_files import write_adapter
from support.paths import ROOT
from support.sessions import session_of

from graphs import math_duo
from marft_bridge.common.errors import ServingError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.rollouts.episode_plan import plan_episodes
from marft_bridge.rollouts.session import Session
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.adapter_registry import publish, retire
from trace_store.store import TraceStore

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

NODES = ("reasoner", "actor")
SLOTS = 4
QKV = {"q_proj": (576, 576), "v_proj": (192, 576)}
LAYERS = {f"layers.{layer}.self_attn.{name}": shape for layer in range(30) for name, shape in QKV.items()}
# Eight blocks of 32 tokens and more, so that there is a prefix to be cached.
LONG = " ".join(f"Then {name} gives {n} apples to a friend." for n in range(12) for name in ("Ann", "Tom"))
EXACT = 1e-3  # nats: two float32 batches of different shape


def stat_of(process: Path) -> list[str]:
    """State, parent and what follows; of a process that is gone by now, none."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X", "0"]


class Line:
    """A session on the real server, and what was said."""

    def __init__(self, session: Session, folder: RunFolder, said: io.StringIO) -> None:
        self.session, self.folder, self._said = session, folder, said
        self.model = session.models
        self.process = session.models.served[0].server._process

    def said(self) -> str:
        text = self._said.getvalue()
        self._said.truncate(0)
        self._said.seek(0)
        return text

    def signal_core(self, number: signal.Signals) -> None:
        """To the process that computes: the largest below the guard."""
        assert self.process is not None
        assert self.process._guard is not None
        parents = {int(path.name): int(stat_of(path)[1]) for path in Path("/proc").iterdir() if path.name.isdecimal()}
        family, found = {self.process._guard.pid}, 0
        while len(family) > found:
            found = len(family)
            family |= {pid for pid, parent in parents.items() if parent in family}
        family.discard(self.process._guard.pid)
        os.kill(max(family, key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1])), number)

    def asked(self, model: str, **changes: Any) -> httpx.Request:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": LONG}],
            "temperature": 0.0,
            "max_tokens": 8,
            "logprobs": True,
            "return_token_ids": True,
        }
        place = self.model.judge
        headers = {"Authorization": f"Bearer {place.api_key}"}
        return httpx.Request("POST", f"{place.base_url}/chat/completions", json=body | changes, headers=headers)

    def logprobs(self, model: str, **changes: Any) -> list[float]:
        with httpx.Client(trust_env=False, timeout=300) as client:
            answer = client.send(self.asked(model, **changes))
        assert answer.status_code == 200, answer.text
        return [entry["logprob"] for entry in answer.json()["choices"][0]["logprobs"]["content"]]

    def round(self, run_id: str, episodes: int = 12) -> Counter[str]:
        """Outcomes of the episodes, as they are acknowledged; failed ones and those that repeat them are rows too."""
        versions = dict.fromkeys(NODES, 0)
        requests = plan_episodes(
            list(math_duo.tasks()), episodes, 1, seed=0, run_id=run_id, split="train", adapters=versions
        )
        self.model.publish(versions)
        self.session.run(requests, run_id, "reward")
        return self.outcomes(run_id)

    def outcomes(self, run_id: str) -> Counter[str]:
        with TraceStore.open(self.folder.store) as store:
            store.take_in()
            return Counter(e.outcome for e in store.episodes(run_id=run_id))

    @contextmanager
    def after(self, answers: int, act: Callable[[httpx.Response], None]) -> Iterator[None]:
        """Does something with the answer of this number to the graph, before the graph sees it."""
        hooks = self.model.chat.http_async_client.event_hooks  # type: ignore[union-attr]
        seen = Counter[str]()

        async def count(response: httpx.Response) -> None:
            await response.aread()
            seen["answers"] += 1
            if seen["answers"] == answers:
                act(response)

        self.model.chat.http_async_client.event_hooks = hooks | {"response": [count]}  # type: ignore[union-attr]
        try:
            yield
        finally:
            self.model.chat.http_async_client.event_hooks = hooks  # type: ignore[union-attr]
        assert seen["answers"] >= answers


@pytest.fixture(scope="module")
def line(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    pytest.importorskip("vllm", exc_type=ImportError)
    run, said = tmp_path_factory.mktemp("faults") / "run", io.StringIO()
    settings = {
        "run": str(run),
        "model.path": str(smollm2_dir),
        "serve.max_loras": SLOTS,
        "serve.max_model_len": 1024,
        "serve.startup_timeout_s": 600.0,
        "serve.hang_s": 30.0,
        "serve.lora_target_modules": ["q_proj", "v_proj"],
        "train.trainer.lora": {"target_modules": ["q_proj", "v_proj"]},
        "sampling.max_tokens": 8,
        "collect.in_flight": 8,
        "collect.timeout_s": 600.0,
    }
    config = toml_to_config(ROOT / "examples/math_duo/bridge.toml", settings)
    folder = RunFolder(run)
    folder.create()
    with session_of(config, folder, Reporter(Console(file=said, width=1000))) as session:
        yield Line(session, folder, said)


def published(line: Line, node: str, versions: Sequence[int], scale: float = 0.2) -> list[str]:
    """Adapters of random weights, each different, in service."""
    registry, names = line.model.versions.registry, []
    for version in versions:
        if version not in registry.versions(node):
            write_adapter(registry.new_folder(node, version), LAYERS, scale=scale, seed=version)
            registry.register(node, version, None, {})
        names.append(publish(line.model.served[0].server, registry, node, version))
    return names


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Of the first tokens: later ones depend on those before."""
    return abs(one[0] - other[0])


def test_more_adapters_than_slots_each_answer_with_their_own_weights(line: Line) -> None:
    itself = line.logprobs("base")  # while there are slots that nobody took
    names = published(line, "slots", range(1, SLOTS + 3))
    base = line.model.judge.model  # what a judge asks
    alone = {name: line.logprobs(name) for name in (*names, base)}
    for number, name in enumerate(names[1:]):
        assert distance(alone[name], alone[names[number]]) > 10 * EXACT
    assert alone[base] == pytest.approx(itself, abs=EXACT)
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(line.logprobs, alone))
    for name, logprobs in zip(alone, together, strict=True):
        assert logprobs == pytest.approx(alone[name], abs=EXACT)
    for version in range(1, SLOTS + 3):
        retire(line.model.served[0].server, "slots", version)


def test_a_call_finishes_on_the_version_that_it_began_with(line: Line) -> None:
    (name,) = published(line, "flight", [1])
    limits = {"max_tokens": 96, "ignore_eos": True}
    undisturbed = line.logprobs(name, **limits)
    seen: list[float] = []
    others = range(2, 2 + 2 * SLOTS + 1)  # as many as the engine keeps in memory, and one more
    with httpx.Client(trust_env=False, timeout=300) as client:
        answer = client.send(line.asked(name, **limits, stream=True), stream=True)
        for event in answer.iter_lines():
            if not event.startswith("data: {"):
                continue
            for choice in json.loads(event[6:])["choices"]:
                seen += [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or []]
            if seen and name in line.model.served[0].server.adapter_names():
                retire(line.model.served[0].server, "flight", 1)
                assert len(seen) < 48, "it was nearly done before it was retired"
                published(line, "flight", others)
        answer.close()
    assert len(seen) == len(undisturbed) == 96
    assert seen == pytest.approx(undisturbed, abs=EXACT)
    with pytest.raises(AssertionError, match="does not exist"):  # a new call of it is refused, not answered by another
        line.logprobs(name)
    for version in others:
        retire(line.model.served[0].server, "flight", version)


def test_a_damaged_adapter_is_named_and_the_others_go_on(line: Line) -> None:
    registry, server = line.model.versions.registry, line.model.served[0].server
    (name,) = published(line, "damaged", [1])
    before = line.logprobs(name)
    folder = write_adapter(registry.new_folder("damaged", 2), LAYERS, seed=2)
    registry.register("damaged", 2, 1, {})
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(
        ServingError, match=rf"^'{re.escape(str(weights))}' is not what was registered .*put the file back"
    ):
        publish(server, registry, "damaged", 2)
    torn = write_adapter(registry.new_folder("damaged", 3), LAYERS, seed=3) / "adapter_model.safetensors"
    torn.write_bytes(whole[:-100])
    registry.register("damaged", 3, 1, {})  # what was registered was damaged already
    with pytest.raises(ServingError, match="is not a safetensors file"):
        publish(server, registry, "damaged", 3)
    assert line.logprobs(name) == pytest.approx(before, abs=EXACT)
    retire(server, "damaged", 1)


def test_a_malformed_answer_costs_one_episode(line: Line) -> None:
    def spoil(response: httpx.Response) -> None:
        body = json.loads(response.content)
        body["choices"][0]["logprobs"]["content"].pop()
        response._content = json.dumps(body).encode()

    with line.after(5, spoil):
        assert line.round("malformed", 8) == Counter(terminated=7, failed=1)
    with TraceStore.open(line.folder.store) as store:
        (failed,) = [e for e in store.episodes(run_id="malformed") if e.outcome == "failed"]
    reason = r"ServingError: malformed answer of the model server to node '\w+': \d+ sampled tokens but \d+ log-probs"
    assert re.fullmatch(reason, failed.reason or "")


def test_a_killed_engine_is_replaced_in_the_middle_of_a_round_by_the_same_one(line: Line) -> None:
    server = line.model.served[0].server
    # One node's versions one after the other, under long prefixes that are cached; then one name with other weights.
    swapped = {name: line.logprobs(name) for name in published(line, "swap", [1, 2])}
    again = write_adapter(line.model.versions.registry.root / "again/a", LAYERS, scale=0.2, seed=71)
    other = write_adapter(line.model.versions.registry.root / "again/b", LAYERS, scale=0.2, seed=72)
    server.load_adapter("again@1", again)
    first = line.logprobs("again@1")
    server.unload_adapter("again@1")
    server.load_adapter("again@1", other)
    second = line.logprobs("again@1")
    assert distance(first, second) > 10 * EXACT
    live, endpoint = server.adapter_names(), server.endpoint
    line.said()

    with line.after(10, lambda _: line.signal_core(signal.SIGKILL)):
        outcomes = line.round("killed")
    assert outcomes["terminated"] == 12
    assert outcomes.keys() <= {"terminated", "failed"}
    said = line.said()
    assert re.search(r"the model server ended with exit code \d+; starting it again \(1 of 2\); log \S+:\d+\n", said)
    assert server.endpoint == endpoint
    assert server.adapter_names() == live
    # A fresh server, with these adapters loaded once and nothing cached, says the same.
    for name, logprobs in swapped.items():
        assert line.logprobs(name) == pytest.approx(logprobs, abs=EXACT)
    assert line.logprobs("again@1") == pytest.approx(second, abs=EXACT)


def test_an_engine_that_hangs_is_replaced_too(line: Line) -> None:
    line.said()
    with line.after(10, lambda _: line.signal_core(signal.SIGSTOP)):
        outcomes = line.round("hung")
    assert outcomes["terminated"] == 12
    assert re.search(r"the model server hangs: \d calls wait, .*; starting it again \(2 of 2\)", line.said())


def test_an_engine_that_is_killed_once_too_often_ends_the_round_and_loses_nothing(line: Line) -> None:
    with (
        pytest.raises(ServingError, match=r"ended with exit code \d+ after 2 restarts \(serve\.restarts\); the end of"),
        line.after(18, lambda _: line.signal_core(signal.SIGKILL)),
    ):
        line.round("lost")
    outcomes = line.outcomes("lost")
    assert outcomes["terminated"] >= 9 - 8 + 1  # of 18 answers, two an episode, eight episodes in flight
    with pytest.raises(ServingError, match="after 2 restarts"):
        line.model.publish(dict.fromkeys(NODES, 0))
