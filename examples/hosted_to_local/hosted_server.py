"""A model folder -> an OpenAI-compatible endpoint under another name, for as long as a command runs.

    python -m examples.hosted_to_local.hosted_server runs/teacher/model -- sh run.sh

The command finds HOSTED_BASE_URL, HOSTED_MODEL and HOSTED_API_KEY in its environment, as it would for a provider.
Invariant: the server ends with the command, and with this process however that ends.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from marft_bridge.config.serve import CpuOptions
from marft_bridge.serving import process_guard
from marft_bridge.serving.cpu.plan import options_to_cpu_plan
from marft_bridge.serving.vllm_arguments import KEY_GUARD, server_environment, vllm_runs_on_cpu
from marft_bridge.serving.vllm_process import free_port

NAME = "hosted-large"
STARTUP_S = 300


def model_to_argv(model: Path, port: int, *, name: str = NAME, max_model_len: int = 256) -> list[str]:
    """The command line of a server without adapters; prompts of the desk are short."""
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    argv += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--max-model-len", str(max_model_len), "--max-num-seqs", "32", "--generation-config", "vllm"]
    argv += ["--disable-uvicorn-access-log", "--disable-log-stats", "--enforce-eager", "--middleware", KEY_GUARD]
    argv += ["--kv-cache-memory-bytes", str(1 << 29)]
    if vllm_runs_on_cpu():
        argv += ["--block-size", "32", *options_to_cpu_plan(CpuOptions()).argv()]
    return argv


@contextmanager
def open_server(model: Path, log: Path, *, name: str = NAME, max_model_len: int = 256) -> Iterator[tuple[str, str]]:
    """A server for as long as the block runs: its address up to and with /v1, and its key.

    Args:
        name: of the model there.
        max_model_len: tokens of prompt and reply together.
    """
    port, key = free_port(None), secrets.token_urlsafe(32)
    command = model_to_argv(model, port, name=name, max_model_len=max_model_len)
    argv = [sys.executable, "-I", "-S", str(Path(process_guard.__file__)), "--", *command]
    variables = server_environment(key, vllm_runs_on_cpu())
    with log.open("ab") as output:
        server = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=output, stderr=output, env=variables, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(url, server, log)
        yield f"{url}/v1", key
    finally:
        assert server.stdin is not None
        server.stdin.close()  # the guard sees it, and ends the server
        server.wait()


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + STARTUP_S
    while True:
        try:
            opener.open(f"{url}/health", timeout=2).close()
        except (urllib.error.URLError, OSError):
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the hosted model's server did not start; its log is {log}")
            time.sleep(0.3)
        else:
            return


def serve_beside(model: Path, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> int:
    """Runs the command beside the server, and gives its exit code back."""
    with open_server(model, log) as (base_url, key):
        print(f"{model} answers as {NAME} at {base_url}", flush=True)
        hosted = {"HOSTED_BASE_URL": base_url, "HOSTED_MODEL": NAME, "HOSTED_API_KEY": key}
        return subprocess.run(
            [*command], env={**environment, **hosted, "NO_PROXY": "127.0.0.1"}, check=False
        ).returncode


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m examples.hosted_to_local.hosted_server", description=__doc__)
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("command", nargs="+", help="behind --: what runs beside it")
    given = parser.parse_args()
    sys.exit(serve_beside(given.model, given.command, given.model.parent / "server.log", os.environ))


if __name__ == "__main__":
    main()
