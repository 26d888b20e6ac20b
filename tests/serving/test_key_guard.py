"""Owns: the model server answers nothing but /health without its key, whatever vLLM mounts.

- The routes are vLLM's own pieces: its authentication, and the routes that the SageMaker standards add for adapters.
- What has the key is passed on as it came; the two routes of sleep are answered for it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from marft_bridge.config.serve import PlacedServeOptions, ServeOptions
from marft_bridge.serving.key_guard import SLEEP_PATH, WAKE_PATH, KeyGuard
from marft_bridge.serving.vllm_arguments import KEY_GUARD, server_argv

KEY = "s3cret"
WRONG_KEYS = [None, "", "another", "s3cret ", "s3cre"]
ADAPTER = {"name": "planner@5", "src": "/elsewhere"}


class Engine:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    async def sleep(self, level: int, mode: str) -> None:
        self.told.append((level, mode))

    async def wake_up(self) -> None:
        self.told.append("wake")


@pytest.fixture(autouse=True)
def key_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)


@pytest.fixture
def app() -> Starlette:
    async def echo(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("heard")
        await socket.close()

    names = ("/health", "/metrics", "/tokenize", "/invocations", "/health/more")
    routes = [Route(name, lambda _: PlainTextResponse("up"), methods=["GET", "POST"]) for name in names]
    app = Starlette(routes=[*routes, WebSocketRoute("/v1/realtime", echo)], middleware=[Middleware(KeyGuard)])
    app.state.engine_client = Engine()
    return app


def ask(app: Callable[..., Any], method: str, path: str, key: str | None, **more: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path, headers=headers, **more)

    return asyncio.run(send())


@pytest.mark.parametrize("key", WRONG_KEYS)
def test_without_the_key_only_health_is_answered(app: Starlette, key: str | None) -> None:
    for path in ("/metrics", "/tokenize", "/invocations", "/health/more", "/v1/nothing", "//health", "/"):
        for method in ("GET", "POST", "DELETE", "OPTIONS"):
            assert ask(app, method, path, key).status_code == 401, (method, path)
    assert ask(app, "GET", "/health", key).text == "up"


def test_a_browsers_question_whether_a_page_may_ask_needs_no_key_and_reaches_no_route(app: Starlette) -> None:
    """It never has one. vLLM's own CORS layer answers it, which stands behind the guard."""
    asked = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    app.user_middleware.reverse()  # the guard is outermost
    with TestClient(app) as client:
        answer = client.options("/tokenize", headers=asked)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
        assert client.options("/tokenize").status_code == client.post("/tokenize", headers=asked).status_code == 401


def test_what_has_the_key_is_passed_on(app: Starlette) -> None:
    assert ask(app, "POST", "/tokenize", KEY).text == "up"
    assert ask(app, "GET", "/v1/nothing", KEY).status_code == 404


def test_a_socket_needs_the_key_too(app: Starlette) -> None:
    with TestClient(app) as client:
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/realtime"):
            pass
        with client.websocket_connect("/v1/realtime", headers={"Authorization": f"Bearer {KEY}"}) as socket:
            assert socket.receive_text() == "heard"


def test_the_engine_sleeps_and_wakes_for_who_has_the_key(app: Starlette) -> None:
    assert ask(app, "POST", SLEEP_PATH, KEY).status_code == 200
    assert ask(app, "POST", WAKE_PATH, KEY).status_code == 200
    assert app.state.engine_client.told == [(1, "wait"), "wake"]  # its weights are kept, calls under way are answered


@pytest.mark.parametrize("path", [SLEEP_PATH, WAKE_PATH])
@pytest.mark.parametrize("key", WRONG_KEYS)
def test_nothing_sleeps_without_the_key(app: Starlette, path: str, key: str | None) -> None:
    assert ask(app, "POST", path, key).status_code == 401
    assert ask(app, "GET", path, KEY).status_code == 405
    assert app.state.engine_client.told == []


def test_a_guard_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "")
    with pytest.raises(RuntimeError, match="VLLM_API_KEY is not set"):
        KeyGuard(Starlette())


def test_every_server_that_is_started_has_the_guard() -> None:
    assert f"{KeyGuard.__module__}.{KeyGuard.__qualname__}" == KEY_GUARD
    for options in (ServeOptions(), PlacedServeOptions(), PlacedServeOptions(sleeps=True)):
        for cpu in (True, False):
            argv = server_argv(options, Path("model"), 1, cpu=cpu)
            assert argv[argv.index("--middleware") + 1] == KEY_GUARD


def read_vllm_authentication() -> Any:
    """vLLM's own class, from its file alone: importing vLLM takes seconds."""
    vllm = importlib.util.find_spec("vllm")
    folders = vllm.submodule_search_locations if vllm is not None else None
    file = Path(next(iter(folders or [""])), "entrypoints/serve/middleware/authenticate.py")
    if not folders or not file.is_file():
        pytest.skip("no vLLM that has its authentication there")
    spec = importlib.util.spec_from_file_location("vllm_authenticate", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.AuthenticationMiddleware


@pytest.fixture
def log_levels_as_they_were() -> Iterator[None]:
    """SageMaker's routes have the root logger and its handlers say errors only, for the whole process."""
    before = [(speaker, speaker.level) for speaker in (logging.root, *logging.root.handlers)]
    yield
    for speaker, level in before:
        speaker.setLevel(level)


@pytest.mark.usefixtures("log_levels_as_they_were")
def test_routes_that_vllm_mounts_beside_its_key_are_guarded() -> None:
    """vLLM's own authentication lets the SageMaker routes through, which load and replace adapters."""
    sagemaker = pytest.importorskip("model_hosting_container_standards.sagemaker")
    fastapi = pytest.importorskip("fastapi")
    vllm_guard = read_vllm_authentication()

    def application(*, guarded: bool) -> tuple[Any, list[str]]:
        loaded: list[str] = []
        router = fastapi.APIRouter()

        @sagemaker.register_load_adapter_handler(
            request_shape={"lora_name": "body.name", "lora_path": "body.src"},
        )
        @router.post("/v1/load_lora_adapter")
        async def load(request: dict[str, Any], raw_request: fastapi.Request) -> Any:
            loaded.append(str(request))
            return fastapi.Response("ok")

        app = fastapi.FastAPI()
        app.include_router(router)
        app.add_middleware(vllm_guard, tokens=[KEY])
        if guarded:
            app.add_middleware(KeyGuard)  # as vLLM does with --middleware, behind its own
        return sagemaker.bootstrap(app), loaded

    open_app, _ = application(guarded=False)
    assert ask(open_app, "POST", "/adapters", None, json=ADAPTER).status_code != 401  # so this test tests something
    guarded_app, loaded = application(guarded=True)
    for method, path in (("POST", "/adapters"), ("DELETE", "/adapters/planner@5"), ("POST", "/invocations")):
        assert ask(guarded_app, method, path, None, json=ADAPTER).status_code == 401
    assert loaded == []
