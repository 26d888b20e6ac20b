"""A stand-in for vLLM's server process that breaks as it is told, and a small model for it to serve.

{"die_after": 6}      with the seventh chat request the process ends, with exit code 9
{"hang_after": 6}     from the seventh on nothing is answered, but /health says that all is well
{"keep": true}        the next process does the same; otherwise it works
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))  # it is started as a script

from support.fake_vllm import FakeVllm, _Handler

FAULTS = "MARFT_TEST_FAULTS"  # names the file that holds them


def write_model(folder: Path) -> Path:
    """A model directory that no engine could run, with the layers that the adapters of these tests change."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    layers = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    weights = {f"model.layers.0.{layer}.weight": np.ones((4, 4), np.float32) for layer in layers}
    save_file(weights, folder / "model.safetensors")
    return folder


class _Breaking(_Handler):
    server: FaultyVllm

    def do_POST(self) -> None:  # noqa: N802 - fixed by http.server
        if self.server.hangs.is_set() and "lora" not in self.path:
            time.sleep(600)
        super().do_POST()

    def _chat(self, body: dict[str, Any]) -> None:
        faults = self.server.faults
        if len(self.server.asked) >= faults.get("die_after", 1 << 30):
            os._exit(9)
        if len(self.server.asked) >= faults.get("hang_after", 1 << 30):
            self.server.hangs.set()
            time.sleep(600)
        time.sleep(0.05)
        super()._chat(body)


class FaultyVllm(FakeVllm):
    """Serves on `port`, with the faults of the file."""

    request_queue_size = 256
    daemon_threads = True

    def __init__(self, port: int, key: str, faults: Path) -> None:
        super().__init__(key)
        self.server_close()
        ThreadingHTTPServer.__init__(self, ("127.0.0.1", port), _Breaking)
        self.answer = lambda body: "add one" if "Reasoner:" not in str(body["messages"]) else "7"
        self.hangs = threading.Event()
        self.faults = json.loads(faults.read_text()) if faults.exists() else {}
        if not self.faults.get("keep"):
            faults.unlink(missing_ok=True)


def main() -> None:
    """The process: command line and environment are those of vLLM's."""
    flags = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
    sys.stdout.write(f"Starting to load model {os.getpid()}\n")
    sys.stdout.flush()
    time.sleep(float(flags["--wait"]))
    FaultyVllm(int(flags["--port"]), os.environ["VLLM_API_KEY"], Path(os.environ[FAULTS])).serve_forever()


if __name__ == "__main__":
    main()
