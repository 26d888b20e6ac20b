"""examples/math_duo in small -> a run folder as `collect`, `train` and `compare` leave it, in half a minute.

Graph, spans, store, update, adapters and statistics are real. The model server is a stand-in whose answers get better
with the version of the adapter that is asked, and whose log-probs are those of a tiny model. Invariant: the same
program makes the same answers, rewards and figures; ids, times and seconds are of the day.
"""

from __future__ import annotations

import io
import random
import re
import tomllib
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models

from marft_bridge.commands.collect import collect
from marft_bridge.common.progress import Reporter
from marft_bridge.comparison.command import VersionFlags, compare
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.training.train import train
from support.fake_vllm import END_OF_TURN, running
from support.paths import ROOT
from support.study_server import StudyServer
from support.tiny_policy import save_tiny_llama

CONFIG = ROOT / "examples/math_duo/bridge.toml"
SIZES: dict[str, dict[str, Any]] = {
    "collect": {"episodes": 40, "in_flight": 1},  # one at a time: in the same order each time
    "train": {"rounds": 5, "episodes_per_round": 24, "evaluation_episodes": 0},
    "compare": {"tasks": 30, "samples_per_task": 1},
}


def growing_answer(body: dict[str, Any]) -> str:
    """What a version of an agent says: the reasoner's hints and the actor's sums get better with it."""
    node, _, version = str(body["model"]).rpartition("@")
    grown = int(version) if version.isdecimal() else 0
    chance = random.Random(f"{body.get('seed')} {body['messages']}")
    question = str(body["messages"][-1]["content"])
    a, b = (int(number) for number in re.findall(r"\d+", question)[:2])
    if node == "reasoner":
        hints = ["Count them one by one.", "Think of the things.", f"Multiply {a} by {b}."]
        return f"Add {b} to {a}." if chance.random() < 0.3 + 0.1 * grown else chance.choice(hints)
    was_helped = "Reasoner: Add" in question
    if chance.random() < 0.25 + 0.11 * grown - (0 if was_helped else 0.2):
        return str(a + b)
    return chance.choice([str(a + b + 1), f"It is {a} and {b}.", f"The answer is {a * b}."])


def save_byte_tokenizer(path: Path) -> None:
    """The tokenizer of the stand-in: an id for every byte, and one that ends a turn."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    tokenizer = Tokenizer(models.WordLevel(letters | {"<|im_end|>": END_OF_TURN}, unk_token="<|im_end|>"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))


def demo_config(run: Path, model: Path, url: str) -> BridgeConfig:
    """The example's configuration with the sizes of a picture book."""
    raw = tomllib.loads(CONFIG.read_text())
    raw |= {"run": str(run), "model": {"path": str(model)}, "serve": {"attach": url}}
    for table, sizes in SIZES.items():
        raw[table] |= sizes
    raw["train"]["trainer"]["lora"] = {"rank": 4}
    raw["train"]["trainer"]["system"] = {"tokens_per_microbatch": 8192}
    return BridgeConfig.model_validate(raw)


def make_demo_run(folder: Path) -> Path:
    """Collects, trains and compares in `folder`; the run folder."""
    model = save_tiny_llama(folder / "model", vocabulary=END_OF_TURN + 1)
    save_byte_tokenizer(model / "tokenizer.json")
    server = StudyServer(str(model), 0, None)
    server.answer = growing_answer
    reporter = Reporter(Console(file=io.StringIO(), width=100))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with running(server):
            config = demo_config(folder / "runs/math_duo", model, server.url)
            collect(config, reporter, resume=False)
            train(config, reporter, resume=False)
            compare(config, reporter, False, VersionFlags())
    finally:
        torch.set_num_threads(threads)
    return folder / "runs/math_duo"
