"""Owns: who is let in to `marft-bridge view`, and how it begins and ends.

- without the token nothing of the store is told; with it a cookie is set that scripts and other sites cannot use
- a request under another name, or with another method, is refused; no answer may be framed, kept or read elsewhere
- it listens on one address of this machine, until Ctrl-C
- what there is not to look at is one line; nothing heavy is loaded
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.commands import ROOT
from support.traces_rig import sound_store
from support.view_rig import ONCE, TOKEN, Served, hostile_run, serving

from marft_bridge import cli
from marft_bridge.common.errors import ConfigError
from marft_bridge.view.source import path_to_source


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(hostile_run(tmp_path_factory.mktemp("place")).path) as server:
        yield server


def asked(served: Served, path: str, method: str = "GET", **headers: str) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=60) as client:
        return client.request(method, f"{served.url}{path}", headers=headers)


def cookie_of(served: Served) -> str:
    return asked(served, f"/?token={TOKEN}").headers["set-cookie"].split(";")[0]


PATHS = (
    *("/", "/episodes", "/run?id=train", f"/episode?id={'f' * 32}", f"/pair?a={'f' * 32}&b={'f' * 32}", "/training"),
    *("/training.json", "/comparison", "/report.html", "/style.css", "/static/app.js", "/nowhere"),
)


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_told_without_the_token(served: Served, path: str) -> None:
    name = cookie_of(served).split("=")[0]
    joined = "&" if "?" in path else "?"
    for answer in (
        asked(served, path),
        asked(served, f"{path}{joined}token=wrong"),
        asked(served, f"{path}{joined}token="),
        asked(served, f"{path}{joined}token={TOKEN}&token={TOKEN}"),
        asked(served, path, Cookie=f"{name}=wrong"),
        asked(served, path, Cookie=f"{name}={TOKEN}"),  # the cookie is another secret
        asked(served, path, Authorization=f"Bearer {TOKEN}"),
    ):
        assert answer.status_code == 403
        assert "marft-bridge view` printed" in answer.text
        assert "train" not in answer.text


def test_the_token_sets_a_cookie_that_scripts_and_other_sites_cannot_use_and_leads_on(served: Served) -> None:
    answer = asked(served, f"/run?id=train&token={TOKEN}&round=1")
    assert (answer.status_code, answer.headers["location"]) == (303, "/run?id=train&round=1")
    name, *attributes = answer.headers["set-cookie"].split("; ")
    assert name.startswith(f"marft_view_{served.port}=")
    assert TOKEN not in name
    assert {attribute.lower() for attribute in attributes} == {"httponly", "path=/", "samesite=strict"}
    assert asked(served, "/run?id=train", Cookie=cookie_of(served)).status_code == 200


@pytest.mark.parametrize(
    "path", ["//elsewhere.example/", "/\\elsewhere.example", "///elsewhere.example", "/%5C%5Celsewhere"]
)
def test_the_token_never_leads_to_another_host(served: Served, path: str) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as wire:  # as no client would send it
        wire.sendall(
            f"GET {path}?token={TOKEN} HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nConnection: close\r\n\r\n".encode()
        )
        answer = b"".join(iter(lambda: wire.recv(65536), b"")).decode()
    location = re.search(r"(?im)^location: (.*?)\r$", answer)
    assert location is not None, answer
    assert re.match(r"/[^/\\]", location[1])


def test_the_address_that_a_browser_is_started_with_works_once(served: Served) -> None:
    assert asked(served, f"/?token={ONCE}").status_code == 303
    assert asked(served, f"/?token={ONCE}").status_code == 403
    assert asked(served, f"/?token={TOKEN}").status_code == 303


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "127.0.0.1.evil.example:{port}", ""]
)
def test_another_name_is_refused_even_with_the_cookie(served: Served, host: str) -> None:
    answer = asked(served, "/", Host=host.format(port=served.port), Cookie=cookie_of(served))
    assert answer.status_code == 421
    assert asked(served, f"/?token={TOKEN}", Host=host.format(port=served.port)).status_code == 421
    assert asked(served, "/", Host=f"localhost:{served.port}", Cookie=cookie_of(served)).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(served: Served, method: str) -> None:
    for path in ("/", f"/?token={TOKEN}"):
        answer = asked(served, path, method, Cookie=cookie_of(served), Origin="http://evil.example")
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


def test_no_answer_may_be_framed_kept_or_read_by_another_origin(served: Served) -> None:
    cookie = cookie_of(served)
    for path in (*PATHS, f"/?token={TOKEN}", "/run", "/?token=wrong"):
        answer = asked(served, path, Cookie=cookie, Origin="http://evil.example")
        assert not [name for name in answer.headers if name.startswith("access-control")]
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; ")
        assert "frame-ancestors 'none'" in policy
        assert "script-src" not in policy or "script-src 'self';" in policy
        assert "unsafe-eval" not in policy
        assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]
        assert "http" not in policy
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert "server" not in answer.headers
    assert asked(served, "/" + "x" * 9000, Cookie=cookie).status_code == 414


def test_it_listens_on_one_address_until_the_block_ends(tmp_path: Path) -> None:
    with serving(sound_store(tmp_path)) as server:
        assert asked(server, "/").status_code == 403
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", server.port), timeout=60).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=60).close()


@pytest.mark.slow
def test_the_command_prints_its_address_once_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    path = sound_store(tmp_path)
    before = path.read_bytes()
    argv = [sys.executable, "-m", "marft_bridge", "view", str(path), "--no-browser"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=ROOT, text=True, stdout=pipe, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline(), process.stdout.readline()]
        found = re.fullmatch(r"open (http://127\.0\.0\.1:(\d+))/\?token=([\w-]{43})\n", lines[1])
        assert found is not None, [*lines, process.stdout.read()]
        with httpx.Client(trust_env=False, follow_redirects=True, timeout=60) as client:
            assert "<h1>Runs</h1>" in client.get(f"{found[1]}/?token={found[3]}").text
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    assert (process.returncode, rest) == (0, "")
    assert lines[0] == f"looking at {path.parent}; Ctrl-C ends it\n"
    assert path.read_bytes() == before
    assert not path.with_name(path.name + ".wal").exists()


def test_what_there_is_not_to_look_at_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for path, why in ((tmp_path / "none", "there is no"), (tmp_path / "empty", "holds no store")):
        assert cli.run(["view", str(path), "--no-browser"]) == 2
        assert why in capsys.readouterr().err
    path = sound_store(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.run(["view", str(path), "--port", str(port)]) == 2
        assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    assert cli.run(["view", str(path), "--model", str(tmp_path)]) == 2
    assert "--model names the directory of the base model" in capsys.readouterr().err


def test_a_folder_a_store_and_an_export_are_places(tmp_path: Path) -> None:
    store = sound_store(tmp_path)
    assert path_to_source(tmp_path) == path_to_source(store)
    assert path_to_source(tmp_path).run is not None
    other = store.rename(tmp_path / "other.duckdb")
    assert path_to_source(other).run is None
    assert cli.run(["traces", "export", str(tmp_path / "export"), "--store", str(other)]) == 0
    with serving(tmp_path / "export") as server:
        assert 'href="/run?id=run"' in server.text("/")
    with pytest.raises(ConfigError):
        path_to_source(tmp_path / "none.duckdb")


@pytest.mark.slow
def test_looking_loads_neither_torch_nor_langgraph() -> None:
    code = (
        "import sys, marft_bridge.cli, marft_bridge.view.command, marft_bridge.view.web;"
        "print([m for m in ('torch', 'transformers', 'vllm', 'langgraph') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"
