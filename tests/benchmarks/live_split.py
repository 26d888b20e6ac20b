"""What sharing live traffic out adds to a request: through the proxy against straight to the engine, 32 in flight.

The engine is a stand-in in a process of its own that answers each request after THINKS_S, so that as many are in flight
as a real one has; the proxy is in another, recording to a real journal on a real disk, and the client in a third. The
added time is the difference of the medians of the two, which are measured in turns.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import uvicorn
from support.live_rig import KEY, SALT, TEAMS

from benchmarks.harness import Measurement, bench
from marft_bridge.config.record import RecordOptions
from marft_bridge.live.calls import LiveRecorder
from marft_bridge.live.proxy import LivePlan
from marft_bridge.live.proxy_server import proxy_server
from marft_bridge.live.split import Split
from marft_bridge.recording.span_processor import options_to_processor
from trace_store.journal import Journal

IN_FLIGHT, REQUESTS, ROUNDS = 32, 640, 5
THINKS_S = 0.25
TOKENS, PROMPT_TOKENS = 64, 200
ASK = "What is three and four? Think of apples in two baskets, and count them one by one before you answer. " * 4


def _answer() -> bytes:
    """An answer of TOKENS tokens as vLLM sends it when ids and log-probs are asked for."""
    content = [{"token": "tok", "logprob": -0.51171875, "bytes": [116], "top_logprobs": []}] * TOKENS
    choice = {"index": 0, "message": {"role": "assistant", "content": "tok" * TOKENS}, "finish_reason": "stop"}
    choice |= {"logprobs": {"content": content}, "token_ids": list(range(TOKENS))}
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": TOKENS, "total_tokens": PROMPT_TOKENS + TOKENS}
    frame = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "planner@0"}
    return json.dumps(
        frame | {"choices": [choice], "usage": usage, "prompt_token_ids": list(range(PROMPT_TOKENS))}
    ).encode()


async def _engine(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await asyncio.sleep(THINKS_S)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(_ANSWER)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": _ANSWER})


_ANSWER = _answer()


class _Engine(uvicorn.Server):
    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        sys.stdout.write(f"{self.servers[0].sockets[0].getsockname()[1]}\n")
        sys.stdout.flush()


def _serve_engine() -> None:
    config = uvicorn.Config(
        _engine, port=0, lifespan="off", log_config=None, access_log=False, http="h11", timeout_graceful_shutdown=1
    )
    _Engine(config).run()


def _serve_proxy(engine: str, folder: Path) -> None:
    journal = Journal(folder / "journal")
    recorder = LiveRecorder(options_to_processor(journal, RecordOptions()), "bench", "app", 60.0, 1.0, {}, ())
    plan = LivePlan(TEAMS, Split(50, 50), SALT, (KEY,), lambda _: None)
    with proxy_server(plan, (engine, "no key"), recorder, 0, mirrored=False) as proxy:
        sys.stdout.write(f"{proxy.port}\n")
        sys.stdout.flush()
        sys.stdin.read()
    journal.close()


@contextmanager
def _process(*arguments: str) -> Iterator[str]:
    """One of the two servers in a process of its own; its address."""
    command = [sys.executable, "-m", "benchmarks.live_split", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1"
        finally:
            process.terminate()


async def _seconds(address: str, requests: int) -> list[float]:
    """How long each request took, IN_FLIGHT at a time."""
    limits = httpx.Limits(max_connections=IN_FLIGHT, max_keepalive_connections=IN_FLIGHT)
    headers = {"Authorization": f"Bearer {KEY}"}
    found: list[float] = []
    waiting = iter(range(requests))
    async with httpx.AsyncClient(limits=limits, headers=headers, timeout=60, trust_env=False) as client:

        async def worker(number: int) -> None:
            await asyncio.sleep(THINKS_S * number / IN_FLIGHT)  # requests of real users do not come in step
            for request in waiting:
                body = {"model": "planner", "messages": [{"role": "user", "content": ASK}], "user": f"u{request % 97}"}
                began = time.perf_counter()
                answer = await client.post(f"{address}/chat/completions", json=body)
                found.append(time.perf_counter() - began)
                assert answer.status_code == 200, answer.text

        await asyncio.gather(*(worker(number) for number in range(IN_FLIGHT)))
    return found


@bench
def live_split_overhead_ms(folder: Path) -> Iterator[Measurement]:
    """Time that the proxy adds to a request at 32 in flight, recording included. It should stay under 2 ms."""
    with ExitStack() as stack:
        engine = stack.enter_context(_process("engine"))
        proxy = stack.enter_context(_process("proxy", engine, str(folder)))
        for address in (engine, proxy):
            asyncio.run(_seconds(address, 4 * IN_FLIGHT))
        while True:
            straight: list[float] = []
            through: list[float] = []
            for _ in range(ROUNDS):
                straight += asyncio.run(_seconds(engine, REQUESTS // ROUNDS))
                through += asyncio.run(_seconds(proxy, REQUESTS // ROUNDS))
            base, added = median(straight), median(through) - median(straight)
            yield Measurement(1e3 * added, "ms", 1e3 * base, (base + added) / base)


def main(arguments: Sequence[str]) -> None:
    """One of the two servers, until standard input ends or a signal comes."""
    if arguments[0] == "engine":
        _serve_engine()
    else:
        _serve_proxy(arguments[1], Path(arguments[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
