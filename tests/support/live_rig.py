"""A live proxy in front of the fake vLLM, with a journal and a store beside it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

from marft_bridge.common.loopback_server import LoopbackServer
from marft_bridge.config.fallback import FallbackOptions
from marft_bridge.config.record import RecordOptions
from marft_bridge.live.calls import LiveRecorder
from marft_bridge.live.fallback import FallbackKeys
from marft_bridge.live.proxy import LivePlan
from marft_bridge.live.proxy_server import proxy_server
from marft_bridge.live.split import BASE, CANDIDATE, Split
from marft_bridge.live.teams import Team, versions_to_team
from marft_bridge.model_calls.call_monitor import CallsUnderWay
from marft_bridge.recording.span_processor import options_to_processor
from support import fake_vllm
from support.fake_vllm import FakeVllm
from trace_store.journal import Journal
from trace_store.records import AdapterRow, Trajectory
from trace_store.store import TraceStore

NODES = ("planner", "writer")
ENGINE_KEY, KEY, SALT = "engine-key-of-the-test", "key-of-the-app-under-test", b"salt of the test"
TEAMS: dict[str, Team] = {
    BASE: versions_to_team(BASE, dict.fromkeys(NODES, 0), ()),
    CANDIDATE: versions_to_team(CANDIDATE, dict.fromkeys(NODES, 3), ()),
}
SAY = [{"role": "user", "content": "say it"}]
Odd = Callable[[Any, dict[str, Any]], None]


class OddVllm(FakeVllm):
    """A fake vLLM that serves both teams, and answers some of its models oddly: served name -> (handler, body)."""

    request_queue_size = 256  # the default of 5 resets connections when many come at once

    def __init__(self) -> None:
        super().__init__(ENGINE_KEY)
        self.RequestHandlerClass = _OddHandler
        self.odd: dict[str, Odd] = {}
        self.broken = 0  # answers whose client went away
        self.adapters = {name: "somewhere" for team in TEAMS.values() for name in team.served_names.values()}

    def handle_error(self, request: Any, client_address: Any) -> None:
        self.broken += 1


class _OddHandler(fake_vllm._Handler):
    def do_POST(self) -> None:  # noqa: N802 - fixed by http.server
        if self.path != "/v1/completions":
            return super().do_POST()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        ids = fake_vllm.text_to_ids(f"{body['model']} wrote")
        logprobs = {"token_logprobs": [fake_vllm.id_to_logprob(token) for token in ids]}
        choice = {"index": 0, "text": f"{body['model']} wrote", "finish_reason": "stop"}
        choice |= {"logprobs": logprobs if body.get("logprobs") is not None else None}
        choice |= {"token_ids": ids, "prompt_token_ids": [1, 2]} if body.get("return_token_ids") else {}
        usage = {"prompt_tokens": 2, "completion_tokens": len(ids), "total_tokens": 2 + len(ids)}
        frame = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"]}
        return self._answer(200, frame | {"choices": [choice], "usage": usage})

    def _chat(self, body: dict[str, Any]) -> None:
        odd = self.server.odd.get(body["model"])
        if odd is None:
            return super()._chat(body)
        self.server.asked.append(body)
        return odd(self, body)


@dataclass
class LiveRig:
    """One proxy that runs, and what it leaves behind."""

    engine: OddVllm
    proxy: LoopbackServer
    path: Path
    warnings: list[str] = field(default_factory=list)

    @property
    def base_url(self) -> str:
        return f"{self.proxy.url}/v1"

    def client(self, **options: Any) -> openai.OpenAI:
        options = {"max_retries": 0, "timeout": 30} | options
        return openai.OpenAI(base_url=self.base_url, api_key=KEY, **options)

    def post(self, path: str = "/v1/chat/completions", key: str = KEY, **request: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} | request.pop("headers", {})
        return httpx.post(f"{self.proxy.url}{path}", headers=headers, timeout=30, trust_env=False, **request)

    def say(self, node: str = "planner", headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
        return self.post(json={"model": node, "messages": SAY} | more, headers=headers or {})

    def live(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {KEY}"}
        answer = httpx.get(f"{self.proxy.url}/marft/live", headers=headers, timeout=30, trust_env=False)
        assert answer.status_code == 200
        told: dict[str, Any] = answer.json()
        return told

    def wait_for(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + 20
        while not condition(told := self.live()):
            assert time.monotonic() < deadline, told
            time.sleep(0.02)
        return told


@contextmanager
def live_rig(
    folder: Path,
    split: tuple[float, float] = (90, 10),
    *,
    mirror: bool = False,
    quiet_s: float = 60.0,
    options: RecordOptions | None = None,
    frozen: tuple[str, ...] = (),
    fallback: tuple[FallbackOptions, FallbackKeys] | None = None,
    calls: CallsUnderWay | None = None,
) -> Iterator[LiveRig]:
    """The proxy and the engine behind it, until the block ends."""
    journal, warnings = Journal(folder / "store.duckdb.journal"), list[str]()
    for team in TEAMS.values():
        for node, version in team.versions.items():
            journal.append(AdapterRow(node, version, None, "somewhere", "a" * 64, "b" * 64, 1))
    processor = options_to_processor(journal, options or RecordOptions())
    recorder = LiveRecorder(processor, "live-test", "app", quiet_s, 1.0, {}, frozen)
    plan = LivePlan(TEAMS, Split(*split), SALT, (KEY,), warnings.append)
    with fake_vllm.running(OddVllm()) as engine:
        assert isinstance(engine, OddVllm)
        address = (f"{engine.url}/v1", ENGINE_KEY)
        with proxy_server(plan, address, recorder, 0, mirrored=mirror, fallback=fallback, calls=calls) as proxy:
            yield LiveRig(engine, proxy, folder / "store.duckdb", warnings)
    journal.close()


def episodes(path: Path) -> list[Trajectory]:
    """Everything that was recorded, in the order of its time; nothing of it may be refused."""
    with TraceStore.open(path) as store:
        store.take_in()
        assert store.counts()["refusals"] == 0, store.sql("SELECT * FROM refusals")
        return sorted(store.trajectories(), key=lambda trajectory: trajectory.episode.started_ns)
