"""A stand-in for vLLM's server process that the hosted desk of examples/ can start, for its hosted and its local model.

The hosted one is right nine times in ten, the local ones three in four, by the request's seed; log-probs are those of
the tiny model and the adapter that was asked for, as in `study_server`.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import torch

from examples.hosted_to_local import orders
from examples.hosted_to_local.hosted_server import NAME
from support import study_server
from support.study_server import StudyServer


def install(folder: Path) -> None:
    """Makes a folder that, on PYTHONPATH, is found as vLLM."""
    study_server.install(folder)
    (folder / study_server.PACKAGE).write_text("from support.desk_server import main\n\nmain()\n")


class DeskServer(StudyServer):
    """Knows the answers of all tasks, and does not always give them."""

    def __init__(self, model: str, port: int, key: str | None) -> None:
        super().__init__(model, port, key)
        self._oracle = orders.Oracle([*orders.tasks(), *orders.lessons()])
        self.answer = self._answer

    def _answer(self, body: dict[str, Any]) -> str:
        profile, text = (str(message["content"]) for message in body["messages"])
        chance = random.Random(f"{body['model']} {body.get('seed')} {text}")
        right = chance.random() < (0.9 if body["model"] == NAME else 0.75)
        return self._oracle.answer(profile, text) if right else "well, no"


def main() -> None:
    """The process: command line and environment are those of vLLM's."""
    flags = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
    torch.set_num_threads(1)
    server = DeskServer(flags["--model"], int(flags["--port"]), os.environ["VLLM_API_KEY"])
    if flags["--served-model-name"] == NAME:
        server.adapters[NAME] = ""
    server.serve_forever()
