"""Owns: whom the commands of a run folder send the keys of its servers.

- A second `serve` is kept out of a run folder from the first's start on, and takes away nothing that is another's.
- Addresses are used while the command that wrote them runs, and are forgotten with it, however it ended; nothing is
  sent to who has the port afterwards.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from rich.console import Console
from support.paths import ROOT

from marft_bridge.commands.serve import serve
from marft_bridge.common.errors import ConfigError
from marft_bridge.common.files import held_file, read_held
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.live.flags import LiveOptions
from marft_bridge.live.split import Split, read_live_file, read_or_make_live_file, read_running_file
from marft_bridge.live.status import read_live_lines
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.server_file import announced_servers, running_servers
from marft_bridge.serving.vllm_server import Endpoint
from trace_store.errors import StoreError

KEY = "the-key-of-the-run"
LIVE_OPTIONS = LiveOptions(Split(50.0, 50.0), "0", "1", mirror=False, port=0, key_env=None, quiet_s=60.0)
SERVE = """
import sys, time
from pathlib import Path
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.server_file import announced_servers
from marft_bridge.serving.vllm_server import Endpoint

with announced_servers(RunFolder(Path(sys.argv[1])), {"": Endpoint(sys.argv[2], sys.argv[3], "base")}):
    print("there", flush=True)
    time.sleep(600)
"""
LIVE = """
import sys, time
from pathlib import Path
from marft_bridge.live.split import LiveFile
from marft_bridge.runs.run_folder import RunFolder

with LiveFile(RunFolder(Path(sys.argv[1])).live, b"salt", sys.argv[3]).announced(sys.argv[2]):
    print("there", flush=True)
    time.sleep(600)
"""
LIVE_REPORT = (
    b'{"split": {"base": 100, "candidate": 0}, "variants": {}, "without_key": 0, "mirror_dropped": 0, "refused": {},'
    b' "not_recorded": {"calls": 0, "spans": 0}}'
)
"""What a proxy answers that has had no request."""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.create()
    return made


class _AnyPort(ThreadingHTTPServer):
    """Answers everybody, as anybody could on a port that is free, and keeps what it was sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Listening)
        self.keys: list[str | None] = []


class _Listening(BaseHTTPRequestHandler):
    server: _AnyPort

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["Authorization"])
        self.send_response(200)
        self.end_headers()
        self.wfile.write(LIVE_REPORT)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def listener() -> Iterator[_AnyPort]:
    with _AnyPort() as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@contextmanager
def announcing(program: str, folder: RunFolder, port: int) -> Iterator[subprocess.Popen[str]]:
    """A process that says that it serves on this port; it is killed at the end."""
    argv = [sys.executable, "-c", program, str(folder.path), f"http://127.0.0.1:{port}/v1", KEY]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("program", "name", "look"), [(SERVE, "server.json", running_servers), (LIVE, "live.json", read_live_lines)]
)
def test_a_killed_server_s_address_is_not_asked_and_gets_no_key(
    program: str, name: str, look: Callable[[RunFolder], object], folder: RunFolder, listener: _AnyPort
) -> None:
    with announcing(program, folder, listener.server_port):
        assert look(folder)
        assert listener.keys == [f"Bearer {KEY}"]
    assert KEY in (folder.path / name).read_text(), "it was killed, and left its file"
    assert not look(folder)
    assert listener.keys == [f"Bearer {KEY}"]


def test_a_server_that_ended_in_order_leaves_no_address(folder: RunFolder, listener: _AnyPort) -> None:
    address = f"http://127.0.0.1:{listener.server_port}"
    with announced_servers(folder, {"": Endpoint(f"{address}/v1", KEY, "base")}):
        assert folder.server.stat().st_mode & 0o777 == 0o600
        assert running_servers(folder) == {"": (address, KEY)}
        assert running_servers(folder) == {"": (address, KEY)}, "looking takes nothing away"
    assert not folder.server.exists()
    assert running_servers(folder) == {}
    assert len(listener.keys) == 2


def test_a_held_file_is_read_while_it_is_held_and_its_copy_never(tmp_path: Path) -> None:
    path, copy = tmp_path / "one", tmp_path / "two"
    assert read_held(path) is None
    with held_file(path, "text"):
        copy.write_bytes(path.read_bytes())
        assert (read_held(path), read_held(copy)) == ("text", None)
        with held_file(path, "newer"):
            assert read_held(path) == "newer"
        assert read_held(path) is None, "its writer replaced what another held"
    copy.unlink()
    copy.symlink_to(path)
    with pytest.raises(StoreError, match="is a link"):
        read_held(copy)


@pytest.mark.parametrize(
    ("live", "lock", "owner"), [(None, "serve.lock", "serve"), (LIVE_OPTIONS, "live.lock", "serve --split")]
)
def test_a_second_serve_is_refused_before_it_starts_a_server(
    folder: RunFolder, live: LiveOptions | None, lock: str, owner: str
) -> None:
    config = toml_to_config(ROOT / "examples/math_duo/bridge.toml", {"run": str(folder.path)})
    with (
        folder.lock_for(owner, name=lock),
        pytest.raises(ConfigError, match=rf"{owner}: .* is in use by `marft-bridge {owner}` \(process \d+\)"),
    ):
        serve(config, Reporter(Console(quiet=True)), [], live)
    assert [path.name for path in folder.path.iterdir()] == [lock]
    with folder.lock_for("serve", name=lock), folder.lock_for("train"):
        """Other commands work beside it."""


def test_a_server_that_ends_takes_away_only_its_own_address(folder: RunFolder) -> None:
    first = announced_servers(folder, {"": Endpoint("http://127.0.0.1:1/v1", "one", "base")})
    first.__enter__()
    with announced_servers(folder, {"": Endpoint("http://127.0.0.1:2/v1", "two", "base")}):
        first.__exit__(None, None, None)
        assert "two" in (read_held(folder.server) or "")
    assert not folder.server.exists()


def test_a_proxy_that_ends_leaves_anothers_address_and_brings_nothing_back(folder: RunFolder) -> None:
    live_file = read_or_make_live_file(folder.live)
    first = live_file.announced("http://127.0.0.1:1/v1")
    first.__enter__()
    with live_file.announced("http://127.0.0.1:2/v1"):
        first.__exit__(None, None, None)
        running = read_running_file(folder.live)
        assert running is not None
        assert running.base_url == "http://127.0.0.1:2/v1"
        folder.live.unlink()  # to assign every key anew
    assert not folder.live.exists()


def test_salt_and_key_of_live_traffic_outlive_its_proxy(folder: RunFolder, listener: _AnyPort) -> None:
    with announcing(LIVE, folder, listener.server_port):
        pass
    kept = read_live_file(folder.live)
    assert kept is not None
    assert (kept.salt, kept.api_key) == (b"salt", KEY)
