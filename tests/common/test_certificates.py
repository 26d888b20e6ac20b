"""Owns: clients of model servers trust whom SSL_CERT_FILE and SSL_CERT_DIR name, and go through no proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from marft_bridge.common.certificates import trusted_authorities
from marft_bridge.common.errors import BridgeError, ConfigError
from marft_bridge.live.upstream import EngineFailed, Upstream
from marft_bridge.model_calls.call_monitor import AsyncWatchedTransport, CallsUnderWay, WatchedTransport
from marft_bridge.rewards.judge_requests import judge_client
from marft_bridge.serving.vllm_client import EngineClient

pytest.importorskip("cryptography")
from support.private_authority import vllm_of_private_authority

BODY = {"model": "base", "messages": [{"role": "user", "content": "hello"}]}


def ask_as_engine_client(url: str) -> None:
    client = EngineClient(url, "key")
    try:
        assert client.models() == {"base": None}
    finally:
        client.close()


def ask_as_node(url: str) -> None:
    transport = WatchedTransport(CallsUnderWay(), httpx.Limits())
    with httpx.Client(transport=transport, trust_env=False) as client:
        client.get(f"{url}/health").raise_for_status()


def ask_as_async_node(url: str) -> None:
    async def ask() -> None:
        transport = AsyncWatchedTransport(CallsUnderWay(), httpx.Limits())
        async with httpx.AsyncClient(transport=transport, trust_env=False) as client:
            (await client.get(f"{url}/health")).raise_for_status()

    asyncio.run(ask())


def ask_as_live_proxy(url: str) -> None:
    async def ask() -> None:
        upstream = Upstream(f"{url}/v1", None)
        try:
            async with upstream.post("/v1/chat/completions", BODY) as answer:
                assert answer.status_code == 200
        finally:
            await upstream.aclose()

    asyncio.run(ask())


def ask_as_judged(url: str) -> None:
    async def ask() -> None:
        async with judge_client(5.0) as client:
            (await client.get(f"{url}/health")).raise_for_status()

    asyncio.run(ask())


CLIENTS = [ask_as_engine_client, ask_as_node, ask_as_async_node, ask_as_live_proxy, ask_as_judged]


@pytest.fixture(autouse=True)
def no_authorities_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    with vllm_of_private_authority(tmp_path_factory.mktemp("authority")) as address_and_file:
        yield address_and_file


@pytest.mark.parametrize("ask", CLIENTS)
def test_a_server_of_a_private_authority_is_reached_where_the_environment_names_that(
    server: tuple[str, Path], ask: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, authority = server
    with pytest.raises((httpx.ConnectError, BridgeError, EngineFailed)):
        ask(url)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    ask(url)


def test_without_the_variables_the_public_authorities_count(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(trusted_authorities().get_ca_certs()) > 50
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    assert trusted_authorities().get_ca_certs() == []  # of a folder they are read when they are needed
    monkeypatch.setenv("SSL_CERT_FILE", str(server[1]))
    assert len(trusted_authorities().get_ca_certs()) == 1


@pytest.mark.parametrize(
    ("variable", "content", "problem"),
    [
        (
            "SSL_CERT_FILE",
            None,
            "SSL_CERT_FILE: cannot read certificates from .*: No such file or directory; name",
        ),
        (
            "SSL_CERT_FILE",
            "text",
            "SSL_CERT_FILE: cannot read certificates from .*: it has none in PEM form; name",
        ),
        ("SSL_CERT_DIR", None, "SSL_CERT_DIR: there is no folder .*; name one with certificates, or leave it out"),
    ],
)
def test_authorities_that_cannot_be_read_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, content: str | None, problem: str
) -> None:
    path = tmp_path / "authorities"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv(variable, str(path))
    with pytest.raises(ConfigError, match=problem):
        EngineClient("https://127.0.0.1:1", None)
