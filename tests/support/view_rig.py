"""A run folder full of hostile text, made by hand, and `marft-bridge view` on a run folder over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tokenizers import Tokenizer, decoders, models

from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.training.advantage_log import credits_to_file
from marft_bridge.view.pages import Pages
from marft_bridge.view.source import path_to_source
from marft_bridge.view.web import pages_to_server
from support.growth_rig import fill
from support.sample_spans import START, SampleTrace
from trace_store.records import Reward, RunRow
from trainers.credit.action_credits import ActionCredit

TOKEN, ONCE = "the-token-of-the-tests", "works-a-single-time"
HOSTILE = (
    "<script>window.owned=1;document.title='owned'</script><img src=x onerror='window.owned=1'>\"'\u202egnp.exe\x1b[2J"
)
SEEN = (
    r"<script>window.owned=1;document.title='owned'</script><img src=x onerror='window.owned=1'>"
    + "\"'\\u202egnp.exe\\x1b[2J"
)
EPISODE = "f" * 32
SECOND_NS = 10**9


@dataclass(frozen=True)
class Served:
    """A server on some pages, and a browser's worth of access to it."""

    port: int
    pages: Pages

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def text(self, path: str, status: int = 200) -> str:
        """A page, for whoever has the token."""
        with httpx.Client(base_url=self.url, trust_env=False, timeout=60) as client:
            client.get("/style.css", params={"token": TOKEN})
            answer = client.get(path)
        assert answer.status_code == status, answer.text
        return answer.text


@contextmanager
def serving(path: Path, tokenizer: Path | None = None) -> Iterator[Served]:
    """The pages of a run folder or a store."""
    pages = Pages(path_to_source(path), tokenizer)
    with pages_to_server(pages, 0, TOKEN, ONCE) as server:
        yield Served(server.port, pages)


def save_tokenizer(folder: Path, texts: dict[int, str]) -> Path:
    """A tokenizer to which every id is a text of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {texts.get(i, f"w{i} "): i for i in range(max(texts) + 1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0 "))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def hostile_run(folder: Path) -> RunFolder:
    """One episode of round 1 of `train`, whose every text is hostile; token 4 is such a text too, token 5 is `fine`."""
    run = RunFolder(folder / "run")
    run.create()
    t = SampleTrace(EPISODE)
    node = t.node(f"{HOSTILE}:1", 10, 20, step=1)
    said = json.dumps([{"role": HOSTILE, "content": HOSTILE + "\n" + "long " * 9000}])
    called = json.dumps([{"role": "assistant", "content": HOSTILE, "tool_calls": [{"id": "c1", "name": HOSTILE}]}])
    texts: dict[str, Any] = {
        "RESPONSE_MODEL": HOSTILE,
        "FINISH_REASONS": [HOSTILE],
        "ADAPTER": f"{HOSTILE}@3",
        "ADAPTER_VERSION": 3,
    }
    t.call("x", node, 11, 14, INPUT_MESSAGES=said, OUTPUT_MESSAGES=called, **texts)
    t.call("y", t.node("b:1", 30, 40, step=2, after=(f"{HOSTILE}:1",)), 31, 39, OUTPUT_MESSAGES=said, LOGPROBS=None)
    root = {"TASK_ID": HOSTILE, "RUN_ID": "train", "ROUND": 1, "OUTCOME": "truncated", "OUTCOME_REASON": HOSTILE}
    spans = t.spans(**root, ADAPTERS=json.dumps({HOSTILE: 3}))
    rewards = [
        Reward(EPISODE, "reward", 0.5, HOSTILE, START),
        Reward(EPISODE, HOSTILE, 0.25, HOSTILE, START),
        Reward(EPISODE, HOSTILE, -1.0, HOSTILE, START, "step", "x"),
        Reward(EPISODE, HOSTILE, -1.0, HOSTILE, START, "agent", None, HOSTILE),
    ]
    fill(run.store, [[RunRow("train", "train", START), *spans, *rewards]])
    credit = ActionCredit(EPISODE, "x", np.array([-0.5, 0.5]), np.array([-2.0, 2.0]), {HOSTILE: np.array([-0.5, 0.5])})
    credits_to_file([credit], run.advantages, 1)
    tokenizer = save_tokenizer(folder / "model", {4: HOSTILE, 5: "fine"})
    config = {"model": {"path": str(tokenizer.parent)}, "train": {"trainer": {"reward": "reward"}}}
    (run.path / "bridge.json").write_text(json.dumps({"train": {"version": "1", "config": config}}))
    line = {"phase": "online", "round": 1, "agents": {HOSTILE: {"tokens": 2, "approx_kl": 0.01, "entropy": None}}}
    run.metrics.write_text(json.dumps(line) + "\n")
    return run


def many_episodes(path: Path, count: int) -> Path:
    """Episodes of `train` a second apart: 4 tasks, rounds 1 and 2, rewards 0.0 to 0.9; every fifth one failed."""
    records: list[list[object]] = []
    for i in range(count):
        t = SampleTrace(f"{i:x}", START + i * SECOND_NS)
        t.call("x", t.node("a:1", 10, 20, step=1), 11, 19)
        outcome = {"OUTCOME": "failed", "OUTCOME_REASON": "boom"} if i % 5 == 0 else {}
        spans = t.spans(RUN_ID="train", ROUND=1 + i % 2, TASK_ID=f"t{i % 4}", SAMPLE=i, **outcome)
        records.append([*spans, Reward(t.trace_id, "reward", i % 10 / 10, "test", START)])
    fill(path, records)  # type: ignore[arg-type]
    return path
