"""A stand-in for vLLM's server process that the study can start: `vllm.entrypoints.openai.api_server`, so to speak.

Its answers are made up from the request's seed, but their log-probs are real: those of the tiny model and the adapter
that was asked for, so that all checks between engine and trainer hold.
"""

from __future__ import annotations

import os
import random
import re
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from support.fake_vllm import FakeVllm, _Handler

PACKAGE = "vllm/entrypoints/openai/api_server.py"


def install(folder: Path) -> None:
    """Makes a folder that, on PYTHONPATH, is found as vLLM."""
    path = folder / PACKAGE
    path.parent.mkdir(parents=True)
    for package in list(path.relative_to(folder).parents)[:-1]:
        (folder / package / "__init__.py").touch()
    path.write_text("from support.study_server import main\n\nmain()\n")


def answer(body: dict[str, Any]) -> str:
    """The right number three times in five, whoever is asked."""
    numbers = [int(n) for n in re.findall(r"\d+", str(body["messages"][-1]["content"]))]
    chance = random.Random(body["seed"])
    return str(sum(numbers[:2]) + (chance.random() < 0.4))


class _Scoring(_Handler):
    server: StudyServer

    def _sample(self, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        prompt, choices = super()._sample(body)
        for choice in choices:
            if choice["logprobs"] is None:
                continue  # nobody asked
            said = self.server.score(
                body["model"], prompt["prompt_token_ids"], choice["token_ids"], body["temperature"]
            )
            for entry, logprob in zip(choice["logprobs"]["content"], said, strict=True):
                entry["logprob"] = logprob
        return prompt, choices


class StudyServer(FakeVllm):
    """Serves on `port`, and scores by the model in `model`."""

    def __init__(self, model: str, port: int, key: str | None) -> None:
        super().__init__(key)
        self.server_close()
        ThreadingHTTPServer.__init__(self, ("127.0.0.1", port), _Scoring)
        self.answer = answer
        self._models: dict[str, PeftModel] = {}
        self._lock = threading.Lock()
        self._model = model

    @torch.no_grad()
    def score(self, name: str, prompt: list[int], sampled: list[int], temperature: float) -> list[float]:
        """Log-probs of `sampled` after `prompt` through an adapter."""
        with self._lock:
            if name not in self._models:
                base = AutoModelForCausalLM.from_pretrained(self._model)
                self._models[name] = PeftModel.from_pretrained(base, self.adapters[name]).eval()
            logits = self._models[name](input_ids=torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1]
        logp = (logits / temperature).log_softmax(-1)
        return [float(logp[i, token]) for i, token in enumerate(sampled)]


def main() -> None:
    """The process: command line and environment are those of vLLM's."""
    flags = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
    torch.set_num_threads(1)
    server = StudyServer(flags["--model"], int(flags["--port"]), os.environ["VLLM_API_KEY"])
    if (name := flags["--served-model-name"]) != "base":
        server.adapters[name] = ""  # of a server without adapters, under another name
    server.serve_forever()
